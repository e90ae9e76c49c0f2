"""Adapters of PEFT other than LoRA: captured as one program, with the gradients of the plain model."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import l2l_compile
from models import compiled

peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")

LAYERS = {"target_modules": ["up", "down"]}
METHODS = {
    "lora": lambda: peft.LoraConfig(**LAYERS, r=2),
    "rslora": lambda: peft.LoraConfig(**LAYERS, r=2, use_rslora=True),
    "dora": lambda: peft.LoraConfig(**LAYERS, r=2, use_dora=True),
    "ia3": lambda: peft.IA3Config(**LAYERS, feedforward_modules=["down"]),
    "vera": lambda: peft.VeraConfig(**LAYERS, r=2),
    "oft": lambda: peft.OFTConfig(**LAYERS, oft_block_size=4),
    "hra": lambda: peft.HRAConfig(**LAYERS, r=2),
    "loha": lambda: peft.LoHaConfig(**LAYERS, r=2),
    "lokr": lambda: peft.LoKrConfig(**LAYERS, r=2),
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def adapted(method):
    model = peft.get_peft_model(Layers(), METHODS[method]())
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow(but=("dora", "vera", "lokr"))
def test_a_method_is_one_program_with_the_gradients_of_eager(method):
    model, x = adapted(method), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    if method in ("loha", "lokr"):  # as docs/loops.md says
        for module in model.modules():
            if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
                module.training = False
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*backend 'l2l'.*")
        step = compiled(model, block_compiler="eager", micro_batches=1)
        step(x).pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    (program,) = l2l_compile.programs(step)
    assert len(program.segments) >= 3
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
