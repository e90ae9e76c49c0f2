"""Find the segments that hold more than one layer, and the reason why each was not cut.

Device memory grows with the depth of the model if a segment does. Layers are recognised as items of module lists that run one
after the other or, without module names, as repeated uses of parameters.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from l2l_compile.ir.segments import Segment, Uncut
from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.passes.operation_sequence import OperationSequence
from l2l_compile.passes.segmentation.chains import chains, extended_to_next, find_predecessors, uses_in
from l2l_compile.passes.segmentation.cut_segments import ABOUT_A_LAYER
from l2l_compile.passes.segmentation.names import Path, has_names, items
from l2l_compile.passes.segmentation.repeats import best_rotation, repeats

_MOST = 0.75  # share of a segment's bytes that the layers in it must hold: a single layer may have a list of its own


@dataclass(frozen=True)
class MeasureGranularity:
    """Provides `granularity`: `compilation.uncut`, the segments that hold several layers."""

    name: ClassVar[str] = "measure_granularity"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.BATCHING})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.GRANULARITY})

    def apply(self, compilation: Compilation) -> None:
        sequence = compilation.sequence
        layers = {segment: _layers(sequence, segment.span) for segment in compilation.segments}
        single = max((_bytes(sequence, s.span) for s, inner in layers.items() if len(inner) < 2), default=0)
        found = [
            _uncut(sequence, segment, inner) for segment, inner in layers.items() if _is_more(sequence, segment, inner, single)
        ]
        compilation.uncut = tuple(found)


def _is_more(sequence: OperationSequence, segment: Segment, inner: list[range], single: int) -> bool:
    """Whether a segment holds several layers, which have most of its bytes, and is larger than each of them and than `single`.

    `single` is the largest number of bytes of a segment that does not hold several layers.
    """
    if len(inner) < 2:
        return False
    whole, sizes = _bytes(sequence, segment.span), [_bytes(sequence, layer) for layer in inner]
    return whole > ABOUT_A_LAYER * max(single, *sizes) and sum(sizes) >= _MOST * whole


def _uncut(sequence: OperationSequence, segment: Segment, inner: list[range]) -> Uncut:
    largest = max(_bytes(sequence, layer) for layer in inner)
    borders = [range(before.stop, after.start + 1) for before, after in itertools.pairwise(inner)]
    why = next((reason for border in borders if (reason := _why_not(sequence, border))), None)
    if why is None:
        why = "no repeat was found there whose copies feed one another"
        remedy = "put the layers into one torch.nn.ModuleList, so that their names tell"
    else:
        remedy = "compute that inside of each layer, or hand tensors from layer to layer"
    return Uncut(segment.name, _bytes(sequence, segment.span) / largest, segment.parameter_bytes, why, remedy)


def _why_not(sequence: OperationSequence, border: range) -> str | None:
    """The reason why all of these cuts are forbidden; None if one is allowed."""
    reasons = [sequence.why_not(cut) for cut in border]
    return reasons[0] if reasons and all(reasons) else None


def _layers(sequence: OperationSequence, span: range) -> list[range]:
    """The layers in a range of the sequence, in order, as far as names or repeats tell."""
    if has_names(sequence, span):
        lists = [_items(sequence, span, path) for path in {item[:-1] for p in span for item in items(sequence.paths[p])}]
        return max((found for found in lists if _are_layers(sequence, found)), key=len, default=[])
    uses = uses_in(sequence, span)
    first = sequence.uses.index(uses[0]) if uses else 0
    for repeat in repeats(uses)[:4]:
        copies = best_rotation(sequence, repeat, span.start, span.stop, first).ranges
        longest = max(chains(sequence, copies), key=len)
        if len(longest) > 2:
            return [copies[i] for i in longest]
    return []


def _items(sequence: OperationSequence, span: range, container: Path) -> list[range]:
    """The items of a container that use parameters within a range, each from its first to its last operation.

    Empty if no two of them have the same class.
    """
    places: dict[Path, list[int]] = {}
    for position in span:
        for item in items(sequence.paths[position]):
            if item[:-1] == container:
                places.setdefault(item, []).append(position)
    with_parameters = {item: at for item, at in places.items() if uses_in(sequence, range(at[0], at[-1] + 1))}
    if max(Counter(map(sequence.classes.get, with_parameters)).values(), default=0) < 2:
        return []  # parts of one layer, each of a different class
    return sorted((range(at[0], at[-1] + 1) for at in with_parameters.values()), key=lambda r: r.start)


def _are_layers(sequence: OperationSequence, found: list[range]) -> bool:
    in_turn = all(before.stop <= after.start for before, after in itertools.pairwise(found))
    return len(found) > 1 and in_turn and 2 * len(find_predecessors(sequence, extended_to_next(found))) >= len(found)


def _bytes(sequence: OperationSequence, span: range) -> int:
    return sum(sequence.weight_bytes(weight) for weight in {use.weight for use in uses_in(sequence, span)})
