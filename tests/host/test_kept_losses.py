"""A loop that keeps its losses, with their graphs, keeps nothing else of its steps."""

from __future__ import annotations

import gc

import pytest
import torch

from models import Stack, compiled, rows

LOOPS = [
    {"update": "at_step"},
    {"update": "in_backward"},
    {"update": "in_forward"},
    {"update": "in_forward", "max_grad_norm": 1.0},
    {"update": "in_forward", "delay": 1},
]


def bytes_of_all_tensors() -> int:
    gc.collect()
    tensors = [
        each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu"
    ]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("options", LOOPS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_kept_loss_holds_no_gradients(options):
    model = Stack(3, width=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streamed = compiled(model, optimizer=optimizer, micro_batches=2, **options)
    kept, sizes = [], []
    for _ in range(9):
        loss = streamed(rows(4, dtype=torch.float32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss)
        sizes.append(bytes_of_all_tensors())
    weights = sum(p.nbytes for p in model.parameters())
    assert sizes[8] - sizes[4] < weights  # four more are kept
