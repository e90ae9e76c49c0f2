"""Nodes in which all ranks take part, and those that make this rank's part of a value: weights, gradients, rows of the batch.

Handlers as in `executor.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.ir.segments import Segment
from l2l_compile.lanes import Lane
from l2l_compile.ranks.shard_spec import ShardSpec
from l2l_compile.runtime.executor import Executor, handles
from l2l_compile.runtime.runtime_value import RuntimeValue, bytes_of
from l2l_compile.runtime.segment_run import for_the_link, norms
from l2l_compile.runtime.slab import slots


@handles(nodes.all_gather_weights)
def _all_gather_weights(run: Executor, node: fx.Node, segment: int, slab: RuntimeValue) -> RuntimeValue:
    gathered, ranks = run.segments[segment], run.step.ranks
    result = RuntimeValue()
    result.slab, result.place = slab.slab, slab.place

    def work() -> None:
        weights = list(zip(slab.tensors, slots(gathered, run.step.rows.bindings), strict=True))
        ranks.gather([weight for weight, slot in weights if slot.is_gathered])
        run.step.stats.gathered_bytes += sum(
            slot.bytes - slot.bytes // ranks.shard_mesh_size for _, slot in weights if slot.is_gathered
        )
        result.tensors = [weight if slot.shard_spec is None else _unpadded(weight, slot.shard_spec) for weight, slot in weights]

    run.submit(Lane.COMM, (slab,), (result,), work)
    return result


def _unpadded(weight: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    return weight if spec.replicated else weight[: spec.shape[0]]


@handles(nodes.reduce_scatter_gradients)
def _reduce_scatter_gradients(run: Executor, node: fx.Node, segment: int, gradients: RuntimeValue) -> RuntimeValue:
    reduced, ranks = run.segments[segment], run.step.ranks
    result = RuntimeValue(absent=gradients.absent)
    if result.absent:
        return result

    def work() -> None:
        is_mean = not run.step.rows.is_global
        shards = ranks.reduce_scatter(gradients.tensors, [weight.shard_spec for weight in reduced.weights], is_mean)
        run.step.stats.reduced_bytes += sum(bytes_of([g]) for g in gradients.tensors if g is not None)
        _fill_shards(run, reduced, result, shards)

    run.submit_behind_releases(Lane.COMM, (gradients,), (result,), work)
    return result


@handles(nodes.local_shard)
def _local_shard(run: Executor, node: fx.Node, segment: int, gradients: RuntimeValue) -> RuntimeValue:
    taken, ranks = run.segments[segment], run.step.ranks
    result = RuntimeValue(absent=gradients.absent)
    if result.absent:
        return result

    def work() -> None:
        shards = ranks.local_shard(gradients.tensors, [weight.shard_spec for weight in taken.weights])
        _fill_shards(run, taken, result, shards)

    run.submit(Lane.COMPUTE, (gradients,), (result,), work)
    return result


def _fill_shards(run: Executor, segment: Segment, result: RuntimeValue, shards: Sequence[torch.Tensor | None]) -> None:
    """Fill `result` with this rank's shards of a segment's gradients, in the dtypes that cross the link."""
    weights = zip(segment.block.weights, shards, strict=True)
    result.tensors = [for_the_link(run.step, spec, shard) for spec, shard in weights]
    if run.step.host.wants_norms and run.device.takes_norms:
        result.tensors.append(norms(result.tensors))
    run.device.hold([shard for shard in result.tensors if shard is not None])


def _exchanged(run: Executor, x: RuntimeValue, change: Callable[[torch.Tensor], torch.Tensor]) -> RuntimeValue:
    """A whole value that a collective makes from another one."""
    if x.absent:
        return RuntimeValue(absent=True)
    result = RuntimeValue()

    def work() -> None:
        result.tensors = [change(x.tensors[0])]
        run.device.hold(result.tensors)

    run.submit_behind_releases(Lane.COMM, (x,), (result,), work)
    return result


@handles(nodes.all_gather_rows)
def _all_gather_rows(run: Executor, node: fx.Node, x: RuntimeValue) -> RuntimeValue:
    dim, rows = run.step.rows.in_value(node.meta["spec"])
    return _exchanged(run, x, lambda own: run.step.ranks.all_gather_rows(own, dim, rows))


@handles(nodes.local_rows)
def _local_rows(run: Executor, node: fx.Node, x: RuntimeValue) -> RuntimeValue:
    dim, rows = run.step.rows.in_value(node.meta["spec"])
    rank = run.step.ranks.shard_mesh_rank
    start, count = sum(rows[:rank]), rows[rank]
    return run.change_layout(x, lambda whole: [whole[0].narrow(dim, start, count).clone(memory_format=torch.contiguous_format)])


@handles(nodes.all_reduce)
def _all_reduce(run: Executor, node: fx.Node, x: RuntimeValue) -> RuntimeValue:
    return _exchanged(run, x, run.step.ranks.sum)


@handles(nodes.mask_to_first_rank)
def _mask_to_first_rank(run: Executor, node: fx.Node, x: RuntimeValue) -> RuntimeValue:
    is_first = run.step.ranks.shard_mesh_rank == 0
    return run.change_layout(x, lambda same: [same[0].clone() if is_first else torch.zeros_like(same[0])])
