"""Parses one graph of the text of a program: a line for each node, and the line of its results."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from l2l_compile.errors import ParseError
from l2l_compile.ir import nodes
from l2l_compile.ir.operand_text import STRING, Reader, count_of, shown, string_of
from l2l_compile.ir.value_text import parse_value
from l2l_compile.ir.values import Bindings
from l2l_compile.lanes import Lane
from l2l_compile.units import parse_bytes

_PICK = re.compile(r"%(\w+)\[([0-9]+)\]", re.ASCII)
_SEGMENT = re.compile(rf"(?:%\w+ = )?(?P<word>\w+)\((?P<name>{STRING})", re.ASCII)
_NAME = re.compile(r"%[a-zA-Z_][a-zA-Z0-9_]{0,999}")
_MOST_BYTES = 2**63
_KINDS = ("input", "stash", "gradient", *nodes.KEPT_OF_SEGMENT)
_VALUES = (nodes.Result.DEVICE, nodes.Result.HOST, nodes.Result.DISK, nodes.Result.KEPT)


@dataclass(frozen=True)
class Line:
    """A line of a graph: its number in the text, the call, the lane, and the description of the result."""

    number: int
    call: str
    lane: str
    right: str


@dataclass(frozen=True)
class Names:
    """The names that a graph may use: segments by index, symbols of sizes with their values, the symbol of the batch.

    `inputs` are the inputs that are written, by index. The graph adds those that it names.
    """

    segments: dict[str, int]
    sizes: Bindings
    batch: sympy.Symbol | None
    inputs: dict[str, int] = field(default_factory=dict)


def segment_call(line: Line) -> tuple[nodes.Operation, str] | None:
    """The word and the segment of a call; None if it names no segment."""
    match = _SEGMENT.match(line.call)
    word = _words().get(match["word"]) if match is not None else None
    if match is None or word is None or not word.names_segment:
        return None
    return word, string_of(match["name"], line.number)


_SIMPLE: dict[type, tuple[type, str]] = {int: (int, "number"), str: (str, "text")}


class GraphParser:
    """Parses one graph, node by node: `graph` has the result. `names` are those of the program."""

    def __init__(self, names: Names, title: str, body: Sequence[Line], output: tuple[int, str]):
        self.names, self.graph = names, fx.Graph()
        self.made: dict[str, fx.Node] = {}
        for line in body:
            self._line(line)
        number, returned = output
        result = Reader(returned, number, lambda name: self._node(name, number)).result()
        _check_result(title, result, number)
        self.graph.output(result)

    def _line(self, line: Line) -> None:
        name, _, call = line.call.partition(" = ") if line.call.startswith("%") else ("", "", line.call)
        if name and not _NAME.fullmatch(name):
            raise ParseError(line.number, f"no node can have the name {shown(name)}")
        node = self._placeholder(name[1:], call, line) if call in _KINDS else self._call(name[1:], call, line)
        if name and node.name != name[1:]:
            raise ParseError(line.number, f"the name '{name}' is taken, or is none that a node can have")
        self._describe(node, line)
        self.made[node.name] = node

    def _placeholder(self, name: str, kind: str, line: Line) -> fx.Node:
        if not name or line.lane not in (Lane.HOST, "device", "disk"):
            raise ParseError(
                line.number, f"expected '%name = {kind}' and its place, host, device or disk, got {shown(line.call)}"
            )
        node = self.graph.placeholder(name)
        node.target = node.name
        node.meta.update(segment=None, kind=kind, host=line.lane == Lane.HOST, disk=line.lane == "disk")
        return node

    def _call(self, name: str, call: str, line: Line) -> fx.Node:
        function, arguments = self._arguments(call, line.number)
        node = self.graph.create_node("call_function", function, arguments, {}, name or None)
        if line.lane != nodes.lane_of(node):
            raise ParseError(line.number, f"{shown(call)} runs on lane {nodes.lane_of(node)}, not on {line.lane}")
        node.meta["segment"] = nodes.segment_of(node)
        return node

    def _arguments(self, call: str, number: int) -> tuple[Any, tuple]:
        if picked := _PICK.fullmatch(call):
            return operator.getitem, (self._of_several(picked[1], number), count_of(picked[2], number))
        name, _, inside = call.partition("(")
        words = _words()
        word = words.get(name)
        if word is None or not inside.endswith(")"):
            raise ParseError(number, f"no node is called {shown(name)}; there are {', '.join(sorted(words))}")
        reader = Reader(inside[:-1], number, lambda name: self._node(name, number))
        positional, named = reader.call()
        if unknown := set(named) - {operand.name for operand in word.operands}:
            raise ParseError(number, f"'{name}' has no operand {', '.join(sorted(unknown))}")
        try:
            operands = word.arguments(*positional, **named)
        except TypeError as error:
            raise ParseError(number, f"'{name}' takes ({', '.join(o.name for o in word.operands)}): {error}") from error
        return word.function, tuple(
            self._typed(operand, value, f"'{operand.name}' of '{name}'", number)
            for operand, value in zip(word.operands, operands, strict=True)
        )

    def _of_several(self, name: str, number: int) -> fx.Node:
        node = self._node(name, number)
        word = nodes.operation_of(node)
        if word is None or word.result is not nodes.Result.SEVERAL:
            raise ParseError(number, f"picks a result of %{name}, which has one alone")
        return node

    def _typed(self, operand: nodes.Operand, value: Any, what: str, number: int) -> Any:
        """The value of an operand. Raises `ParseError` if it is of another kind than the operand."""
        if operand.several != isinstance(value, tuple):
            raise ParseError(number, f"{what} is {'a tuple in parentheses' if operand.several else 'one operand'}")
        if operand.several:
            return tuple(self._of_kind(operand, each, what, number) for each in value)
        return self._of_kind(operand, value, what, number)

    def _of_kind(self, operand: nodes.Operand, value: Any, what: str, number: int) -> Any:
        if value is None:
            if not operand.nullable:
                raise ParseError(number, f"{what} cannot be '-'")
            return None
        if operand.kind is nodes.SegmentIndex:
            return self._segment(value, what, number)
        if operand.kind is nodes.InputIndex:
            return self._input(value, what, number)
        wanted, kind = _SIMPLE.get(operand.kind, (fx.Node, "node"))
        if not isinstance(value, wanted):
            raise ParseError(number, f"{what} is a {kind}, not {shown(str(value))}")
        if isinstance(value, fx.Node) and operand.kind in (nodes.OnDevice, nodes.OnHost, nodes.StoredOnDisk):
            self._check_value(operand, value, what, number)
        return value

    def _check_value(self, operand: nodes.Operand, node: fx.Node, what: str, number: int) -> None:
        word = nodes.operation_of(node)
        if word is not None and word.result in (nodes.Result.SEVERAL, nodes.Result.DONE, nodes.Result.NOTHING):
            raise ParseError(number, f"{what} is a value, and %{node.name} is {word.result.value}")
        if operand.several and "spec" not in node.meta:
            raise ParseError(number, f"{what} is a value, and the line of %{node.name} does not describe one")

    def _segment(self, name: Any, what: str, number: int) -> int:
        if not isinstance(name, str) or name not in self.names.segments:
            raise ParseError(number, f"{what} is the name of a segment, not {shown(str(name))}")
        return self.names.segments[name]

    def _input(self, name: Any, what: str, number: int) -> int:
        if not isinstance(name, str):
            raise ParseError(number, f"{what} is the name of an input, not {shown(str(name))}")
        return self.names.inputs.setdefault(name, len(self.names.inputs))

    def _describe(self, node: fx.Node, line: Line) -> None:
        if nodes.keeps_of_segment(node):
            node.meta["value"] = line.right
            return
        found = parse_value(line.right, self.names.sizes, self.names.batch, line.number)
        if found is not None and _makes_value(node):
            node.meta.update(value=found.value, spec=found.spec, split=found.split)
            if found.turn is not None:
                node.meta["turn"] = found.turn
            if found.streamed:
                node.meta["host"] = True
        elif nodes.carries(node) is not None:
            node.meta["bytes"] = _bytes(line)
        elif _makes_value(node) and not _picks_gradients(node):
            raise ParseError(line.number, f"expected 'name: dtype[shape], flags  bytes', got {shown(line.right)}")
        elif line.right and not nodes.runs_segment(node):
            raise ParseError(line.number, f"{shown(line.call)} makes no value that {shown(line.right)} could describe")

    def _node(self, name: str, number: int) -> fx.Node:
        if name not in self.made:
            raise ParseError(number, f"reads {shown('%' + name)[1:-1]}, which no line before it makes")
        return self.made[name]


def _words() -> dict[str, nodes.Operation]:
    return {word.name: word for word in nodes.VOCABULARY.values()}


def _makes_value(node: fx.Node) -> bool:
    """Whether the line of a node describes a value."""
    word = nodes.operation_of(node)
    is_call = word is not None and not word.names_segment and word.result in _VALUES
    return is_call or node.op == "placeholder"


def _picks_gradients(node: fx.Node) -> bool:
    """Whether a node may be the gradients of a segment's weights, which no line describes."""
    return node.target is operator.getitem and nodes.operands(node).results.target is nodes.backward


def _check_result(title: str, result: Any, number: int) -> None:
    """Raise `ParseError` if a graph does not return tuples of nodes: forward three of them, backward one."""
    groups = result if title != "backward" else (result,)
    if not isinstance(groups, tuple) or title != "backward" and len(groups) != 3:
        raise ParseError(number, "forward returns ((outputs), (values that it keeps), (writes))")
    for group in groups:
        if not isinstance(group, tuple) or not all(node is None or isinstance(node, fx.Node) for node in group):
            raise ParseError(number, f"{title} returns tuples of nodes")


def _bytes(line: Line) -> int:
    try:
        count = parse_bytes(line.right)
    except (ValueError, OverflowError):
        raise ParseError(line.number, f"expected bytes such as '1.5 KiB', got {shown(line.right)}") from None
    if count >= _MOST_BYTES:
        raise ParseError(line.number, f"no memory has {shown(line.right)}")
    return count
