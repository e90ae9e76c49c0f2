"""Values that cross the link micro-batch by micro-batch, while the inner loop of their segment runs.

These are outputs of the model that go to the user, and the gradients of such outputs. They are never whole on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from l2l_compile.devices.device import Device
from l2l_compile.ir.values import TensorSpec
from l2l_compile.lanes import Lane
from l2l_compile.runtime.runtime_value import RuntimeValue, bytes_of
from l2l_compile.runtime.step import Step

Work = Callable[[], None]
Submit = Callable[[str, Sequence[RuntimeValue], Sequence[RuntimeValue], Callable[[], Any]], None]


class OutputStream:
    """Outputs that go to the host micro-batch by micro-batch: each is freed on the device while the next one is computed."""

    def __init__(self, device: Device, step: Step, submit: Submit, outputs: Sequence[RuntimeValue]):
        self.device, self.step, self.submit, self.outputs = device, step, submit, outputs
        self._on_device: list[RuntimeValue] = []  # by micro-batch: stands for its outputs on the device

    def run(self, inner_loop: Sequence[Work], reads: Sequence[RuntimeValue], results: Sequence[RuntimeValue]) -> None:
        copied, whole = None, [result for result in results if result not in self.outputs]
        for micro_batch, work in enumerate(inner_loop):
            self.submit(Lane.COMPUTE, reads, [*whole, self._value_of(micro_batch)], work)
            if micro_batch:
                self._free(micro_batch - 1, copied)
            copied = self._send(micro_batch)
        self._free(len(inner_loop) - 1, copied)
        for output in self.outputs:
            output.lane, output.event = Lane.D2H, copied

    def _value_of(self, micro_batch: int) -> RuntimeValue:
        while len(self._on_device) <= micro_batch:
            self._on_device.append(RuntimeValue())
        return self._on_device[micro_batch]

    def _send(self, micro_batch: int) -> Any:
        """Copy the outputs of a micro-batch to the host as soon as they are made. Returns the event of the copy."""
        d2h, made = self.device.lanes[Lane.D2H], self.device.lanes[Lane.COMPUTE].record()
        if made is not None:
            d2h.wait(made)

        def work() -> None:
            on_device = self._on_device[micro_batch]
            self.device.accesses.read(on_device.place)
            on_device.tensors = [output.tensors[micro_batch] for output in self.outputs]
            for output, tensor in zip(self.outputs, on_device.tensors, strict=True):
                self.device.accesses.write(output.place)
                output.tensors[micro_batch] = on_host = self.device.download(tensor)
                self.step.stats.offloaded_bytes += bytes_of([on_host])

        d2h.run(work)
        return d2h.record()

    def _free(self, micro_batch: int, copied: Any) -> None:
        compute = self.device.lanes[Lane.COMPUTE]
        if copied is not None:
            compute.wait(copied)

        def work() -> None:
            self.device.accesses.write(self._on_device[micro_batch].place)
            self.device.free(self._on_device[micro_batch].tensors)
            self._on_device[micro_batch].tensors = None

        compute.run(work)


@dataclass(frozen=True, eq=False)
class StreamedGradient:
    """A gradient that is whole on the host, and the value that it fills on the device, micro-batch by micro-batch."""

    source: RuntimeValue
    arriving: RuntimeValue
    spec: TensorSpec


class GradientStream:
    """Gradients that come to the device micro-batch by micro-batch: the next gradient arrives while one is used."""

    def __init__(self, device: Device, step: Step, submit: Submit, gradients: Sequence[StreamedGradient]):
        self.device, self.step, self.submit, self.gradients = device, step, submit, gradients
        self._on_device: list[RuntimeValue] = []  # by micro-batch: stands for its gradients on the device

    def run(self, inner_loop: Sequence[Work], reads: Sequence[RuntimeValue], results: Sequence[RuntimeValue]) -> None:
        compute, events = self.device.lanes[Lane.COMPUTE], [self._bring(0)]
        for micro_batch, work in enumerate(inner_loop):
            if micro_batch + 1 < len(inner_loop):  # two are on the device at once
                events.append(self._bring(micro_batch + 1))
            needed = 2 if self.step.engine.check and micro_batch == 0 else 1
            for event in events[micro_batch : micro_batch + needed]:
                if event is not None:
                    compute.wait(event)
            self.submit(Lane.COMPUTE, [*reads, *self._on_device[micro_batch : micro_batch + needed]], results, work)
            compute.run(functools.partial(self._free, micro_batch))

    def _bring(self, micro_batch: int) -> Any:
        """Copy the gradients of a micro-batch to the device. Returns the event after which they are there."""
        h2d, value = self.device.lanes[Lane.H2D], RuntimeValue()
        self._on_device.append(value)

        def work() -> None:
            self.device.accesses.write(value.place)
            for gradient in self.gradients:
                arriving = gradient.arriving
                arriving.tensors = arriving.tensors or []
                self.device.accesses.read(gradient.source.place)
                rows = self.step.rows.slice(gradient.source.tensors[0], gradient.spec, micro_batch)
                arriving.tensors.append(self.device.upload(rows))
                self.device.hold(arriving.tensors[micro_batch:])
                self.step.stats.restored_bytes += bytes_of(arriving.tensors[micro_batch:])

        h2d.run(work)
        return h2d.record()

    def _free(self, micro_batch: int) -> None:
        self.device.accesses.write(self._on_device[micro_batch].place)
        for gradient in self.gradients:
            self.device.free([gradient.arriving.tensors[micro_batch]])
            gradient.arriving.tensors[micro_batch] = None
