"""Training state of four times `host_memory`, in a memory cgroup that ends the process if the bound does not hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memory_cgroup import memory_cgroup

TESTS = Path(__file__).parent.parent
HOST_MEMORY = 256 << 20
BESIDE = 600 << 20  # the interpreter, libraries, code and activations
TRAIN = f"""
import sys, torch
from torch import nn
import l2l_compile

folder, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)
WIDTH, LAYERS = 1024, 84  # 12 bytes a parameter: four times {HOST_MEMORY >> 20} MiB
layers = []
for _ in range(LAYERS):
    with torch.no_grad():
        layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
options = {{"optimizer": optimizer, "update": "in_backward", "block_compiler": "eager"}}
if folder:
    options |= {{"disk": folder, "host_memory": {HOST_MEMORY}}}
step = torch.compile(model, backend="l2l", options=options)
for number in range(steps):
    step(torch.ones(4, WIDTH)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(sum(p.double().sum().item() for p in model.parameters()))
"""


SWAPS = len(Path("/proc/swaps").read_text().splitlines()) > 1  # then the kernel may swap, and nothing is refused


@pytest.fixture
def cgroup():
    yield from memory_cgroup(f"l2l_test_{os.getpid()}", HOST_MEMORY + BESIDE)


def trained(cgroup: Path, folder: str, steps: int) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    enter = f"import os; open({str(cgroup / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    command = [sys.executable, "-c", enter + TRAIN, folder, str(steps)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_model_of_four_times_the_memory_trains_in_a_cgroup(cgroup, tmp_path):
    """Without the disk, the first forward is refused: the kernel would end the process in its backward."""
    found = trained(cgroup, str(tmp_path), 20)
    assert found.returncode == 0, found.stderr[-2000:]
    refused = trained(cgroup, "", 20)
    assert refused.returncode == 1 or SWAPS, refused.stderr[-2000:]
    assert "L2LError: a step needs 672.0 MiB more of host memory (672.0 MiB of optimizer state), and" in refused.stderr or SWAPS
