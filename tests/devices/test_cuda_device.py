"""What can be said of the CUDA device without a GPU: streams and the runtime are stand-ins that note what they are asked."""

from __future__ import annotations

import contextlib
import os

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
        cuda._page_unlock(GPU, os.getpid(), 1)
    runtime.launch()


def test_a_forked_process_unlocks_nothing(runtime):
    """CUDA cannot be used there: a data loader's worker may collect a model of its parent."""
    cuda._page_unlock(GPU, os.getpid() + 1, 1)
    assert runtime.calls == []


def test_page_locks_are_for_all_gpus_and_begin_to_use_no_other(runtime):
    """From a thread of the host, whose current GPU is the first."""
    cuda._page_lock(GPU, 1, 10)
    cuda._page_unlock(GPU, os.getpid(), 1)
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

    def record_event(self, event):
        return f"event of {self.name}"


class Waits:
    """An event that happens after some looks at it; a stream records it."""

    def __init__(self, looks):
        self.looks = looks

    def record_event(self):
        return self

    def query(self):
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("looks", [0, 3, 10**9])
def test_a_stream_that_waits_for_a_rank_is_polled(monkeypatch, device, looks):
    checks = iter([None] * 5)
    monkeypatch.setattr(cuda, "_streams", lambda device: {"compute": Waits(0), "comm": Waits(looks)})
    with pytest.raises(StopIteration) if looks > 5 else contextlib.nullcontext():
        device.await_ranks(lambda: next(checks))
    assert len(list(checks)) == max(0, 5 - looks)


@pytest.fixture
def device(monkeypatch):
    """A `CudaDevice` of the second GPU, without its memory; `device.asked` has what its streams are asked."""
    device = object.__new__(cuda.CudaDevice)
    device.kept = {}
    device.torch_device, device.slabs, device.asked = GPU, [], []
    device.lanes = {}
    for name in ("compute", "h2d", "d2h"):
        lane = device.lanes[name] = object.__new__(cuda._Stream)
        lane.stream = Stream(name, device.asked)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
    return device


def test_threads_of_the_host_use_the_gpu_of_the_session(runtime, device):
    """They have chosen none, and would take memory of the first one: for a wait, a look at an event, an optimizer's step."""

    class Event:
        def synchronize(self):
            used.append(runtime.current)

        query = synchronize

    used, device._process = [], os.getpid()
    device.wait_on_host(Event())
    device._has_happened(Event())
    with device.updating():
        used.append(runtime.current)
    assert used == [GPU] * 3
    device._process += 1
    with device.updating():  # of a forked process, which cannot use CUDA
        assert runtime.current.index == 0


def test_an_update_runs_within_the_devices_context(monkeypatch):
    step, inside = compiled(Stack(2)), []
    step(rows(6, dtype=torch.float32))
    session = session_of(step)

    @contextlib.contextmanager
    def updating():
        inside.append("begin")
        yield
        inside.append("end")

    monkeypatch.setattr(session.device, "updating", updating)
    session.server.worker.submit(lambda: inside.append("work")).wait()
    assert inside == ["begin", "work", "end"]


def test_the_first_fetch_waits_for_new_slabs(monkeypatch, device):
    """They are made on compute, where their memory was in use before, and are written on h2d."""

    class Made:
        def numel(self):
            return 8

    monkeypatch.setattr(torch, "empty", lambda *_, **__: device.asked.append("slab") or Made())
    device.reserve_slabs(2, 8)
    device.reserve_slabs(2, 8)
    assert device.asked == ["slab", "slab", ("h2d", "waits for", "event of compute")]


def test_recovery_records_no_event(device):
    """A device that has failed for good may refuse it."""
    device.lanes["compute"].record = pytest.fail
    device.reserve_slabs(0, 0)


def test_sessions_of_a_gpu_share_its_streams(monkeypatch):
    """cuBLAS and the allocator keep memory for each stream."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    cuda._streams.cache_clear()
    try:
        assert cuda._streams(GPU) is cuda._streams(torch.device("cuda", 1))
        assert cuda._streams(GPU)["compute"] is not cuda._streams(torch.device("cuda", 0))["compute"]
    finally:
        cuda._streams.cache_clear()


def test_waits_for_events_leave_the_core_idle(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: options)
    device.lanes["h2d"].stream.record_event = lambda event: event
    assert device.lanes["h2d"].record() == {"blocking": True}


@pytest.mark.parametrize(("current", "gpus", "expected"), [(0, 8, 3), (0, 1, 0), (5, 8, 5)], ids=["torchrun", "one seen", "set"])
@pytest.mark.parametrize("started", [True, False], ids=["ranks", "alone"])
def test_each_rank_takes_a_gpu_of_its_own(monkeypatch, current, gpus, expected, started):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert cuda.CUDA.resolve(torch.device("cuda")).index == (expected if started else current)
    assert cuda.CUDA.resolve(torch.device("cuda:6")).index == 6
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(device.index))
    monkeypatch.setattr(cuda, "_streams", lambda device: {})
    monkeypatch.setattr(cuda.Accelerator, "__init__", lambda *_: None)
    cuda.CudaDevice(cuda.CUDA.resolve(torch.device("cuda")))
    assert chosen == ([expected] if started and current == 0 else [])  # PyTorch's optimizers look at the current one


@pytest.mark.parametrize("change", [("cudnn", "version"), ("_C", "_get_sdp_priority_order")])
def test_attention_kernels_are_a_part_of_a_traces_key(monkeypatch, change):
    """Another cuDNN, and another order of preference, may take another kernel."""
    values = {"get_device_name": "H", "get_device_capability": (9, 0)}
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    before = cuda._identity(GPU)
    owner, name = change
    monkeypatch.setattr(torch.backends.cudnn if owner == "cudnn" else torch._C, name, lambda: (7,))
    assert cuda._identity(GPU) != before


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
    assert device._staging._filled >= tensor.nbytes  # it came out of the ring
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
