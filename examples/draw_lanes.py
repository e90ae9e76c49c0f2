"""Draw the lanes of one training step as SVG, from the program of a small transformer.

    python examples/draw_lanes.py                     # writes docs/lanes.svg
    python examples/draw_lanes.py --output step.svg

The nodes, their lanes and their order are those of the program that `explain` returns. Their times are computed, not
measured: each lane takes its nodes in order, and a node starts when its lane is free, its operands are there and, for
weights, a slab is free. Copies and updates take a time in proportion to their bytes. A segment computes `FORWARD` times
as long as the copy of its weights takes, in backward `BACKWARD` times.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import torch
import torch.nn.functional as F
from torch import fx, nn

import l2l_compile
from l2l_compile.ir import nodes
from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Segment

FORWARD = 1.3  # time of all micro-batches over that of the weights' copy: above 1, copies are hidden
BACKWARD = 3 * FORWARD  # recompute, gradients of the values, gradients of the weights
NO_WEIGHTS = 16 << 10  # bytes: a segment without weights (the loss) is drawn as if it had so many
PREFETCH = 1  # segments ahead; the device then has two weight slabs
MICRO_BATCHES = 4


# ---- the model and its program ---------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Transformer(nn.Module):
    """A language model: tokens [batch, length] to the mean loss of the next token."""

    def __init__(self, layers: int, width: int = 64, vocabulary: int = 256):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def program_of_a_step(layers: int = 3) -> Program:
    """Forward and backward of the transformer, with layers updated as their gradients arrive."""
    with torch.device("meta"):  # nothing is computed, so no memory is needed
        model, tokens = Transformer(layers), torch.zeros(8, 32, dtype=torch.int64)
    options = {
        "micro_batches": MICRO_BATCHES,
        "prefetch": PREFETCH,
        "device": "cpu",
        "optimizer": torch.optim.AdamW(model.parameters()),
        "update": "in_backward",
    }
    return l2l_compile.explain(model, options)(tokens, tokens.clone()).programs[0]


# ---- when each node runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A node on its lane. Times are in bytes that the link copies meanwhile; the loss and its gradient have no segment."""

    node: fx.Node
    lane: str
    start: float
    end: float
    segment: Segment | None


@dataclass(frozen=True)
class Slab:
    """The weights of a segment in a weight slab of the device."""

    number: int
    start: float
    end: float
    segment: Segment


class Schedule:
    """When each node of a program runs. Lanes are queues: `free` is when each has done all that it was given so far."""

    def __init__(self, program: Program):
        self.program = program
        self.pieces: list[Piece] = []
        self.slabs: list[Slab] = []
        self.free = dict.fromkeys((nodes.H2D, nodes.COMPUTE, nodes.D2H, nodes.HOST), 0.0)
        self._run(program.forward.graph)
        self.backward_begins = max(self.free.values())  # the loss is on the host then
        self.free = dict.fromkeys(self.free, self.backward_begins)
        self._run(program.backward.graph)

    def _run(self, graph: fx.Graph) -> None:
        done: dict[fx.Node, float] = {}
        slabs = _Slabs(self.free[nodes.H2D])
        for node in graph.nodes:
            lane = nodes.COMPUTE if node.target is nodes.release else nodes.lane_of(node)  # compute frees memory
            waits = [self.free.get(lane, 0.0), *(done[read] for read in node.all_input_nodes)]
            if node.target is nodes.release:
                waits += [done[reader] for reader in nodes.operands(node).x.users if reader in done]
            elif node.target is nodes.restore:
                waits.append(self.free[nodes.COMPUTE])  # its memory may belong to a value that compute still reads
            elif node.target is nodes.fetch_weights:
                waits.append(slabs.next_is_free())
            start = max(waits)
            done[node] = end = start + self._duration(node)
            if lane in self.free:
                self.free[lane] = end
            if end > start:
                self.pieces.append(Piece(node, lane, start, end, self._segment(node)))
            if node.target is nodes.fetch_weights:
                slabs.take(node, start)
            elif node.target is nodes.release and (fetch := nodes.operands(node).x).target is nodes.fetch_weights:
                number, since = slabs.release(fetch, end)
                self.slabs.append(Slab(number, since, end, self._segment(fetch)))

    def _duration(self, node: fx.Node) -> float:
        """Time in bytes of the link. Splitting, joining and freeing take none."""
        if node.target in (nodes.offload, nodes.restore):
            return node.meta["spec"].bytes(self.program.bindings)
        if node.target in (nodes.fetch_weights, nodes.push_gradients, nodes.update):
            return self._weight_bytes(node)
        if nodes.runs_segment(node):
            passes = FORWARD if node.target is nodes.forward else BACKWARD
            return passes * (self._weight_bytes(node) or NO_WEIGHTS)
        return 0.0

    def _weight_bytes(self, node: fx.Node) -> int:
        return self._segment(node).block.weight_bytes(self.program.bindings)

    def _segment(self, node: fx.Node) -> Segment | None:
        """The segment that a node names, or the first one that reads the value that is copied; None if there is none."""
        index = nodes.segment_of(node)
        if index is None:
            value = nodes.operands(node).x if node.target is nodes.offload else node
            index = next((nodes.segment_of(run) for run in _runs_that_read(value)), None)
        return None if index is None else self.program.segments[index]


class _Slabs:
    """The weight slabs of the device: fetches take them in turn."""

    def __init__(self, now: float):
        self._free = [now] * (PREFETCH + 1)
        self._taken: dict[fx.Node, tuple[int, float]] = {}

    def next_is_free(self) -> float:
        return self._free[len(self._taken) % len(self._free)]

    def take(self, fetch: fx.Node, start: float) -> None:
        self._taken[fetch] = len(self._taken) % len(self._free), start

    def release(self, fetch: fx.Node, now: float) -> tuple[int, float]:
        """The number of a fetch's slab, and since when it was taken."""
        number, since = self._taken[fetch]
        self._free[number] = now
        return number, since


def _runs_that_read(value: fx.Node) -> Iterator[fx.Node]:
    """The segments' runs that read a value, whole or split."""
    for user in value.users:
        if nodes.runs_segment(user):
            yield user
        elif user.target in (nodes.split, nodes.merge):
            yield from _runs_that_read(user)


# ---- the picture -----------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT = 1000, 148, 14  # pixels
TOP, BOX, SPACE, SLAB, LETTER = 48, 40, 22, 9, 5.8
COLOURS = ("#5b6470", "#0a66c2", "#b34700", "#1a7f37", "#8250df", "#5b6470")  # white text is readable on each
ROWS = {
    nodes.H2D: ("host → device", "lane h2d"),
    "slabs": ("on the device", f"{PREFETCH + 1} layers' weights"),
    nodes.COMPUTE: ("compute", "lane compute"),
    nodes.D2H: ("device → host", "lane d2h"),
    nodes.HOST: ("optimizer", "lane host"),
}
VERBS = {nodes.fetch_weights: "fetch", nodes.push_gradients: "push", nodes.update: "update"}
CAPTION = (
    "Each colour is a layer. All micro-batches (1 to 4) run through a layer before the next one."
    " Meanwhile, the weights of the next layer arrive (fetch).",
    "Outlined: the input of a layer goes to the host in forward (stash) and comes back for backward,"
    " which runs the layer again and differentiates it.",
    "The gradients of a layer leave (push) while the next one computes, and the host updates the layer."
    " The device holds the weights of two layers at most.",
    "Order and overlap are those of the program. Widths are computed, not measured:"
    " copies and updates by bytes, compute by parameters.",
)
STYLE = """
  text { font: 12px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #1f2328 }
  .panel { fill: #ffffff; stroke: #d0d7de } .soft { fill: #57606a; font-size: 11px } .bold { font-weight: 600 }
  .row { fill: #f3f5f7 } .cut { stroke: #ffffff; stroke-width: 1 } .rule { stroke: #8c959f; stroke-dasharray: 3 3 }
  .on { fill: #ffffff; font-size: 10.5px; text-anchor: middle }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .panel { fill: #0d1117; stroke: #30363d } .soft { fill: #9198a1 }
    .row { fill: #161b22 } .cut { stroke: #0d1117 } .rule { stroke: #6e7681 } .on { fill: #ffffff }
  }
"""


class Picture:
    """SVG elements, as text."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        segments = schedule.program.segments
        self.colours = {s: COLOURS[s.index % len(COLOURS)] for s in segments}
        self.ends = max(p.end for p in schedule.pieces)
        self.tops = dict(zip(ROWS, _tops(), strict=True))
        self.elements: list[str] = []

    def draw(self) -> str:
        bottom = self.tops[nodes.HOST] + BOX + 12
        for row, (title, subtitle) in ROWS.items():
            self._row(row, title, subtitle)
        self._phases(bottom)
        for slab in self.schedule.slabs:
            top = self.tops["slabs"] + slab.number * (SLAB + 4)
            self._box(slab.start, slab.end, top, SLAB, self.colours[slab.segment])
        for piece in self.schedule.pieces:
            self._piece(piece)
        for number, line in enumerate(CAPTION):
            self._text(14, bottom + 26 + 18 * number, line, "soft")
        height = bottom + 22 + 18 * len(CAPTION)
        panel = f'<rect class="panel" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>'
        title = "<title>The lanes of one training step of a transformer of three layers</title>"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        return "\n".join([head, title, f"<style>{STYLE}</style>", panel, *self.elements, "</svg>", ""])

    def _x(self, time: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * time / self.ends

    def _text(self, x: float, y: float, text: str, kind: str = "") -> None:
        attribute = f' class="{kind}"' if kind else ""
        self.elements.append(f'<text{attribute} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>')

    def _row(self, row: str, title: str, subtitle: str) -> None:
        top, height = self.tops[row], _height(row)
        self.elements.append(
            f'<rect class="row" x="{LEFT}" y="{top - 5}" width="{WIDTH - LEFT - RIGHT}" height="{height + 10}" rx="4"/>'
        )
        middle = top + height / 2
        self._text(14, middle - 3, title, "bold")
        self._text(14, middle + 12, subtitle, "soft")

    def _phases(self, bottom: float) -> None:
        x = self._x(self.schedule.backward_begins)
        self.elements.append(f'<path class="rule" d="M{x:.1f} 16V{bottom:.1f}"/>')
        self._text(LEFT + 4, 28, "forward", "bold")
        self._text(x + 8, 28, "backward", "bold")

    def _box(self, start: float, end: float, top: float, height: float, colour: str, faint: bool = False) -> None:
        width = max(self._x(end) - self._x(start) - 1, 1.5)
        style = f'fill="{colour}" fill-opacity="0.3" stroke="{colour}"' if faint else f'fill="{colour}"'
        self.elements.append(
            f'<rect x="{self._x(start):.1f}" y="{top:.1f}" width="{width:.1f}" height="{height}" rx="2" {style}/>'
        )

    def _piece(self, piece: Piece) -> None:
        top, height = self.tops[piece.lane], _height(piece.lane)
        moved = piece.node.target in (nodes.offload, nodes.restore)
        self._box(piece.start, piece.end, top, height, self.colours.get(piece.segment, COLOURS[0]), faint=moved)
        width, middle = self._x(piece.end) - self._x(piece.start), (self._x(piece.start) + self._x(piece.end)) / 2
        if piece.lane == nodes.COMPUTE:
            name = piece.segment.name
            if len(name) * LETTER < width:
                self._text(middle, top + 16, name, "on")
            if piece.segment.block.inner_looped:
                self._micro_batches(piece, top)
        elif not moved and len(VERBS[piece.node.target]) * LETTER < width:
            self._text(middle, top + height / 2 + 4, VERBS[piece.node.target], "on")

    def _micro_batches(self, piece: Piece, top: float) -> None:
        cell = (self._x(piece.end) - self._x(piece.start)) / piece.segment.micro_batches
        for turn in range(piece.segment.micro_batches):
            x = self._x(piece.start) + turn * cell
            if turn:
                self.elements.append(f'<path class="cut" d="M{x - 0.5:.1f} {top + 22}v{BOX - 22}"/>')
            if cell > 8:
                self._text(x + cell / 2, top + 35, str(turn + 1), "on")


def _height(row: str) -> float:
    return (PREFETCH + 1) * (SLAB + 4) - 4 if row == "slabs" else BOX


def _tops() -> Iterator[float]:
    top = TOP
    for row in ROWS:
        yield top
        top += _height(row) + SPACE


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent.parent / "docs" / "lanes.svg")
    options = parser.parse_args(arguments)
    options.output.write_text(drawing())


def drawing() -> str:
    """The picture as SVG."""
    return Picture(Schedule(program_of_a_step())).draw()


if __name__ == "__main__":
    main()
