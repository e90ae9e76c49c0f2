"""What crosses the link micro-batch by micro-batch, while the inner loop of its segment runs.

These are outputs of the model that go to the user, the gradients of such outputs, and what forward keeps on the host of the inside of
its segments (`activation_copies.py`). They are never whole on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from l2l_compile.devices.device import Device
from l2l_compile.ir.values import TensorSpec
from l2l_compile.lanes import Lane
from l2l_compile.runtime.runtime_value import RuntimeValue, bytes_of
from l2l_compile.runtime.step import Step

Work = Callable[[], None]
Submit = Callable[[str, Sequence[RuntimeValue], Sequence[RuntimeValue], Callable[[], Any]], None]


class MicroBatchCopies(Protocol):
    """Copies beside the micro-batches of a segment. Called by the caller, in turn with the work that it gives to the compute lane."""

    def before(self, micro_batch: int) -> tuple[Sequence[RuntimeValue], Sequence[RuntimeValue]]:
        """The micro-batch is computed next. Returns what it reads and what it fills of this stream."""

    def after(self, micro_batch: int) -> None:
        """The work of the micro-batch was given to the compute lane."""

    def end(self) -> None:
        """That of all micro-batches was."""


def run_with(
    streams: Sequence[MicroBatchCopies],
    submit: Submit,
    inner_loop: Sequence[Work],
    reads: Sequence[RuntimeValue],
    fills: Sequence[RuntimeValue],
) -> None:
    """Give the work of each micro-batch to the compute lane, with the copies of the streams between them."""
    for micro_batch, work in enumerate(inner_loop):
        read, filled = list(reads), list(fills)
        for stream in streams:
            of_stream = stream.before(micro_batch)
            read += of_stream[0]
            filled += of_stream[1]
        submit(Lane.COMPUTE, read, filled, work)
        for stream in streams:
            stream.after(micro_batch)
    for stream in streams:
        stream.end()


def free_behind(device: Device, copied: Any, value: RuntimeValue) -> None:
    """Free a value of the device behind the event of its copy (compute lane)."""
    compute = device.lanes[Lane.COMPUTE]
    if copied is not None:
        compute.wait(copied)

    def work() -> None:
        device.accesses.write(value.place)
        device.free(value.tensors)
        value.tensors = None

    compute.run(work)


class OutputStream:
    """Outputs that go to the host micro-batch by micro-batch: each is freed on the device while the next one is computed."""

    def __init__(self, device: Device, step: Step, outputs: Sequence[RuntimeValue]):
        self.device, self.step, self.outputs = device, step, outputs
        self._sent: tuple[Any, RuntimeValue] | None = None  # the last outputs on the device, and the event of their copy
        self._made = RuntimeValue()  # stands for the outputs of this micro-batch on the device

    def before(self, micro_batch: int) -> tuple[Sequence[RuntimeValue], Sequence[RuntimeValue]]:
        self._made = RuntimeValue()
        return (), (self._made,)

    def after(self, micro_batch: int) -> None:
        self._free_sent()
        self._sent = self._send(micro_batch, self._made), self._made

    def end(self) -> None:
        copied = self._sent[0] if self._sent is not None else None
        self._free_sent()
        for output in self.outputs:
            output.lane, output.event = Lane.D2H, copied

    def _free_sent(self) -> None:
        if self._sent is not None:
            free_behind(self.device, *self._sent)

    def _send(self, micro_batch: int, on_device: RuntimeValue) -> Any:
        """Copy the outputs of a micro-batch to the host as soon as they are made. Returns the event of the copy."""
        d2h, made = self.device.lanes[Lane.D2H], self.device.lanes[Lane.COMPUTE].record()
        if made is not None:
            d2h.wait(made)

        def work() -> None:
            self.device.accesses.read(on_device.place)
            on_device.tensors = [output.tensors[micro_batch] for output in self.outputs]
            for output, tensor in zip(self.outputs, on_device.tensors, strict=True):
                self.device.accesses.write(output.place)
                output.tensors[micro_batch] = on_host = self.device.download(tensor)
                self.step.stats.offloaded_bytes += bytes_of([on_host])

        d2h.run(work)
        return d2h.record()


@dataclass(frozen=True, eq=False)
class StreamedGradient:
    """A gradient that is whole on the host, and the value that it fills on the device, micro-batch by micro-batch."""

    source: RuntimeValue
    arriving: RuntimeValue
    spec: TensorSpec


class GradientStream:
    """Gradients that come to the device micro-batch by micro-batch: the next gradient arrives while one is used."""

    def __init__(self, device: Device, step: Step, count: int, gradients: Sequence[StreamedGradient]):
        self.device, self.step, self.count, self.gradients = device, step, count, gradients
        self._on_device: list[RuntimeValue] = []  # by micro-batch: stands for its gradients on the device
        self._events: list[Any] = []  # after which they are there
        self._bring(0)

    def before(self, micro_batch: int) -> tuple[Sequence[RuntimeValue], Sequence[RuntimeValue]]:
        if micro_batch + 1 < self.count:  # two are on the device at once
            self._bring(micro_batch + 1)
        needed = 2 if self.step.engine.check and micro_batch == 0 else 1
        for event in self._events[micro_batch : micro_batch + needed]:
            if event is not None:
                self.device.lanes[Lane.COMPUTE].wait(event)
        return self._on_device[micro_batch : micro_batch + needed], ()

    def after(self, micro_batch: int) -> None:
        def work() -> None:
            self.device.accesses.write(self._on_device[micro_batch].place)
            for gradient in self.gradients:
                self.device.free([gradient.arriving.tensors[micro_batch]])
                gradient.arriving.tensors[micro_batch] = None

        self.device.lanes[Lane.COMPUTE].run(work)

    def end(self) -> None:
        """Every gradient is freed already."""

    def _bring(self, micro_batch: int) -> None:
        """Copy the gradients of a micro-batch to the device."""
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
        self._events.append(h2d.record())
