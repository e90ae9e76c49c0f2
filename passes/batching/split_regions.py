"""Cut a segment where rows mix: the operations before, the operations that mix, and the operations after become segments.

A block often cannot be proven row-wise because of a few operations: a loss reduces over the batch, a BatchNorm takes its
statistics, a contrastive loss compares every row with every other row. The operations of such a block are put into phases,

    0: row by row     1: whole batch     2: row by row     ...

each operation as early as its operands allow, and the segment is cut between the phases. Only the whole-batch phases run on
the whole batch at once. No result of this pass is assumed to be correct: `prove_row_independence` proves every new block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from l2l_compile.errors import LoweringError
from l2l_compile.ir.captured import LOSS_TERM
from l2l_compile.ir.graph import AT_READER, may_be_size
from l2l_compile.ir.segments import Block, Segment
from l2l_compile.lowering.probes import probe_values
from l2l_compile.passes.batching.batch_rules import Mixing, RowIds, regions
from l2l_compile.passes.batching.proof import (
    partial_sum_dtypes,
    prove_block,
    states_of_operands,
    suitable_primes,
    unproven_functions,
)
from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.passes.operation_sequence import OperationSequence, makes_number
from l2l_compile.passes.segmentation.canonical import OPERATION, operations
from l2l_compile.passes.segmentation.cut_segments import instantiate

_KINDS = {Mixing: "mixes", RowIds: "numbers", type(None): "free"}  # else "rows"


@dataclass(frozen=True)
class SplitRegions:
    """Provides `regions`: a block that is refused as a whole is cut if some of its parts are row-wise."""

    name: ClassVar[str] = "split_regions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.SEGMENTS, Fact.BLOCKS})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS})

    def apply(self, compilation: Compilation) -> None:
        for block in compilation.blocks:
            prove_block(compilation, block)
        mixing = {b: found for b in compilation.blocks if not b.inner_looped and (found := _kinds(compilation, b))}
        phases = {s: _phases(compilation.sequence, s, mixing[s.block]) for s in compilation.segments if s.block in mixing}
        if not any(len(set(found)) > 1 for found in phases.values()):
            return
        ranges = [r for s in compilation.segments for r in _reorder(compilation.sequence, s.span, phases.get(s))]
        compilation.sequence = OperationSequence(compilation.captured)
        instantiate(compilation, ranges)


@dataclass
class _Kinds:
    """The kind of each operation of a block, by its number, and the numbers of the operations that write.

    Kinds: "rows" (row by row), "mixes", "free" (reads no rows) and "numbers" (numbers the rows; must run where it is read).
    """

    of: dict[int, str]
    writers: set[int]


def _kinds(compilation: Compilation, block: Block) -> _Kinds | None:
    """The kinds of the operations of a refused block. None if they are not known, or if a cut would gain nothing."""
    batch, hints = compilation.captured.batch, compilation.captured.hints
    if compilation.captured.autocast is not None and not any(LOSS_TERM in n.meta for n in block.graph.graph.nodes):
        return None  # see proof.partial_sum_dtypes
    if not compilation.splits_rows or batch is None or not any(v.batch for v in block.values):
        return None
    primes = suitable_primes(block, hints, batch)
    try:
        small, large = (probe_values(block, {**hints, batch: prime}) for prime in primes)
    except LoweringError:
        return None
    if small.hidden:
        return None  # a transform of torch.func cannot be cut
    states = regions(
        small.graph, large.graph, *primes, states_of_operands(block, hints), partial_sum_dtypes(compilation.captured)
    )
    if states is None:
        return None
    kinds: dict[int, str] = {}
    for node, state in zip(small.made_by, states, strict=True):
        kind = _KINDS.get(type(state), "rows")
        before = kinds.get(node.meta[OPERATION])
        kinds[node.meta[OPERATION]] = kind if before in (None, "free") or kind == "mixes" else before
    kinds |= {n.meta[OPERATION]: "mixes" for n in unproven_functions(compilation, block) if OPERATION in n.meta}
    return _Kinds(kinds, {n.meta[OPERATION] for n in small.writers if OPERATION in n.meta})


def _phases(sequence: OperationSequence, segment: Segment, found: _Kinds) -> list[int]:
    """The phase of every position of a segment: even phases are row-wise, odd phases run on the whole batch."""
    numbered = list(enumerate(operations(sequence, segment.span)))
    kinds = {node: found.of[number] for number, node in numbered if number in found.of}
    writers = {node for number, node in numbered if number in found.writers}
    while True:
        phases = _assign(sequence, segment.span, kinds, writers)
        row_wise: dict[int, list[fx.Node]] = {}  # operations of each row-wise phase
        for position, phase in zip(segment.span, phases, strict=True):
            node = sequence.nodes[position]
            if kinds.get(node) == "rows":
                row_wise.setdefault(phase, []).append(node)
        pointless = next((p for p in sorted(row_wise) if not _is_worth_it(sequence, segment, phases, p)), None)
        if pointless is None:
            return phases
        kinds.update(dict.fromkeys(row_wise[pointless], "mixes"))
        if len(row_wise) == 1:
            return [0] * len(segment.span)


def _assign(sequence: OperationSequence, span: range, kinds: dict[fx.Node, str], writers: set[fx.Node]) -> list[int]:
    phase: dict[fx.Node, int] = {}
    floor = top = 0
    inside = [sequence.nodes[i] for i in span]
    numbering = [
        node for node in inside if kinds.get(node) == "numbers" or AT_READER in node.meta or _is_no_value(sequence, node)
    ]
    for node in inside:
        kind = kinds.get(node, "free")
        found = max([floor, *(phase.get(a, 0) for a in node.all_input_nodes)])
        if kind in ("rows", "mixes"):
            found += found % 2 != (kind == "mixes")
        if node in writers or node.meta.get("example_value") is None:  # no operation may move past a write or a mode switch
            found = floor = found + max(0, top - found + ((top - found) % 2 if kind in ("rows", "mixes") else 0))
        phase[node], top = found, max(top, found)
    for node in reversed(numbering):
        readers = {phase[u] for u in node.users if u in phase}
        if len(readers) > 1 and _is_no_value(sequence, node):
            return [0] * len(span)  # no segment can hand it on
        phase[node] = min(readers, default=phase[node])
    return list(phase.values())


def _is_no_value(sequence: OperationSequence, node: fx.Node) -> bool:
    """Whether no segment can hand on the result: a float computed from a size, a tuple, or a tensor that is a size."""
    if may_be_size(node):
        return True
    return node not in sequence.captured.specs and not makes_number(node) and node.meta.get("example_value") is not None


def _is_worth_it(sequence: OperationSequence, segment: Segment, phases: list[int], phase: int) -> bool:
    """Whether a row-wise phase uses a parameter, or hands on fewer bytes of batched values than it reads."""
    inside = {sequence.nodes[i] for i, p in zip(segment.span, phases, strict=True) if p == phase}
    read = {a for n in inside for a in n.all_input_nodes} - inside
    if any(a in sequence.weights and sequence.weights[a].kind == "parameter" for a in read):
        return True
    made = {n for n in inside if any(u not in inside for u in n.users)}
    return _bytes(sequence, made) < _bytes(sequence, read)


def _bytes(sequence: OperationSequence, nodes: set[fx.Node]) -> int:
    specs = (sequence.captured.specs.get(n) for n in nodes)
    return sum(s.bytes(sequence.captured.hints) for s in specs if s is not None and s.batch is not None)


def _reorder(sequence: OperationSequence, span: range, phases: list[int] | None) -> list[range]:
    """Move a segment's operations into the order of their phases. Returns the range of the sequence for each phase."""
    if phases is None or len(set(phases)) == 1:
        return [span]
    ordered = [span[i] for i in sorted(range(len(span)), key=phases.__getitem__)]
    place = sequence.nodes[span.stop - 1].next
    for position in ordered:
        place.prepend(sequence.nodes[position])
    sizes = [phases.count(p) for p in sorted(set(phases))]
    ends = [span.start + sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [range(a, b) for a, b in zip([span.start, *ends], ends, strict=False)]
