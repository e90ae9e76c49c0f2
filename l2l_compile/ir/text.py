"""A program as text, which `parse.py` reads back.

    sizes: s0 = 4 (batch)

    blocks:
      block_0    x2    inner loop

    forward:
      %x = input                                   host    x: float32[s0, 8]  128 B
      %fetch_weights = fetch_weights('layers.0')   h2d     288 B
      ...
      return ((%y), (%x), ())

Each node has one line: the call, its lane (for a placeholder: the place of its value), and for a value its name, dtype,
shape, flags and bytes. Segments and inputs are shown by name. `-` stands for an operand that is None.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.ir.segments import Block, Segment
from l2l_compile.ir.values import Bindings, TensorSpec, float_operand
from l2l_compile.units import format_bytes

_WIDEST = 100  # characters of the column of calls; longer calls move the other columns to the right
SPLIT, EQUAL_ROWS, GRADIENT, STREAMED = "split", "equal rows", "grad", "streamed to the host"
COMPUTES_IN, PARTIAL, TURN = "computes in ", "partial ", "turn "


def print_program(
    graphs: Mapping[str, fx.Graph],
    blocks: Sequence[Block],
    segments: Sequence[Segment],
    inputs: Mapping[int, str],
    bindings: Bindings,
    batch: sympy.Symbol | None,
    ranks: int = 1,
) -> str:
    """The text of a program: its sizes, a line per block, and its graphs by title. `inputs` are names by index."""
    printer = _Printer({s.index: s for s in segments}, inputs, bindings)
    lines = [f"ranks: {ranks}"] if ranks > 1 else []
    lines += [printer.sizes(batch), ""] if bindings else [""] * len(lines)
    lines.append("blocks:")
    lines += map(_block, blocks)
    for title, graph in graphs.items():
        lines += ["", f"{title}:", *printer.graph(graph)]
    return "\n".join(lines)


def _block(block: Block) -> str:
    how = "inner loop" if block.inner_looped else f"whole batch: {block.reason}"
    return f"  {block.name:10s} x{block.repeats:<4d} {how}"


class _Printer:
    def __init__(self, segments: Mapping[int, Segment], inputs: Mapping[int, str], bindings: Bindings):
        self.segments, self.inputs, self.bindings = segments, inputs, bindings

    def sizes(self, batch: sympy.Symbol | None) -> str:
        bindings = self.bindings.items()
        operands = {float_operand(i) for i in range(len(bindings))}  # examples; a segment's own values are among the others
        shown = (
            f"{symbol} = {value}{' (batch)' if symbol == batch else ''}" for symbol, value in bindings if symbol not in operands
        )
        return f"sizes: {', '.join(shown)}"

    def graph(self, graph: fx.Graph) -> Iterator[str]:
        rows = [(self._left(node), self._lane(node), self._right(node)) for node in graph.nodes if node.op != "output"]
        width = min(_WIDEST, max((len(left) for left, _, _ in rows), default=0))
        for left, lane, right in rows:
            yield f"  {left:<{width}s}  {lane:<7s} {right}".rstrip()
        yield f"  return {_argument(graph.output_node().args[0])}"

    def _left(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return f"%{node.name} = {node.meta['kind']}"
        word, operands = nodes.called(node), nodes.operands(node)
        if node.target is operator.getitem:
            return f"%{node.name} = %{operands.results.name}[{operands.index}]"
        shown = []
        for operand, value in zip(word.operands, operands, strict=True):
            if operand.optional and value == operand.default:
                continue
            text = self._operand(operand.kind, value)
            shown.append(f"{operand.name}={text}" if operand.optional else text)
        call = f"{word.name}({', '.join(shown)})"
        is_read = node.users or word.result not in (nodes.Result.DONE, nodes.Result.NOTHING)
        return f"%{node.name} = {call}" if is_read else call

    def _operand(self, kind: type, value: Any) -> str:
        if kind is nodes.SegmentIndex:
            return repr(self.segments[value].name)
        if kind is nodes.InputIndex:
            return repr(self.inputs[value])
        return repr(value) if kind is str else _argument(value)

    def _lane(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return nodes.place_of(node)
        return nodes.lane_of(node)

    def _right(self, node: fx.Node) -> str:
        if "spec" in node.meta:
            return self._value(node)
        if nodes.keeps_of_segment(node):
            return node.meta["value"]
        index = nodes.segment_of(node)
        if index is None:
            return ""
        block, count = self.segments[index].block, self.segments[index].micro_batches
        if nodes.runs_segment(node):
            return f"{block.name} x {count} micro-batches" if block.inner_looped else block.name
        if "bytes" in node.meta:  # of this rank's shards
            return format_bytes(node.meta["bytes"])
        match nodes.carries(node):
            case nodes.Carries.WEIGHTS:
                return format_bytes(block.weight_bytes(self.bindings))
            case nodes.Carries.GRADIENTS:
                return format_bytes(block.gradient_bytes(self.bindings))
        return ""

    def _value(self, node: fx.Node) -> str:
        spec = node.meta["spec"]
        turn = node.meta.get("turn")
        flags = [f"{TURN}{turn}" if turn is not None else SPLIT] if node.meta["split"] else []
        flags += _flags(spec)
        flags += [STREAMED] if node.op == "call_function" and node.meta.get("host") else []
        return f"{node.meta['value']}: {', '.join((str(spec), *flags))}  {format_bytes(spec.bytes(self.bindings))}"


def _flags(spec: TensorSpec) -> Iterator[str]:
    if spec.equal_rows:
        yield EQUAL_ROWS
    if spec.partial is not None:
        yield f"{PARTIAL}{spec.partial}"
    if spec.compute_dtype is not None:
        yield f"{COMPUTES_IN}{str(spec.compute_dtype).removeprefix('torch.')}"
    if spec.requires_grad:
        yield GRADIENT


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_argument, value))})"
    return "-" if value is None else str(value)
