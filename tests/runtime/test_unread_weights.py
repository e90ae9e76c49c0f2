"""A large weight that no code reads is not copied: backward differentiates a lookup without its table."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.runtime import fetch
from models import Stack, backward_of_loss, compiled, pair_of, rows

VOCABULARY, WIDTH = 40, 8


class Words(nn.Module):
    """A table, positions, layers, and a head that may share the table; the first layer's norm needs what the table gives."""

    def __init__(self, tied: bool, dropout: float = 0.0):
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(7, WIDTH)
        self.layers, self.head = nn.Sequential(*Stack(2, WIDTH).layers), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.dropout = nn.Dropout(dropout)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids) + self.positions(torch.arange(ids.shape[1]))
        return F.cross_entropy(self.head(self.layers(self.dropout(x))).flatten(0, 1), ids.flatten())


@pytest.fixture(autouse=True)
def every_weight_is_large(monkeypatch):
    monkeypatch.setattr(fetch, "LARGE", 1)


def ids(count: int = 6) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count, 7))


@pytest.mark.parametrize("tied", [False, True], ids=["a table of its own", "a table that the head reads"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tables_do_not_cross_the_link_in_backward(threaded, tied, precision):
    """What a first step has lowered, the second one knows. Freed memory is NaN there: who reads what was not fetched finds it."""
    model = Words(tied) if precision == "bf16" else Words(tied).double()
    pair = pair_of(model, micro_batches=3, precision=precision, tolerance=1e-12 if precision == "fp32" else 2e-2)
    x, fetched = ids(), []
    for _ in range(3):
        pair.run(backward_of_loss, x).check()
        fetched.append(l2l_compile.stats(pair.compiled).fetched_bytes)
    tables = sum(p.numel() for p in (model.table.weight, model.positions.weight))
    assert fetched[0] - fetched[1] >= tables * (2 if precision == "bf16" else 8) and fetched[1] == fetched[2]


def test_what_is_dropped_is_dropped_again(threaded):
    model = Words(False, dropout=0.5)
    step, x, found = compiled(model, micro_batches=2), ids(2), []
    for _ in range(3):
        torch.manual_seed(0)
        model.zero_grad()
        step(x).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, found[0], found[2]))


def test_with_checks_everything_is_fetched():
    model, x, found = Words(False), ids(), []
    step = compiled(model, check=True)
    for _ in range(2):
        step(x).backward()
        found.append(l2l_compile.stats(step).fetched_bytes)
    assert found[0] == found[1]


def test_code_that_reads_what_was_not_fetched_is_not_run(monkeypatch):
    """Known to the fetch as unread, and read after all: never with wrong numbers."""
    step, x = compiled(Stack(2)), rows(4, dtype=torch.float32)
    step(x).sum().backward()
    monkeypatch.setattr("l2l_compile.runtime.weight_handlers.unread", lambda step, node, segments: frozenset({0}))
    with pytest.raises(L2LError, match="segment 'embed' reads a weight that was not fetched"):
        step(x)
