"""The programs of ranks that divide a model, from a graph that was captured on one rank: no process group, and no other trace.

The result is what `shard` and `pipeline` lead to: captured inputs say how they are sharded and which rank has them, and the streaming
passes do the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from l2l_compile.errors import L2LError
from l2l_compile.ir.captured import Captured, Input, Mesh, Owners
from l2l_compile.ir.program import Program
from l2l_compile.ir.rank_layout import Layout
from l2l_compile.options import Options
from l2l_compile.passes.compilation import Compilation
from l2l_compile.passes.pipeline import STREAMING
from l2l_compile.ranks.shard_spec import ShardSpec


def programs_of_layout(compilation: Compilation, layout: Layout, rank_of: Mapping[str, int], options: Options) -> list[Program]:
    """The program of each rank of a pipeline; of one rank, without a pipeline. The programs of a stage's shards are alike.

    `rank_of` has the rank of each parameter, by name, for a layout with a pipeline. The programs are not verified. Raises `L2LError`
    as `shard` and `pipeline` do.
    """
    return [_program(_placed(compilation, layout, rank_of, rank, options)) for rank in range(layout.depth)]


def _program(compilation: Compilation) -> Program:
    for step in (*STREAMING, *compilation.options.passes):
        step.apply(compilation)
    return compilation.program()


def _placed(compilation: Compilation, layout: Layout, rank_of: Mapping[str, int], rank: int, options: Options) -> Compilation:
    """A copy of a compilation, as a rank of this layout has it before the streaming passes."""
    captured = compilation.captured
    if layout.shards > 1:
        _check_slices(captured)
    sharded = {
        i: replace(i, shard_spec=_shard_spec(captured, i, layout.shards)) for i in captured.inputs if i.kind == "parameter"
    }
    inputs = tuple(sharded.get(i, i) for i in captured.inputs) if layout.batches > 1 else captured.inputs
    mesh = Mesh(layout.shards, layout.replicas, text=str(layout)) if layout.batches > 1 else None
    placed = replace(
        captured, inputs=inputs, mesh=mesh, owners=_owners(captured, layout, rank_of, rank), dropped=dict(captured.dropped)
    )
    now = dict(zip(captured.inputs, inputs, strict=True))
    segments = [replace(s, weights=tuple(now.get(w, w) for w in s.weights)) for s in compilation.segments]
    return replace(compilation, captured=placed, segments=segments, options=options, backward=None, step=None)


def _check_slices(captured: Captured) -> None:
    """Raise `L2LError` for slices of parameters that are weights: with shards, a slice of a parameter is no slice of a shard."""
    for derived in captured.derived:
        raise L2LError(f"'{derived.name}' is a part of a parameter: a plan knows no shards of parameters that are read in parts")


def _shard_spec(captured: Captured, i: Input, ranks: int) -> ShardSpec:
    shape = captured.specs[i.node].sizes(captured.hints)
    return ShardSpec(tuple(shape), ranks, replicated=not shape)


def _owners(captured: Captured, layout: Layout, rank_of: Mapping[str, int], rank: int) -> Owners | None:
    """Who has each parameter; a buffer goes with the parameters of its module if these are on one rank."""
    if layout.depth == 1:
        return None
    of_module: dict[str, set[int]] = {}
    for name, owner in rank_of.items():
        of_module.setdefault(name.rpartition(".")[0], set()).add(owner)
    found: dict[int, int] = {}
    for i in captured.inputs:
        owners = of_module.get(i.name.rpartition(".")[0], set())
        if i.kind == "parameter" and i.name in rank_of:
            found[i.index] = rank_of[i.name]
        elif i.kind in ("buffer", "state") and len(owners) == 1:
            found[i.index] = next(iter(owners))
    return Owners(rank, layout.depth, found)
