"""Every test starts with a clean Dynamo, a fixed seed and one thread a worker."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import shutil
import tempfile
import warnings

import pytest
import torch

from lean import freeze, reset, settle

# What one test has traced and compiled is there for the next one, as in a process of a user; nothing of an earlier run is. A folder
# for each worker: two processes that write one file of Inductor's cache at once have been seen to fail.
CACHE = tempfile.mkdtemp(prefix="l2l_compile_tests_")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = CACHE
# The same kernels for 16 bits on every machine, AMX left out: some virtual machines say that they have it, and die of it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
warnings.filterwarnings("ignore", message=".*lowering to.*")


STALE = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """The cases of a test that its mark `slow` leaves to `make test` lose it, before `-m` chooses."""
    unused = {}
    for item in items:
        for mark in item.iter_markers("slow"):
            patterns = [(name, pattern) for name in ("but", "only") for pattern in _several(mark.kwargs.get(name, ()))]
            for name, pattern in patterns:
                unused.setdefault((item.path, item.originalname, name, pattern), True)
            found = [(name, p) for name, p in patterns if fnmatch.fnmatchcase(item.callspec.id, p)]
            unused |= {(item.path, item.originalname, *key): False for key in found}
            if patterns and bool(found) != ("only" in mark.kwargs):
                item.own_markers = [other for other in item.own_markers if other is not mark]
    if config.args_source is config.ArgsSource.TESTPATHS:  # all tests are here
        wrong = {
            key[:2]: f"its mark slow has an id that no case has: {key[2]}={key[3]!r}" for key, absent in unused.items() if absent
        }
        for item in items:
            if sentence := wrong.get((item.path, getattr(item, "originalname", None))):
                item.stash[STALE] = sentence
                item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]  # so that `make test` says it


def pytest_runtest_setup(item):
    if STALE in item.stash:
        pytest.fail(item.stash[STALE])


def _several(patterns: str | tuple[str, ...]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else patterns


def pytest_collection_finish():
    settle()


def pytest_sessionfinish():
    shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def frozen_heap():
    """Collections look at what this file makes, not at what earlier ones leave behind."""
    yield
    freeze()


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    reset()


@pytest.fixture(autouse=True)
def watched(request, monkeypatch):
    """Every program of every test is watched for races, unless the test is marked `unwatched`."""
    if request.node.get_closest_marker("unwatched") is not None:
        return
    from l2l_compile import session
    from l2l_compile.devices.watched import watch

    open_device = session.open_device
    monkeypatch.setattr(session, "open_device", lambda options: watch(open_device(options)))


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    """Runs scripts in processes of their own. One for all files: it imports PyTorch and the package once."""
    from forked import Launcher

    launcher = Launcher(tmp_path_factory.mktemp("scripts"))
    yield launcher
    launcher.close()


@pytest.fixture(autouse=True)
def as_many_micro_batches_as_given(request):
    """Calls of tiny models without gradients have as many micro-batches as with gradients, unless a test is marked `few_micro_batches`."""
    from l2l_compile.runtime import micro_batches

    with pytest.MonkeyPatch.context() as patched:  # not the fixture of the test, whose changes must end before other fixtures do
        if request.node.get_closest_marker("few_micro_batches") is None:
            patched.setattr(micro_batches, "limit_of", lambda program: 1)
        yield


@pytest.fixture
def threaded(monkeypatch):
    """Compiled models run on a device of three threads; `threaded.devices` lists the devices opened so far."""
    from l2l_compile.devices.cpu import CPU
    from l2l_compile.devices.registry import KINDS
    from l2l_compile.testing.strict_device import ThreadedDevice

    class Opener:
        def __init__(self):
            self.devices: list[ThreadedDevice] = []
            self.delay, self.seed = 0.002, 0

        def __call__(self, device, pinned_memory):
            self.devices.append(ThreadedDevice(self.delay, self.seed, pinned_memory))
            return self.devices[-1]

    opener = Opener()
    monkeypatch.setitem(KINDS, CPU.name, dataclasses.replace(CPU, open=opener))
    return opener


@pytest.fixture
def stand_in(monkeypatch):
    """The name of a device whose tensors are of another type than the host's, for the option `device`."""
    import stand_in as module
    from l2l_compile.devices.registry import KINDS

    if module.MISSING:
        pytest.skip(module.MISSING)
    module.register()
    monkeypatch.setitem(KINDS, module.NAME, module.STAND_IN)
    return module.NAME
