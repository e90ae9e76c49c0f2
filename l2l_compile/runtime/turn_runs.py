"""Run steps that go forward and back turn by turn (the option `schedule`), with a flush at the end of each call or without."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import fx

from l2l_compile.errors import DiskError, L2LError, RankError
from l2l_compile.ir.captured import Captured
from l2l_compile.ir.segments import Segment
from l2l_compile.ranks.announcements import ActionKind
from l2l_compile.ranks.pipeline_ranks import PipelineRanks
from l2l_compile.ranks.sharded import sharded_as
from l2l_compile.reentry import check, whole
from l2l_compile.runtime.call_arguments import Arguments
from l2l_compile.runtime.executor import Executor
from l2l_compile.runtime.graphs_by_need import Steps
from l2l_compile.runtime.joint_forward import JointRun, begin_apart, begin_together
from l2l_compile.runtime.outputs import Outputs
from l2l_compile.runtime.paused_step import PausedStep, StepGraph
from l2l_compile.runtime.runtime_value import RuntimeValue
from l2l_compile.runtime.slabs import Slabs
from l2l_compile.runtime.step import Engine, Step


class Runs(Protocol):
    """The program, as its steps by turns need it (`runner.py`)."""

    engine: Engine
    captured: Captured
    outputs: Outputs
    arguments: Arguments

    @property
    def segments(self) -> Sequence[Segment]: ...

    def run(self, graph: fx.Graph, step: Step, inputs: Sequence[RuntimeValue], /) -> Any: ...

    def executor(self, graph: fx.Graph, step: Step, slabs: Slabs, inputs: Sequence[RuntimeValue], /) -> Executor: ...

    def on_device(self, graph: fx.Graph, step: Step, /, *others: Step) -> AbstractContextManager[Slabs]: ...

    def joint(self, graph: fx.Graph, /) -> JointRun: ...

    def absent_for(self, step: Step, mask: tuple[bool, ...], /) -> frozenset[tuple[int, str]]: ...


class TurnRuns:
    """The steps of one program that go by turns."""

    def __init__(self, program: Runs, steps: Steps):
        self._program, self._steps = program, steps

    @property
    def _engine(self) -> Engine:
        return self._program.engine

    def made(self, step: Step) -> StepGraph:
        """The graph for the micro-batches of a step."""
        return self._steps.of(len(step.rows.sizes))

    def pauses(self, step: Step) -> bool:
        """Whether the last turns of a step go back in the next call."""
        return self.made(step).pauses

    def goes_on(self, paused: PausedStep, micro_batches: int) -> bool:
        """Whether a step that is in flight goes on in a call with this many micro-batches."""
        return micro_batches > 1 and self._steps.of(micro_batches) is paused.made

    def begin(self, step: Step, joint: JointRun, captured: Captured) -> bool:
        """Begin a step together with the other ranks, if it is one that pauses. Returns whether it is.

        The first one waits for the others. A further one does not, and has a channel of its own: its messages come between those before.
        """
        if not self.pauses(step) or step.world is None:
            return False
        ranks, before = pipeline_of(step), self._engine.in_flight.paused
        if before is None or step.world is not ranks:
            begin_together(step.world, step, joint, captured, to_train=True, is_global=False)
            ranks.open_channels(2)
            ranks.connect(self._engine.device.torch_device)
        if before is not None:
            step.channel = 1 - before.step.channel
            if step.world is ranks:
                begin_apart(ranks, step, joint, captured)
        return True

    def run(self, step: Step) -> list[torch.Tensor]:
        """The losses of a step. Its gradients wait until the loss is differentiated."""
        program, made = self._program, self.made(step)
        if program.captured.owners is not None:
            step.absent = program.absent_for(step, self._steps.mask)
        step.pushed, step.scale = [], self._engine.server.loss_scale()
        specs = [node.meta["spec"] for node in made.graph.find_nodes(op="placeholder") if node.meta["kind"] == "gradient"]
        ones = [RuntimeValue([torch.full(s.sizes(step.rows.bindings), step.scale, dtype=s.dtype)]) for s in specs]
        inputs = [*program.arguments.values(step.arguments), *ones]
        if made.pauses:
            return self._run_until_pause(step, made, inputs)
        outputs, _, _ = program.run(made.graph, step, inputs)
        return program.outputs.made(outputs, [], self._engine.device)

    # ---- without a flush ---------------------------------------------------------------------------------------------

    def _run_until_pause(self, step: Step, made: StepGraph, inputs: Sequence[RuntimeValue]) -> list[torch.Tensor]:
        """Run a step to the end of its own call, and between its turns the rest of the step before. Returns the losses."""
        program, in_flight = self._program, self._engine.in_flight
        self._check_optimizer(step)
        with in_flight.lock:
            before = in_flight.take()
            if before is not None:
                in_flight.read_at_once.next_step(before.was_read)
            try:
                with program.on_device(made.graph, step, *([] if before is None else [before.step])) as slabs:
                    executor = program.executor(made.graph, step, slabs, inputs)
                    paused = PausedStep(step, made, executor, self._finish, self._engine.server.end_turns)
                    paused.run(before)
                    there = {position: paused.loss(position) for position in made.losses.keys() - made.received}
                    pipeline_of(step).heard()
                    in_flight.put(paused)
                if before is not None:
                    self._fill(before)
            except BaseException as error:
                if before is not None:
                    before.drop(error)
                raise
        pipeline_of(step).in_flight = weakref.ref(in_flight)
        read = functools.partial(self._read_early, paused)
        losses, paused.coming = program.outputs.promised(there, step, read, self._engine.device)
        return losses

    def _check_optimizer(self, step: Step) -> None:
        """Raise `L2LError` for parameters that get no update; the other ranks, which have begun, are told."""
        try:
            self._engine.server.check_optimizer_has_all(step)
        except L2LError as error:
            step.ranks.failed(error)
            raise

    def _fill(self, paused: PausedStep) -> None:
        """A step is over: its losses are on the host."""
        assert paused.outputs is not None, "it is over"
        for position, coming in paused.coming.items():
            coming.fill(self._program.outputs.one(position, paused.outputs[position], self._engine.device))

    @whole("a loss that is read")
    def _read_early(self, paused: PausedStep, position: int) -> torch.Tensor:
        """The loss of a step whose turns are in flight: waits for the rank that computes it."""
        check()
        in_flight = self._engine.in_flight
        with in_flight.lock:
            if (coming := paused.coming[position]).is_there:  # another thread has read it, or its step is over
                return coming.read()
            in_flight.read_at_once.read()
            with self._program.on_device(paused.made.graph, paused.step):
                value = paused.loss(position)
            return self._program.outputs.one(position, value, self._engine.device)

    def _finish(self, paused: PausedStep, kind: ActionKind) -> None:
        """Run what is in flight of a step, together with the other ranks. It stays so if the wait for them is interrupted.

        Ranks that do something else, or have failed, never go on with it: it is lost.
        """
        graph, step, in_flight = paused.made.graph, paused.step, self._engine.in_flight
        with in_flight.lock:
            try:
                self._program.joint(graph).announce(step.ranks, kind)
            except (RankError, DiskError) as error:  # of another rank, or of this one
                for lost in in_flight.drop(error):
                    self._engine.server.recover(lost)
                raise
            in_flight.take()
            try:
                with self._program.on_device(graph, step):
                    paused.run_rest()
                self._fill(paused)
            except BaseException as error:
                paused.drop(error)
                raise

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def hand_over(self, step: Step, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """Give the gradients of a step to the host: those that are there now, and with turns in flight the others when they come.

        Returns the gradients for `p.grad`, by index of the argument.
        """
        mask, pushed, server = self._program.outputs.gradient_mask(gradients), step.pushed, self._engine.server
        if mask != self._steps.mask:
            raise L2LError(
                "schedule='1f1b' has computed the gradients of the loss alone: use schedule='breadth_first' for other outputs"
            )
        if pushed is None:
            raise L2LError(
                "schedule='1f1b' hands the gradients of a step over once: use schedule='breadth_first' for retain_graph=True"
            )
        made, step.pushed = self.made(step), None
        if step.world is not None and not made.pauses:  # a step that pauses is compared with the next forward: nobody waits here
            self._program.joint(made.graph).announce(step.world, ActionKind.BACKWARD, f"gradients of outputs {mask}")
        server.begin_backward(step, made.graph, self._program.segments)
        (gradient,) = [float(g) for g in gradients if g is not None]
        step.host.factor = gradient * step.host.scale / step.scale
        paused = self._engine.in_flight.paused
        if paused is not None and paused.step is step and not paused.is_over:
            server.begin_turns(step)
        for segment, value in pushed:
            server.collect(step, segment, value)
        return {i: sharded_as(g, step.given[i]) for i, g in server.end_backward(step).items()}


def pipeline_of(step: Step) -> PipelineRanks:
    """The ranks of the pipeline that runs a step."""
    pipeline = step.ranks.pipeline
    assert isinstance(pipeline, PipelineRanks), "only a pipeline has turns in flight"
    return pipeline
