"""Values of the option `update` as declarations: a mode that is added here works everywhere, and nothing names a mode twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import l2l_compile
from l2l_compile import OptionError
from l2l_compile.command.main import parser
from l2l_compile.host.updates.classes import CLASSES
from l2l_compile.host.updates.in_backward import UpdatesInBackward
from l2l_compile.ir import nodes
from l2l_compile.testing import training_equivalent
from l2l_compile.update_modes import MODES
from models import Stack, compiled, rows

NAME = "in_backward_as_well"


class UpdatesAsWell(UpdatesInBackward):
    """Another class for the same place in the program."""


@pytest.fixture
def added(monkeypatch):
    monkeypatch.setitem(MODES, NAME, replace(MODES["in_backward"], name=NAME))
    monkeypatch.setitem(CLASSES, NAME, UpdatesAsWell)


def test_every_mode_has_a_class():
    assert set(MODES) == set(CLASSES) and all(name == mode.name for name, mode in MODES.items())


def test_a_mode_that_is_added_trains_as_at_step(added):
    batches = [rows(6) for _ in range(3)]
    found = training_equivalent(
        Stack(2), batches, lambda p: torch.optim.AdamW(p, lr=1e-2), updates=(NAME,), options={"micro_batches": 3}
    )
    assert found.passes and len(found.comparisons) == 2


def test_a_mode_that_is_added_is_known_to_options_and_reports(added):
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(model, optimizer=optimizer, update=NAME)
    loss = step(rows(6, dtype=torch.float32)).pow(2).mean()
    loss.backward()
    optimizer.step()
    (program,) = l2l_compile.programs(step)
    assert program.backward.graph.find_nodes(op="call_function", target=nodes.update)
    with pytest.raises(OptionError, match=f"max_grad_norm.*update='{NAME}' does"):
        l2l_compile.Options.build({"update": NAME, "optimizer": optimizer, "max_grad_norm": 1.0})
    with pytest.raises(OptionError, match="'update' must be one of.*" + NAME):
        l2l_compile.Options.build({"update": "never"})
    report = l2l_compile.explain(model, {"update": NAME, "optimizer": optimizer, "micro_batches": 3, "device": "cpu"})
    assert MODES[NAME].host_work in report(rows(6, dtype=torch.float32)).page("h200")
    assert parser().parse_args(["simulate", "llama", "--machine", "h200", "--update", NAME]).update == NAME
