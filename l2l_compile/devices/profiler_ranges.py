"""Ranges with lane, node, segment and micro-batch in the traces of profilers: `torch.profiler`, and NVTX on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.autograd import profiler

from l2l_compile.devices.device import Device
from l2l_compile.devices.labels import label_of_micro_batch
from l2l_compile.devices.observed import Observer, Work, observe
from l2l_compile.lanes import Lane


def ranges(device: Device) -> AbstractContextManager:
    """Context manager with ranges for the device's work, if a profiler is active or the step is profiled. Else empty, at no cost."""
    if not (profiler._is_profiler_enabled or device.profiled):
        return nullcontext()
    return observe(device, _Ranges(device.torch_device.type == "cuda"))


class _Ranges(Observer):
    """A range around each piece of work of a lane, and one inside of it for each micro-batch."""

    def __init__(self, on_cuda: bool):
        self._on_cuda = on_cuda
        self._computing, self._micro_batch = "", ExitStack()

    def gives(self, lane: str, label: str, work: Work) -> Work:
        def ranged() -> None:
            with self._range(f"l2l {lane}: {label}"):
                if lane != Lane.COMPUTE:
                    return work()
                self._computing = label
                with ExitStack() as self._micro_batch:
                    work()

        return ranged

    def begins_micro_batch(self, number: int) -> None:
        self._micro_batch.close()
        self._micro_batch.enter_context(self._range(f"l2l compute: {label_of_micro_batch(self._computing, number)}"))

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        with profiler.record_function(name), torch.cuda.nvtx.range(name) if self._on_cuda else nullcontext():
            yield
