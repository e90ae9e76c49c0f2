"""Several models in several threads of one process: the numbers of one after the other."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.backends import registry

import l2l_compile
from l2l_compile import backend
from l2l_compile.devices.cpu import CpuDevice

ACTIVATIONS = (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh)


class Own(nn.Module):
    """A model of its own width and activation, so that each thread compiles blocks of its own."""

    def __init__(self, number: int):
        super().__init__()
        torch.manual_seed(number)
        width = 8 + 4 * number
        self.embed, self.head = nn.Linear(5, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), ACTIVATIONS[number](), nn.Linear(width, width))
            for _ in range(3)
        )

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def train(model: nn.Module, number: int, update: str, block_compiler: str, steps: int = 20) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"micro_batches": 2, "device": "cpu", "optimizer": optimizer, "update": update, "block_compiler": block_compiler}
    step = torch.compile(model, backend="l2l", options=options)
    for turn in range(steps):
        rows = 6 if turn < steps // 2 else 4  # a second size while the other threads run
        x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(100 * number + turn))
        step(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    l2l_compile.synchronize(step)


@pytest.mark.parametrize("block_compiler", ["eager", "inductor"])
@pytest.mark.parametrize("update", ["at_step", "in_backward", "in_forward"])
@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.slow(but="2-in_forward-eager")
@pytest.mark.unwatched
def test_models_in_threads_train_as_one_after_the_other(threads, update, block_compiler):
    models = [Own(number) for number in range(threads)]
    apart, errors = copy.deepcopy(models), []

    def run(number: int) -> None:
        try:
            train(models[number], number, update, block_compiler)
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    running = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(300)
    assert not errors and not any(thread.is_alive() for thread in running)
    torch._dynamo.reset()
    for number, model in enumerate(apart):
        train(model, number, update, block_compiler)
    for together, alone in zip(models, apart, strict=True):
        assert all(map(torch.equal, together.state_dict().values(), alone.state_dict().values()))


def test_a_backend_may_be_registered_twice_by_threads():
    assert registry.register_backend(compiler_fn=backend.l2l, name="l2l") is backend.l2l
    with pytest.raises(AssertionError, match="duplicate name"):
        registry.register_backend(compiler_fn=lambda gm, inputs: gm, name="l2l")


FIRST = """
import threading, torch
models, errors = [torch.nn.Linear(3, 3) for _ in range(4)], []
def first(model):
    try:
        torch.compile(model, backend="l2l", options={"block_compiler": "eager", "device": "cpu"})(torch.ones(2, 3)).sum().backward()
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=first, args=(model,)) for model in models]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
"""


@pytest.mark.slow
def test_the_first_compilation_may_be_that_of_several_threads():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FIRST], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_one_thread_at_a_time_draws_from_a_seeded_generator():
    device, entered, drawn = CpuDevice(), threading.Event(), []

    def other() -> None:
        entered.wait()
        with device.seeded(7):
            drawn.append(torch.rand(3))

    thread = threading.Thread(target=other)
    thread.start()
    with device.seeded(3):
        first = torch.rand(3)
        entered.set()
        thread.join(0.2)
        second = torch.rand(3)
    thread.join()
    with device.seeded(3):
        assert torch.equal(torch.rand(3), first) and torch.equal(torch.rand(3), second)
    with device.seeded(7):
        assert torch.equal(torch.rand(3), drawn[0])
