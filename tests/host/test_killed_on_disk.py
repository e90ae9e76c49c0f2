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

TESTS = Path(__file__).parent.parent
STEPS = 8
RUN = f"""
import os, sys, time, torch
from stored_training import training

folder, saved = sys.argv[1:]
made = training("adamw", disk=folder, update="in_forward", precision="bf16")
made.step()
if os.path.exists(saved):
    state = torch.load(saved)
    made.model.load_state_dict(state["model"])
    made.optimizer.load_state_dict(state["optimizer"])
    made.number = state["number"]
print("ready", flush=True)
while made.number < {STEPS}:
    made.step()
    torch.save({{"model": made.model.state_dict(), "optimizer": made.optimizer.state_dict(), "number": made.number}}, saved + ".new")
    os.replace(saved + ".new", saved)
torch.save(made.tensors(), saved + ".end")
"""


def running(folder: Path, saved: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(folder), str(saved)]
    made = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert made.stdout.readline() == "ready\n"
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kills", [5])
def test_a_killed_run_goes_on_with_the_same_bits(kills, tmp_path):
    (folder := tmp_path / "disk").mkdir()
    assert running(folder, tmp_path / "whole").wait() == 0
    times = random.Random(0)
    for _ in range(kills):
        run = running(folder, tmp_path / "killed")
        time.sleep(times.uniform(0.0, 0.6))
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert os.listdir(folder) == []
    assert running(folder, tmp_path / "killed").wait() == 0
    whole, killed = (torch.load(tmp_path / f"{name}.end") for name in ("whole", "killed"))
    assert all(map(torch.equal, whole, killed)) and len(whole) == len(killed)
