"""The eager param-server (EPS; L2L, section 2.1): weights for the executor, gradients from it."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from ..devices.device import Device
from ..errors import L2LError
from ..ir import nodes
from ..ir.captured import Input
from ..ir.segments import Segment
from ..memory.accesses import Unwatched
from ..options import Options
from ..ranks.sharded import divided_as
from ..runtime.step import RuntimeValue, Stats, Step
from ..timeline import HOST, UPDATE
from .gradients import GradientMemory
from .optimizer.at_step import UpdatesAtStep
from .optimizer.delayed import DelayedUpdates
from .optimizer.gradient_ledger import Parameter, PendingBackward, Pushed
from .optimizer.in_backward import UpdatesInBackward
from .optimizer.in_forward import UpdatesInForward
from .optimizer.updates import Updates, wait_for_other_models
from .versions import DelayedWires
from .wire import Ready, Wire, Wires, nobody
from .worker import Ticket, Worker

_UPDATES = {"at_step": UpdatesAtStep, "in_backward": UpdatesInBackward, "in_forward": UpdatesInForward}


class ParameterServer:
    """Master weights on the host, the wire that leaves it, and the gradients that come back. One per compiled model.

    With `update="at_step"`, gradients go to `p.grad`. Otherwise they stay here, and updates run while the device computes.
    """

    def __init__(self, options: Options, device: Device, worker: Callable[[int, Unwatched, str], Worker] = Worker):
        self.options, self.device = options, device
        threads = device.host_threads()
        names = (HOST, UPDATE) if options.delay else (HOST,)
        self.workers = [worker(threads, device.accesses, name) for name in names]
        self.worker = self.workers[0]
        for each in self.workers:
            weakref.finalize(self, each.close)
        self._in_flight: deque[Ticket] = deque()  # the last work on each segment's gradients
        self._memory = GradientMemory(device.unlocked_pool())
        self.wires: Wires
        self.updates: Updates
        if options.delay:
            self.wires = wires = DelayedWires(device.pinned, device.accesses)
            self.updates = DelayedUpdates(options, self.worker, wires, threads, self._memory, self.workers[1])
        else:
            kind = _UPDATES[options.update]
            self.wires = Wires(device.pinned, None if kind.keeps_wires else self._memory)
            self.updates = kind(options, self.worker, self.wires, threads, self._memory)
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def watch(self, modules: Sequence[torch.nn.Module]) -> None:
        """Watch the modules that own the parameters: their `state_dict` waits for updates that were put off."""
        self._modules.update(modules)
        self.updates.watch(modules)

    def describe(self, stats: Stats) -> None:
        """Add the figures of the host side to the figures of the programs."""
        self.updates.describe(stats)

    def synchronize(self) -> None:
        """Block until every update made so far can be seen in the parameters. Raises the error of an update that failed."""
        self.updates.synchronize()
        if self.device.accesses.watches:
            self.device.accesses.read_parameters(p for module in self._modules for p in module.parameters())

    # ---- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(self, step: Step, parameters: Sequence[Parameter], to_train: bool) -> None:
        """A forward begins: updates of the step before are done or will be waited for, and wires are checked again."""
        step.gradient_wire = self.options.gradients_on_link
        self.wires.begin_forward()
        if to_train:
            self._check_optimizer(parameters)
        wait_for_other_models(self.updates, parameters)
        step.pending = self.updates.begin_forward(parameters, to_train)

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
        owned = {p for group in optimizer.param_groups for p in group["params"]}
        if trained and owned.isdisjoint(trained) and owned.isdisjoint(p for m in self._modules for p in m.parameters()):
            raise L2LError(
                f"the option 'optimizer' holds none of the {len(trained)} parameters that this model trains: build it from "
                "the parameters of the model that is compiled"
            )

    def load(
        self, step: Step, segment: Segment, weights: Sequence[torch.Tensor], ready: Ready = nobody
    ) -> tuple[Wire | None, list[torch.Tensor]]:
        """The wire of a segment's parameters, up to date, and its other weights as they are (h2d lane).

        `ready` is called for one part of the wire after another, as soon as it is up to date.
        With update='at_step', every forward copies the wire again, so backward frees a wire whose memory gradients will take.
        """
        owners = [step.given[i.owner] for i in segment.weights if i.kind == "parameter"]
        self.updates.wait(owners)
        if not self.options.delay:
            self.device.accesses.read_parameters(owners)
        parameters = [
            (w if i.pieces is None else step.given[i.index], spec.dtype)
            for w, spec, i in zip(weights, segment.block.weights, segment.weights, strict=True)
            if i.kind == "parameter"
        ]
        if (self.options.precision == "fp32" and not self.options.delay) or not parameters:
            return None, list(weights)
        key = _indices(segment)
        if key in step.last_fetches:
            step.last_fetches[key] -= 1
        wire = self.wires.load(
            [p for p, _ in parameters],
            [dtype for _, dtype in parameters],
            owners,
            keep=step.last_fetches.get(key) != 0,
            newest=step.pending is None,
            ready=ready,
        )
        return wire, [w for w, i in zip(weights, segment.weights, strict=True) if i.kind != "parameter"]

    # ---- backward ----------------------------------------------------------------------------------------------------

    def begin_backward(self, step: Step, graph: fx.Graph, segments: Sequence[Segment]) -> None:
        """A backward begins; sets `step.scale`, the factor by which the gradients of its outputs are to be multiplied."""
        step.returned = {}
        if not self.updates.keeps_wires:
            fetches = graph.find_nodes(op="call_function", target=nodes.fetch_weights)
            step.last_fetches = Counter(_indices(segments[nodes.operands(n).segment]) for n in fetches)
        pushing = [segments[nodes.operands(n).segment] for n in graph.find_nodes(op="call_function", target=nodes.push_gradients)]
        is_final = step.world is None or step.world.replicas == 1  # no mean over replicas follows behind the link
        step.wants_norms = self.updates.wants_norms and _collecting(step) is not None and is_final
        pending = _collecting(step)
        self.updates.begin_backward(pending, Counter(p for s in pushing for p in _managed(step, s, pending).values()))
        step.scale = self.updates.scale.value if self.updates.scale is not None else 1.0

    def collect(self, step: Step, segment: Segment, gradients: RuntimeValue) -> None:
        """Take the gradients of a segment: they are on the host after the event of their value, or absent.

        Blocks while too many other segments (`segments_in_flight`) have gradients that are not yet at their place.
        """
        if _collecting(step) is None and gradients.absent:
            return
        while len(self._in_flight) >= segments_in_flight(self.options):
            self._in_flight.popleft().wait()
        pending = _collecting(step)  # now: when the work is done, another backward of the step may be under way
        self._in_flight.append(self.worker.submit(lambda: self._collect(step, segment, gradients, pending)))

    def _collect(self, step: Step, segment: Segment, gradients: RuntimeValue, pending: PendingBackward | None) -> None:
        """Wait for the gradients, and give each to the updates or to `p.grad` (host lane)."""
        if gradients.event is not None:
            self.device.wait_on_host(gradients.event)
        self.device.accesses.read(gradients.place)
        tensors: list[torch.Tensor | None] = gradients.tensors or []
        arrived = {w: g for w, g in zip(segment.weights, tensors, strict=False) if g is not None}
        norms = _by_weight(arrived, tensors[len(segment.weights) :])
        gradients.tensors = None
        if step.world is not None and step.world.replicas > 1:
            step.world.average_replicas(tensors)
        if pending is not None:
            managed = _managed(step, segment, pending)
            pushed = [Pushed(p, arrived.pop(w, None), w.part, norms.get(w)) for w, p in managed.items()]
            self.updates.collect(pending, pushed)
        self._return(step, segment, arrived)

    def _return(self, step: Step, segment: Segment, arrived: dict[Input, torch.Tensor]) -> None:
        """Add gradients to the sums that go to `p.grad` (host lane)."""
        weights = [w for w in segment.weights if w.kind == "parameter" or w in arrived]
        gradients = [arrived.pop(w, None) for w in weights]
        self._memory.widen_together(gradients, [step.arguments[w.index] for w in weights])
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                self.device.accesses.write(step.places[1])
                gradient = gradient.div_(step.scale) if step.scale != 1.0 else gradient
                total, owner = step.returned.get(weight.owner), step.arguments[weight.owner]
                step.returned[weight.owner] = self._memory.collected(total, gradient, owner, weight.part)

    def update(self, step: Step, segment: Segment) -> None:
        """The segment has pushed its gradients: parameters whose gradients are complete may be updated."""
        if (pending := _collecting(step)) is not None:
            ticket = self.updates.update(pending, _managed(step, segment, pending).values())
            if ticket is not None:
                self._in_flight[-1] = ticket

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
            self.device.accesses.write(step.places[1])
        found, step.returned = step.returned, {}
        returned = (divided_as(g, step.given[i]) for i, g in found.items())
        step.stats.gradient_squares += self.updates.squares_of_returned(returned)
        return found

    def recover(self, step: Step) -> None:
        """After a failure in a step: its gradients are dropped, and no backward of its forward is waited for."""
        for worker in self.workers:
            try:
                worker.drain()
            except Exception:  # noqa: BLE001 - the first error is on its way to the user already
                pass
        self._in_flight.clear()
        self.updates.forget(step.pending)


def _by_weight(arrived: Iterable[Input], norms: Sequence[torch.Tensor | None]) -> dict[Input, float]:
    """The norm of each gradient that has arrived. `norms` is empty, or has one tensor with all norms that the device took."""
    return {w: norm for taken in norms if taken is not None for w, norm in zip(arrived, taken.tolist(), strict=True)}


def segments_in_flight(options: Options) -> int:
    """How many segments may have gradients on the host that are not yet at their place."""
    return options.prefetch + 2


def _collecting(step: Step) -> PendingBackward | None:
    """The pending backward that collects gradients of the current backward; None if they are not for the optimizer."""
    return step.pending if step.for_optimizer else None


def _managed(step: Step, segment: Segment, pending: PendingBackward | None) -> dict[Input, Parameter]:
    """The weights of a segment that are updated here, each with the parameter that it is or is a part of."""
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
    return any(p.requires_grad and p not in pending.parameters for p in step.given if isinstance(p, Parameter))


def _indices(segment: Segment) -> tuple[int, ...]:
    return tuple(w.index for w in segment.weights if w.kind == "parameter")
