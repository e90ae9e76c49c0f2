"""A compiled `optimizer.step()`: Dynamo keeps the parameters in the graph, where a write would be lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from l2l_compile import L2LError


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("whole", [False, True], ids=["the step alone", "a training step"])
def test_is_an_error_and_nothing_is_written(optimizer, whole):
    model = nn.Linear(3, 2)
    stepped, before = optimizer(model.parameters(), lr=0.1), [p.detach().clone() for p in model.parameters()]

    def train(x):
        stepped.zero_grad()
        model(x).sum().backward()
        stepped.step()

    model(torch.ones(1, 3)).sum().backward()
    call = torch.compile(train if whole else stepped.step, backend="l2l", options={"block_compiler": "eager"})
    with pytest.raises(L2LError, match="compiled optimizer.step.*Compile the model alone"):
        call(torch.ones(1, 3)) if whole else call()
    assert all(map(torch.equal, before, model.parameters()))
