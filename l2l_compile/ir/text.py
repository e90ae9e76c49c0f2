"""A program as text: one line a node, with what it reads, its segment, lane, shape and bytes."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from torch import fx

from ..units import format_bytes
from . import nodes
from .values import Bindings

if TYPE_CHECKING:
    from .program import Program, Segment


def print_program(program: Program) -> str:
    """Both graphs of a program, after a line per block."""
    lines = ["blocks:"]
    for block in program.blocks:
        how = "inner loop" if block.inner_looped else f"whole batch: {block.reason}"
        lines.append(f"  {block.name:10s} x{block.repeats:<4d} {how}")
    for title, module in (("forward", program.forward), ("backward", program.backward)):
        if module is not None:
            lines += ["", f"{title}:", *_graph_lines(module.graph, program)]
    return "\n".join(lines)


def _graph_lines(graph: fx.Graph, program: Program) -> list[str]:
    names = {
        "segment": {segment.index: segment.name for segment in program.segments},
        "input": {given.index: given.name for given in program.captured.inputs},
    }
    segments, bindings = program.segments, program.bindings
    rows = []
    for node in graph.nodes:
        if node.op == "placeholder":
            where = "host" if node.meta["host"] else "device"
            rows.append((f"%{node.name} = {node.meta['kind']}", where, _describe(node, bindings)))
        elif node.op == "output":
            rows.append((f"return {_argument(node.args[0])}", "", ""))
        else:
            rows.append((_call(node, names), nodes.lane_of(node), _size(node, segments, bindings)))
    width = min(100, max((len(text) for text, _, _ in rows if not text.startswith("return")), default=0))
    return [f"  {text:<{width}s}  {lane:<7s} {size}".rstrip() for text, lane, size in rows]


def _call(node: fx.Node, names: dict[str, dict[int, str]]) -> str:
    if node.target is operator.getitem:
        return f"%{node.name} = %{node.args[0].name}[{node.args[1]}]"
    arguments, kind = list(node.args), nodes.VOCABULARY[node.target].names
    shown = [repr(names[kind][arguments.pop(0)])] if kind is not None else []
    shown += [_argument(a) for a in arguments]
    text = f"{node.target.__name__}({', '.join(shown)})"
    silent = node.target in (nodes.release, nodes.push_gradients, nodes.update, nodes.write_back) and not node.users
    return text if silent else f"%{node.name} = {text}"


def _argument(value) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_argument, value))})"
    return "-" if value is None else str(value)


def _describe(node: fx.Node, bindings: Bindings) -> str:
    spec = node.meta["spec"]
    form = " split" if node.meta["split"] else ""
    if node.meta["split"] and spec.equal_rows:
        return f"{spec} split, equal rows: computed once"
    form += " sent to the host" if node.op == "call_function" and node.meta.get("host") else ""
    return f"{spec}{form}  {format_bytes(spec.bytes(bindings))}"


def _size(node: fx.Node, segments: tuple[Segment, ...], bindings: Bindings) -> str:
    if "spec" in node.meta:
        return _describe(node, bindings)
    if node.target is nodes.fetch_weights:
        return format_bytes(sum(w.bytes(bindings) for w in segments[node.args[0]].block.weights))
    if node.target is nodes.push_gradients:
        return format_bytes(sum(w.bytes(bindings) for w in segments[node.args[0]].block.weights if w.differentiable))
    if node.target in (nodes.forward, nodes.backward):
        segment = segments[node.args[0]]
        return (
            f"{segment.block.name} x {segment.micro_batches} micro-batches" if segment.block.inner_looped else segment.block.name
        )
    return ""
