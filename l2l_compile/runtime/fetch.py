"""Copies the weights of a segment into a slab: the weights that the node after it reads, or this rank's shards of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from l2l_compile.devices.device import Device, HostCopy, HostWeights
from l2l_compile.ir import nodes
from l2l_compile.ir.segments import Segment
from l2l_compile.memory.layout import joined
from l2l_compile.runtime.runtime_value import bytes_of
from l2l_compile.runtime.segment_run import requests
from l2l_compile.runtime.slab import slots
from l2l_compile.runtime.step import Step

LARGE = 1 << 20  # bytes; to copy fewer over a link takes hardly longer than to start another copy


def unread(step: Step, node: fx.Node, segments: Sequence[Segment]) -> frozenset[int]:
    """Positions of the large weights of a fetch that none of its readers reads: backward reads no table of a lookup.

    Empty if the code of a reader is not known yet, as in a first step. Also empty if ranks must agree on the fetch, or if other
    code reads the weights as well (sums over the whole batch, the option `check`).
    """
    segment = segments[nodes.operands(node).segment]
    if segment.parameter_bytes < LARGE or segment.sharded or segment.block.summed_whole or step.engine.check is not None:
        return frozenset()
    found = frozenset(i for i, weight in enumerate(segment.block.weights) if weight.bytes(step.rows.bindings) >= LARGE)
    for reader in filter(nodes.runs_segment, node.users):
        for request in requests(step, reader, segments):
            code = step.engine.lowering.known(request)
            if code is None or not (found := found & code.unread(len(segment.weights))):
                return frozenset()
    return found


def load(
    step: Step, device: Device, segment: Segment, slab: torch.Tensor, weights: Sequence[torch.Tensor], unread: frozenset[int]
) -> list[torch.Tensor]:
    """Fetch a segment's weights, except the entries of the weights in `unread` (h2d lane)."""
    if segment.sharded:
        return _load_shards(step, device, segment, slab, *step.engine.server.load(step, segment, weights))
    on_wire = step.engine.server.on_wire(step, segment)

    def send(wire: HostWeights, start: int, end: int) -> None:
        for first, last in joined([span for i, span in zip(on_wire, wire.spans, strict=True) if i not in unread]):
            if first < end and start < last:
                device.send(slab, wire, max(first, start), min(last, end))

    wire, loose = step.engine.server.load(step, segment, weights, send)
    read = (weight for place, weight in zip(_others(on_wire, weights), loose, strict=True) if place not in unread)
    step.stats.disk_fetched_bytes += sum(map(device.stored_bytes, read))
    order = [*on_wire, *_others(on_wire, weights)]  # a slab begins with the wire
    loaded = device.load_weights(slab, wire, loose, frozenset(place for place, i in enumerate(order) if i in unread))
    by_position = dict(zip(order, loaded, strict=True))
    step.stats.fetched_bytes += bytes_of([tensor for i, tensor in by_position.items() if i not in unread])
    return [by_position[i] for i in range(len(order))]


def _others(on_wire: Sequence[int], weights: Sequence[torch.Tensor]) -> list[int]:
    """Positions of the weights that are not on the wire."""
    return [i for i in range(len(weights)) if i not in on_wire]


def _load_shards(
    step: Step, device: Device, segment: Segment, slab: torch.Tensor, wire: HostWeights | None, loose: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Fetch this rank's shards of a segment's weights. Returns the whole weights, with padding, as they will be gathered."""
    from_wire, others = iter(wire.views if wire is not None else ()), iter(loose)
    positions = set(step.engine.server.on_wire(step, segment))
    on_wire = [i in positions for i in range(len(segment.weights))]
    sources = [next(from_wire if is_on_wire else others) for is_on_wire in on_wire]
    places = slots(segment, step.rows.bindings)
    shards = [
        HostCopy(source.detach(), slot.own(step.ranks.shard_mesh_rank), pinned=is_on_wire and wire is not None and wire.pinned)
        for source, slot, is_on_wire in zip(sources, places, on_wire, strict=True)
    ]
    last = places[-1]
    memory = device.load_copies(slab, shards, last.start + last.bytes)
    step.stats.fetched_bytes += bytes_of(sources)
    return [slot.padded(memory) for slot in places]
