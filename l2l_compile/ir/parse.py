"""Parses the text of a program (`text.py`): the graphs with the meta of every node, and the segments and blocks.

A parsed block has no operations, so a parsed program cannot run. It can be verified, changed by passes and printed.

A text may come from anybody. Nothing in it is executed: a node is one of the vocabulary, a size is parsed by `size_text.py`, a
dtype is one of PyTorch's. The time to parse a text grows with its length, and every error is a `ParseError`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from l2l_compile.errors import ParseError
from l2l_compile.ir import nodes
from l2l_compile.ir.graph_text import GraphParser, Line, Names, segment_call
from l2l_compile.ir.operand_text import count_of, shown
from l2l_compile.ir.segments import Block, Segment
from l2l_compile.ir.values import Bindings, TensorSpec
from l2l_compile.lanes import OF_DEVICE, Lane

_BLOCK = re.compile(r"  (?P<name>\S+)\s+x(?P<repeats>[0-9]+)\s+(?P<how>inner loop|whole batch: (?P<reason>.*))")
# The lane stands behind the first gap of two spaces or more that a lane follows. The gap begins where no space is before it:
# without that, the time to search a line of spaces would grow with the square of its length.
_LANE = re.compile(
    rf"(?<!\s)\s\s+(?P<lane>{'|'.join((*OF_DEVICE, Lane.HOST, Lane.DISK_READ, Lane.DISK_WRITE, Lane.NONE, 'device', 'disk'))})\b\s*"
)
_RUNS = re.compile(r"(?P<block>\S+)(?: x (?P<count>[0-9]+) micro-batches)?")
_FLOAT = r"-?(?:[0-9]{1,20}\.[0-9]{1,20}(?:e[+-][0-9]{1,3})?|[0-9]{1,20}e[+-][0-9]{1,3}|inf)"
_SIZE = re.compile(
    rf"(?P<symbol>[a-zA-Z_][a-zA-Z0-9_]*) = (?:(?P<value>[0-9]+)|(?P<float>{_FLOAT}))(?P<batch> \(batch\))?", re.ASCII
)


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
    if not isinstance(printed, str):
        raise TypeError(f"the text of a program is a str, got {type(printed).__name__}")
    return _Parser(printed).parse()


class _Parser:
    def __init__(self, printed: str):
        self.lines = list(enumerate(printed.split("\n"), 1))
        self.bindings: dict[sympy.Symbol, Any] = {}
        self.batch: sympy.Symbol | None = None
        self.blocks: dict[str, Block] = {}
        self.segments: dict[str, Segment] = {}
        self.graphs: dict[str, fx.Graph] = {}

    def parse(self) -> Parsed:
        sections = self._sections()
        self._sizes(sections.pop("sizes", []))
        ranks = self._ranks(sections.pop("ranks", []))
        self._blocks(sections.pop("blocks", []))
        if "forward" not in sections and "step" not in sections:
            raise ParseError(len(self.lines), "a program has a section 'forward:' or 'step:'")
        bodies = {title: self._body(lines) for title, lines in sections.items()}
        self._find_segments([line for body, _ in bodies.values() for line in body])
        names = Names({name: s.index for name, s in self.segments.items()}, self.bindings, self.batch)
        for title, (body, output) in bodies.items():
            self.graphs[title] = GraphParser(names, title, body, output).graph
        self.by_index = list(self.segments.values())
        self._describe_blocks()
        return Parsed(
            self.graphs,
            tuple(self.blocks.values()),
            tuple(self.segments.values()),
            tuple(names.inputs),
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
                if title not in ("blocks", "forward", "backward", "step") or not line.rstrip().endswith(":"):
                    raise ParseError(
                        number, f"expected 'sizes: ...', 'blocks:', 'forward:', 'backward:' or 'step:', got {shown(line)}"
                    )
                current = found.setdefault(title, [])
            elif current is None:
                raise ParseError(number, f"stands in no section: {shown(line)}")
            else:
                current.append((number, line))
        return found

    def _sizes(self, lines: Sequence[tuple[int, str]]) -> None:
        for number, line in lines:
            for part in line.split(", "):
                match = _SIZE.fullmatch(part.strip())
                if match is None:
                    raise ParseError(number, f"expected a size such as 's0 = 4' or 's0 = 4 (batch)', got {shown(part)}")
                if match["float"]:  # a number of the user's that changes from call to call
                    self.bindings[sympy.Symbol(match["symbol"], real=True)] = float(match["float"])
                    continue
                symbol = sympy.Symbol(match["symbol"], positive=True, integer=True)
                self.bindings[symbol] = count_of(match["value"], number)
                self.batch = symbol if match["batch"] else self.batch

    def _ranks(self, lines: Sequence[tuple[int, str]]) -> int:
        for number, line in lines:
            if not re.fullmatch(r"[1-9][0-9]*", line.strip()):
                raise ParseError(number, f"expected a number of ranks, got {shown(line)}")
            return count_of(line.strip(), number)
        return 1

    def _blocks(self, lines: Sequence[tuple[int, str]]) -> None:
        for number, line in lines:
            match = _BLOCK.fullmatch(line.rstrip())
            if match is None:
                raise ParseError(number, f"expected a block such as 'block_0  x2  inner loop', got {shown(line)}")
            self.blocks[match["name"]] = Block(
                match["name"], None, {}, None, (), (), (),
                inner_looped=match["reason"] is None, reason=match["reason"], repeats=count_of(match["repeats"], number),
            )  # fmt: skip

    def _body(self, lines: Sequence[tuple[int, str]]) -> tuple[list[Line], tuple[int, str]]:
        """The lines of a graph's nodes, and the line number and text of its return value."""
        body: list[Line] = []
        for number, line in lines:
            if line.strip().startswith("return "):
                if number != lines[-1][0]:
                    raise ParseError(number, "the line of a graph that returns is its last line")
                return body, (number, line.strip().removeprefix("return "))
            gap = _LANE.search(written := line.strip())
            if gap is None or not line.startswith("  ") or not gap.start():
                raise ParseError(number, f"expected a node and its lane, two spaces apart, got {shown(line)}")
            body.append(Line(number, written[: gap.start()], gap["lane"], written[gap.end() :]))
        raise ParseError(lines[-1][0] if lines else 0, "a graph ends with 'return (...)'")

    def _find_segments(self, body: Sequence[Line]) -> None:
        """Number the segments in the order in which they run forward, then the other segments in the order of mention."""
        calls = [(line, *call) for line in body if (call := segment_call(line)) is not None]
        for line, word, name in [*(call for call in calls if call[1].function is nodes.forward), *calls]:
            segment = self.segments.setdefault(name, Segment(len(self.segments), name, _UNKNOWN, (), (), ()))
            if word.runs_segment:
                self._runs(segment, line)
        for line, _, name in calls:
            if self.segments[name].block is _UNKNOWN:
                raise ParseError(line.number, f"names the segment {shown(name)}, which no line runs")

    def _runs(self, segment: Segment, line: Line) -> None:
        """Read the block and the number of micro-batches: `block_0 x 2 micro-batches`, or `block_0`."""
        match = _RUNS.fullmatch(line.right)
        if match is None or match["block"] not in self.blocks:
            named = line.right.partition(" x ")[0]
            raise ParseError(
                line.number, f"names {shown(named)}, which is in no line of 'blocks:' with a number of micro-batches"
            )
        block = self.blocks[match["block"]]
        if segment.block not in (_UNKNOWN, block):
            raise ParseError(line.number, f"runs {block.name}, and another line runs the segment as {segment.block.name}")
        segment.block = block
        segment.micro_batches = max(1, count_of(match["count"], line.number)) if match["count"] else 1

    def _describe_blocks(self) -> None:
        """Set the specs of each block: of values and outputs from the nodes of an instance, of weights from their bytes."""
        for graph in self.graphs.values():
            for node in graph.nodes:
                if nodes.runs_segment(node):
                    self._describe(self._segment_of(node).block, node)
        for graph in self.graphs.values():
            for node in graph.nodes:
                if "bytes" in node.meta and not self._is_of_shards(node):
                    self._weigh(self._segment_of(node).block, nodes.carries(node), node.meta.pop("bytes"))

    def _is_of_shards(self, node: fx.Node) -> bool:
        """Whether a node moves this rank's shards of a sharded segment. Its bytes then do not describe the whole weights."""
        segment = self._segment_of(node)
        segment.sharded = segment.sharded or any(map(_is_between_ranks, (node, *node.users)))
        return segment.sharded and not _is_between_ranks(node)

    def _segment_of(self, node: fx.Node) -> Segment:
        return self.by_index[nodes.operands(node).segment]

    def _describe(self, block: Block, node: fx.Node) -> None:
        block.values = block.values or tuple(read.meta["spec"] for read in nodes.operands(node).values)
        if node.target is nodes.forward:
            picked = {nodes.operands(user).index: user.meta["spec"] for user in node.users if user.target is operator.getitem}
            block.outputs = tuple(picked[index] for index in sorted(picked))
        elif not block.outputs:
            arriving = nodes.arriving_gradients(node)
            block.outputs = tuple(g.meta["spec"] if g is not None else TensorSpec((), torch.float32) for g in arriving)

    def _weigh(self, block: Block, carried: nodes.Carries | None, size: int) -> None:
        """Give a block two stand-in weights, one trained and one untrained, with the bytes that the text has."""
        is_of_gradients = carried is nodes.Carries.GRADIENTS
        trained = size if is_of_gradients else block.gradient_bytes({})
        whole = max(block.weight_bytes({}) if is_of_gradients else size, trained)
        specs = (
            TensorSpec((trained,), torch.float8_e4m3fn, requires_grad=True),
            TensorSpec((whole - trained,), torch.uint8),
        )
        block.weights = tuple(spec for spec in specs if spec.shape[0])


def _is_between_ranks(node: fx.Node) -> bool:
    """Whether a node moves weights or gradients of its segment between ranks."""
    word = nodes.operation_of(node)
    return word is not None and word.is_collective and word.carries is not None


_UNKNOWN = Block("", None, {}, None, (), (), (), inner_looped=False)
