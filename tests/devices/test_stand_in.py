"""Programs on a device whose tensors are of another type than the host's: nothing is made, read or drawn on the wrong side."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import l2l_compile
import stand_in as module
from l2l_compile.testing import training_equivalent
from models import Attention, EncoderDecoder, Layer, Stack, TwoHeads, assert_parity, compiled, rows
from stand_in import DeviceTensor, StandIn
from test_device_of_new_tensors import MAKERS, WIDTH, Maker
from test_huggingface import build


@pytest.mark.parametrize(
    ("make", "shape", "options"),
    [
        (lambda: Stack(4), (5,), {"prefetch": 2}),
        (lambda: Stack(3), (5,), {"prefetch": 0, "stash": "device"}),
        (lambda: nn.Sequential(Attention(), Attention()), (4, 8), {}),
        (EncoderDecoder, (4, 8), {}),
        (TwoHeads, (5,), {}),
    ],
    ids=["stack", "stashes on the device", "attention", "encoder and decoder", "several outputs"],
)
def test_parity(stand_in, make, shape, options):
    step = assert_parity(make().double(), rows(6, *shape), rows(7, *shape), device=stand_in, **options)
    device = l2l_compile.session.session_of(step).device
    assert isinstance(device, StandIn) and device.ledger.held == 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_parity_of_hugging_face_models(stand_in, name):
    model, inputs = build(name)
    assert_parity(model, inputs, device=stand_in)


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
def test_updates_behind_the_device(stand_in, update):
    training_equivalent(
        Stack(3).double(),
        [rows(6) for _ in range(3)],
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        updates=(update,),
        options={"micro_batches": 3, "block_compiler": "eager", "device": stand_in},
        loss=lambda outputs: outputs.pow(2).mean(),
    )


def test_sixteen_bits(stand_in):
    model, x = Stack(3), rows(6, dtype=torch.float32)
    expected = model(x)
    found = compiled(model, device=stand_in, precision="bf16")(x)
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "random"])
def test_tensors_that_a_model_makes(stand_in, name):
    assert_parity(Maker(MAKERS[name]).double(), rows(6, 4, WIDTH), device=stand_in)
