"""Nodes that copy weights to the device: into a slab, or into memory where they stay. Handlers as in `executor.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.ir.segments import Segment
from l2l_compile.lanes import Lane
from l2l_compile.runtime.executor import Executor, handles
from l2l_compile.runtime.fetch import load, unread
from l2l_compile.runtime.resident_weights import key_of
from l2l_compile.runtime.runtime_value import RuntimeValue, bytes_of
from l2l_compile.runtime.slab import slab_bytes
from l2l_compile.runtime.step import Step


@handles(nodes.fetch_weights)
def _fetch_weights(run: Executor, node: fx.Node, segment: int, after: RuntimeValue | None = None) -> RuntimeValue:
    fetched = run.segments[segment]
    weights = _weights_of(run.step, fetched)
    if (resident := _resident(run, fetched, weights)) is not None:
        return resident
    slab, kept = run.slabs.take(segment, may_stay=not fetched.sharded)  # ranks must gather the same weights
    result = RuntimeValue()
    result.slab, result.place = slab, run.slabs.places[slab]
    is_copied = kept is None and (run.step.to_train or not run.device.is_host)
    result.unfetched = unread(run.step, node, run.segments) if is_copied else frozenset()
    if run.slabs.free[slab] is not None:
        run.device.lanes[Lane.H2D].wait(run.slabs.free[slab])

    def work() -> None:
        if kept is not None:
            run.step.engine.server.load(run.step, fetched, weights)  # the server counts fetches
            result.tensors = kept.tensors
            return
        result.tensors = load(run.step, run.device, fetched, run.device.slabs[slab], weights, result.unfetched)
        run.device.hold(result.tensors)

    run.submit(Lane.H2D, (), (result,), work)
    return result


def _weights_of(step: Step, segment: Segment) -> list[torch.Tensor]:
    """The weights of a segment on the host."""
    return [step.arguments[w.index] if w.index >= 0 else step.constants[w.name] for w in segment.weights]


def _resident(run: Executor, segment: Segment, weights: Sequence[torch.Tensor]) -> RuntimeValue | None:
    """The weights of a segment that stay on the device from call to call; None if these do not."""
    step, device, resident = run.step, run.device, run.step.engine.resident
    if step.to_train or step.world is not None or not resident.is_used:
        return None
    step.engine.server.await_updates(step, segment)  # one that was put off would not show in the comparison yet
    key, size = key_of(segment, weights), 0
    found = resident.find(key, weights)
    if (entry := found) is None:
        size = slab_bytes([segment], step.rows.bindings)
        entry = resident.admit(key, size)
    if entry is None:
        return None
    result = RuntimeValue()
    result.resident = entry

    def work() -> None:
        if found is None:
            entry.fill(load(step, device, segment, device.set_apart(size), weights, frozenset()), weights)
            device.hold(entry.tensors)
        else:
            step.stats.resident_bytes += bytes_of(entry.tensors)
        result.tensors = entry.tensors

    run.submit(Lane.H2D, (), (result,), work)
    return result


@handles(nodes.fetch_resident)
def _fetch_resident(run: Executor, node: fx.Node, segment: int, after: RuntimeValue | None = None) -> RuntimeValue:
    fetched, result, step = run.segments[segment], RuntimeValue(), run.step
    weights, buffer = _weights_of(step, fetched), step.engine.set_apart.take(slab_bytes([fetched], step.rows.bindings))
    result.set_apart, result.place = buffer, buffer.place

    def work() -> None:
        result.tensors = load(step, run.device, fetched, buffer.memory(run.device), weights, frozenset())
        run.device.hold(result.tensors)

    run.submit(Lane.H2D, (), (result,), work)
    return result


@handles(nodes.keep_weights)
def _keep_weights(run: Executor, node: fx.Node, segment: int, weights: RuntimeValue) -> RuntimeValue:
    run.step.stats.resident_bytes += run.segments[segment].block.weight_bytes(run.step.rows.bindings)
    return weights
