"""Run a compiled program as PyTorch calls it: arguments in, outputs out, gradients through autograd."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from l2l_compile.devices.host import outside_inference_mode, without_autocast
from l2l_compile.devices.profiler_ranges import ranges
from l2l_compile.ir import nodes
from l2l_compile.ir.captured import Captured
from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Segment
from l2l_compile.ir.values import is_float
from l2l_compile.ranks.announcements import ActionKind
from l2l_compile.ranks.pipeline_ranks import PipelineRanks
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.ranks.sharded import sharded_as
from l2l_compile.reentry import check, whole
from l2l_compile.runtime import collective_handlers, message_handlers, weight_handlers  # noqa: F401 - handlers of the executor
from l2l_compile.runtime.absent_gradients import absent_gradients
from l2l_compile.runtime.call_arguments import Arguments
from l2l_compile.runtime.executor import Executor
from l2l_compile.runtime.graphs_by_need import Backwards, Steps
from l2l_compile.runtime.instructions import instructions_of
from l2l_compile.runtime.joint_forward import JointRun, begin_together, collectives_of, options_told
from l2l_compile.runtime.kept_activations import KeptLevels, Room, kept_levels
from l2l_compile.runtime.micro_batches import MicroBatches
from l2l_compile.runtime.out_of_memory import name_remedies, name_slabs
from l2l_compile.runtime.outputs import Outputs
from l2l_compile.runtime.resident_weights import MeasuredNeed
from l2l_compile.runtime.rows import StepRows
from l2l_compile.runtime.runtime_value import RuntimeValue
from l2l_compile.runtime.segment_run import lowerings, savings_of
from l2l_compile.runtime.slab import slab_bytes
from l2l_compile.runtime.slabs import Slabs
from l2l_compile.runtime.stashes import Stashes
from l2l_compile.runtime.stats import Stats
from l2l_compile.runtime.step import Engine, Step
from l2l_compile.runtime.stored_stashes import host_bytes, sizes_on_disk
from l2l_compile.runtime.streamed_function import StreamedFunction
from l2l_compile.runtime.turn_runs import TurnRuns
from l2l_compile.units import format_bytes
from l2l_compile.user_line import warn


class Runner:
    """The callable that Dynamo gets for a graph. One step at a time.

    differentiable  which outputs can have a gradient
    ranks           the ranks that run the program together; None for one
    steps           the graphs of whole steps, if they go turn by turn
    """

    def __init__(
        self,
        program: Program,
        engine: Engine,
        backwards: Backwards,
        differentiable: Sequence[bool],
        ranks: Ranks | None = None,
        steps: Steps | None = None,
    ):
        self.engine, self.ranks = engine, ranks
        self._turns = TurnRuns(self, steps) if steps is not None else None
        self.captured: Captured = program.captured
        self.outputs, self.arguments = Outputs(program, differentiable), Arguments(program)
        self._program = self._shown = program
        self._backwards = backwards
        self._bindings = program.bindings
        self._stores = program.forward.graph.find_nodes(op="call_function", target=nodes.store)
        self._levels: dict[tuple, Mapping[int, KeptLevels]] = {}  # by backward graph, room, sizes
        self._absent: dict[tuple[bool, ...], frozenset[tuple[int, str]]] = {}  # by outputs that have a gradient
        self._lowered: set[tuple] = set()  # sizes for which compilation has begun
        self._micro_batches = MicroBatches(program, engine.options, engine.lowering)
        self._need = MeasuredNeed()
        self._weight_bytes = sum(slab_bytes([segment], self.captured.hints) for segment in program.here)
        goes_whole = program.step is not None  # one micro-batch goes forward and back
        self._streamed = program.here if goes_whole else program.streamed
        self._slab_bytes = slab_bytes(self._streamed, self.captured.hints)

    @property
    def program(self) -> Program:
        """The program, with the sizes of the last forward and the graph of the last backward; the same object while both stay."""
        if self._shown.bindings != self._bindings or self._shown.backward is not self._backwards.latest:
            self._shown = replace(self._program, bindings=self._bindings, backward=self._backwards.latest)
        return self._shown

    @whole("a forward")
    def __call__(self, *arguments: Any) -> list:
        """One forward pass; outputs on the host, joined to autograd where they take a gradient. Raises `ReentryError`."""
        check()
        self.arguments.check(arguments, self.engine.device.assertions_are_final)
        if any(self.outputs.differentiable) and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            made = StreamedFunction.apply(self, *arguments)
        else:
            with outside_inference_mode():
                made, step, _ = self.forward(arguments, to_train=False)
                return self._completed(step, made, arguments)
        return self.outputs.complete(made, arguments)

    def forward(self, arguments: Sequence, to_train: bool) -> tuple[list[torch.Tensor], Step, Stashes]:
        """Run the forward graph. Returns the outputs that it makes, on the host, and the step and the stashes for backward.

        `to_train` says whether a backward may follow.
        """
        engine, device = self.engine, self.engine.device
        start = device.now()
        self._settle_others()
        if not self._goes_on(arguments, to_train):
            reason = ActionKind.DRAIN_TO_CHANGE if to_train else ActionKind.DRAIN_TO_EVALUATE
            engine.in_flight.drain(reason)
        runs = engine.begin_forward()
        runs.append(stats := Stats())
        device.start_peak()
        if to_train:
            engine.resident.clear()
            engine.kept_inputs.release()
        else:
            engine.set_apart.clear()
        step = self._begin(arguments, stats, runs, to_train)
        ran_out = ""
        try:
            if (turns := self._turns_of(step)) is not None:
                made = turns.run(step)
                stats.forward_seconds = device.now() - start
                stats.peak_device_bytes = device.peak_bytes()
                return made, step, Stashes(device, [], Room())
            outputs, kept = self._run_forward(step)
        except torch.OutOfMemoryError as error:
            if not engine.resident.lost:
                raise
            ran_out = str(error)
        except RuntimeError as error:
            self.arguments.check_dtypes(arguments, error)
            raise
        if ran_out:  # the error is gone by now, and with it what its traceback has held of the device
            step = self._without_residents(step, ran_out)
            outputs, kept = self._run_forward(step)
        step.extent = None  # the stashes hold their places
        stats = step.stats
        device.accesses.read(step.place)
        for index, contents in step.writes.items():
            _overwrite(arguments[index], contents)
        stats.kept_bytes, stats.kept_on_host_bytes = room = _kept(step)
        stashes = Stashes(device, kept, room)
        if to_train:
            engine.waiting.add(stashes)
        made = self.outputs.made(outputs, kept, device)
        stats.forward_seconds = device.now() - start
        stats.peak_device_bytes = device.peak_bytes()
        return made, step, stashes

    def _run_forward(self, step: Step) -> tuple[Sequence[RuntimeValue], Sequence[RuntimeValue]]:
        """The outputs and the stashes of the forward graph, on the host."""
        inputs = self.arguments.values(step.arguments)
        replay = functools.partial(self.outputs.replay, step, self.engine.device)
        outputs, kept, _ = self.run(self._program.forward.graph, step, inputs, step.to_train, meanwhile=replay)
        if not step.to_train:
            self.engine.resident.end(self._need, self._sizes_of(step))
        return outputs, kept

    @property
    def segments(self) -> Sequence[Segment]:
        return self._program.segments

    def absent_for(self, step: Step, mask: tuple[bool, ...]) -> frozenset[tuple[int, str]]:
        if mask not in self._absent:
            self._absent[mask] = absent_gradients(step, self._program, mask)
        return self._absent[mask]

    def _without_residents(self, step: Step, error: str) -> Step:
        """The step once more, after weights that stay on the device left too little memory. Nothing was written yet."""
        resident = self.engine.resident
        gc.collect()  # an error and its traceback may be a circle, which holds memory of the device
        resident.leave_more()
        warn(
            f"backend 'l2l': the device ran out of memory beside {format_bytes(resident.lost)} of weights that stay there, which are freed "
            f"now; the call runs again, and fewer stay from now on. The option resident=0 keeps none. {error}"
        )
        step.runs[-1] = stats = Stats()
        again = self._begin(step.given, stats, step.runs, to_train=False)
        again.seed = step.seed
        return again

    def _completed(self, step: Step, made: Sequence[torch.Tensor], arguments: Sequence) -> list:
        """All outputs of a call without gradients. Keeps on the device what the next call may read: its tensors are known now."""
        kept = self.engine.kept_inputs
        try:
            outputs = self.outputs.complete(made, arguments, step.replayed)
        except BaseException:
            for value, size in step.keeps.values():
                kept.refuse(value.tensors, size)
            raise
        for (node, index), (value, size) in step.keeps.items():
            kept.keep((arguments if node is nodes.keep_input else outputs)[index], value.tensors, size)
        return outputs

    def _begin(self, arguments: Sequence, stats: Stats, runs: list[Stats], to_train: bool) -> Step:
        """A new step: its arguments, its rows, agreed with the other ranks, and the compilation of blocks for new sizes."""
        captured, options = self.captured, self.engine.options
        owners = captured.owners
        all_parameters = [i for i in captured.inputs if i.kind == "parameter"]
        parameters = [arguments[i.index] for i in all_parameters if owners is None or owners.has(i)]
        rows = self._rows_of(arguments)
        stored = sizes_on_disk(self._stores, rows) if to_train and self.engine.stashes_on_disk is not None else {}
        if to_train:
            self.engine.server.expect_stashes(self._memory_for(stored, rows))
            self._place(parameters)
        read = self.arguments.read(arguments, to_train)
        step = Step(self.engine, read, arguments, captured.constants, rows, stats, runs, to_train, self.ranks)
        if to_train and self.engine.stashes_on_disk is not None:
            self._place_stashes(step, stored)
        if self.ranks is not None:
            joint, is_global = self.joint(self._first_graph(step)), options.batch_scope == "global"
            turns = self._turns_of(step)
            if turns is None or not turns.begin(step, joint, captured):
                begin_together(self.ranks, step, joint, captured, to_train, is_global)
        if to_train and options.keeps_activations:
            step.levels = self._levels_of(step)
        if (sizes := (to_train, *self._sizes_of(step), sum(step.rows.of_ranks))) not in self._lowered:
            self._lowered.add(sizes)
            self.engine.lowering.ahead(lowerings(step, self.program, to_train))
        if owners is not None:
            step.elsewhere = frozenset(arguments[i.index] for i in all_parameters if not owners.has(i))
        fetches = self._first_graph(step).find_nodes(op="call_function", target=nodes.fetch_resident)
        resident = [self._program.segments[nodes.operands(node).segment] for node in fetches]
        self.engine.server.begin_forward(step, parameters, to_train, resident)
        self._bindings = rows.bindings
        return step

    def _place(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Move parameters to where they belong. The other ranks, which wait for this one to begin, are told of a failure."""
        try:
            self.engine.server.place(parameters)
        except BaseException as error:
            if self.ranks is not None:
                self.ranks.failed(error)
            raise

    def _memory_for(self, stored: Mapping[fx.Node, int], rows: StepRows) -> int:
        """Host memory for stashes on their way to the disk, and back."""
        backward = self._program.backward
        return host_bytes([*stored.values()], backward.graph if backward is not None else None, rows.bindings)

    def _place_stashes(self, step: Step, stored: Mapping[fx.Node, int]) -> None:
        """Room on disk for what the forward stores. The other ranks are told of a failure."""
        assert self.engine.stashes_on_disk is not None
        try:
            step.stored, step.extent = stored, self.engine.stashes_on_disk.begin_forward([*stored.values()])
        except BaseException as error:
            if self.ranks is not None:
                self.ranks.failed(error)
            raise

    def _rows_of(self, arguments: Sequence) -> StepRows:
        bindings = self.captured.bindings(arguments)
        return StepRows(bindings, self.captured.batch, self._micro_batches.of(bindings))

    def _settle_others(self) -> None:
        """Messages and norms of two models over the same ranks would be mixed up: what another one has in flight is done first."""
        pipeline = self.ranks.pipeline if self.ranks is not None else None
        held = pipeline.in_flight if isinstance(pipeline, PipelineRanks) else None
        other = held() if held is not None else None
        if other is not None and other is not self.engine.in_flight:
            other.settle()

    def _goes_on(self, arguments: Sequence, to_train: bool) -> bool:
        """Whether what is in flight of the step before may go back in this call."""
        paused = self.engine.in_flight.paused
        if paused is None or not to_train or self._turns is None:
            return paused is None
        return self._turns.goes_on(paused, len(self._rows_of(arguments).sizes))

    def _turns_of(self, step: Step) -> TurnRuns | None:
        """What runs a step that goes turn by turn; None for any other."""
        return self._turns if step.to_train and len(step.rows.sizes) > 1 else None

    def _first_graph(self, step: Step) -> fx.Graph:
        """The graph with which a step begins."""
        turns = self._turns_of(step)
        return self._program.forward.graph if turns is None else turns.made(step).graph

    def joint(self, graph: fx.Graph) -> JointRun:
        """What ranks compare before they run a graph."""
        return JointRun(self._options_told, self._stages, collectives_of(graph, self._program.segments))

    @functools.cached_property
    def _options_told(self) -> tuple[tuple[str, str], ...]:
        return options_told(self.engine.options)

    @functools.cached_property
    def _stages(self) -> tuple[str, ...]:
        """The segments of each stage of a pipeline, as text."""
        stages = self._program.stages
        return stages.lines(self._program.segments) if stages is not None else ()

    def _levels_of(self, step: Step) -> Mapping[int, KeptLevels]:
        """What each segment keeps for its backward, at these sizes and beside what earlier forwards keep.

        The gradients that arrive are taken to be those of the last backward.
        """
        engine = self.engine
        sizes = self._sizes_of(step)
        room = engine.room.at(sizes).less(engine.waiting.activations)
        key = self._backwards.latest, room, *sizes
        if key not in self._levels:
            found = kept_levels(self.program, step.rows.bindings_of, engine.savings, room)
            while not engine.savings.ahead(savings_of(found, step.rows, self.program)):
                found = kept_levels(self.program, step.rows.bindings_of, engine.savings, room)
            self._levels[key] = found
        return self._levels[key]

    def _sizes_of(self, step: Step) -> list[int]:
        return [number for symbol, number in step.rows.bindings.items() if not is_float(symbol)]

    def backward(
        self, step: Step, stashes: list[RuntimeValue], gradients: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor]:
        """Run the backward graph, given gradients of the outputs of forward. Returns gradients by index of the argument."""
        device, server, stats = self.engine.device, self.engine.server, step.stats
        start = device.now()
        self.engine.begin_backward(step.runs)
        if (turns := self._turns_of(step)) is not None:
            found = turns.hand_over(step, gradients)
            stats.backward_seconds += device.now() - start
            return found
        mask = self.outputs.gradient_mask(gradients)
        module = self._backwards.of(mask)
        if step.world is not None:
            self.joint(module.graph).announce(step.world, ActionKind.BACKWARD, f"gradients of outputs {mask}")
        if self.captured.owners is not None:
            step.absent = self.absent_for(step, mask)
        server.begin_backward(step, module.graph, self._program.segments)
        scale = step.host.scale
        gradients = [g if g is None else g * scale for g in gradients] if scale != 1.0 else gradients
        returned = self.run(module.graph, step, [*stashes, *(RuntimeValue([g]) for g in gradients if g is not None)])
        values = [i.index for i in self.captured.inputs if i.kind == "value"]
        for value in filter(None, returned):
            device.accesses.read(value.place)
        found = {
            i: device.handed_over(value.tensors[0])
            for i, value in zip(values, returned, strict=True)
            if value is not None and not value.absent
        }
        if scale != 1.0:
            found = {i: g / scale for i, g in found.items()}
        found |= {i: sharded_as(g, step.given[i]) for i, g in server.end_backward(step).items()}
        stats.backward_seconds += device.now() - start
        stats.peak_device_bytes = max(stats.peak_device_bytes, device.peak_bytes())
        self.engine.room.measured(self._sizes_of(step), stats, _kept(step))
        return found

    def run(
        self,
        graph: fx.Graph,
        step: Step,
        inputs: Sequence[RuntimeValue],
        keep: bool = False,
        meanwhile: Callable[[Any], None] = lambda result: None,
    ) -> Any:
        """Run a graph; with `keep`, its last weights stay in their slabs for the backward of the step.

        `meanwhile` is what the caller does with the result while lanes still fill it.
        """
        with self.on_device(graph, step, keep=keep) as slabs:
            result = self.executor(graph, step, slabs, inputs).run()
            if not keep:
                slabs.end()
            self._meanwhile(meanwhile, result)
        return result

    def executor(self, graph: fx.Graph, step: Step, slabs: Slabs, inputs: Sequence[RuntimeValue]) -> Executor:
        """What runs the nodes of a graph for a step."""
        instructions = instructions_of(graph, self.engine.device.launches_first)
        return Executor(self.engine.device, step, self._program.segments, slabs, instructions, inputs)

    @contextmanager
    def on_device(self, graph: fx.Graph, step: Step, *others: Step, keep: bool = False) -> Iterator[Slabs]:
        """Context manager in which lanes run a graph for a step, and what is left of other steps. Waits for them in the end.

        After an error, the device can be used again, and the host has dropped what it has of the steps.
        """
        device = self.engine.device
        count = min(self.engine.options.prefetch, 2 * len(self._program.segments)) + 1  # a graph has no more fetches
        try:
            with device.running(), ranges(device), torch.no_grad(), without_autocast(device.torch_device):
                self.engine.set_apart.begin()
                if fetches := instructions_of(graph, device.launches_first).fetches:
                    self._reserve_slabs(count)
                if not step.to_train:
                    self.engine.kept_inputs.begin(self.engine.resident.bytes)
                    self.engine.resident.begin(self._need, self._sizes_of(step), self._weight_bytes)
                yield Slabs(device, step, count, fetches, keep)
                if step.world is not None:
                    device.await_ranks(step.world.check)
                device.synchronize()
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError):
                if step.levels:
                    self.engine.room.ran_out()
                name_remedies(error, step, _kept(step))
            if step.world is not None:
                step.world.failed(error)
            try:
                if step.world is not None:
                    step.world.abort()
                device.recover()
            except Exception as another:  # noqa: BLE001 - a device that has failed for good fails in each call: the first error says why
                error.add_note(f"the device could not be used after it either: {type(another).__name__}: {another}")
            finally:
                step.extent = None
                self.engine.kept_inputs.clear()
                self.engine.set_apart.clear()
                self.engine.resident.forget()
                self._need = MeasuredNeed()
                lost = self.engine.in_flight.drop(error)
                self._recover_host(step, *others, *lost)
            raise

    def _reserve_slabs(self, count: int) -> None:
        try:
            self.engine.device.reserve_slabs(count, self._slab_bytes)
        except torch.OutOfMemoryError as error:
            name_slabs(error, count, self._streamed, self.captured.hints)
            raise

    def _recover_host(self, *steps: Step) -> None:
        """The host drops what it has of steps that have failed."""
        for step in steps:
            self.engine.server.recover(step)
        if self.engine.stashes_on_disk is not None:
            self.engine.stashes_on_disk.recover()

    def _meanwhile(self, work: Callable[[Any], None], result: Any) -> None:
        try:
            work(result)
        except Exception:
            self.engine.device.synchronize()  # raises the error of a lane, which may be the cause
            raise


def _kept(step: Step) -> Room:
    """Bytes that a step keeps inside of its segments."""
    return Room.sum(levels.room for levels in step.levels.values())


def _overwrite(argument: torch.Tensor, contents: torch.Tensor) -> None:
    """Write into an argument. A tensor that the user has made under inference mode can be written there alone."""
    with torch.inference_mode() if argument.is_inference() else torch.no_grad():
        argument.copy_(contents)
