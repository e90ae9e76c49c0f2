"""Without gradients, a batch is divided no further than memory asks for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile.runtime import micro_batches
from l2l_compile.session import session_of
from models import Stack, compiled, rows

pytestmark = pytest.mark.few_micro_batches


@pytest.fixture
def runs(monkeypatch):
    """The numbers of micro-batches that calls had."""
    found, chosen = [], micro_batches.MicroBatches.of

    def noted(chooser, bindings):
        found.append(chosen(chooser, bindings))
        return found[-1]

    monkeypatch.setattr(micro_batches.MicroBatches, "of", noted)
    return found


def served(model, x, **options):
    torch._dynamo.reset()
    step = compiled(model, micro_batches=4, dynamic=True, **options)
    with torch.no_grad():
        torch.testing.assert_close(step(x), model(x), rtol=1e-12, atol=1e-12)
    return step


def test_a_small_batch_is_not_divided(runs):
    served(Stack(3).double(), rows(8))
    assert runs == [1]


@pytest.mark.parametrize(("limit", "expected"), [(1.0, 1), (0.9, 2), (0.5, 2), (0.45, 4), (0.01, 4)])
def test_a_layer_takes_no_more_than_the_limit(runs, monkeypatch, limit, expected):
    """The least power of two with which a part of what a layer takes fits, and not more than the option."""
    model, x = Stack(3).double(), rows(8)
    monkeypatch.setattr(micro_batches, "limit_of", lambda program: 1 << 40)
    step = served(model, x)
    (program,) = l2l_compile.programs(step)
    lowering = session_of(step).lowering
    taken = max(
        lowering.forward(s.block, program.bindings).workspace_bytes
        + sum(spec.bytes(program.bindings) for spec in (*s.block.values, *s.block.outputs))
        for s in program.segments
    )
    monkeypatch.setattr(micro_batches, "limit_of", lambda program: int(limit * taken))
    served(model, x)
    assert runs[1:] == [expected]


def test_with_gradients_the_option_is_the_number(runs):
    step = compiled(Stack(2).double(), micro_batches=4)
    step(rows(8)).sum().backward()
    assert runs == [4]


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_random_numbers_are_those_of_a_call_with_gradients(runs):
    """A checkpoint of PyTorch runs a model without gradients first, and again with them."""
    torch.manual_seed(0)
    model, x = Noisy().double(), rows(8)
    step = compiled(model, micro_batches=4)
    torch.manual_seed(1)
    with torch.no_grad():
        first = step(x)
    torch.manual_seed(1)
    assert torch.equal(first, step(x).detach())
    assert runs == [4, 4]


def test_the_option_check_compares_micro_batches(runs):
    served(Stack(2).double(), rows(8), check=True)
    assert runs == [4]


def test_a_report_without_gradients_says_up_to():
    model = Stack(3).double()
    report = l2l_compile.explain(model, {"micro_batches": 4})
    with torch.no_grad():
        assert "up to 4 micro-batches" in str(report(rows(8)))
    assert "up to" not in str(report(rows(8)))
