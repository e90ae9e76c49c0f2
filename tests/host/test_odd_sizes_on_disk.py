"""Tensors on disk whose bytes end within a page, in fp32 and in 16 bits: pieces, copies and both places of a version."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile.host.step import in_pieces
from slow_disk import Faults, slow_disk
from stored_training import same, training_of

SIZES = (521, 523, 541, 547)  # primes
QUICKER = 6e7  # bytes a second


def odd():
    torch.manual_seed(0)
    pairs = itertools.pairwise(SIZES)
    return nn.Sequential(
        nn.Linear(5, SIZES[0]), *(nn.Sequential(nn.Linear(*p), nn.Tanh()) for p in pairs), nn.Linear(SIZES[-1], 3)
    )


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.slow(but="True-in_forward-adamw")
def test_sizes_that_end_within_a_page_change_no_bit(optimizer, update, resumable, tmp_path, threaded, monkeypatch):
    options = {"update": update, "precision": "bf16"}
    torch._dynamo.reset()
    expected = training_of(odd(), optimizer, **options)
    expected.step(4)
    monkeypatch.setattr(in_pieces, "PIECE", 1 << 16)
    torch._dynamo.reset()
    with slow_disk(Faults(rate=QUICKER)):
        on_disk = {"disk": tmp_path, "spare": 400_000, "stored_copies": True, "resumable": resumable}
        made = training_of(odd(), optimizer, **on_disk, **options)
        if resumable:
            l2l_compile.resume(made.call)
        made.step(4)
        assert sum(made.stored.plan.placement.copies) == 3
        assert same(expected.tensors(), made.tensors())
