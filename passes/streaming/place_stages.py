"""Decide which ranks of a pipeline run each segment. A rank's program is then a projection of the one program.

A segment runs on the rank that has its parameters. One without any goes with the last segment that it reads from. If it reads inputs
alone and has no gradient, as masks and rotary tables do, it runs on each rank that reads its results: that costs less than a message.

With one rank, every segment is here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from l2l_compile.errors import L2LError
from l2l_compile.ir.segments import Segment, Value
from l2l_compile.ir.stages import Borders, Stages
from l2l_compile.passes.compilation import Compilation, Fact


@dataclass(frozen=True)
class PlaceStages:
    """Provides `stages_placed`. Raises `L2LError` for a segment whose weights are on two ranks."""

    name: ClassVar[str] = "place_stages"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADIENTS})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.STAGES_PLACED})

    def apply(self, compilation: Compilation) -> None:
        owners = compilation.captured.owners
        if owners is None:
            compilation.stages = Stages.alone(compilation.segments)
            return
        compilation.stages = Stages(owners.rank, owners.ranks, _runs_on(compilation))
        _check(compilation)
        _project(compilation)
        _leave_out_outputs(compilation)


def _project(compilation: Compilation) -> None:
    """Leave to this rank what it keeps for backward, and gradients to losses: outputs with rows stay where they are made.

    Raises `L2LError` for a model that returns no loss.
    """
    stages, gradients = compilation.stages, compilation.gradients
    read_here = {value for segment in compilation.segments if stages.runs(segment) for value in segment.values}
    kept = tuple(value for value in gradients.kept if value in read_here)
    is_loss = [value is not None and not has_rows(compilation, value) for value in compilation.outputs]
    differentiable = tuple(d and loss for d, loss in zip(gradients.differentiable, is_loss, strict=True))
    if any(gradients.differentiable) and not any(differentiable):
        raise L2LError(
            "the model returns no loss: in a pipeline the loss is computed by the model, since one rank alone has its outputs. Give the "
            "model its labels, or compile a module that calls the model and returns the loss"
        )
    compilation.gradients = replace(gradients, kept=kept, differentiable=differentiable)
    compilation.gradient_mask = tuple(m and loss for m, loss in zip(compilation.gradient_mask, is_loss, strict=True))


def _leave_out_outputs(compilation: Compilation) -> None:
    """Outputs with rows that another rank makes are on meta here."""
    borders, captured = borders_of(compilation), compilation.captured
    for position, value in enumerate(compilation.outputs):
        if value is not None and not borders.is_made_here(value) and has_rows(compilation, value):
            captured.dropped[position] = captured.specs[value.node]


def borders_of(compilation: Compilation) -> Borders:
    """The values that cross from rank to rank."""
    written = {value.node: value for segment in compilation.segments for value in segment.outputs if value.version}
    owners, inputs = compilation.captured.owners, {i.node: i for i in compilation.captured.inputs}
    shared = [v for node, v in written.items() if node in inputs and (owners is None or owners.of_input(inputs[node]) is None)]
    losses = [value for value in compilation.outputs if value is not None and not has_rows(compilation, value)]
    return Borders(compilation.stages, compilation.segments, [*losses, *shared])


def has_rows(compilation: Compilation, value: Value) -> bool:
    """Whether a value has rows of the batch."""
    spec = compilation.captured.specs[value.node]
    return spec.batch is not None or spec.mixed


def _runs_on(compilation: Compilation) -> tuple[tuple[int, ...], ...]:
    found: dict[int, tuple[int, ...]] = {}
    copied: list[Segment] = []
    made: dict[Value, int | None] = {}  # the index of its segment; None where each reader makes it
    for segment in compilation.segments:
        rank = _owner(compilation, segment)
        before = [index for value in segment.values if (index := made.get(value)) is not None]
        if rank is None and before:
            (rank,) = found[max(before)]
        if rank is None and not _may_be_copied(segment):
            rank = 0
        if rank is None:
            copied.append(segment)
        else:
            found[segment.index] = (rank,)
        made |= dict.fromkeys(segment.outputs, segment.index if rank is not None else None)
    for segment in reversed(copied):
        found[segment.index] = _readers(compilation, segment, found)
    return tuple(found[segment.index] for segment in compilation.segments)


def _owner(compilation: Compilation, segment: Segment) -> int | None:
    """The rank that has the weights of a segment; None for a segment without any."""
    owners = compilation.captured.owners
    assert owners is not None
    ranks = {rank: weight for weight in segment.weights if (rank := owners.of_input(weight)) is not None}
    if len(ranks) > 1:
        (first, a), (second, b), *_ = sorted(ranks.items())
        raise L2LError(
            f"segment '{segment.name}' reads '{a.name}' of rank {first} and '{b.name}' of rank {second}: a segment runs on one rank. Give "
            "both modules to one stage (l2l_compile.pipeline(..., stages=...)), or pass a batch like those of training to pipeline"
        )
    return next(iter(ranks), None)


def _may_be_copied(segment: Segment) -> bool:
    """Whether each rank that reads the results of a segment may make them itself."""
    specs = [*segment.block.operands, *segment.block.outputs]
    return not segment.block.mutated and not any(spec.differentiable for spec in specs)


def _readers(compilation: Compilation, segment: Segment, found: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """The ranks that read what a segment makes. What nobody reads is made by the first rank, a loss by all."""
    owners = compilation.captured.owners
    assert owners is not None
    ranks = {
        rank
        for reader in compilation.segments[segment.index + 1 :]
        if reader.index in found and not set(reader.values).isdisjoint(segment.outputs)
        for rank in found[reader.index]
    }
    if any(value in compilation.outputs and not has_rows(compilation, value) for value in segment.outputs):
        ranks.update(range(owners.ranks))
    return tuple(sorted(ranks)) or (0,)


def _check(compilation: Compilation) -> None:
    """Raise `L2LError` for what has no place in a pipeline: a batch of all ranks, and inputs that take gradients."""
    if compilation.options.batch_scope == "global":
        raise L2LError(
            "batch_scope='global' is not supported in a pipeline: all stages have the same rows. With several pipelines, use 'per_rank', "
            "which takes the mean of their gradients"
        )
    specs = compilation.captured.specs
    for i in compilation.captured.inputs:
        if i.kind == "value" and i.node in specs and specs[i.node].differentiable:
            raise L2LError(
                f"input '{i.name}' takes a gradient, which the stages of a pipeline would make on different ranks: detach it, or make it "
                "a parameter of the model"
            )
    if compilation.carried:
        raise L2LError("the model writes into an input with a gradient, which a pipeline does not support: write into a copy")
