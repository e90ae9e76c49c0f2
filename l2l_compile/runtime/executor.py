"""Run a program graph on a device: one interpreter over the nodes of the vocabulary.

Each node is given to its lane. A value lives in a `RuntimeValue`, which the lane fills; a lane that reads a box filled by
another lane waits for that box's event, and memory is freed on the compute lane after every lane that read it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..devices.device import Device
from ..ir import nodes
from ..ir.program import Segment
from ..ir.values import TensorSpec
from .segment_run import run_backward, run_forward
from .step import RuntimeValue, Step, bytes_of, copies


class Executor:
    """Runs the nodes of one graph for one step. `inputs` fill the placeholders, in order; see `run`."""

    def __init__(self, device: Device, step: Step, segments: Sequence[Segment], slabs: int):
        self.device, self.step, self.segments = device, step, segments
        self.slab_free: list[Any] = [None] * slabs
        self.next_slab = 0

    def run(self, graph: fx.Graph, inputs: Sequence[RuntimeValue]) -> Any:
        """Give every node to its lane; the boxes of the graph's output, in its structure. Does not wait for lanes."""
        env: dict[fx.Node, RuntimeValue] = {}
        arrived = iter(inputs)
        for node in graph.nodes:
            if node.op == "call_function":
                self.device.begins(node)
                env[node] = _HANDLERS[node.target](self, node, env)
            elif node.op == "placeholder":
                env[node] = next(arrived)
            else:
                return fx.node.map_arg(node.args[0], lambda n: env[n])
        raise AssertionError("a program graph ends with its output")

    def submit(self, lane: str, reads: Sequence[RuntimeValue], fills: Sequence[RuntimeValue], work) -> None:
        """Queue work on a lane after the events of what it reads; it fills boxes."""
        queue = self.device.lanes[lane]
        for box in reads:
            if box.lane != lane and box.event is not None:
                queue.wait(box.event)
        queue.run(work)
        event = queue.record()
        for box in reads:
            if event is not None:
                box.readers[lane] = event
        for box in fills:
            box.lane, box.event = lane, event

    def _fetch_weights(self, node: fx.Node, env: dict) -> RuntimeValue:
        segment, slab = self.segments[node.args[0]], self.next_slab
        self.next_slab = (slab + 1) % len(self.slab_free)
        box = RuntimeValue()
        box.slab = slab
        weights = [self.step.arguments[w.index] if w.index >= 0 else self.step.constants[w.name] for w in segment.weights]
        if self.slab_free[slab] is not None:
            self.device.lanes["h2d"].wait(self.slab_free[slab])

        def work() -> None:
            wire, loose = self.step.server.load(self.step, segment, weights)
            loaded = self.device.load_weights(slab, wire, loose)
            self.step.stats.fetched_bytes += bytes_of(loaded)
            sent, others = iter(loaded[: len(loaded) - len(loose)]), iter(loaded[len(loaded) - len(loose) :])
            on_wire = [wire is not None and w.kind == "parameter" for w in segment.weights]
            box.tensors = [next(sent if is_sent else others) for is_sent in on_wire]
            self.device.hold(box.tensors)

        self.submit("h2d", (), (box,), work)
        return box

    def _restore(self, node: fx.Node, env: dict) -> RuntimeValue:
        source, box = env[node.args[0]], RuntimeValue()
        if source.absent:
            return RuntimeValue(absent=True)

        def work() -> None:
            box.tensors, copied = copies(source.tensors, self.device.upload)
            self.device.hold(box.tensors)
            self.step.stats.restored_bytes += copied

        self.submit("h2d", (source,), (box,), work)
        return box

    def _offload(self, node: fx.Node, env: dict) -> RuntimeValue:
        source, box = env[node.args[0]], RuntimeValue()
        if source.absent:
            return RuntimeValue(absent=True)

        def work() -> None:
            box.tensors, copied = copies(source.tensors, self.device.download)
            self.step.stats.offloaded_bytes += copied

        self.submit("d2h", (source,), (box,), work)
        return box

    def _stash(self, node: fx.Node, env: dict) -> RuntimeValue:
        return env[node.args[0]]

    def _split(self, node: fx.Node, env: dict) -> RuntimeValue:
        return self._reform(node, env, lambda tensors: self.step.split(tensors[0], node.meta["spec"]))

    def _merge(self, node: fx.Node, env: dict) -> RuntimeValue:
        spec = node.meta["spec"]
        if spec.batch is None:
            return self._reform(
                node, env, lambda parts: [sum(p * self.step.partial_weight(i, spec.partial) for i, p in enumerate(parts))]
            )
        return self._reform(node, env, lambda parts: [torch.cat(parts, spec.batch.dim) if len(parts) > 1 else parts[0]])

    def _reform(self, node: fx.Node, env: dict, change) -> RuntimeValue:
        source, box = env[node.args[0]], RuntimeValue()
        if source.absent:
            return RuntimeValue(absent=True)

        def work() -> None:
            box.tensors = change(source.tensors)
            self.device.hold(box.tensors)

        self.submit("compute", (source,), (box,), work)
        return box

    def _forward(self, node: fx.Node, env: dict) -> RuntimeValue:
        segment = self.segments[node.args[0]]
        weights = env[node.args[1]] if node.args[1] is not None else RuntimeValue([])
        operands = [env[n] for n in node.args[2]]
        box = RuntimeValue()
        box.results = [RuntimeValue() for _ in segment.block.outputs]
        micro_batches = run_forward(self.step, self.device, segment, weights, operands, box.results)
        sent = [box.results[i] for i in node.args[3]] if len(node.args) > 3 else []
        if not sent:
            self.submit("compute", (weights, *operands), box.results, lambda: [work() for work in micro_batches])
            return box
        copied = None
        for micro_batch, work in enumerate(micro_batches):
            self.submit("compute", (weights, *operands), box.results, work)
            if micro_batch:
                self._free_sent(sent, micro_batch - 1, copied)
            copied = self._send(sent, micro_batch)
        self._free_sent(sent, len(micro_batches) - 1, copied)
        for result in sent:
            result.lane, result.event = "d2h", copied
        return box

    def _send(self, sent: Sequence[RuntimeValue], micro_batch: int) -> Any:
        """Copy what a micro-batch has just made to the host; the event after which it is there."""
        d2h, made = self.device.lanes["d2h"], self.device.lanes["compute"].record()
        if made is not None:
            d2h.wait(made)

        def work() -> None:
            for result in sent:
                on_host = self.device.download(result.tensors[micro_batch])
                self.step.stats.offloaded_bytes += bytes_of([on_host])
                result.tensors[micro_batch] = (result.tensors[micro_batch], on_host)

        d2h.run(work)
        return d2h.record()

    def _free_sent(self, sent: Sequence[RuntimeValue], micro_batch: int, copied: Any) -> None:
        compute = self.device.lanes["compute"]
        if copied is not None:
            compute.wait(copied)

        def work() -> None:
            for result in sent:
                on_device, result.tensors[micro_batch] = result.tensors[micro_batch]
                self.device.free([on_device])

        compute.run(work)

    def _backward(self, node: fx.Node, env: dict) -> RuntimeValue:
        segment = self.segments[node.args[0]]
        weights = env[node.args[1]] if node.args[1] is not None else RuntimeValue([])
        operands = [env[n] for n in node.args[2]]
        brought = {i: env[node.args[3][i]] for i in (node.args[4] if len(node.args) > 4 else ())}
        gradients = [RuntimeValue(absent=n is None) if n is None or i in brought else env[n] for i, n in enumerate(node.args[3])]
        box = RuntimeValue()
        box.results = [RuntimeValue(absent=True) for _ in range(len(segment.values) + 1)]
        if all(g.absent for g in gradients):
            return box
        micro_batches = run_backward(self.step, self.device, segment, weights, operands, gradients, box.results)
        if not brought:
            self.submit("compute", (weights, *operands, *gradients), box.results, lambda: [work() for work in micro_batches])
            return box
        arriving = [(source, gradients[i], segment.block.outputs[i]) for i, source in brought.items()]
        compute, events = self.device.lanes["compute"], [self._bring(arriving, 0)]
        for micro_batch, work in enumerate(micro_batches):
            if micro_batch + 1 < len(micro_batches):  # it arrives while this one is computed; two are on the device at once
                events.append(self._bring(arriving, micro_batch + 1))
            needed = 2 if self.step.check and micro_batch == 0 else 1
            for event in events[micro_batch : micro_batch + needed]:
                if event is not None:
                    compute.wait(event)
            self.submit("compute", (weights, *operands, *gradients), box.results, work)
            compute.run(functools.partial(self._free_brought, arriving, micro_batch))
        return box

    def _bring(self, arriving: Sequence[tuple[RuntimeValue, RuntimeValue, TensorSpec]], micro_batch: int) -> Any:
        """Copy a micro-batch of whole values of the host to the device; the event after which it is there."""
        h2d = self.device.lanes["h2d"]

        def work() -> None:
            for source, box, spec in arriving:
                box.tensors = box.tensors or []
                box.tensors.append(self.device.upload(self.step.part(source.tensors[0], spec, micro_batch)))
                self.device.hold(box.tensors[micro_batch:])
                self.step.stats.restored_bytes += bytes_of(box.tensors[micro_batch:])

        h2d.run(work)
        return h2d.record()

    def _free_brought(self, arriving: Sequence[tuple[RuntimeValue, RuntimeValue, TensorSpec]], micro_batch: int) -> None:
        for _, box, _ in arriving:
            self.device.free([box.tensors[micro_batch]])
            box.tensors[micro_batch] = None

    def _getitem(self, node: fx.Node, env: dict) -> RuntimeValue:
        return env[node.args[0]].results[node.args[1]]

    def _accumulate(self, node: fx.Node, env: dict) -> RuntimeValue:
        a, b, box = env[node.args[0]], env[node.args[1]], RuntimeValue()
        if a.absent and b.absent:
            return RuntimeValue(absent=True)
        both = [x for x in (a, b) if not x.absent]

        def work() -> None:
            box.tensors = (
                [torch.add(x, y) for x, y in zip(a.tensors, b.tensors, strict=True)] if len(both) == 2 else both[0].tensors
            )
            self.device.hold(box.tensors)

        self.submit("compute", both, (box,), work)
        return box

    def _push_gradients(self, node: fx.Node, env: dict) -> RuntimeValue:
        segment, bundle = self.segments[node.args[0]], env[node.args[1]]
        box = RuntimeValue(absent=bundle.absent)
        if box.absent:
            self.step.server.collect(self.step, segment, box)
            return box

        def work() -> None:
            box.tensors = [g if g is None else self.device.push(g) for g in bundle.tensors]
            self.step.stats.pushed_bytes += bytes_of([t for t in box.tensors if t is not None])

        self.submit("d2h", (bundle,), (box,), work)
        self.step.server.collect(self.step, segment, box)
        return box

    def _update(self, node: fx.Node, env: dict) -> RuntimeValue:
        self.step.server.update(self.step, self.segments[node.args[0]])
        return RuntimeValue(absent=True)

    def _write_back(self, node: fx.Node, env: dict) -> RuntimeValue:
        source = env[node.args[1]]

        def work() -> None:
            self.step.writes[node.args[0]] = self.device.download(source.tensors[0])

        self.submit("d2h", (source,), (), work)
        return RuntimeValue(absent=True)

    def _release(self, node: fx.Node, env: dict) -> RuntimeValue:
        box, compute = env[node.args[0]], self.device.lanes["compute"]
        if box.absent:
            return box
        if box.lane != "compute" and box.event is not None:
            compute.wait(box.event)
        for lane, event in box.readers.items():
            if lane != "compute":
                compute.wait(event)

        def work() -> None:
            self.device.free([t for t in box.tensors if t is not None])
            box.tensors = None

        compute.run(work)
        if box.slab is not None:
            self.slab_free[box.slab] = compute.record()
        return box


_HANDLERS = {
    nodes.fetch_weights: Executor._fetch_weights,
    nodes.restore: Executor._restore,
    nodes.offload: Executor._offload,
    nodes.stash: Executor._stash,
    nodes.split: Executor._split,
    nodes.merge: Executor._merge,
    nodes.forward: Executor._forward,
    nodes.backward: Executor._backward,
    operator.getitem: Executor._getitem,
    nodes.accumulate: Executor._accumulate,
    nodes.push_gradients: Executor._push_gradients,
    nodes.update: Executor._update,
    nodes.write_back: Executor._write_back,
    nodes.release: Executor._release,
}
