"""Tests on PyTorch's CUDA build and a CUDA runtime that computes nothing. `make cuda-dry` starts pytest with it."""

from __future__ import annotations

import ctypes
import gc
import os

import pytest
import torch


class Runtime:
    """The CUDA runtime of runtime.cpp, which this process was started with."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        library.fake_report.restype = ctypes.c_char_p
        library.fake_set_limit.argtypes = [ctypes.c_size_t]

    def reset(self) -> None:
        self._library.fake_reset()

    def set_lazy(self, on: bool) -> None:
        """Carry out operations as late as CUDA allows."""
        self._library.fake_set_lazy(int(on))

    def set_late(self, stream: torch.cuda.Stream) -> None:
        """Carry out the operations of this stream as late as CUDA allows, and those of others as early."""
        self._library.fake_set_late(ctypes.c_void_p(stream.cuda_stream))

    @property
    def not_computed(self) -> list[str]:
        """Operations of which the numbers are not to be believed: failed on the CPU, or not known to it."""
        return [name for name in self.counts if name.startswith(("failed: ", "not computed: "))]

    def set_limit(self, size: int | None) -> None:
        """Bytes of the device that this process may have: other processes have the others. None: all are free."""
        self._library.fake_set_limit(ctypes.c_size_t(-1) if size is None else size)

    def fail_locks(self, number: int) -> None:
        """The next page-locks fail."""
        self._library.fake_fail_locks(number)

    @property
    def counts(self) -> dict[str, int]:
        """Calls since `reset`, by name; `locked ranges` and `device bytes` are those of now."""
        pairs = (line.rsplit("=", 1) for line in self._lines() if "=" in line)
        return {name: int(number) for name, number in pairs}

    @property
    def violations(self) -> list[str]:
        """What a GPU would not have forgiven, a sentence each."""
        return [line for line in self._lines() if "=" not in line]

    def _lines(self) -> list[str]:
        return self._library.fake_report().decode().splitlines()


@pytest.fixture
def runtime():
    """Each test checks `violations` by itself, or is checked behind."""
    process = ctypes.CDLL(None)
    if not hasattr(process, "fake_report"):
        pytest.skip("this process has no CUDA runtime without kernels: make cuda-dry starts one that has")
    runtime = Runtime(process)
    torch.backends.cudnn.enabled = False  # its attention has a library of its own, which looks for a GPU
    torch.backends.cuda.enable_cudnn_sdp(False)
    runtime.set_lazy(False)
    runtime.reset()
    yield runtime
    torch._dynamo.reset()
    gc.collect()
    found = runtime.violations
    runtime.set_lazy(False)
    runtime.fail_locks(0)
    runtime.set_limit(None)
    runtime.reset()
    assert not found


@pytest.fixture
def computing(runtime):
    """The CPU's kernels compute what is launched, on device memory. Kernels of Triton compute nothing."""
    library = ctypes.CDLL(os.environ["FAKE_CUDA_COMPUTING"])
    library.fake_compute(1)
    yield runtime
    runtime.set_lazy(False)
    library.fake_compute(0)
    assert runtime.not_computed == []
