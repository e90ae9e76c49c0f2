"""Parses the text of a program (`text.py`): the graphs with the meta of every node, and the segments and blocks.

A parsed block has no operations, so a parsed program cannot run. It can be verified, changed by passes and printed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy import functions as sympy_functions

from ..errors import ParseError
from ..units import parse_bytes
from . import nodes, text
from .segments import Block, Segment
from .values import Bindings, Dim, TensorSpec, find_batch

_BLOCK = re.compile(r"  (?P<name>\S+)\s+x(?P<repeats>\d+)\s+(?P<how>inner loop|whole batch: (?P<reason>.*))")
_NODE = re.compile(r"  (?P<call>.+?)\s\s+(?P<lane>compute|h2d|d2h|comm|host|device|none)\b\s*(?P<right>.*)")
_VALUE = re.compile(r"(?P<value>[^:]+): (?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?P<flags>(?:, [\w ]+?)*)  (?P<bytes>.+)")
_SIZE = re.compile(r"(?P<symbol>\w+) = (?P<value>\d+)(?P<batch> \(batch\))?")
_TOKEN = re.compile(
    r"""\s*(?:%(?P<node>\w+)|(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<number>\d+)|(?P<word>\w+)|(?P<mark>[(),=-]))"""
)
_KINDS = ("input", "stash", "gradient")


@dataclass(frozen=True)
class Parsed:
    """The parts of a program that its text has. `inputs` are the names of inputs that are written, in order of mention."""

    graphs: dict[str, fx.Graph]
    blocks: tuple[Block, ...]
    segments: tuple[Segment, ...]
    inputs: tuple[str, ...]
    bindings: Bindings
    batch: sympy.Symbol | None
    ranks: int


def parse(printed: str) -> Parsed:
    """Parse the text of a program. Raises `ParseError`, with the line number, if it is no text of a program."""
    return _Parser(printed).parse()


@dataclass(frozen=True)
class _Line:
    """A line of a graph: its number in the text, the call, the lane, and the description of the result."""

    number: int
    call: str
    lane: str
    right: str


class _Parser:
    def __init__(self, printed: str):
        self.lines = list(enumerate(printed.split("\n"), 1))
        self.bindings: dict[sympy.Symbol, int] = {}
        self.batch: sympy.Symbol | None = None
        self.blocks: dict[str, Block] = {}
        self.segments: dict[str, Segment] = {}
        self.inputs: list[str] = []
        self.graphs: dict[str, fx.Graph] = {}

    def parse(self) -> Parsed:
        sections = self._sections()
        self._sizes(sections.pop("sizes", []))
        ranks = self._ranks(sections.pop("ranks", []))
        self._blocks(sections.pop("blocks", []))
        if "forward" not in sections:
            raise ParseError(len(self.lines), "a program has a section 'forward:'")
        bodies = {title: self._body(lines) for title, lines in sections.items()}
        self._find_segments([line for body, _ in bodies.values() for line in body])
        for title, (body, output) in bodies.items():
            self.graphs[title] = _Graph(self, body, output).graph
        self._describe_blocks()
        return Parsed(
            self.graphs,
            tuple(self.blocks.values()),
            tuple(self.segments.values()),
            tuple(self.inputs),
            self.bindings,
            self.batch,
            ranks,
        )

    def _sections(self) -> dict[str, list[tuple[int, str]]]:
        """The lines below each heading. `ranks` and `sizes` have their content in the same line as the heading."""
        found: dict[str, list[tuple[int, str]]] = {}
        current: list[tuple[int, str]] | None = None
        for number, line in self.lines:
            if not line.strip():
                continue
            if line.startswith(("sizes: ", "ranks: ")):
                heading, _, rest = line.partition(": ")
                found[heading] = [(number, rest)]
            elif not line.startswith(" "):
                title = line.rstrip().removesuffix(":")
                if title not in ("blocks", "forward", "backward") or not line.rstrip().endswith(":"):
                    raise ParseError(number, f"expected 'sizes: ...', 'blocks:', 'forward:' or 'backward:', got {line!r}")
                current = found.setdefault(title, [])
            elif current is None:
                raise ParseError(number, f"stands in no section: {line!r}")
            else:
                current.append((number, line))
        return found

    def _sizes(self, lines: Sequence[tuple[int, str]]) -> None:
        for number, line in lines:
            for part in line.split(", "):
                match = _SIZE.fullmatch(part.strip())
                if match is None:
                    raise ParseError(number, f"expected a size such as 's0 = 4' or 's0 = 4 (batch)', got {part!r}")
                symbol = sympy.Symbol(match["symbol"], positive=True, integer=True)
                self.bindings[symbol] = int(match["value"])
                self.batch = symbol if match["batch"] else self.batch

    def _ranks(self, lines: Sequence[tuple[int, str]]) -> int:
        for number, line in lines:
            if not line.strip().isdigit():
                raise ParseError(number, f"expected a number of ranks, got {line!r}")
            return int(line)
        return 1

    def _blocks(self, lines: Sequence[tuple[int, str]]) -> None:
        for number, line in lines:
            match = _BLOCK.fullmatch(line.rstrip())
            if match is None:
                raise ParseError(number, f"expected a block such as 'block_0  x2  inner loop', got {line!r}")
            self.blocks[match["name"]] = Block(
                match["name"], None, {}, None, (), (), (),
                inner_looped=match["reason"] is None, reason=match["reason"], repeats=int(match["repeats"]),
            )  # fmt: skip

    def _body(self, lines: Sequence[tuple[int, str]]) -> tuple[list[_Line], tuple[int, str]]:
        """The lines of a graph's nodes, and the line number and text of its return value."""
        body: list[_Line] = []
        for number, line in lines:
            if line.strip().startswith("return "):
                return body, (number, line.strip().removeprefix("return "))
            match = _NODE.fullmatch(line.rstrip())
            if match is None:
                raise ParseError(number, f"expected a node and its lane, two spaces apart, got {line!r}")
            body.append(_Line(number, match["call"], match["lane"], match["right"]))
        raise ParseError(lines[-1][0] if lines else 0, "a graph ends with 'return (...)'")

    def _find_segments(self, body: Sequence[_Line]) -> None:
        """Number the segments in the order in which they run forward, then the other segments in the order of mention."""
        first = [line for line in body if re.search(r"\bforward\('", line.call)]
        for line in [*first, *body]:
            name = _segment_named(line.call)
            if name is not None and name not in self.segments:
                self.segments[name] = Segment(len(self.segments), name, _UNKNOWN, (), (), ())
            if name is not None and line.lane == nodes.COMPUTE:
                self._runs(self.segments[name], line)

    def _runs(self, segment: Segment, line: _Line) -> None:
        """Read the block and the number of micro-batches: `block_0 x 2 micro-batches`, or `block_0`."""
        block, _, count = line.right.partition(" x ")
        if block not in self.blocks:
            raise ParseError(line.number, f"names {block!r}, which is in no line of 'blocks:'")
        segment.block = self.blocks[block]
        segment.micro_batches = int(count.split()[0]) if count else 1

    def _describe_blocks(self) -> None:
        """Set the specs of each block: of values and outputs from the nodes of an instance, of weights from their bytes."""
        for graph in self.graphs.values():
            for node in graph.nodes:
                if nodes.runs_segment(node):
                    self._describe(self.segment_at(nodes.operands(node).segment).block, node)
        for graph in self.graphs.values():
            for node in graph.nodes:
                if "bytes" in node.meta and not self._is_of_pieces(node):
                    self._weigh(self.segment_at(nodes.operands(node).segment).block, node.target, node.meta.pop("bytes"))

    def _is_of_pieces(self, node: fx.Node) -> bool:
        """Whether a node moves this rank's pieces of a divided segment. Its bytes then do not describe the whole weights."""
        segment = self.segment_at(nodes.operands(node).segment)
        segment.divided = (
            segment.divided
            or node.target in (nodes.gather_weights, nodes.reduce_gradients)
            or any(user.target is nodes.gather_weights for user in node.users)
        )
        return segment.divided and node.target in (nodes.fetch_weights, nodes.push_gradients)

    def segment_at(self, index: int) -> Segment:
        return list(self.segments.values())[index]

    def _describe(self, block: Block, node: fx.Node) -> None:
        block.values = block.values or tuple(read.meta["spec"] for read in nodes.operands(node).values)
        if node.target is nodes.forward:
            picked = {nodes.operands(user).index: user.meta["spec"] for user in node.users if user.target is operator.getitem}
            block.outputs = tuple(picked[index] for index in sorted(picked))
        elif not block.outputs:
            arriving = nodes.arriving_gradients(node)
            block.outputs = tuple(g.meta["spec"] if g is not None else TensorSpec((), torch.float32) for g in arriving)

    def _weigh(self, block: Block, target: Any, size: int) -> None:
        """Give a block two stand-in weights, one trained and one untrained, with the bytes that the text has."""
        is_of_gradients = target in (nodes.push_gradients, nodes.reduce_gradients)
        trained = size if is_of_gradients else block.gradient_bytes({})
        whole = max(block.weight_bytes({}), trained) if is_of_gradients else size
        specs = (
            TensorSpec((trained,), torch.float8_e4m3fn, requires_grad=True),
            TensorSpec((whole - trained,), torch.uint8),
        )
        block.weights = tuple(spec for spec in specs if spec.shape[0])

    def spec(self, match: re.Match, number: int) -> TensorSpec:
        shape = tuple(self._dim(part, number) for part in _between_commas(match["shape"]))
        flags = _between_commas(match["flags"].removeprefix(", "))
        batch, mixed = find_batch(shape, self.batch)
        spec = TensorSpec(shape, _dtype(match["dtype"], number), text.GRADIENT in flags, batch, mixed)
        partial = next((f.removeprefix(text.PARTIAL) for f in flags if f.startswith(text.PARTIAL)), None)
        width = next((f.removeprefix(text.COMPUTES_IN) for f in flags if f.startswith(text.COMPUTES_IN)), None)
        return replace(
            spec,
            partial=partial,
            compute_dtype=_dtype(width, number) if width is not None else None,
            equal_rows=text.EQUAL_ROWS in flags,
        )

    def _dim(self, part: str, number: int) -> Dim:
        if part.isdigit():
            return int(part)
        names = {str(symbol): symbol for symbol in self.bindings}
        try:
            return _evaluated(ast.parse(part, mode="eval").body, names)
        except (SyntaxError, KeyError) as error:
            raise ParseError(number, f"cannot read the size {part!r}: {error}") from error


class _Graph:
    """Parses one graph, node by node."""

    def __init__(self, parser: _Parser, body: Sequence[_Line], output: tuple[int, str]):
        self.parser, self.graph = parser, fx.Graph()
        self.made: dict[str, fx.Node] = {}
        for line in body:
            self._line(line)
        number, returned = output
        self.graph.output(self._read(returned, number))

    def _line(self, line: _Line) -> None:
        name, _, call = line.call.partition(" = ") if line.call.startswith("%") else ("", "", line.call)
        if call in _KINDS:
            node = self.graph.placeholder(name[1:])
            node.target = node.name
            node.meta.update(segment=None, kind=call, host=line.lane == nodes.HOST)
        else:
            node = self._call(name[1:], call, line)
        if name and node.name != name[1:]:
            raise ParseError(line.number, f"the name '{name}' is taken, or is none that a node can have")
        self._describe(node, line)
        self.made[node.name] = node

    def _call(self, name: str, call: str, line: _Line) -> fx.Node:
        function, arguments = self._arguments(call, line.number)
        node = self.graph.create_node("call_function", function, arguments, {}, name or None)
        if line.lane != nodes.lane_of(node):
            raise ParseError(line.number, f"'{call}' runs on lane {nodes.lane_of(node)}, not on {line.lane}")
        node.meta["segment"] = nodes.segment_of(node)
        return node

    def _arguments(self, call: str, number: int) -> tuple[Any, tuple]:
        if picked := re.fullmatch(r"%(\w+)\[(\d+)\]", call):
            return operator.getitem, (self._node(picked[1], number), int(picked[2]))
        name, _, inside = call.partition("(")
        words = _words()
        word = words.get(name)
        if word is None or not inside.endswith(")"):
            raise ParseError(number, f"no node is called {name!r}; there are {', '.join(sorted(words))}")
        positional, named = self._reader(inside[:-1], number).call()
        if unknown := set(named) - {operand.name for operand in word.operands}:
            raise ParseError(number, f"'{name}' has no operand {', '.join(sorted(unknown))}")
        try:
            operands = word.arguments(*positional, **named)
        except TypeError as error:
            raise ParseError(number, f"'{name}' takes ({', '.join(o.name for o in word.operands)}): {error}") from error
        kinds = [operand.kind for operand in word.operands]
        return word.function, tuple(self._named(kind, value, number) for kind, value in zip(kinds, operands, strict=True))

    def _named(self, kind: type, value: Any, number: int) -> Any:
        if kind is nodes.SegmentIndex:
            return self.parser.segments[value].index
        if kind is nodes.InputIndex:
            if value not in self.parser.inputs:
                self.parser.inputs.append(value)
            return self.parser.inputs.index(value)
        return value

    def _describe(self, node: fx.Node, line: _Line) -> None:
        if match := _VALUE.fullmatch(line.right):
            flags = _between_commas(match["flags"].removeprefix(", "))
            node.meta.update(value=match["value"], spec=self.parser.spec(match, line.number), split=text.SPLIT in flags)
            if text.STREAMED in flags:
                node.meta["host"] = True
        elif node.target in (nodes.fetch_weights, nodes.gather_weights, nodes.reduce_gradients, nodes.push_gradients):
            node.meta["bytes"] = parse_bytes(line.right)
        elif line.right and not nodes.runs_segment(node):
            raise ParseError(line.number, f"expected 'name: dtype[shape], flags  bytes', got {line.right!r}")

    def _read(self, written: str, number: int) -> Any:
        return self._reader(written, number).value()

    def _reader(self, written: str, number: int) -> _Reader:
        return _Reader(written, number, lambda name: self._node(name, number))

    def _node(self, name: str, number: int) -> fx.Node:
        if name not in self.made:
            raise ParseError(number, f"reads %{name}, which no line before it makes")
        return self.made[name]


class _Reader:
    """Parses operands: `%node`, `'text'`, `3`, `-` (None), and tuples of these."""

    def __init__(self, written: str, number: int, node: Callable[[str], fx.Node]):
        self.number, self.node = number, node
        self.tokens = list(self._split(written))

    def _split(self, written: str) -> Iterator[tuple[str, str]]:
        position = 0
        while position < len(written.rstrip()):
            match = _TOKEN.match(written, position)
            if match is None:
                raise ParseError(self.number, f"cannot read {written[position:]!r}")
            yield match.lastgroup or "", match[match.lastgroup or 0]
            position = match.end()

    def call(self) -> tuple[list, dict[str, Any]]:
        """The positional operands, and the operands with a name."""
        positional: list = []
        named: dict[str, Any] = {}
        while self.tokens:
            if self.tokens[0][0] == "word":
                _, name = self.tokens.pop(0)
                self._expect("=")
                named[name] = self.value()
            else:
                positional.append(self.value())
            if self.tokens:
                self._expect(",")
        return positional, named

    def value(self) -> Any:
        kind, written = self.tokens.pop(0) if self.tokens else ("", "")
        if kind == "node":
            return self.node(written)
        if kind == "string":
            return ast.literal_eval(written)
        if kind == "number":
            return int(written)
        if written == "-":
            return None
        if written == "(":
            return self._tuple()
        raise ParseError(self.number, f"expected an operand, got {written!r}")

    def _tuple(self) -> tuple:
        found = []
        while self.tokens and self.tokens[0][1] != ")":
            found.append(self.value())
            if self.tokens and self.tokens[0][1] != ")":
                self._expect(",")
        self._expect(")")
        return tuple(found)

    def _expect(self, mark: str) -> None:
        if not self.tokens or self.tokens.pop(0)[1] != mark:
            raise ParseError(self.number, f"expected {mark!r}")


_UNKNOWN = Block("", None, {}, None, (), (), (), inner_looped=False)


def _segment_named(call: str) -> str | None:
    """The name of the segment in a call; None if it names no segment."""
    match = re.match(r"(?:%\w+ = )?(?P<word>\w+)\((?P<name>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")", call)
    if match is None or match["word"] not in _words():
        return None
    return ast.literal_eval(match["name"]) if _words()[match["word"]].names_segment else None


def _words() -> dict[str, nodes.Operation]:
    return {word.name: word for word in nodes.VOCABULARY.values()}


_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.Div: operator.truediv,
    ast.FloorDiv: sympy_functions.FloorDiv,
}


def _evaluated(written: ast.expr, symbols: Mapping[str, sympy.Symbol]) -> sympy.Expr:
    """Evaluate a size as SymPy prints it. Raises `KeyError` for a name or an operation that is unknown in sizes."""
    if isinstance(written, ast.Constant):
        return sympy.Integer(written.value)
    if isinstance(written, ast.Name):
        return symbols[written.id]
    if isinstance(written, ast.BinOp):
        left, right = (_evaluated(side, symbols) for side in (written.left, written.right))
        return _ARITHMETIC[type(written.op)](left, right)
    if isinstance(written, ast.UnaryOp) and isinstance(written.op, ast.USub):
        return -_evaluated(written.operand, symbols)
    if isinstance(written, ast.Call) and isinstance(written.func, ast.Name):
        function = getattr(sympy_functions, written.func.id, None) or getattr(sympy, written.func.id)
        return function(*(_evaluated(a, symbols) for a in written.args))
    raise KeyError(ast.unparse(written))


def _between_commas(written: str) -> list[str]:
    """The parts between the commas of a list. A comma within parentheses does not separate."""
    parts, depth = [""], 0
    for letter in written:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _dtype(name: str, number: int) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ParseError(number, f"no dtype is called {name!r}")
    return found
