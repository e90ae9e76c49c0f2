"""Cut the sequence into segments: the layers that were found, and pieces of the stretches between them.

A stretch between layers (embeddings, a different first layer, a head, or a whole model without repeats) is cut so
that no piece holds many more parameter bytes than the largest layer or the largest single use. Among such cuts, dynamic
programming over the candidate cuts between parameter uses finds the cuts that the fewest bytes cross.

Segments with equal fingerprints are instances of one block; see `canonical`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from l2l_compile.ir.segments import Segment, Value
from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.passes.operation_sequence import OperationSequence
from l2l_compile.passes.segmentation.canonical import Piece, build_block
from l2l_compile.passes.segmentation.names import items

ABOUT_A_LAYER = 1.1  # a first layer may have a table that the other layers read
_ABOUT_A_USE = 1.02  # a head may have a norm in front of it: a segment of the norm alone would be too short to hide a copy


@dataclass(frozen=True)
class CutSegments:
    """Provides `segments` and `blocks`."""

    name: ClassVar[str] = "cut_segments"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.LAYERS})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.SEGMENTS, Fact.BLOCKS})

    def apply(self, compilation: Compilation) -> None:
        sequence = compilation.sequence
        ranges = list(compilation.layers)
        limit = ABOUT_A_LAYER * max((_weight_bytes(sequence, r) for r in ranges), default=0)
        for gap in _gaps(ranges, len(sequence)):
            edges = _with_parameters(sequence, gap, compilation.forced_cuts)
            for a, b in itertools.pairwise(edges):
                ranges += _narrow(sequence, range(a, b), limit)
        instantiate(compilation, _completed(compilation, ranges, limit))


def _completed(compilation: Compilation, ranges: list[range], limit: float) -> list[range]:
    """The ranges, with each unique layer joined to a neighbouring range that lies in the same list item.

    A layer is found as the operations that several copies have in common, so a norm in front of only one copy is left out.
    """
    sequence = compilation.sequence
    ranges = sorted(ranges, key=lambda r: r.start)
    layers = set(compilation.layers)
    beside_a_layer = [(a, b) for a, b in itertools.pairwise(ranges) if (a in layers) != (b in layers)]
    torn = [(a, b) for a, b in beside_a_layer if b.start not in compilation.forced_cuts and _within_an_item(sequence, b.start)]
    if not torn:
        return ranges
    fingerprints = Counter(Piece.of(sequence, layer).fingerprint for layer in layers)
    for a, b in torn:
        joined = range(a.start, b.stop)
        alone = fingerprints[Piece.of(sequence, a if a in layers else b).fingerprint] == 1
        if alone and a in ranges and b in ranges and _weight_bytes(sequence, joined) <= limit:
            ranges[ranges.index(a) : ranges.index(b) + 1] = [joined]
    return ranges


def _within_an_item(sequence: OperationSequence, cut: int) -> bool:
    """Whether one item of a list lies on both sides of a cut."""
    return not set(items(sequence.paths[cut - 1])).isdisjoint(items(sequence.paths[cut]))


def instantiate(compilation: Compilation, ranges: list[range]) -> None:
    """Make a segment of each of these ranges of the sequence. A block whose fingerprint is known already is kept."""
    sequence = compilation.sequence
    pieces = [Piece.of(sequence, r) for r in _without_empty(sequence, sorted(ranges, key=lambda r: r.start))]
    _name(pieces)
    known, compilation.fingerprints, compilation.segments = compilation.fingerprints, {}, []
    for index, piece in enumerate(pieces):
        block = compilation.fingerprints.get(piece.fingerprint)
        if block is None:
            block = known.get(piece.fingerprint) or build_block(sequence, piece, "")
            block.name, block.repeats = f"block_{len(compilation.fingerprints)}", 0
            compilation.fingerprints[piece.fingerprint] = block
        block.repeats += 1
        compilation.segments.append(
            Segment(
                index,
                piece.name,
                block,
                piece.weights,
                tuple(map(Value, piece.values)),
                tuple(map(Value, piece.outputs)),
                parameter_bytes=sum(sequence.weight_bytes(w) for w in piece.weights if w.kind == "parameter"),
                span=piece.span,
                floats=piece.floats,
            )
        )
    compilation.blocks = list(compilation.fingerprints.values())


def _gaps(layers: list[range], length: int) -> list[range]:
    gaps, end = [], 0
    for layer in sorted(layers, key=lambda r: r.start):
        if layer.start > end:
            gaps.append(range(end, layer.start))
        end = layer.stop
    if end < length:
        gaps.append(range(end, length))
    return gaps


def _with_parameters(sequence: OperationSequence, gap: range, wanted: set[int]) -> list[int]:
    """The ends of a gap and the wanted cuts in it, such that every piece has parameters.

    A piece without parameters loses one of its two cuts: the cut that more bytes cross.
    """
    edges = [gap.start, *sorted(c for c in wanted if gap.start < c < gap.stop), gap.stop]
    place = 0
    while place < len(edges) - 1 and len(edges) > 2:
        if _weights(sequence, range(edges[place], edges[place + 1])):
            place += 1
            continue
        choices = [i for i in (place, place + 1) if 0 < i < len(edges) - 1]
        del edges[max(choices, key=lambda i: sequence.crossing[edges[i]])]
        place = max(place - 1, 0)
    return edges


def _weight_bytes(sequence: OperationSequence, piece: range) -> int:
    return sum(sequence.weight_bytes(w) for w in _weights(sequence, piece))


def _weights(sequence: OperationSequence, piece: range) -> set:
    first = bisect.bisect_left(sequence.uses, piece.start, key=lambda u: u.position)
    last = bisect.bisect_left(sequence.uses, piece.stop, key=lambda u: u.position)
    return {u.weight for u in sequence.uses[first:last]}


def _narrow(sequence: OperationSequence, gap: range, limit: float) -> list[range]:
    """Cut a stretch where the fewest bytes cross. A piece has at most `limit` parameter bytes, or little more than one use."""
    cuts = _candidates(sequence, gap)
    atoms = [_weights(sequence, range(a, b)) for a, b in itertools.pairwise(cuts)]
    limit = max([limit, *(_ABOUT_A_USE * sum(map(sequence.weight_bytes, atom)) for atom in atoms)])
    best = [0.0] + [math.inf] * len(atoms)
    came = [0] * (len(atoms) + 1)
    for end in range(1, len(cuts)):
        held: set = set()
        toll = sequence.crossing[cuts[end]] if end < len(atoms) else 0.0
        for begin in range(end - 1, -1, -1):
            held |= atoms[begin]
            if sum(map(sequence.weight_bytes, held)) > limit:
                break
            if best[begin] + toll < best[end]:
                best[end], came[end] = best[begin] + toll, begin
    pieces, end = [], len(atoms)
    while end > 0:
        pieces.append(range(cuts[came[end]], cuts[end]))
        end = came[end]
    return pieces[::-1]


def _candidates(sequence: OperationSequence, gap: range) -> list[int]:
    """The cheapest cut between each pair of successive parameter uses of a stretch, and the ends of the stretch."""
    uses = [u.position for u in sequence.uses if gap.start <= u.position < gap.stop]
    cuts = [gap.start]
    for before, after in itertools.pairwise(uses):
        choices = range(before + 1, after + 1)
        if choices:
            cut = min(choices, key=lambda c: (sequence.crossing[c], -c))
            if math.isfinite(sequence.crossing[cut]):
                cuts.append(cut)
    return [*cuts, gap.stop]


def _without_empty(sequence: OperationSequence, ranges: list[range]) -> list[range]:
    """Join each range that makes no value for later ranges (a leftover mode switch) to the next range."""
    kept: list[range] = []
    start = None
    for r in ranges:
        span = range(r.start if start is None else start, r.stop)
        if r is ranges[-1] or any(_makes_value(sequence, i, span.stop) for i in span):
            kept.append(span)
            start = None
        else:
            start = span.start
    return kept


def _makes_value(sequence: OperationSequence, position: int, stop: int) -> bool:
    node = sequence.nodes[position]
    return node in sequence.captured.specs and any(sequence.position.get(u, len(sequence)) >= stop for u in node.users)


def _name(pieces: list[Piece]) -> None:
    """Number the pieces that have equal names, in order."""
    counts = Counter(p.name for p in pieces)
    seen: Counter[str] = Counter()
    for piece in pieces:
        if counts[piece.name] > 1:
            seen[piece.name] += 1
            piece.name = f"{piece.name}#{seen[piece.name]}"
