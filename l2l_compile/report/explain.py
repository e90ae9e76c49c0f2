"""`explain`: reports how the backend would compile a model, without running it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from l2l_compile.backend import compile_program, stream_again
from l2l_compile.devices.host import HOST
from l2l_compile.devices.registry import ACCELERATOR
from l2l_compile.dumps import Dump, log_artifact
from l2l_compile.errors import L2LError
from l2l_compile.estimate.activations import KeptActivations, kept_activations, room_in
from l2l_compile.estimate.device_memory import DeviceMemory, StepLevels, device_memory, levels_of_step
from l2l_compile.estimate.host_memory import HostMemory, host_memory
from l2l_compile.frontend.capture import capture
from l2l_compile.frontend.dynamo import adapter, kept_programs, watched_frames
from l2l_compile.frontend.dynamo.meta_models import on_the_host
from l2l_compile.host.compiled_step.compiled_step import why_not_compiled
from l2l_compile.host.step.trial import check_layers_are_independent
from l2l_compile.ir.program import Program
from l2l_compile.ir.rank_layout import Layout
from l2l_compile.ir.segments import Block, Segment, Uncut
from l2l_compile.ir.values import Bindings, dim_of, evaluate
from l2l_compile.lowering.lower import Lowering
from l2l_compile.options import AUTO, Options
from l2l_compile.passes.compilation import Compilation
from l2l_compile.passes.programs_of_layout import programs_of_layout
from l2l_compile.report.page.write import frame_of, page_of
from l2l_compile.report.report_text import text_of
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.result import Simulation
from l2l_compile.simulation.ring import machine_of_rank
from l2l_compile.simulation.simulate import simulate
from l2l_compile.simulation.simulated_disk import on_disk_of
from l2l_compile.timeline import Timeline
from l2l_compile.torch_internals.fresh_code import WithoutArguments, fresh_caller


@dataclass(frozen=True)
class WholeBatch:
    """A segment that runs on the whole batch at once, and the operation or condition that is the reason."""

    segment: str
    reason: str


@dataclass(frozen=True)
class Output:
    """A tensor that the model returns, which is copied to the host in every step."""

    name: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Report:
    """How the backend compiles a model; `print(report)` shows it as a table.

    programs      one per captured graph; each with `.segments` and `.blocks`
    graph_breaks  why Dynamo cut the model into several graphs, one reason for each cut
    uncompiled    functions that Dynamo could not compile: their code outside of programs runs on the host, uncompiled
    whole_batch   the segments that do not run micro-batch by micro-batch
    host_memory   the host memory that the model needs
    outputs       the tensors that the model returns or that cross a graph break, the largest first
    options       the options of the report
    simulated     simulates a step on a machine, for the page; None for a report without a call
    measured      the timeline of a step that ran, for the page
    compilations  those of the programs, for `streamed`; empty for a report of programs that have run
    levels        what each segment keeps for backward; None if it was not asked for yet
    machine       the machine whose device is counted (`on`); None for the option `device`
    tokens        tokens of the batch; None for a model that takes no tokens
    model         the class of the model, or the name of a function; "" if it is not known
    """

    programs: tuple[Program, ...]
    graph_breaks: tuple[str, ...]
    uncompiled: tuple[str, ...]
    whole_batch: tuple[WholeBatch, ...]
    outputs: tuple[Output, ...]
    host_memory: HostMemory
    options: Options = field(default_factory=Options.build, repr=False)
    simulated: Callable[[str | Path | Machine], Simulation] | None = field(default=None, repr=False, compare=False)
    measured: Timeline | None = field(default=None, repr=False, compare=False)
    compilations: tuple[Compilation, ...] = field(default=(), repr=False, compare=False)
    levels: StepLevels | None = field(default=None, repr=False, compare=False)
    machine: Machine | None = field(default=None, repr=False)
    tokens: int | None = None
    model: str = ""

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(b for p in self.programs for b in p.blocks)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(s for p in self.programs for s in p.segments)

    @property
    def uncut(self) -> tuple[Uncut, ...]:
        """Segments that hold several layers, and why they were not cut."""
        return tuple(u for p in self.programs for u in p.uncut)

    @functools.cached_property
    def update(self) -> str | None:
        """How overlapped updates are made on the host; None if `optimizer.step()` updates them. Tries steps on small tensors."""
        return _how_updated(self.options)

    @functools.cached_property
    def kept(self) -> KeptActivations | None:
        """What forwards keep inside of layers for backward, with the option `keep`; None without it. Traces each block."""
        return kept_activations(self.programs, self.options, self.machine, self.levels)

    @functools.cached_property
    def device_memory(self) -> DeviceMemory:
        """The expected peak of device memory, and the parts of it that grow with depth. The first access traces each block."""
        return device_memory(self.programs, self.options, self.machine, self.levels)

    def on(self, machine: Machine) -> Report:
        """The report with memory counted as on a machine: an accelerator has weight slabs, and copies from page-locked memory."""
        options = on_disk_of(replace(self.options, device=ACCELERATOR if machine.overlaps else HOST), machine)
        levels = levels_of_step(self.programs, options, machine) if options.keeps_activations else None
        memory = host_memory(self.programs, options, room_in(levels or ()).host)
        memory = replace(memory, parameters=self.host_memory.parameters)
        return replace(self, machine=machine, options=options, host_memory=memory, levels=levels)

    def streamed(self, options: Options, rows: int | None = None) -> Report:
        """The report of the same segments with other options, without a new trace: micro_batches, prefetch, stash, updates.

        Options that decide on segments (precision, outputs, one micro-batch or several) have to stay. `rows` is another number
        of rows of the batch, which takes several micro-batches.
        """
        chosen = replace(options, device=HOST)
        made = self._of_programs([stream_again(compilation, chosen) for compilation in self.compilations], options, rows)
        return made if self.machine is None else made.on(self.machine)

    def of_stages(
        self, options: Sequence[Options], layout: Layout, rank_of: Mapping[str, int], machine: Machine, rows: int | None = None
    ) -> list[Report]:
        """The reports of a rank of each stage, if ranks divide the model in this way; as `streamed`, and on a whole `machine`.

        `options` has those of each stage, which differ in bytes that are kept. `rank_of` has the rank of each parameter in the pipeline, by
        name. Raises `L2LError` as `shard` and `pipeline` do.
        """
        chosen = replace(options[0], device=HOST)
        of_programs = [programs_of_layout(compilation, layout, rank_of, chosen) for compilation in self.compilations]
        on = machine_of_rank(machine, layout.ranks) if layout.ranks > 1 else machine
        stages = zip(zip(*of_programs, strict=True), options, strict=True)
        return [self._of_programs(programs, of_stage, rows).on(on) for programs, of_stage in stages]

    def _of_programs(self, made: Sequence[Program], options: Options, rows: int | None) -> Report:
        """The report of other programs of the same compilations."""
        programs = [replace(p, lowering=known.lowering) for p, known in zip(made, self.programs, strict=True)]
        if rows is not None:
            programs = [_with_rows(program, rows) for program in programs]
        found = report_of(programs, options, self.uncompiled)
        memory = replace(found.host_memory, parameters=self.host_memory.parameters)
        return replace(found, compilations=self.compilations, model=self.model, host_memory=memory)

    @property
    def large_outputs(self) -> tuple[Output, ...]:
        """Outputs of more than 1 MiB that are larger than every value that a layer passes to the next one."""
        passed = max(
            (s.bytes(p.bindings) for p in self.programs for b in p.blocks for s in b.outputs if b.repeats > 1), default=0
        )
        return tuple(o for o in self.outputs if o.bytes > max(passed, 2**20))

    def __str__(self) -> str:
        return text_of(self)

    def save(self, path: str | Path, machine: str | Path | Machine = "h200") -> None:
        """Write the report as one HTML page, which needs no network. Its step is measured, or else simulated on `machine`."""
        Path(path).write_text(self.page(machine), encoding="utf-8")

    def page(self, machine: str | Path | Machine = "h200") -> str:
        """The text of the page (see `save`)."""
        if self.measured is not None:
            return page_of(self, self.measured, "l2l report: a measured step")
        if self.simulated is None:
            return page_of(self, None, "l2l report")
        chosen = machine if isinstance(machine, Machine) else Machine.load(machine)
        step = self.simulated(chosen)
        others = [stage.timeline for stage in step.stages]
        return page_of(self.on(chosen), step.timeline, f"l2l report: a step simulated on {chosen.name}", others)

    def _repr_html_(self) -> str:
        return frame_of(self.page())


def _with_rows(program: Program, rows: int) -> Program:
    """The program for another number of rows. Raises `L2LError` if its batch has no symbol."""
    if program.captured.batch is None:
        raise L2LError(
            f"the rows of this batch cannot be changed without another trace, since {program.captured.why_static}: pass a batch of {rows} rows"
        )
    return replace(program, bindings={**program.bindings, program.captured.batch: rows})


def explain(
    model: Callable, options: Mapping[str, Any] | None = None, *, dump: str | Path | None = None
) -> Callable[..., Report]:
    """`explain(model, options)(*args, **kwargs)` reports the programs that `torch.compile(model, backend="l2l")` would run.

    `model` is a module or a function, compiled or not. `options` default to the options of a compiled model. Pass the
    arguments of a training step, on the host. Nothing is computed and nothing changes: the model is only traced. After a graph
    break, the trace goes on with zeros as the outputs of the program before it. With `dump`, a folder, the program after every
    pass is written to `dump/program0/04_find_blocks.txt` and so on, with the seconds of the pass. Raises the errors that
    compilation would raise.
    """
    if not callable(model):
        raise TypeError(f"explain takes a module or a function, got {type(model).__name__}")
    chosen = Options.build(options if options is not None else adapter.options_of(model))
    chosen.check_decided("a report")
    plain = adapter.uncompiled(model)

    def trace(*args: Any, **kwargs: Any) -> Report:
        explainer = _Explainer(chosen, Dump(dump) if dump is not None else None)
        watched_frames.retry_skipped()
        compiled = torch.compile(fresh_caller(), backend=explainer)
        try:
            with torch.random.fork_rng([]), on_the_host(plain, args, kwargs) as call:
                compiled(plain, *call.args, **call.kwargs)
        finally:
            kept_programs.forget(adapter.owner_of(compiled))
            watched_frames.retry_skipped()  # so that a later compilation gives its own warning or error
        given = options if options is not None else adapter.options_of(model)

        def simulated(machine: str | Path | Machine) -> Simulation:
            return simulate(model, machine, given)(*args, **kwargs)

        return replace(explainer.report(simulated), model=model_name(plain))

    return WithoutArguments(trace, "explain(model)")


class _Explainer:
    """A backend that compiles programs and runs none."""

    streams_layers = True  # `batch_marks.mark_batches` looks for this attribute
    __name__ = "l2l_explain"

    def __init__(self, options: Options, dump: Dump | None):
        self.options, self.dump = options, dump
        self.programs: list[Program] = []
        self.compilations: list[Compilation] = []
        self.skipped: list[watched_frames.SkippedFrame] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        lowering = Lowering(self.options.device, self.options.block_compiler)
        after = self.dump.next_program() if self.dump is not None else log_artifact
        program, compilation = compile_program(capture(gm)[0], self.options, lowering, after)
        self.programs.append(program)
        self.compilations.append(compilation)
        return lambda *arguments: _placeholders(program, arguments)

    def report(self, simulated: Callable[[str | Path | Machine], Simulation]) -> Report:
        made = report_of(self.programs, self.options, tuple(map(str, self.skipped)))
        return replace(made, simulated=simulated, compilations=tuple(self.compilations))


def report_of(programs: Sequence[Program], options: Options, uncompiled: tuple[str, ...] = ()) -> Report:
    """The report of programs that were made with these options. What a link carries is known on a machine alone."""
    levels = levels_of_step(programs, options, None) if options.keep_on_host not in (0, AUTO) else None
    return Report(
        tuple(programs),
        tuple(p.break_reason for p in programs if p.break_reason),
        uncompiled,
        tuple(WholeBatch(s.name, s.block.reason or "") for p in programs for s in p.whole_batch),
        tuple(sorted(_returned(programs), key=lambda o: -o.bytes)),
        host_memory(programs, options, room_in(levels or ()).host),
        options=options,
        levels=levels,
        tokens=_tokens_of(programs),
    )


def model_name(model: Any) -> str:
    """The class of a module, or the name of a function, compiled or not."""
    plain = adapter.uncompiled(model)
    plain = getattr(plain, "__self__", plain)  # the method of a module that is compiled in place
    return type(plain).__name__ if isinstance(plain, torch.nn.Module) else getattr(plain, "__name__", "")


def _tokens_of(programs: Sequence[Program]) -> int | None:
    """The tokens of the batch: the entries of the first integer input with two dimensions; None if there is none."""
    for program in programs:
        specs = (program.captured.specs.get(i.node) for i in program.captured.inputs if i.kind == "value")
        for spec in specs:
            if spec is not None and len(spec.shape) == 2 and spec.dtype in (torch.int64, torch.int32):
                return math.prod(spec.sizes(program.bindings))
    return None


def _placeholders(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """The outputs of a call of a program that does not run: placeholders of the right shape."""
    bindings = program.captured.bindings(arguments)  # of this call: a function may be called again with other sizes
    outputs = [_placeholder(program, position, arguments, bindings) for position in range(len(program.captured.outputs))]
    program.captured.fill_views(outputs, arguments, bindings)
    return outputs


def _placeholder(program: Program, position: int, arguments: Sequence[Any], bindings: Bindings) -> Any:
    """Zeros in the place of an output; arguments and constants as they are."""
    node, dropped = program.captured.outputs[position], program.captured.dropped.get(position)
    if dropped is not None:
        return torch.empty(dropped.sizes(bindings), dtype=dropped.dtype, device="meta")
    spec = program.captured.specs.get(node)
    if spec is None:
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else node
        return evaluate(dim_of(value), bindings) if isinstance(value, torch.SymInt) else value
    if node.op == "placeholder":
        return arguments[[i.node for i in program.captured.inputs].index(node)]
    made = torch.zeros(spec.sizes(bindings), dtype=spec.dtype, requires_grad=spec.differentiable)
    return made.clone() if spec.differentiable else made  # a leaf would become a weight of the graph that reads it


def _how_updated(options: Options) -> str | None:
    if options.optimizer is None or not options.mode.is_overlapped:
        return None
    try:
        check_layers_are_independent(options.optimizer)
    except L2LError as error:
        return f"refused: {error}"
    if not options.compile_update:
        return "the optimizer's own step, layer by layer"
    reason = why_not_compiled(options.optimizer)
    return "one compiled pass over each matrix" if reason is None else f"the optimizer's own step, layer by layer: {reason}"


def _returned(programs: Sequence[Program]) -> list[Output]:
    found = []
    for program in programs:
        for node in program.captured.outputs:
            spec = program.captured.specs.get(node)
            if spec is not None and node.op != "placeholder":
                found.append(Output(node.name, spec.sizes(program.bindings), spec.bytes(program.bindings)))
    return found
