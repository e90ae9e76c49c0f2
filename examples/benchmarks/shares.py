"""The bytes that each of N ranks holds and moves, computed from the program of an unsharded model, which may be on meta."""

from __future__ import annotations

import math
from dataclasses import dataclass

from l2l_compile import Program
from l2l_compile.ir import nodes
from l2l_compile.ir.segments import Segment
from l2l_compile.ranks.shard_spec import ShardSpec

STATE = 3  # fp32 numbers for each entry of a trained parameter: the gradient, and the two moments of AdamW


@dataclass(frozen=True)
class Share:
    """Bytes of one rank.

    host     its shards of parameters, gradients and AdamW's state
    slabs    device memory of all slabs, `prefetch` + 1 of the largest segment
    link     bytes that a step fetches and pushes
    between  bytes of weights that a step receives from other ranks, and of gradients that it reduces with them
    """

    host: int
    slabs: int
    link: int
    between: int


def share_of(program: Program, ranks: int, prefetch: int = 1) -> Share:
    """The share of rank 0, the largest, of a step in fp32 with AdamW."""
    held, link, between = {}, 0, 0
    for segment in program.segments:
        for weight, spec, size, trained in _weights(segment, ranks):
            own = math.prod(spec.shape_of(0)) if weight.kind == "parameter" else math.prod(spec.shape)
            held[weight.index] = own * (size + 4 * STATE * trained)
    for graph in program.graphs.values():
        for node in graph.nodes:
            if nodes.fetches_weights(node) or node.target is nodes.push_gradients:
                fetches = nodes.fetches_weights(node)
                for _, spec, size, trained in _weights(program.segments[nodes.operands(node).segment], ranks):
                    if fetches or trained:
                        link += spec.entries * size
                        whole = math.prod(spec.padded if fetches else spec.shape) * size
                        between += 0 if ranks == 1 or spec.replicated and fetches else whole - whole // ranks * fetches
    whole = (sum(math.prod(p.padded) * size for _, p, size, _ in _weights(s, ranks)) for s in program.segments)
    return Share(sum(held.values()), (prefetch + 1) * max(whole), link, between)


def _weights(segment: Segment, ranks: int):
    """Each weight of a segment, how it is sharded, the bytes of an entry, and whether it is trained."""
    for weight, spec in zip(segment.weights, segment.block.weights, strict=True):
        shape = spec.sizes({})
        sharded = weight.kind == "parameter" and len(shape) > 0
        yield weight, ShardSpec(shape, ranks, replicated=not sharded), spec.dtype.itemsize, spec.differentiable
