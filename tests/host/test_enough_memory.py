"""A step that the host has no memory for is refused before it begins."""

from __future__ import annotations

import pytest
import torch

import l2l_compile
import l2l_compile.host.enough_memory as enough_memory
from l2l_compile import L2LError, Machine, simulate
from l2l_compile.options import Options
from stored_training import LAYERS, WIDTH, training

ENTRIES = 6 * WIDTH + LAYERS * (WIDTH * WIDTH + WIDTH) + 3 * WIDTH + 3


@pytest.fixture
def available(monkeypatch):
    """Sets the bytes that are available."""
    monkeypatch.setattr(enough_memory, "_swap_space", lambda: 0)
    return lambda size: monkeypatch.setattr(enough_memory, "own_memory", lambda: size)


CASES = [
    ("adamw", {"update": "in_backward"}, 8, "optimizer state"),
    ("sgd", {"update": "in_forward"}, 8, "4 bytes of momentum, and a gradient"),
    ("sgd", {"update": "in_forward", "precision": "bf16"}, 8, "4 bytes of state, 2 of a gradient, 2 of a copy"),
    ("sgd", {"update": "in_forward", "delay": 1}, 20, "4 of state, two gradients and two copies in fp32"),
    ("adamw", {"update": "in_backward", "accumulate": 2}, 12, "a gradient in fp32"),
    ("adafactor", {"update": "in_backward", "precision": "bf16"}, 2, "rows and columns of state are not counted"),
    ("adamw", {"update": "at_step"}, 12, "p.grad"),
]


@pytest.mark.parametrize(("optimizer", "options", "of_entry", "what"), CASES, ids=lambda value: str(value)[:40])
def test_a_step_is_refused_for_want_of_a_byte(optimizer, options, of_entry, what, available):
    needed = of_entry * ENTRIES
    available(needed - 1)
    made = training(optimizer, **options)
    with pytest.raises(L2LError, match=r"a step needs .* more of host memory \(.*\), and .* are available: .*'disk'"):
        made.backward()
    assert not made.optimizer.state
    for size in (needed, 0):  # what there is by now is not asked for again
        available(size)
        for _ in range(options.get("accumulate", 1) - 1):
            made.backward()
        made.step()


def test_state_that_is_there_needs_no_more_memory(available):
    first = training("adamw", update="in_backward")
    first.step()
    l2l_compile.synchronize(first.call)
    available(0)
    torch._dynamo.reset()
    call = torch.compile(
        first.model,
        backend="l2l",
        options={"optimizer": first.optimizer, "update": "in_backward", "block_compiler": "eager", "device": "cpu"},
    )
    call(torch.ones(6, 5)).sum().backward()
    first.optimizer.step()


def test_a_step_with_a_disk_has_a_budget_of_its_own(available, tmp_path):
    available(0)
    training("adamw", disk=tmp_path, update="in_backward").step()


def test_a_simulated_machine_has_its_own_memory(available):
    available(0)
    made = training("adamw", update="in_backward")
    found = simulate(made.call, Machine.load("h200"))(torch.ones(6, 5))
    assert found.seconds > 0


class LowRank(torch.optim.SGD):
    """Keeps its state in a few columns, as GaLore does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 2 and "columns" not in self.state[parameter]:
                    self.state[parameter]["columns"] = torch.zeros(parameter.shape[0], 128)
        return super().step(closure)


def test_state_that_grows_with_rows_alone_is_not_counted(available):
    made = training("sgd", update="in_forward")
    optimizer = LowRank(made.model.parameters(), lr=0.1)
    options = Options.build({"optimizer": optimizer, "update": "in_backward", "device": "cpu"})
    available(0)
    enough_memory.check_enough_memory(options)
