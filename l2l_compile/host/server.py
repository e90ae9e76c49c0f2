"""The eager param-server (EPS; L2L, section 2.1): weights for the executor, gradients from it."""

from __future__ import annotations

import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import fx

from l2l_compile.devices.device import Device
from l2l_compile.disk.disk_store import await_writes, range_of
from l2l_compile.errors import L2LError
from l2l_compile.host import watched_parameters
from l2l_compile.host.double_buffer import DelayedWires
from l2l_compile.host.enough_memory import check_enough_memory
from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.hooks import optimizers_of, remove_left
from l2l_compile.host.updates.classes import CLASSES
from l2l_compile.host.updates.delayed import DelayedUpdates
from l2l_compile.host.updates.gradient_ledger import Parameter, PendingBackward, Pushed
from l2l_compile.host.updates.interface import Updates
from l2l_compile.host.updates.other_models import wait_for_other_models
from l2l_compile.host.updates.without_flush import UpdatesWithoutFlush
from l2l_compile.host.wire import Ready, Wire, Wires, is_locked, no_waiter, on_wire, shape_on_host
from l2l_compile.host.worker import Ticket, Worker
from l2l_compile.ir import nodes
from l2l_compile.ir.captured import Input
from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Segment
from l2l_compile.ir.values import TensorSpec
from l2l_compile.lanes import Lane
from l2l_compile.memory.finalizers import members
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.races import Unwatched
from l2l_compile.ranks.sharded import local, sharded_as
from l2l_compile.runtime.runtime_value import RuntimeValue
from l2l_compile.runtime.stats import Stats
from l2l_compile.runtime.step import Step
from l2l_compile.user_line import warn


class ParameterServer:
    """Master weights on the host, the wire that leaves it, and the gradients that come back. One per compiled model.

    With `update="at_step"`, gradients go to `p.grad`. Otherwise they stay here, and updates run while the device computes.
    """

    def __init__(self, options: Options, device: Device, worker: Callable[[int, Unwatched, str], Worker] = Worker):
        self.options, self.device = options, device
        threads = device.host_threads()
        names = (Lane.HOST, Lane.UPDATE) if options.delay else (Lane.HOST,)
        self.workers = [worker(threads, device.accesses, name) for name in names]
        self.worker = self.workers[0]
        for each in self.workers:
            each.running = _updating(weakref.ref(device))
            weakref.finalize(self, each.close)
        self._in_flight: deque[_InFlight] = deque()
        self._memory = GradientMemory(device.unlocked_pool())
        self.wires: Wires
        self.updates: Updates
        if options.delay:
            self.wires = wires = DelayedWires(device.pinned, device.accesses)
            delayed = UpdatesWithoutFlush if options.goes_by_turns else DelayedUpdates
            self.updates = delayed(options, self.worker, wires, threads, self._memory, self.workers[1])
        else:
            kind = CLASSES[options.update]
            self.wires = Wires(device.pinned, None if kind.keeps_wires else self._memory)
            self.updates = kind(options, self.worker, self.wires, threads, self._memory)
        self._has_memory = False  # for a step: looked at once
        self._looked_at: set[int] = set()  # parameters that were looked for in optimizers
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def watch(self, modules: Sequence[torch.nn.Module]) -> None:
        """Watch the modules that own the parameters: their `state_dict` waits for updates that were put off."""
        self._modules.update(modules)
        self.updates.watch(modules)

    def add(self, program: Program) -> None:
        """The model has a program."""
        self.updates.expect(largest_segment(program))

    def describe(self, stats: Stats) -> None:
        """Add the figures of the host side to the figures of the programs."""
        self.updates.describe(stats)

    def synchronize(self) -> None:
        """Block until every update made so far can be seen in the parameters. Raises the error of an update that failed."""
        self.updates.synchronize()
        if self.device.accesses.watches:
            self.device.accesses.read_parameters(p for module in members(self._modules) for p in module.parameters())

    def expect_stashes(self, size: int) -> None:
        """The next forward needs so much memory for stashes on their way to the disk, and back: `place` plans with it."""
        self.updates.expect_stashes(size)

    def place(self, parameters: Sequence[Parameter]) -> None:
        """A forward that may train is about to read these: move to other memory what belongs there (the option `disk`).

        Raises `L2LError` before the first one if the host has too little memory for a step.
        """
        if not self._has_memory:
            check_enough_memory(self.options)
            self._has_memory = True
        self.updates.place(parameters)

    # ---- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(
        self, step: Step, parameters: Sequence[Parameter], to_train: bool, resident: Iterable[Segment] = ()
    ) -> None:
        """A forward begins: updates of the step before are done or will be waited for, and wires are checked again.

        The weights of `resident` segments stay on the device until backward, which does not fetch them.
        """
        remove_left()
        watched_parameters.suspend()
        step.host.gradient_wire = self.options.gradients_on_link
        self.wires.begin_forward()
        self.device.begin_step()
        self._memory.begin_step()
        if to_train:
            self._check_optimizer(parameters)
        wait_for_other_models(self.updates, parameters)
        step.host.pending = self.updates.begin_forward(parameters, to_train)
        if not self.updates.keeps_wires:
            step.host.last_fetches = Counter(map(_indices, resident))

    def _check_optimizer(self, parameters: Sequence[Parameter]) -> None:
        """Raise `L2LError` if fp16 lacks the option `optimizer`, or if that optimizer has no parameter of the model."""
        optimizer = self.options.optimizer
        if optimizer is None:
            if self.options.precision == "fp16":
                raise L2LError(
                    "precision='fp16' scales the loss and skips the step when a gradient overflows: it needs the option "
                    "'optimizer', the one of the training loop"
                )
            return
        trained = [p for p in parameters if p.requires_grad]
        owned = set(parameters_of(optimizer))
        if trained and owned.isdisjoint(trained) and owned.isdisjoint(p for m in members(self._modules) for p in m.parameters()):
            raise L2LError(
                f"the option 'optimizer' holds none of the {len(trained)} parameters that this model trains: build it from "
                "the parameters of the model that is compiled"
            )

    def load(
        self, step: Step, segment: Segment, weights: Sequence[torch.Tensor], ready: Ready = no_waiter
    ) -> tuple[Wire | None, list[torch.Tensor]]:
        """The wire of a segment's parameters (see `on_wire`), up to date, and its other weights as they cross the link (h2d lane).

        `ready` is called for one chunk of the wire after another, as soon as it is up to date.
        With update='at_step', every forward copies the wire again, so backward frees a wire whose memory gradients will take.
        """
        self.await_updates(step, segment)
        key = _indices(segment)
        if key in step.host.last_fetches:
            step.host.last_fetches[key] -= 1
        copied = self.on_wire(step, segment)
        wire = self._wire(step, segment, weights, copied, key, ready) if copied else None
        stored = self._stored(step, segment)
        loose = [i for i in range(len(weights)) if i not in copied and i not in stored]
        for i in loose:
            await_writes(local(weights[i]))
        if self.device.pinned.budget != 0:  # else nothing is page-locked, as on the host
            self.device.lock([weights[i] for i in loose if self._is_locked(step, segment, i)])
        copies = {}
        if stored:
            assert self.updates.stored_copies is not None
            dtypes = [segment.block.weights[i].dtype for i in stored]
            copies = dict(zip(stored, self.updates.stored_copies.load([weights[i] for i in stored], dtypes), strict=True))
        return wire, [copies.get(i, weight) for i, weight in enumerate(weights) if i not in copied]

    def await_updates(self, step: Step, segment: Segment) -> None:
        """Wait until a segment's parameters have the updates that belong to this forward."""
        owners = [step.given[i.owner] for i in segment.weights if i.kind == "parameter"]
        self.updates.wait(owners)
        if not self.options.delay:
            self.device.accesses.read_parameters(owners)

    def on_wire(self, step: Step, segment: Segment) -> list[int]:
        """Positions of the weights of a segment that cross the link on its wire."""
        stored = self._stored(step, segment)
        return [i for i in on_wire(segment, step.rows.bindings, self.options) if i not in stored]

    def _stored(self, step: Step, segment: Segment) -> list[int]:
        """Positions of the weights of a segment whose copies for the link are on disk."""
        if (stored := self.updates.stored_copies) is None:
            return []
        positions = on_wire(segment, step.rows.bindings, self.options)
        return [i for i in positions if stored.has(step.given[segment.weights[i].owner])]

    def _is_locked(self, step: Step, segment: Segment, position: int) -> bool:
        """Whether a weight that crosses the link from its own memory is to be page-locked there."""
        is_parameter = segment.weights[position].kind == "parameter"
        return (
            is_parameter
            and range_of(local(step.given[segment.weights[position].owner])) is None
            and is_locked(segment.block.weights[position], self.options, step.to_train)
        )

    def _wire(
        self,
        step: Step,
        segment: Segment,
        weights: Sequence[torch.Tensor],
        copied: Sequence[int],
        key: tuple[int, ...],
        ready: Ready,
    ) -> Wire:
        on_wire = [(segment.weights[i], weights[i], segment.block.weights[i]) for i in copied]
        return self.wires.load(
            [w if i.shard_spec is None else step.given[i.index] for i, w, _ in on_wire],
            [spec.dtype for _, _, spec in on_wire],
            [step.given[i.owner] for i, _, _ in on_wire],
            keep=step.host.last_fetches.get(key) != 0,
            newest=step.host.pending is None,
            ready=ready,
        )

    # ---- backward ----------------------------------------------------------------------------------------------------

    def begin_backward(self, step: Step, graph: fx.Graph, segments: Sequence[Segment]) -> None:
        """A backward begins; sets `step.host.scale`, the factor by which the gradients of its outputs are to be multiplied."""
        watched_parameters.suspend()
        step.host.returned = {}
        if not self.updates.keeps_wires:
            step.host.last_fetches = Counter(_indices(segments[nodes.operands(n).segment]) for n in nodes.fetches(graph))
        pushing = [segments[nodes.operands(n).segment] for n in graph.find_nodes(op="call_function", target=nodes.push_gradients)]
        is_final = step.world is None or step.world.replicate_mesh_size == 1  # no mean over replicas follows behind the link
        step.host.wants_norms = self.updates.wants_norms and _collecting(step) is not None and is_final
        pending = _collecting(step)
        self.updates.begin_backward(pending, Counter(p for s in pushing for p in _managed(step, s, pending).values()))
        step.host.factor = 1.0
        step.host.scale = self.updates.scale_now()

    def loss_scale(self) -> float:
        """The factor on the loss of the next backward, behind all steps so far; 1 where gradients are not scaled."""
        return self.updates.next_scale()

    def check_optimizer_has_all(self, step: Step) -> None:
        """Raise `L2LError` for a step of which turns stay in flight, if some of its gradients would go to `p.grad`."""
        if step.host.pending is None:
            raise L2LError(
                "a stage has no parameter that its optimizer trains, and a schedule without a flush needs one on every rank: give the stage layers "
                "to train, or leave out delay=1"
            )
        if _returns_gradients(step):
            raise L2LError(
                "a schedule without a flush leaves gradients in flight when loss.backward() returns, so that none can go to p.grad, and the "
                "optimizer lacks parameters that take a gradient: give it all of them, or freeze those with requires_grad_(False)"
            )

    def begin_turns(self, step: Step) -> None:
        """Some gradients of a backward come later: with turns that are in flight."""
        if (pending := _collecting(step)) is not None:
            self.updates.begin_turns(pending)

    def end_turns(self, step: Step) -> None:
        """All turns of a step are back: its gradients are on their way."""
        if (pending := _collecting(step)) is not None:
            self.updates.end_turns(pending)

    def collect(self, step: Step, segment: Segment, gradients: RuntimeValue) -> None:
        """Take the gradients of a segment: they are on the host after the event of their value, or absent.

        Blocks while too many other segments (`segments_in_flight`) have gradients that are not yet at their place.
        """
        if _collecting(step) is None and gradients.absent:
            return
        while len(self._in_flight) >= segments_in_flight(self.options):
            self._in_flight.popleft().last.wait()
        pending = _collecting(step)  # now: when the work is done, another backward of the step may be under way
        ticket = self.worker.submit(lambda: self._collect(step, segment, gradients, pending))
        gradients.in_flight = _InFlight(ticket)
        self._in_flight.append(gradients.in_flight)

    def _collect(self, step: Step, segment: Segment, gradients: RuntimeValue, pending: PendingBackward | None) -> None:
        """Wait for the gradients, and give each to the updates or to `p.grad` (host lane)."""
        if gradients.event is not None:
            self.device.wait_on_host(gradients.event)
        self.device.accesses.read(gradients.place)
        tensors: list[torch.Tensor | None] = gradients.tensors or []
        arrived = {w: g for w, g in zip(segment.weights, tensors, strict=False) if g is not None}
        norms = _by_weight(arrived, tensors[len(segment.weights) :], abs(step.host.factor))
        gradients.tensors = None
        if step.host.factor != 1.0:
            for gradient in [g for g in tensors if g is not None]:
                gradient.mul_(step.host.factor)
        if step.world is not None and step.world.replicate_mesh_size > 1:
            step.world.average_replicas(tensors)
        if pending is not None:
            managed = _managed(step, segment, pending)
            pushed = [Pushed(p, arrived.pop(w, None), w.slice, norms.get(w)) for w, p in managed.items()]
            self.updates.collect(pending, pushed)
        self._return(step, segment, arrived)

    def _return(self, step: Step, segment: Segment, arrived: dict[Input, torch.Tensor]) -> None:
        """Add gradients to the sums that go to `p.grad` (host lane)."""
        copied = {segment.weights[i] for i in self.on_wire(step, segment)}
        weights = [w for w in segment.weights if w in copied or w in arrived]  # the buffer is that of the wire
        gradients = [arrived.pop(w, None) for w in weights]
        self._memory.widen_together(gradients, [step.arguments[w.index] for w in weights])
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                self.device.accesses.write(step.host.place)
                gradient = gradient.div_(step.host.scale) if step.host.scale != 1.0 else gradient
                total, owner = step.host.returned.get(weight.owner), step.arguments[weight.owner]
                step.host.returned[weight.owner] = self._memory.collected(total, gradient, owner, weight.slice)

    def update(self, step: Step, segment: Segment, pushed: RuntimeValue | None) -> None:
        """Update the parameters of a segment whose gradients are complete; `pushed` are the gradients that came last."""
        if (pending := _collecting(step)) is not None:
            ticket = self.updates.update(pending, _managed(step, segment, pending).values())
            if ticket is not None and pushed is not None:
                pushed.in_flight.last = ticket

    def end_backward(self, step: Step) -> dict[int, torch.Tensor]:
        """All gradients of a backward are on their way. Returns the gradients for `p.grad`, by index of the argument."""
        if (pending := _collecting(step)) is not None:
            self.updates.end_backward(pending)
        if _returns_gradients(step):
            try:
                self.worker.drain()
            except BaseException:
                self.recover(step)
                raise
            self.device.accesses.write(step.host.place)
        found, step.host.returned = step.host.returned, {}
        returned = (sharded_as(g, step.given[i]) for i, g in found.items())
        step.stats.add_squares(self.updates.squares_of_returned(returned))
        self._warn_of_parameters_in_no_optimizer(step, found)
        return found

    def _warn_of_parameters_in_no_optimizer(self, step: Step, found: Iterable[int]) -> None:
        """Warn once of parameters with gradients for `p.grad` that no optimizer will use."""
        if self.options.optimizer is None:
            return
        new = {p for i in found if isinstance(p := step.given[i], Parameter) and id(p) not in self._looked_at}
        if not new:
            return
        self._looked_at.update(map(id, new))
        missing = new.difference(parameters_of(self.options.optimizer))
        if missing:
            missing.difference_update(*map(parameters_of, optimizers_of(missing)))
        if missing:
            names = list(dict.fromkeys(n for m in members(self._modules) for n, p in m.named_parameters() if p in missing))
            listed = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
            warn(
                f"backend 'l2l': {len(missing)} parameters take gradients, and no optimizer holds them ({listed}): their gradients "
                "cross the link in every step, and stay in p.grad. Give them to an optimizer, or freeze them with requires_grad_(False)"
            )

    def recover(self, step: Step) -> None:
        """After a failure in a step: its gradients are dropped, and no backward of its forward is waited for."""
        try:
            for worker in self.workers:
                worker.settle()  # the first error is on its way to the user already
        finally:
            self._in_flight.clear()
            self.updates.forget(step.host.pending)


def _updating(device: weakref.ref[Device]) -> Callable[[], AbstractContextManager]:
    """`Device.updating` of a device that is not kept alive: the threads of its lanes end with the model."""

    def running() -> AbstractContextManager:
        found = device()
        return found.updating() if found is not None else nullcontext()

    return running


@dataclass
class _InFlight:
    """Gradients that a node `push_gradients` has given to the host: `last` is the last work that reads them."""

    last: Ticket


def _by_weight(arrived: Iterable[Input], norms: Sequence[torch.Tensor | None], factor: float) -> dict[Input, float]:
    """The norm of each gradient that has arrived, times a factor. `norms` has one tensor with all that the device took, or none."""
    return {w: norm * factor for taken in norms if taken is not None for w, norm in zip(arrived, taken.tolist(), strict=True)}


def largest_segment(program: Program) -> int:
    """The most entries of trained parameters that a segment has on this host."""
    trained = (
        [(w, s) for w, s in zip(each.weights, each.block.weights, strict=True) if w.kind == "parameter"] for each in program.here
    )
    return max((sum(_entries(w, s, program) for w, s in own if s.differentiable) for own in trained), default=0)


def _entries(weight: Input, spec: TensorSpec, program: Program) -> int:
    return math.prod(shape_on_host(weight, spec, program.bindings))


def segments_in_flight(options: Options) -> int:
    """How many segments may have gradients on the host that are not yet at their place."""
    return options.prefetch + 2


def _collecting(step: Step) -> PendingBackward | None:
    """The pending backward that collects gradients of the current backward; None if they are not for the optimizer."""
    return step.host.pending if step.host.for_optimizer else None


def _managed(step: Step, segment: Segment, pending: PendingBackward | None) -> dict[Input, Parameter]:
    """The weights of a segment that are updated here, each with the parameter that it is or is a slice of."""
    if pending is None:
        return {}
    weights = zip(segment.weights, segment.block.weights, strict=True)
    found = {w: step.given[w.owner] for w, spec in weights if w.index >= 0 and spec.differentiable}
    return {w: p for w, p in found.items() if p in pending.parameters}


def _returns_gradients(step: Step) -> bool:
    """Whether a backward may have gradients for `p.grad`, for which the caller must wait."""
    pending = _collecting(step)
    if pending is None:
        return True
    here = (p for p in step.given if isinstance(p, Parameter) and p not in step.elsewhere)
    return any(p.requires_grad and p not in pending.parameters for p in here)


def _indices(segment: Segment) -> tuple[int, ...]:
    return tuple(w.index for w in segment.weights if w.kind == "parameter")
