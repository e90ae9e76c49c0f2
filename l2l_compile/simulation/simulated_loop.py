"""A loop of training steps, or of calls without gradients, of one rank in virtual time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from l2l_compile.backend import new_runner
from l2l_compile.devices.host import HOST
from l2l_compile.devices.registry import ACCELERATOR
from l2l_compile.frontend.dynamo import adapter, kept_programs, watched_frames
from l2l_compile.frontend.dynamo.meta_models import OnTheHost
from l2l_compile.host.compiled_step.compiled_step import CompiledStep
from l2l_compile.host.step.torch_step import TorchStep
from l2l_compile.host.updates.overlapped import OverlappedUpdates
from l2l_compile.host.watched_parameters import nothing_is_read
from l2l_compile.lanes import Lane
from l2l_compile.lowering.costs import typical_rates
from l2l_compile.options import AUTO, Options
from l2l_compile.races import Unwatched
from l2l_compile.ranks.pipeline_ranks import PipelineRanks
from l2l_compile.ranks.ranks import Ranks, standing_in
from l2l_compile.ranks.sharded import local
from l2l_compile.runtime.activation_room import STEPS
from l2l_compile.session import Session
from l2l_compile.simulation.block_times import MeasuredTimes
from l2l_compile.simulation.blocks import SimulatedLowering
from l2l_compile.simulation.charges import Charges
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.result import Simulation
from l2l_compile.simulation.simulated_device import open_simulated
from l2l_compile.simulation.simulated_disk import SimulatedCopies, SimulatedStore, through_disk
from l2l_compile.simulation.simulated_host import OnePass, SimulatedWorker, WaitingWorker
from l2l_compile.simulation.simulated_pipeline import Messages, SimulatedPipeline
from l2l_compile.simulation.simulated_ranks import Division, SimulatedRanks
from l2l_compile.simulation.simulated_stashes import SimulatedStashes
from l2l_compile.torch_internals.fresh_code import fresh_caller

_MOST_STEPS = 6  # until two take equally long: the first step makes optimizer state, and updates may end in the next step
_MOST_CALLS = 12  # without gradients: each may add some of the weights that stay

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """What all ranks have in common.

    plain        the model or function, without compilation
    division     how the model is sharded; None for one rank
    state_bytes  bytes of optimizer state for each entry of a parameter, if they are known
    """

    plain: Callable
    call: OnTheHost
    machine: Machine
    division: Division | None
    options: Options
    state_bytes: int | None
    loss: Loss
    blocks: str


@dataclass(frozen=True)
class Rank:
    """What a rank has: its parameters, and their optimizer."""

    parameters: Sequence[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer | None


@dataclass(frozen=True)
class Stage:
    """A rank of a pipeline, and what all of them share: the real ranks, and the messages."""

    number: int
    pipeline: PipelineRanks
    messages: Messages


class SimulatedLoop:
    """A loop of training steps, or of calls without gradients, on fake tensors. Made and used in fake mode."""

    def __init__(self, setting: Setting, rank: Rank, stage: Stage | None = None):
        options, machine = setting.options, setting.machine
        self.trains = torch.is_grad_enabled()
        self.setting, self.rank = setting, rank
        self.options = dataclasses.replace(
            options, optimizer=rank.optimizer, disk=None, host_memory=None
        )  # its file is simulated
        self.device = open_simulated(machine, options.pinned_memory)
        self.charges = Charges(self.device)
        rates = typical_rates(ACCELERATOR if machine.overlaps else HOST)  # a run does not know its machine
        times = MeasuredTimes(options.block_compiler, rates) if setting.blocks == "measured" else None
        with self.charges:
            self.session = Session(
                self.options,
                self.device,
                SimulatedLowering(self.device, options.block_compiler == "inductor", times),
                rates=rates,
                worker=self._worker,
            )
        self.device.occupied = self._occupied()
        updates, state_bytes = self.session.server.updates, setting.state_bytes
        if isinstance(updates, OverlappedUpdates) and isinstance(updates._step, CompiledStep):
            updates._step = self._step_of_updates(state_bytes)  # type: ignore[assignment]
        self.device.clocks.disks = options.disks
        if options.stash == "disk":
            self.session.stashes_on_disk = SimulatedStashes(self.device, self._worker)
        if options.stores_parameters:
            assert isinstance(updates, OverlappedUpdates)
            on_disk = SimulatedStore(self.device.clocks, dataclasses.replace(options, optimizer=rank.optimizer))
            updates._stored = on_disk  # type: ignore[assignment]
            updates.stored_copies = SimulatedCopies(on_disk, self.session.server.wires) if not options.delay else None
            updates._step = through_disk(updates._step, on_disk)  # type: ignore[assignment, arg-type]
        self.pipeline = SimulatedPipeline(stage.messages, stage.number, self.device.clocks) if stage is not None else None
        self._residents_changed = False  # in the last call
        self._acting: dict[Ranks, Ranks] = {}
        if stage is not None and self.pipeline is not None:
            self._acting[stage.pipeline] = self.pipeline
        if setting.division is not None:
            self._acting[setting.division.ranks] = SimulatedRanks(setting.division, self.device.clocks, self.pipeline)

    def _step_of_updates(self, state_bytes: int | None) -> OnePass | TorchStep:
        """A compiled step is one pass. One that is not compiled runs the operations of the optimizer on tensors without memory."""
        server = self.session.server
        if state_bytes is not None:
            return OnePass(self.device.clocks, server.wires, state_bytes)
        return TorchStep(self.options.optimizer, server._memory)  # type: ignore[arg-type]  # overlapped updates have one

    def _worker(self, threads: int, accesses: Unwatched, name: str) -> SimulatedWorker:
        """A thread of the host. One that waits for ranks which are behind this one runs when this one waits for it."""
        kind = WaitingWorker if self.options.goes_by_turns and name == Lane.UPDATE else SimulatedWorker
        return kind(self.device.clocks, accesses, name)

    def _occupied(self) -> int:
        """Bytes of this rank's parameters, and of the optimizer's state if it is known."""
        entries = sum(local(p).numel() for p in self.rank.parameters if p.requires_grad)
        return sum(local(p).nbytes for p in self.rank.parameters) + (self.setting.state_bytes or 0) * entries

    def simulation(self) -> Simulation:
        """Run steps until two in a row take equally long, at most `_MOST_STEPS`. Returns the last step."""
        compiled = torch.compile(fresh_caller(), backend=_Simulator(self))
        times, clocks = [self.device.now()], self.device.clocks
        most = _MOST_STEPS if self.trains else _MOST_CALLS
        try:
            with standing_in(self._acting), nothing_is_read():
                while len(times) <= most and (self._goes_on or not self._is_steady(times)):
                    self._start_peaks()
                    changes = self.session.resident.changes
                    self._step(compiled)
                    self._residents_changed = self.session.resident.changes != changes
                    if self.pipeline is not None and not self._goes_on:
                        self.pipeline.meet(0.0)  # the next step of all ranks begins when the last one is here
                    times.append(self.device.now())
                with self.charges:
                    stats = self.session.stats  # may wait for updates
                self.session.in_flight.take()  # no process waits for turns in virtual time
        finally:
            kept_programs.forget(adapter.owner_of(compiled))
        return Simulation(
            self.setting.machine,
            clocks.timeline(*times[-2:]),
            stats,
            self.device.taken.peak,
            self.device.locked.peak,
            self._is_steady(times),
            self.setting.division.copies if self.setting.division is not None else 1,
            self._tokens(),
            self.trains,
        )

    @property
    def _goes_on(self) -> bool:
        """Whether turns are in flight from step to step: no rank waits for the others between them, and all take as many steps."""
        return self.session.in_flight.paused is not None

    def _is_steady(self, times: Sequence[float]) -> bool:
        """Training steps are equal up to the rounding of clocks. With keep_on_host="auto", they keep something behind a few steps.

        Of calls without gradients, each may have a longer text. The third may be as the second before more weights come to stay: the
        second counts a cache twice that stays beside them, and the third is the first to measure the rest.
        """
        if self.trains:
            starts = STEPS + 1 if self.options.keep_on_host == AUTO else 0
            return len(times) > starts + 1 and _is_steady(times, 1e-6)
        return len(times) > 3 and _is_steady(times, 2e-3) and not self._residents_changed

    def _tokens(self) -> int | None:
        """Tokens of the batch: the entries of the first integer tensor with two dimensions; None if there is none."""
        arguments = torch.utils._pytree.tree_leaves((self.setting.call.args, self.setting.call.kwargs))
        tensors = (a for a in arguments if isinstance(a, torch.Tensor))
        return next((t.numel() for t in tensors if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)), None)

    def _start_peaks(self) -> None:
        for ledger in (self.device.taken, self.device.locked):
            ledger.start_peak()

    def _step(self, compiled: Callable) -> None:
        outputs = compiled(self.setting.plain, *self.setting.call.args, **self.setting.call.kwargs)
        if not self.trains:
            return
        clocks = self.device.clocks
        clocks.label = "loss outside of the model"
        with self.charges:
            loss = self.setting.loss(outputs)
        loss.backward()
        del outputs, loss
        clocks.label = "optimizer.step()"
        with self.charges:
            if self.rank.optimizer is not None:
                self.rank.optimizer.step()
                self.rank.optimizer.zero_grad()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for parameter in self.rank.parameters:
            parameter.grad = None


def _is_steady(times: Sequence[float], tolerance: float) -> bool:
    """Whether the last step took as long as the step before it, up to a relative difference."""
    seconds = [after - before for before, after in itertools.pairwise(times)]
    return len(seconds) > 1 and math.isclose(seconds[-1], seconds[-2], rel_tol=tolerance)


class _Simulator:
    """The backend: programs run in virtual time."""

    streams_layers = True  # `batch_marks.mark_batches` looks for this attribute
    __name__ = "l2l_simulate"

    def __init__(self, loop: SimulatedLoop):
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
