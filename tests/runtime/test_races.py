"""No races, by proof: each wait of the executor and of the host, deleted, is refused by the watch, and shows on slow threads.

The waits are found in the source (`waits.py`): one that no case of `race_cases.py` names fails a test. The watch runs on the host,
where lanes do their work at once and every number is right.
"""

from __future__ import annotations

import functools

import pytest

from l2l_compile import RaceError
from l2l_compile.devices.cpu import CpuDevice
from l2l_compile.devices.watched import watch
from l2l_compile.testing.strict_device import ThreadedDevice
from race_cases import CASES, Run, is_missed, same, slow, workers_of
from waits import BY_NAME

ELSEWHERE = {
    "host.updates.in_forward.UpdatesInForward._collected: OverlappedUpdates._drain(self)": "tests/host/test_plain_loops.py",
    "host.updates.overlapped.OverlappedUpdates._step_on_zeros: self.synchronize()": "tests/host/test_plain_loops.py",
    "host.updates.overlapped.OverlappedUpdates.await_commit: self.synchronize()": "tests/host/test_resumable.py",
    "host.updates.overlapped.OverlappedUpdates.keep: self.synchronize()": "tests/host/test_kept_steps.py",
    "host.updates.other_models.wait_for_other_models: other.synchronize()": "tests/host/test_beside_others.py",
    "host.updates.in_backward.UpdatesInBackward.synchronize: self._drain()": "tests/host/test_late_updates.py",
    "host.updates.in_backward.UpdatesInBackward.begin_backward: self._drain()": "tests/host/test_late_updates.py",
    "host.updates.in_backward.UpdatesInBackward.begin_step_of: self.synchronize()": "tests/host/test_late_updates.py",
    "host.updates.overlapped.OverlappedUpdates._before_step_of_others: self.synchronize()": "tests/host/test_late_updates.py",
    "host.updates.interface.Updates.next_scale: self.synchronize()": "tests/ranks/test_one_forward_one_back.py",
    "host.updates.without_flush.UpdatesWithoutFlush._look_behind: collected.wait()": "tests/ranks/test_without_flush.py",
    "host.updates.without_flush.UpdatesWithoutFlush._drain: super()._drain()": "tests/ranks/test_without_flush.py",
    "runtime.runner.Runner._settle_others: other.settle()": "tests/ranks/test_without_flush.py",
    "runtime.runner.Runner.forward: engine.in_flight.drain(reason)": "tests/ranks/test_without_flush.py",
    "runtime.stored_stashes.StashesOnDisk._read: transfer.wait()": "tests/runtime/test_stored_stashes.py",
    "runtime.executor.Executor.submit_behind_releases: self.device.lanes[lane].wait(released)": "tests/ranks/test_memory_taken_again.py",
}
NO_RACE = {
    "runtime.runner.Runner._meanwhile: self.engine.device.synchronize()": "raises what failed on a lane",
    "host.server.ParameterServer.collect: self._in_flight.popleft().last.wait()": "bounds the memory of gradients",
    "runtime.stored_stashes.StashesOnDisk.get: self._device.wait_on_host(copied)": "bounds the memory of stashes",
    "runtime.stored_stashes.StashesOnDisk.recover: worker.settle()": "drops what failed, and has nothing of a lost step under way",
    "host.updates.overlapped.OverlappedUpdates.place: self.synchronize()": "a parameter that is replaced has waited by then",
    "host.updates.deferred_updates.DeferredUpdates.wait: super().wait(parameters)": "raises what failed, and waits for nothing",
}


def test_every_wait_has_a_case():
    in_cases = {name for case in CASES for name in case.waits}
    others = {*NO_RACE, *ELSEWHERE}
    assert in_cases | others == set(BY_NAME) and not in_cases & others


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_watch_refuses_a_program_without_a_wait(case):
    run = Run(case, watch(CpuDevice()))
    run()
    for name in case.waits:
        with BY_NAME[name].deleted():
            try:
                run()
                for worker in workers_of(run.session):
                    worker.drain()  # or a lane of the host saw it, which may have come second
            except RaceError:
                continue
        pytest.fail(f"nobody misses {name}")
    run()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.slow(but=("a buffer", "in_backward", "skips", "state_dict"))
def test_a_wait_that_is_deleted_shows_on_slow_threads(case):
    run = Run(case, ThreadedDevice(0.0))
    expected = run()
    for name, lanes in case.waits.items():
        for lane in lanes.split():
            slowed = functools.partial(slow, run.session, lane)
            assert is_missed(name, run, expected, slowed), f"nobody misses {name}, with {lane} slow"
    assert same(run(), expected)  # with all waits, the last lane is still slow
