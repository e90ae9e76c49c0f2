"""`explain`: what the backend would make of a model, without running it."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .backend import compile_program
from .dumps import Dump
from .dumps import trace as trace_pass
from .frontend import dynamo
from .frontend.capture import capture
from .frontend.meta_models import on_the_host
from .host.memory import HostMemory, host_memory
from .host.optimizer.compiled_step import why_not_compiled
from .ir.program import Program
from .ir.segments import Block, Segment, Uncut
from .lowering.lower import Lowering
from .options import Options
from .runtime.dry_run import DeviceMemory, device_memory
from .units import format_bytes


@dataclass(frozen=True)
class WholeBatch:
    """A segment that sees the whole batch at once, and the operation or circumstance that decided."""

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
    """What the backend makes of a model; `print(report)` shows it as a table.

    programs      one per captured graph; each with `.segments` and `.blocks`
    graph_breaks  why Dynamo cut the model into several graphs, one reason a cut
    uncompiled    functions that Dynamo could not compile: they run on the host as they are, and so does all in them that
                  is in no program
    whole_batch   the segments that do not run micro-batch by micro-batch
    host_memory   what the model needs of the host's memory
    outputs       the tensors that the model returns, and those that cross a graph break, the largest first
    update        how the host updates parameters behind the device; None if it does not
    options       those that were given
    """

    programs: tuple[Program, ...]
    graph_breaks: tuple[str, ...]
    uncompiled: tuple[str, ...]
    whole_batch: tuple[WholeBatch, ...]
    outputs: tuple[Output, ...]
    host_memory: HostMemory
    update: str | None = None
    options: Options = field(default_factory=Options.build, repr=False)

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
    def device_memory(self) -> DeviceMemory:
        """The expected peak of the device's memory, and what of it grows with depth. Traces each block when first asked for."""
        return device_memory(self.programs, self.options)

    @property
    def large_outputs(self) -> tuple[Output, ...]:
        """Outputs of more than a megabyte that are larger than what passes between two layers."""
        passed = max(
            (s.bytes(p.bindings) for p in self.programs for b in p.blocks for s in b.outputs if b.repeats > 1), default=0
        )
        return tuple(o for o in self.outputs if o.bytes > max(passed, 2**20))

    def __str__(self) -> str:
        lines: list[str] = []
        for number, program in enumerate(self.programs):
            lines += [*_program_lines(number, program), ""]
        lines += [f"graph breaks: {len(self.graph_breaks) or 'none'}", *(f"  {b}" for b in self.graph_breaks)]
        if self.uncompiled:
            lines += ["run uncompiled, on the host:", *(f"  {u}" for u in self.uncompiled)]
        total = sum(o.bytes for o in self.outputs)
        lines += [str(self.device_memory), str(self.host_memory)]
        if self.update is not None:
            lines.append(f"updates: {self.update}")
        lines.append(
            f"outputs copied to the host in every step: {len(self.outputs)} tensor{'s' * (len(self.outputs) != 1)}, {format_bytes(total)}"
        )
        if len(self.outputs) > 8 or self.large_outputs:
            shown = ", ".join(f"{o.name} {list(o.shape)} {format_bytes(o.bytes)}" for o in self.outputs[:3])
            lines.append(f"  the largest: {shown}. A cache of keys and values is not needed in training (use_cache=False)")
        return "\n".join(lines)


def _program_lines(number: int, program: Program) -> list[str]:
    rows = [("block", "repeats", "parameters", "segments", "runs")]
    for block in program.blocks:
        members = [s for s in program.segments if s.block is block]
        names = members[0].name if len(members) == 1 else f"{members[0].name} … {members[-1].name}"
        count = members[0].micro_batches
        how = f"{count} micro-batch" + "es" * (count != 1) if block.inner_looped else f"whole batch: {block.reason}"
        if block.summed_whole:
            how += " (some float64 gradients, which the model sums in a narrower dtype, over the whole batch)"
        rows.append((block.name, f"x{block.repeats}", format_bytes(members[0].parameter_bytes), names, how))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    title = f"program {number}: {len(program.segments)} segments, instances of {len(program.blocks)} blocks"
    if program.captured.why_static:
        title += f"; not split: {program.captured.why_static}"
    places = {i.name: program.captured.specs[i.node].batch for i in program.captured.inputs if i.kind == "value"}
    title += "".join(
        f"; '{name}' has the batch in dimension {place.dim}" for name, place in places.items() if place and place.dim
    )
    return [title, *("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)) + "  " + row[4] for row in rows)]


def explain(
    model: Callable, options: Mapping[str, Any] | None = None, *, dump: str | Path | None = None
) -> Callable[..., Report]:
    """`explain(model, options)(*args, **kwargs)` reports what `torch.compile(model, backend="l2l")` would run.

    `model` is a module or a function, compiled or not (then its own options hold, unless others are given); the arguments are
    those of a training step, on the host.
    Nothing is computed and nothing changes: the model is traced, outputs are zeros until the trace ends. After a
    graph break, the trace goes on with those zeros. With `dump`, a folder, the program after every pass is written to
    `dump/program0/04_find_blocks.txt` and so on, with the seconds of the pass. Raises what compilation would raise.
    """
    if not callable(model):
        raise TypeError(f"explain takes a module or a function, got {type(model).__name__}")
    chosen = Options.build(options if options is not None else dynamo.options_of(model))
    plain = dynamo.uncompiled(model)

    def trace(*args: Any, **kwargs: Any) -> Report:
        explainer = _Explainer(chosen, Dump(dump) if dump is not None else None)
        dynamo.retry_skipped()
        try:
            with torch.random.fork_rng([]), on_the_host(plain, args, kwargs) as call:
                torch.compile(fresh_caller(), backend=explainer)(plain, *call.args, **call.kwargs)
        finally:
            dynamo.retry_skipped()  # a compilation to come has its own warning, or error
        return explainer.report()

    return trace


_numbers = itertools.count()


def fresh_caller() -> Callable:
    """A function that calls its first argument, with a code object of its own: Dynamo caches by code object."""

    def call(self, *args, **kwargs):
        return self(*args, **kwargs)

    code = call.__code__.replace(co_name=f"explained_{next(_numbers)}")
    return types.FunctionType(code, globals())


class _Explainer:
    """A backend that compiles programs and runs none."""

    streams_layers = True  # what `dynamo.mark_batches` looks for
    __name__ = "l2l_explain"

    def __init__(self, options: Options, dump: Dump | None):
        self.options, self.dump = options, dump
        self.programs: list[Program] = []
        self.skipped: list[dynamo.SkippedFrame] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        lowering = Lowering(self.options.device, self.options.block_compiler)
        after = self.dump.next_program() if self.dump is not None else trace_pass
        program, _ = compile_program(capture(gm), self.options, lowering, after)
        self.programs.append(program)
        return lambda *arguments: _placeholders(program, arguments)

    def report(self) -> Report:
        programs = tuple(self.programs)
        return Report(
            programs,
            tuple(p.break_reason for p in programs if p.break_reason),
            tuple(map(str, self.skipped)),
            tuple(WholeBatch(s.name, s.block.reason or "") for p in programs for s in p.whole_batch),
            tuple(sorted(_returned(programs), key=lambda o: -o.bytes)),
            host_memory(programs, self.options),
            _how_updated(self.options),
            self.options,
        )


def _placeholders(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """What a call of a program that runs nothing returns."""
    outputs = [_placeholder(program, position, arguments) for position in range(len(program.captured.outputs))]
    program.captured.fill_views(outputs, arguments, program.bindings)
    return outputs


def _placeholder(program: Program, position: int, arguments: Sequence[Any]) -> Any:
    """Zeros in the place of an output; arguments and constants as they are."""
    node, dropped = program.captured.outputs[position], program.captured.dropped.get(position)
    if dropped is not None:
        return torch.empty(dropped.sizes(program.bindings), dtype=dropped.dtype, device="meta")
    spec = program.captured.specs.get(node)
    if spec is None:
        return node.meta.get("example_value") if isinstance(node, fx.Node) else node
    if node.op == "placeholder":
        return arguments[[i.node for i in program.captured.inputs].index(node)]
    made = torch.zeros(spec.sizes(program.bindings), dtype=spec.dtype, requires_grad=spec.differentiable)
    return made.clone() if spec.differentiable else made  # a leaf would be a weight of what reads it


def _how_updated(options: Options) -> str | None:
    if options.optimizer is None or options.update == "at_step":
        return None
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
