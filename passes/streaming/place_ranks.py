"""Write the collectives of a program whose parameters are sharded over ranks.

    %w = fetch_weights(segment)                    %w = fetch_weights(segment)                 this rank's shards
    ...                                      =>    %c = all_gather_weights(segment, %w)            the shards of all ranks
    forward(segment, %w, ...)                      ...
                                                   forward(segment, %c, ...)

    push_gradients(segment, %g)              =>    %r = reduce_scatter_gradients(segment, %g)          the mean over the ranks
                                                   push_gradients(segment, %r)                 this rank's shards of it

Under `batch_scope="global"`, the gradients of a segment that ran on all rows are the same on all ranks: `local_shard` replaces the
reduction.

A gather stands right after its fetch. It is therefore prefetched with the fetch, and comes before the reduction of the segment
that runs meanwhile. With one rank there are no collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from l2l_compile.errors import L2LError
from l2l_compile.ir import nodes
from l2l_compile.ir.segments import Segment
from l2l_compile.passes.compilation import Compilation, Fact


@dataclass(frozen=True)
class PlaceRanks:
    """Provides `ranks_placed`."""

    name: ClassVar[str] = "place_ranks"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.ROWS_PLACED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.RANKS_PLACED})

    def apply(self, compilation: Compilation) -> None:
        if compilation.captured.shards == 1:
            return
        for segment in compilation.segments:
            segment.sharded = any(w.shard_spec is not None for w in segment.weights)
        for graph in compilation.graphs:
            _gather(graph, compilation.segments)
            _reduce(graph, compilation.segments, compilation.is_global)


def _gather(graph: fx.Graph, segments: list[Segment]) -> None:
    for fetch in list(nodes.fetches(graph)):
        index = nodes.operands(fetch).segment
        if segments[index].sharded:
            with graph.inserting_after(fetch):
                gathered = graph.call_function(nodes.all_gather_weights, (index, fetch))
            gathered.meta["segment"] = index
            fetch.meta["bytes"] = _own_bytes(segments[index])
            for user in [user for user in fetch.users if user is not gathered]:
                user.replace_input_with(fetch, gathered)


def _reduce(graph: fx.Graph, segments: list[Segment], is_global: bool) -> None:
    for push in graph.find_nodes(op="call_function", target=nodes.push_gradients):
        index, gradients = nodes.operands(push)
        if segments[index].sharded:
            with graph.inserting_before(push):
                same = is_global and not segments[index].block.inner_looped
                function = nodes.local_shard if same else nodes.reduce_scatter_gradients
                reduced = graph.call_function(function, (index, gradients))
            reduced.meta["segment"] = index
            push.meta["bytes"] = _own_bytes(segments[index], trained=True)
            nodes.set_operands(push, gradients=reduced)


def _own_bytes(segment: Segment, trained: bool = False) -> int:
    """Bytes on the link of this rank's padded shards and of unsharded weights; `trained` leaves out frozen weights."""
    total = 0
    for weight, spec in zip(segment.weights, segment.block.weights, strict=True):
        if spec.differentiable or not trained:
            total += weight.shard_spec.entries * spec.dtype.itemsize if weight.shard_spec is not None else spec.bytes({})
    return total


def check_ranks(compilation: Compilation) -> None:
    """Raise `L2LError` for options that replicas, or layers of `parallelize_module`, do not support."""
    mesh = compilation.captured.mesh
    if mesh is not None and mesh.replicas > 1 and compilation.is_global:
        raise L2LError(
            f"batch_scope='global' is one batch of all ranks, and {mesh.text} has {mesh.replicas} replicas, whose gradients are averaged: "
            "use batch_scope='per_rank', or a mesh of one dimension"
        )
    _check_parallel_layers(compilation)


def _check_parallel_layers(compilation: Compilation) -> None:
    layer, options = compilation.captured.parallel_layer, compilation.options
    if not layer:
        return
    mesh = compilation.captured.mesh
    if options.optimizer is not None and (mesh is None or not mesh.sharded):
        raise L2LError(
            f"{layer}: the option 'optimizer' needs to know the ranks of a parallel layer. Call l2l_compile.shard with a mesh of two "
            "dimensions, of which that of the layer is the second (the first may have the size 1), or update the model without the option"
        )
    if options.batch_scope == "global":
        raise L2LError(f"{layer}: a model with parallel layers is sharded with batch_scope='per_rank' alone")
