"""The times of the graphs of a program in a training step: forward and backward, or one graph that goes by turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from torch import fx

from l2l_compile.estimate.graph_times import GraphTimer, ProgramSetting, TimedStep, Timer
from l2l_compile.estimate.overlapped_times import TimedValue
from l2l_compile.ir import nodes
from l2l_compile.ir.program import Program
from l2l_compile.ir.schedule import END, PAUSE
from l2l_compile.ir.step_parts import calls_of, end_waits, pauses, received
from l2l_compile.lowering.costs import typical_rates
from l2l_compile.lowering.savings import Savings
from l2l_compile.runtime.absent_gradients import absent_gradients
from l2l_compile.runtime.kept_activations import KeptLevels
from l2l_compile.runtime.rows import StepRows
from l2l_compile.runtime.stored_stashes import sizes_on_disk


class ProgramTimer:
    """Times the steps of one program, each by a `forward` and a `backward`. `turns` is the graph of a step by turns, if it has one."""

    def __init__(self, timer: Timer, number: int, program: Program, levels: Mapping[int, KeptLevels]):
        self.timer, self.program, self.levels, self.number = timer, program, levels, number
        self.rows = StepRows(program.bindings, program.captured.batch, timer.options.micro_batches)
        self.turns = program.step.graph if program.step is not None and len(self.rows.sizes) > 1 else None
        stores = program.forward.graph.find_nodes(op="call_function", target=nodes.store)
        self._stored = sizes_on_disk(stores, self.rows)
        self._savings = Savings(timer.lowering, timer.options.block_compiler != "eager", typical_rates(timer.options.device))
        self._engine = SimpleNamespace(check=None, lowering=timer.lowering, options=timer.options)
        self._absent = self._absent_gradients()
        self._stashes: Sequence[TimedValue] = ()
        self._of = self._begun()
        self._step: GraphTimer | None = None  # by turns, whose gradients wait
        self._paused: GraphTimer | None = None  # without a flush, whose last turns are in flight

    @property
    def pauses(self) -> bool:
        """Whether the last turns of a step go back in the next one."""
        return self.turns is not None and pauses(self.turns)

    def _begun(self) -> ProgramSetting:
        """The program in a new step."""
        step = TimedStep(self.rows, self._engine)
        is_by_turns = self.turns is not None
        return ProgramSetting(
            self.timer,
            self.number,
            self.program,
            self.levels,
            self._stored,
            self.rows,
            self._savings,
            step,
            is_by_turns,
            self._absent,
        )

    def _absent_gradients(self) -> frozenset[tuple[int, str]]:
        """The gradients that no rank of a pipeline makes, if the losses are differentiated."""
        captured = self.program.captured
        if captured.owners is None:
            return frozenset()
        specs = [captured.specs.get(node) for node in captured.outputs]
        mask = [spec is not None and spec.differentiable and spec.batch is None and not spec.mixed for spec in specs]
        return absent_gradients(TimedStep(self.rows, self._engine), self.program, mask)  # type: ignore[arg-type]  # all that it asks for

    def forward(self) -> None:
        """The call of the model."""
        if self.turns is None or not self.pauses or self._paused is None:  # else nobody waits for the other ranks
            self.timer.links.meet(self.timer.clocks)
        self._of = self._begun()
        if self.turns is not None:
            self._go_by_turns(self.turns)
            return
        self.timer.stashes.begin_forward([*self._stored.values()])
        graph = self.program.forward.graph
        run = GraphTimer(self._of, graph, self._inputs_of(graph), keep=self.program.backward is not None)
        outputs, self._stashes, _ = run.run()
        for value in dict.fromkeys(output for output in outputs if output is not None and len(output.parts) > 1):
            self.timer.clocks.spend(2 * sum(value.parts) / self.timer.machine.host_bandwidth)  # joined for the caller

    def backward(self) -> None:
        """`loss.backward()`."""
        if self.program.backward is None:
            return
        if not self.pauses:
            self.timer.links.meet(self.timer.clocks)
        if self._step is not None:
            self._hand_over(self._step)
            return
        graph, stashes = self.program.backward.graph, self._stashes
        inputs = [*stashes, *self._inputs_of(graph)[len(stashes) :]]
        run = GraphTimer(self._of, graph, inputs)
        self._begin_backward(run, graph)
        run.run()
        self.timer.host.end_backward()

    def _begin_backward(self, run: GraphTimer, graph: fx.Graph) -> None:
        pushing = graph.find_nodes(op="call_function", target=nodes.push_gradients)
        self.timer.host.begin_backward([run.trained(nodes.operands(node).segment) for node in pushing])

    def _inputs_of(self, graph: fx.Graph) -> list[TimedValue]:
        specs = [node.meta.get("spec") for node in graph.find_nodes(op="placeholder")]
        return [TimedValue([spec.bytes(self.program.bindings) if spec is not None else 0]) for spec in specs]

    # ---- turn by turn -------------------------------------------------------------------------------------------------

    def _go_by_turns(self, graph: fx.Graph) -> None:
        """As `TurnRuns.run`."""
        before = self._paused
        run = GraphTimer(self._of, graph, self._inputs_of(graph), channel=1 - before.channel if before is not None else 0)
        self._step = run
        if not self.pauses:
            run.run()
            return
        schedule, stages = self.program.schedule, self.program.stages
        assert schedule is not None and stages is not None, "a step without a flush is one of a pipeline"
        for call, part in calls_of(schedule.orders[stages.rank], end_waits(graph), bool(received(graph))):
            if (of := before if call else run) is not None:
                self._go(of, part)
        self.timer.synchronize()
        self._paused = run

    def _go(self, run: GraphTimer, part: str) -> None:
        """As `PausedStep._go`."""
        run.go(part)
        if part == PAUSE:
            run.pause()
        elif part == END:
            run.end()
            run.is_over = True
            self.timer.host.end_turns(run.of_step)

    def _hand_over(self, run: GraphTimer) -> None:
        """As `TurnRuns.hand_over`."""
        pushed, run.pushed = run.pushed, None
        assert self.turns is not None and pushed is not None, "gradients are handed over once"
        self._begin_backward(run, self.turns)
        if self.pauses and not run.is_over:
            run.of_step = self.timer.host.begin_turns()
        for segment, value in pushed:
            run.collect(segment, value)
        self.timer.host.end_backward()
