"""When each segment of a step runs that goes by turns, and what cannot go by turns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from l2l_compile.errors import L2LError
from l2l_compile.ir.segments import Segment, Value
from l2l_compile.ir.stages import Borders
from l2l_compile.passes.compilation import Compilation
from l2l_compile.passes.streaming.place_stages import has_rows

REMEDY = "use schedule='breadth_first'"


class TurnKinds:
    """When the segments of a program run, and which values they make turn by turn.

    turned  segments that run turn by turn
    early   segments that run once, before the turns that read their results
    late    segments that run once behind all turns, since they read what the turns make of all rows
    parts   values of which each turn makes its own part
    sums    values of which each turn makes a summand
    once    values that the first turn makes for all
    """

    def __init__(self, compilation: Compilation):
        self.specs = compilation.captured.specs
        self.turned: list[Segment] = []
        self.early: list[Segment] = []
        self.late: list[Segment] = []
        self.parts, self.sums, self.once = set[Value](), set[Value](), set[Value]()
        self.of_late: dict[Value, Segment] = {}
        for segment in compilation.segments:
            self._place(segment)

    def _place(self, segment: Segment) -> None:
        block = segment.block
        waits = [value for value in segment.values if value in self.of_late or value in self.sums]
        if block.inner_looped and any(spec.splits for spec in (*block.values, *block.outputs)):
            if waits:
                made = self.of_late.get(waits[0])
                raise L2LError(
                    f"schedule='1f1b': segment '{segment.name}' reads '{waits[0]}', which "
                    + (f"segment '{made.name}' makes of all rows" if made is not None else "is a sum over all rows")
                    + f", before the last micro-batch is there: {REMEDY}"
                )
            self.turned.append(segment)
            for value, spec in zip(segment.outputs, block.outputs, strict=True):
                kind = self.sums if spec.partial is not None else self.once if spec.computed_once else self.parts
                kind.add(value)
        elif waits or any(value in self.parts for value in segment.values):
            self.late.append(segment)
            self.of_late |= dict.fromkeys(segment.outputs, segment)
        else:
            self.early.append(segment)


def refuse(compilation: Compilation, kinds: TurnKinds, borders: Borders, backwards: Collection[int]) -> None:
    """Raise `L2LError` for a step that cannot go by turns. `backwards` are the indices of segments that run backward."""
    _refuse_several_stages(compilation)
    if sum(compilation.gradient_mask) != 1:
        raise L2LError(f"schedule='1f1b' needs one loss that takes a gradient, and the model returns several: {REMEDY}")
    for given in compilation.captured.inputs:
        spec = compilation.captured.specs.get(given.node) if given.kind == "value" else None
        if spec is not None and spec.differentiable:
            raise L2LError(
                f"schedule='1f1b': input '{given.name}' takes a gradient, and a step by turns has those of parameters alone: detach it, "
                f"or {REMEDY}"
            )
    for value in compilation.outputs:
        if value is not None and has_rows(compilation, value) and borders.is_made_here(value):
            raise L2LError(f"schedule='1f1b' returns losses alone, and '{value}' has rows: add outputs='loss' to the options")
    for segment in compilation.segments:
        if segment.block.mutated:
            raise L2LError(f"schedule='1f1b': segment '{segment.name}' writes into an input or a buffer: {REMEDY}")
        if segment.block.summed_whole:
            raise L2LError(f"schedule='1f1b': segment '{segment.name}' sums gradients over all rows at once: {REMEDY}")
    _refuse_shared(kinds, backwards)


def _refuse_several_stages(compilation: Compilation) -> None:
    stages_of = compilation.stages.of_ranks if compilation.stages.ranks > 1 else {}
    for rank, stages in stages_of.items():
        if len(stages) > 1:
            _name_cause(compilation, rank, [[compilation.segments[index] for index in stage] for stage in stages])


def _name_cause(compilation: Compilation, rank: int, stages: Sequence[Sequence[Segment]]) -> None:
    """Raise `L2LError` for a rank with several stages. The cause is the batch of `pipeline`, a shared parameter, or the division."""
    owners = compilation.captured.owners
    assert owners is not None
    needs = "schedule='1f1b' needs one stage on each rank"
    read_in: dict[int, Segment] = {}
    for stage in stages:
        weights = {weight.owner: (weight, segment) for segment in stage for weight in segment.weights}
        if weights and owners.unread.issuperset(weights):
            raise L2LError(
                f"{needs}, and segment '{stage[0].name}' is apart on rank {rank}: the batch that l2l_compile.pipeline got did not read its "
                f"parameters. Pass a batch that all layers read, name the modules of each stage (stages=...), or {REMEDY}"
            )
        for owner, (weight, segment) in weights.items():
            if owner in read_in:
                raise L2LError(
                    f"{needs}, and segments '{read_in[owner].name}' and '{segment.name}' share '{weight.name}', so that both are on rank "
                    f"{rank}: untie them (in models of transformers, tie_word_embeddings=False), or {REMEDY}"
                )
        read_in |= {owner: segment for owner, (_, segment) in weights.items()}
    shown = " and ".join(f"'{stage[0].name}'" for stage in stages[:2])
    raise L2LError(
        f"{needs}, and rank {rank} has {len(stages)}, which begin with {shown}: give each rank one run of layers "
        f"(l2l_compile.pipeline(..., loops=1)) or neighbouring modules (stages=...), or {REMEDY}"
    )


def _refuse_shared(kinds: TurnKinds, backwards: Collection[int]) -> None:
    for segment in kinds.turned:
        for value, spec in zip(segment.outputs, segment.block.outputs, strict=True):
            if value in kinds.once and spec.differentiable and spec.batch is None and segment.index in backwards:
                raise L2LError(
                    f"schedule='1f1b': segment '{segment.name}' makes '{value}' for all micro-batches, and it takes a gradient: {REMEDY}"
                )
