"""A run on disk that is killed at any time goes on from its last checkpoint with the bits of one that was not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from slow_disk import holders, is_freed_within

TESTS = Path(__file__).parent.parent
RUN = """
import os, sys, time, torch
from stored_training import training

folder, saved, steps = *sys.argv[1:3], int(sys.argv[3])
made = training("adamw", disk=folder, update="in_forward", precision="bf16")
made.step()
if os.path.exists(saved):
    state = torch.load(saved)
    made.model.load_state_dict(state["model"])
    made.optimizer.load_state_dict(state["optimizer"])
    made.number = state["number"]
print("ready", flush=True)
while made.number < steps:
    made.step()
    torch.save({"model": made.model.state_dict(), "optimizer": made.optimizer.state_dict(), "number": made.number}, saved + ".new")
    os.replace(saved + ".new", saved)
torch.save(made.tensors(), saved + ".end")
"""


def running(folder: Path, saved: Path, steps: int) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(folder), str(saved), str(steps)]
    made = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert made.stdout.readline() == "ready\n"
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "steps"), [(5, 8), (50, 40)])
def test_a_killed_run_goes_on_with_the_same_bits(kills, steps, tmp_path):
    (folder := tmp_path / "disk").mkdir()
    assert running(folder, tmp_path / "whole", steps).wait() == 0
    times = random.Random(0)
    for _ in range(kills):
        run = running(folder, tmp_path / "killed", steps)
        time.sleep(times.uniform(0.0, 0.6))
        assert holders(folder), "a file without a name"
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert os.listdir(folder) == [] and is_freed_within(1.0, folder)
    assert running(folder, tmp_path / "killed", steps).wait() == 0
    whole, killed = (torch.load(tmp_path / f"{name}.end") for name in ("whole", "killed"))
    assert all(map(torch.equal, whole, killed)) and len(whole) == len(killed)
