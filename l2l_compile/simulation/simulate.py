"""`simulate`: steps of a model in virtual time, without the machine and without memory for the model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import fx

from l2l_compile.backend import new_runner
from l2l_compile.devices.host import HOST
from l2l_compile.errors import OptionError
from l2l_compile.frontend.dynamo import adapter, watched_frames
from l2l_compile.frontend.dynamo.meta_models import OnTheHost, on_the_host
from l2l_compile.host.compiled_step.compiled_step import CompiledStep, why_not_compiled
from l2l_compile.host.step.closures import check_needs_no_closure
from l2l_compile.host.step.torch_step import state_bytes_of_trial
from l2l_compile.host.step.trial import check_layers_are_independent
from l2l_compile.host.updates.overlapped import OverlappedUpdates
from l2l_compile.object_copies import copied, tensors_within
from l2l_compile.options import AUTO, Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.runtime.activation_room import STEPS
from l2l_compile.session import Session
from l2l_compile.simulation.block_times import MeasuredTimes
from l2l_compile.simulation.blocks import SimulatedLowering
from l2l_compile.simulation.charges import Charges
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.result import Simulation
from l2l_compile.simulation.ring import machine_of_rank
from l2l_compile.simulation.simulated_device import open_simulated
from l2l_compile.simulation.simulated_host import OnePass, SimulatedWorker
from l2l_compile.simulation.simulated_ranks import Division, division_of
from l2l_compile.torch_internals.fresh_code import WithoutArguments, fresh_caller

_MOST_STEPS = 6  # until two take equally long: the first step makes optimizer state, and updates may end in the next step


Loss = Callable[[Any], torch.Tensor]


def simulate(
    model: Callable,
    machine: str | Path | Machine,
    options: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    blocks: str = "roofline",
) -> Callable[..., Simulation]:
    """`simulate(model, "h200", options)(**batch)`: a training step of a compiled model on a machine, in virtual time.

    Under `torch.no_grad()`, a call without backward. An argument that the model writes into, such as an attention cache, is what the
    call before it has left: a token of a text follows a token. The caller's own arguments stay as they are.

    model    a module or a function, compiled or not; its tensors may be on the meta device
    machine  the name of a machine that comes with the package, the path of a file that `measure_machine` wrote, or a `Machine`
    options  options of the backend, by default the options of a compiled model. `device` and `check` are ignored. With
             `optimizer`, the time includes the optimizer's step
    loss     a function from the model's outputs to a number, computed on the host. The default is the model's own loss if it
             returns one (an attribute or an entry `loss`, or a single number), else the sum of all entries of its outputs
    blocks   "roofline": seconds of a block are computed from FLOPs, bytes and the machine's figures. "measured": its code is run on
             random numbers of its sizes, on this host, which has to be the device of the machine (`measure_machine("cpu")`)

    Pass the arguments of a training step, on the host or on meta. Programs, executor, waits and host side are the same as in a
    real step; only times are computed, from the machine's figures. No numbers of the model are computed, and the model and the
    optimizer stay as they are. Raises the errors that compilation would raise.

    For a model that `shard` has sharded, this rank is simulated. The other ranks do the same at the same time, on as many rows
    of their own. The host is shared by as many devices as the machine says. Raises `OptionError` if the machine lacks a figure
    for the links between devices.
    """
    given = dict(options if options is not None else adapter.options_of(model) or {})
    chosen = Options.build({**given, "device": HOST, "check": False})
    figures = machine if isinstance(machine, Machine) else Machine.load(machine)
    _check_blocks(blocks, figures)
    plain = adapter.uncompiled(model)
    division = division_of(plain, figures)
    if division is not None:
        figures = machine_of_rank(figures, division.ring.ranks)

    def run(*args: Any, **kwargs: Any) -> Simulation:
        state_bytes = _state_bytes(chosen)
        watched_frames.retry_skipped()
        try:
            with torch.random.fork_rng([]), on_the_host(plain, args, kwargs, all_fake=True) as call:
                return _Loop(plain, call, figures, division, chosen, state_bytes, loss or _loss_of, blocks).simulation()
        finally:
            watched_frames.retry_skipped()

    return WithoutArguments(run, "simulate(model, machine)")


def _check_blocks(blocks: str, machine: Machine) -> None:
    if blocks not in ("roofline", "measured"):
        raise OptionError(f"blocks is 'roofline' or 'measured', not {blocks!r}")
    if blocks == "measured" and machine.overlaps:
        raise OptionError(
            f"blocks='measured' runs blocks on this host, but layers of machine '{machine.name}' run on an accelerator: "
            "take measure_machine('cpu'), or blocks='roofline'"
        )


def _state_bytes(options: Options) -> int | None:
    """Bytes of optimizer state for each entry of a parameter, by a trial on real tensors; None if its step is not compiled."""
    if options.optimizer is None:
        return None
    if options.mode.is_overlapped:
        check_needs_no_closure(options.optimizer, f"update={options.update!r}")
        check_layers_are_independent(options.optimizer)
        if options.compile_update and why_not_compiled(options.optimizer) is None:
            return state_bytes_of_trial(options.optimizer)
    return None


class _Loop:
    """A loop of training steps, or of calls without gradients, on fake tensors. Made and used in fake mode."""

    def __init__(
        self,
        plain: Callable,
        call: OnTheHost,
        machine: Machine,
        division: Division | None,
        options: Options,
        state_bytes: int | None,
        loss: Loss,
        blocks: str,
    ):
        self.trains = torch.is_grad_enabled()
        self.plain, self.call, self.machine, self.division, self.loss = plain, call, machine, division, loss
        self.optimizer = _on_fakes(options.optimizer, call.fake) if options.optimizer is not None else None
        self.options = dataclasses.replace(options, optimizer=self.optimizer)
        self.device = open_simulated(machine, options.pinned_memory)
        self.charges = Charges(self.device)
        times = MeasuredTimes(options.block_compiler, machine) if blocks == "measured" else None
        with self.charges:
            self.session = Session(
                self.options,
                self.device,
                SimulatedLowering(self.device, options.block_compiler == "inductor", times),
                rates=machine,
                worker=lambda threads, accesses, name: SimulatedWorker(self.device.clocks, accesses, name),
            )
        self.device.occupied = self._occupied(state_bytes)
        updates = self.session.server.updates
        if state_bytes is not None and isinstance(updates, OverlappedUpdates) and isinstance(updates._step, CompiledStep):
            updates._step = OnePass(self.device.clocks, self.session.server.wires, state_bytes)  # type: ignore[assignment]

    def _occupied(self, state_bytes: int | None) -> int:
        """Bytes of the parameters, and of the optimizer's state if it is known."""
        parameters = {p: None for module in self._modules() for p in module.parameters()}
        entries = sum(p.numel() for p in parameters if p.requires_grad)
        return sum(p.nbytes for p in parameters) + (state_bytes or 0) * entries

    def simulation(self) -> Simulation:
        """Run steps until two in a row take equally long, at most `_MOST_STEPS`. Returns the last step."""
        compiled = torch.compile(fresh_caller(), backend=_Simulator(self))
        times, clocks = [self.device.now()], self.device.clocks
        with self.division.in_virtual_time(clocks) if self.division is not None else nullcontext():
            while len(times) <= _MOST_STEPS and not self._is_steady(times):
                self._start_peaks()
                self._step(compiled)
                times.append(self.device.now())
        return Simulation(
            self.machine,
            clocks.timeline(*times[-2:]),
            self.session.stats,
            self.device.taken.peak,
            self.device.locked.peak,
            self._is_steady(times),
            self.division.ring.ranks if self.division is not None else 1,
            self._tokens(),
            self.trains,
        )

    def _is_steady(self, times: Sequence[float]) -> bool:
        """Training steps are equal up to the rounding of clocks. With keep_on_host="auto", they keep something behind a few steps.

        Of calls without gradients, each may have a longer text, and the second is as the first: weights stay from then on.
        """
        if self.trains:
            starts = STEPS + 1 if self.options.keep_on_host == AUTO else 0
            return len(times) > starts + 1 and _is_steady(times, 1e-6)
        return len(times) > 3 and _is_steady(times, 2e-3)

    def _tokens(self) -> int | None:
        """Tokens of the batch: the entries of the first integer tensor with two dimensions; None if there is none."""
        arguments = torch.utils._pytree.tree_leaves((self.call.args, self.call.kwargs))
        tensors = (a for a in arguments if isinstance(a, torch.Tensor))
        return next((t.numel() for t in tensors if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)), None)

    def _start_peaks(self) -> None:
        for ledger in (self.device.taken, self.device.locked):
            ledger.start_peak()

    def _step(self, compiled: Callable) -> None:
        outputs = compiled(self.plain, *self.call.args, **self.call.kwargs)
        if not self.trains:
            return
        clocks = self.device.clocks
        clocks.label = "loss outside of the model"
        with self.charges:
            loss = self.loss(outputs)
        loss.backward()
        del outputs, loss
        clocks.label = "optimizer.step()"
        with self.charges:
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for module in self._modules():
            for parameter in module.parameters():
                parameter.grad = None

    def _modules(self) -> list[torch.nn.Module]:
        found = (self.plain, getattr(self.plain, "__self__", None))
        return [module for module in found if isinstance(module, torch.nn.Module)]


def _is_steady(times: Sequence[float], tolerance: float) -> bool:
    """Whether the last step took as long as the step before it, up to a relative difference."""
    seconds = [after - before for before, after in itertools.pairwise(times)]
    return len(seconds) > 1 and math.isclose(seconds[-1], seconds[-2], rel_tol=tolerance)


class _Simulator:
    """The backend: programs run in virtual time."""

    streams_layers = True  # `batch_marks.mark_batches` looks for this attribute
    __name__ = "l2l_simulate"

    def __init__(self, loop: _Loop):
        self.loop = loop
        self.skipped: list[watched_frames.SkippedFrame] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        runner = new_runner(gm, self.loop.session)
        charges = self.loop.charges
        backward = runner.backward

        @functools.wraps(backward)
        def charged(*arguments: Any) -> Any:
            with charges:
                return backward(*arguments)

        runner.backward = charged  # type: ignore[method-assign, assignment]

        def call(*arguments: Any) -> list:
            with charges:
                return runner(*arguments)

        return call


def _on_fakes(optimizer: torch.optim.Optimizer, fake: Callable[[torch.Tensor], torch.Tensor]) -> torch.optim.Optimizer:
    """A copy of an optimizer in which fake tensors replace parameters and state."""
    held = [*parameters_of(optimizer), *tensors_within(optimizer.state)]
    return copied(optimizer, {id(tensor): fake(tensor) for tensor in held})


def _loss_of(outputs: Any) -> torch.Tensor:
    """The model's own loss if it returns one, else the sum of all entries of the outputs that take a gradient."""
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    tensors = [t for t in torch.utils._pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    return tensors[0] if tensors and tensors[0].dim() == 0 else sum((t.sum() for t in tensors), torch.zeros(()))
