"""What can be said of the CUDA device without a GPU: streams and the runtime are stand-ins that note what they are asked."""

from __future__ import annotations

import contextlib

import pytest
import torch

from l2l_compile.devices import cuda
from l2l_compile.devices.staging import Staging
from l2l_compile.memory.pages import PinnedMemory
from l2l_compile.runtime.executor import Executor
from l2l_compile.session import session_of
from models import Stack, compiled, rows

GPU = torch.device("cuda", 1)


class Runtime:
    """The CUDA runtime: the result of a failed call stays its last error until a launch of a kernel reports it."""

    def __init__(self):
        self.locked, self.last_error, self.calls = set(), 0, []
        self.current = torch.device("cuda", 0)

    @contextlib.contextmanager
    def device(self, device):
        before, self.current = self.current, device
        yield
        self.current = before

    def cudaHostRegister(self, address, size, flags):
        self.calls.append((self.current.index, flags))
        return self._result(712 if address in self.locked else self.locked.add(address) or 0)

    def cudaHostUnregister(self, address):
        self.calls.append((self.current.index, None))
        return self._result(713 if address not in self.locked else self.locked.remove(address) or 0)

    def _result(self, code):
        self.last_error = code or self.last_error
        return code

    def launch(self, *_, **__):
        code, self.last_error = self.last_error, 0
        if code:
            raise RuntimeError(f"CUDA error {code}")


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime()

    def check_error(code):
        if code:
            raise RuntimeError(f"refused with {code}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", runtime.device)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(torch, "ones", runtime.launch)
    return runtime


def test_a_refused_page_lock_is_not_the_next_kernels_error(runtime):
    cuda._page_lock(GPU, 1, 10)
    with pytest.raises(RuntimeError, match="refused with 712"):
        cuda._page_lock(GPU, 1, 10)
    runtime.launch()


def test_what_cannot_be_unlocked_is_a_warning(runtime):
    with pytest.warns(RuntimeWarning, match="stays page-locked: refused with 713"):
        cuda._page_unlock(GPU, 1)
    runtime.launch()


def test_page_locks_are_for_all_gpus_and_begin_to_use_no_other(runtime):
    """From a thread of the host, whose current GPU is the first."""
    cuda._page_lock(GPU, 1, 10)
    cuda._page_unlock(GPU, 1)
    assert runtime.calls == [(1, 1), (1, None)]  # 1 is cudaHostRegisterPortable
    assert runtime.current.index == 0


def test_autocast_of_the_gpu_around_backward_casts_nothing(monkeypatch):
    """As in eager, where backward casts as forward did; casts are in the graphs of the blocks."""
    step = compiled(Stack(2))
    loss = step(rows(6, dtype=torch.float32)).sum()
    monkeypatch.setattr(session_of(step).device, "torch_device", GPU)
    run, seen = Executor.run, []
    monkeypatch.setattr(Executor, "run", lambda *arguments: seen.append(torch.is_autocast_enabled("cuda")) or run(*arguments))
    torch.set_autocast_enabled("cuda", True)
    try:
        loss.backward()
        assert seen == [False] and torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)


class Stream:
    """Notes what it is asked to wait for, in `asked`."""

    def __init__(self, name, asked):
        self.name, self.asked = name, asked

    def wait_event(self, event):
        self.asked.append((self.name, "waits for", event))

    def record_event(self):
        return f"event of {self.name}"


@pytest.fixture
def device(monkeypatch):
    """A `CudaDevice` of the second GPU, without its memory; `device.asked` has what its streams are asked."""
    device = object.__new__(cuda.CudaDevice)
    device.kept = {}
    device.torch_device, device._slabs, device.asked = GPU, [], []
    device.lanes = {}
    for name in ("compute", "h2d", "d2h"):
        lane = device.lanes[name] = object.__new__(cuda._Stream)
        lane.stream = Stream(name, device.asked)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return device


def test_the_first_fetch_waits_for_new_slabs(monkeypatch, device):
    """They are made on compute, where their memory was in use before, and are written on h2d."""

    class Made:
        def numel(self):
            return 8

    monkeypatch.setattr(torch, "empty", lambda *_, **__: device.asked.append("slab") or Made())
    device.reserve_slabs(2, 8)
    device.reserve_slabs(2, 8)
    assert device.asked == ["slab", "slab", ("h2d", "waits for", "event of compute")]


@pytest.mark.parametrize("kind", ["a temporary of the caller", "a view of page-locked memory"])
def test_a_temporary_stays_until_its_copy_is_done(monkeypatch, device, kind):
    """PyTorch copies memory that is not page-locked, or not contiguous, from a temporary that is gone when the call is over."""
    memory = PinnedMemory(1 << 20, lambda address, size: None, lambda address: None)
    device._staging = Staging(memory, lambda: "a copy", lambda event: None)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, device=None, **named: empty(*args, **named))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: kind != "a temporary of the caller")
    tensor = torch.arange(12.0).view(3, 4).t()
    found = device.upload(tensor)
    assert torch.equal(found, tensor) and found.is_contiguous()
    assert "a copy" in device._staging._events  # it came out of the ring
    assert device.asked == [("h2d", "waits for", "event of compute")]


@pytest.mark.parametrize("shape", [(1,), (3, 1), (0,)])
def test_the_ring_takes_tensors_of_any_strides(shape):
    """The gradient of a sum is one number that is expanded; a batch may be a transposed view."""
    memory = PinnedMemory(64, lambda address, size: None, lambda address: None)
    staging = Staging(memory, lambda: "a copy", lambda event: None)
    for source in (
        torch.ones(shape).expand(3, shape[0]),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(7, dtype=torch.int16)[::3],
    ):
        target = torch.zeros(source.numel() * source.element_size(), dtype=torch.uint8)
        staging.send(source, target)
        assert torch.equal(target.view(source.dtype).view(source.shape), source)


def test_blocks_are_compiled_for_the_gpu_that_runs_them(runtime, device):
    with device.running():
        assert runtime.current == GPU
    assert runtime.current.index == 0
