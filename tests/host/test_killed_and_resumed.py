"""A run that is killed at any time, again and again, continues from its last complete step, without a checkpoint."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from stored_training import training

TESTS = Path(__file__).parent.parent
RUN = """
import sys
import l2l_compile
from slow_disk import Faults, slow_disk
from stored_training import training
from test_killed_and_resumed import digest

folder, optimizer, update, precision, delay, steps = *sys.argv[1:5], *map(int, sys.argv[5:])
with slow_disk(Faults(rate=8e7)):
    made = training(optimizer, disk=folder, update=update, precision=precision, delay=delay, resumable=True)
    resumed = l2l_compile.resume(made.call)
    made.number = resumed.steps
    print(resumed.steps, resumed.extra, digest(made.tensors()), flush=True)
    while made.number < steps:
        made.step()
        if made.number % 2:
            l2l_compile.commit(made.call, made.number)
        print("step", flush=True)
    if made.number > resumed.steps:
        l2l_compile.commit(made.call, wait=True)
"""


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def running(folder: Path, *case: object) -> tuple[subprocess.Popen, int, str, str]:
    """A run in a process of its own; the step from which it continues, `extra`, and a digest of all tensors there."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}:{TESTS}/host", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(folder), *map(str, case)]
    made = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    steps, extra, found = made.stdout.readline().split()
    return made, int(steps), extra, found


class Plain:
    """The same training without disk: digests of all tensors behind each step."""

    def __init__(self, optimizer: str, update: str, precision: str, delay: int = 0):
        self._training = training(optimizer, update=update, precision=precision, delay=delay)
        self._digests = [digest([p.detach() for p in self._training.model.parameters()])]

    def behind(self, steps: int) -> str:
        while len(self._digests) <= steps:
            self._training.step()
            self._digests.append(digest(self._training.tensors()))
        return self._digests[steps]


@pytest.mark.parametrize(
    ("kills", "optimizer", "update", "precision", "delay"),
    [
        (3, "adamw", "in_forward", "bf16", 0),
        pytest.param(50, "adamw", "in_forward", "bf16", 0, marks=pytest.mark.slow),
        pytest.param(50, "adamw", "in_backward", "bf16", 0, marks=pytest.mark.slow),
        pytest.param(2, "adamw", "in_forward", "bf16", 1, marks=pytest.mark.slow),
        pytest.param(50, "adamw", "in_forward", "bf16", 1, marks=pytest.mark.slow),
        pytest.param(15, "sgd", "in_forward", "fp16", 0, marks=pytest.mark.slow),
        pytest.param(15, "lamb", "in_backward", "fp32", 0, marks=pytest.mark.slow),
        pytest.param(15, "adafactor", "in_forward", "fp32", 0, marks=pytest.mark.slow),
    ],
)
def test_each_kill_leaves_the_last_complete_step(kills, optimizer, update, precision, delay, tmp_path):
    plain, case = Plain(optimizer, update, precision, delay), (optimizer, update, precision, delay)
    times, before, stepped = random.Random(0), 0, 0
    for _ in range(kills):
        run, steps, extra, found = running(tmp_path, *case, 10**6)
        assert found == plain.behind(steps) and extra == str(steps if steps % 2 else None), f"behind {steps} steps"
        assert steps >= before + stepped - 2, "more than the step under way and the one before was lost"
        stepped = 0
        while stepped < 2:
            stepped += run.stdout.readline() == "step\n"
        time.sleep(times.uniform(0.0, 0.6))
        run.send_signal(signal.SIGKILL)
        stepped += run.communicate()[0].count("step\n")
        before = steps
    last = (before + stepped) // 2 * 2 + 4
    run, steps, _, found = running(tmp_path, *case, last)
    assert run.wait(timeout=120) == 0 and found == plain.behind(steps)
    run, steps, _, found = running(tmp_path, *case, 0)
    assert run.wait(timeout=120) == 0 and (steps, found) == (last, plain.behind(last))
