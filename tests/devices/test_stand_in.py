"""Programs on a device whose tensors are of another type than the host's: nothing is made, read or drawn on the wrong side."""

from __future__ import annotations

import pytest
import torch
from test_device_of_new_tensors import MAKERS, Maker
from test_device_of_new_tensors import WIDTH as WIDTH_OF_MAKER
from torch import nn

import l2l_compile
from l2l_compile import CheckError
from l2l_compile.testing import training_equivalent
from models import WIDTH, Attention, EncoderDecoder, Layer, Stack, TwoHeads, assert_parity, compiled, rows
from stand_in import DeviceTensor, StandIn, generators
from test_check import centre
from test_huggingface import build


@pytest.mark.parametrize(
    ("make", "shape", "options"),
    [
        (lambda: Stack(4), (5,), {"prefetch": 2}),
        (lambda: Stack(3), (5,), {"prefetch": 0, "stash": "device"}),
        (lambda: nn.Sequential(Attention(), Attention()), (4, 8), {}),
        (lambda: EncoderDecoder(2), (4, 8), {}),
        (TwoHeads, (5,), {}),
    ],
    ids=["stack", "stashes on the device", "attention", "encoder and decoder", "several outputs"],
)
def test_parity(stand_in, make, shape, options):
    step = assert_parity(make().double(), rows(6, *shape), rows(7, *shape), device=stand_in, **options)
    device = l2l_compile.session.session_of(step).device
    assert isinstance(device, StandIn) and device.ledger.held == 0


STACKS = {
    "llama": ["model.layers"],
    "gpt2": ["transformer.h"],
    "bert": ["bert.encoder.layer"],
    "t5": ["encoder.block", "decoder.block"],
}


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.slow(but="llama")
def test_parity_of_hugging_face_models(stand_in, name):
    model, inputs = build(name)
    for stack in STACKS[name]:
        del model.get_submodule(stack)[2:]
    assert_parity(model, {key: value[:4] for key, value in inputs.items()}, device=stand_in, micro_batches=2)


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
def test_overlapped_updates(stand_in, update):
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
    expected, found = model(x), []
    for device in ("cpu", stand_in):
        model.zero_grad()
        output = compiled(model, device=device, precision="bf16")(x)
        output.sum().backward()
        found.append([output.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))  # narrowed in the same places
    torch.testing.assert_close(found[1][0], expected, rtol=0.05, atol=0.05)
    assert all(t.isfinite().all() for t in found[1])


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "random"])
def test_tensors_that_a_model_makes(stand_in, name):
    assert_parity(Maker(MAKERS[name]).double(), rows(6, 4, WIDTH_OF_MAKER), device=stand_in)


# ---- random numbers --------------------------------------------------------------------------------------------------


def test_masks_come_again_in_backward(stand_in):
    """With a dropout of one half before a sum, a gradient is 0 or 2, as what forward has added."""

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return nn.functional.dropout(x, 0.5)

    model, x = Dropped().double(), rows(6, WIDTH).requires_grad_()
    output = compiled(model, device=stand_in)(x)
    output.sum().backward()
    kept = 2.0 * (output != 0).double()
    assert 0 < kept.mean() < 2
    weights = [layer.weight for layer in model.layers]
    torch.testing.assert_close(x.grad, kept @ weights[2] @ weights[1] @ weights[0])


RANDOM = {
    "dropout": lambda model, x: nn.functional.dropout(x, 0.5),
    "an operation that draws by itself": lambda model, x: x + torch.poisson(torch.ones_like(x)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_follow_the_seed_and_move_no_generator(stand_in, name):
    model, x, found = Maker(RANDOM[name]).double(), rows(6, WIDTH_OF_MAKER), []
    step, before = compiled(model, device=stand_in), generators.default.get_state()
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        generators.default.set_state(before)
        model.zero_grad()
        output = step(x)
        output.sum().backward()
        found.append([output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        assert torch.equal(generators.default.get_state(), before)
    assert all(map(torch.equal, found[0], found[1])) and not torch.equal(found[0][0], found[2][0])


# ---- the device catches what is wrong --------------------------------------------------------------------------------


def test_a_tensor_of_the_host_in_a_block_is_an_error(stand_in, monkeypatch):
    monkeypatch.setattr(StandIn, "upload", lambda self, tensor: tensor.detach().clone())
    with pytest.raises(RuntimeError, match="is given a tensor of cpu beside one of standin") as caught:
        compiled(Stack(3).double(), device=stand_in)(rows(6))
    assert any("in segment 'embed', forward of micro-batch 1" in note for note in caught.value.__notes__)


def test_a_gradient_of_the_host_in_a_block_is_an_error(stand_in, monkeypatch):
    step = compiled(Stack(3).double(), device=stand_in)
    output = step(rows(6))
    monkeypatch.setattr(StandIn, "upload", lambda self, tensor: tensor.detach().clone())
    with pytest.raises(RuntimeError, match="is given a tensor of cpu beside one of standin"):
        output.sum().backward()


def test_a_generator_of_the_host_is_an_error(stand_in, monkeypatch):
    monkeypatch.setattr(StandIn, "generator", lambda self, seed: torch.Generator().manual_seed(seed))
    monkeypatch.setattr(generators, "_seeds", set())
    with pytest.raises(RuntimeError, match="a generator of the host is given to an operation of standin"):
        compiled(Stack(3, dropout=0.5).double(), device=stand_in)(rows(6))


def test_copies_alone_cross_from_one_device_to_the_other(stand_in):
    there, here = torch.ones(3, device=stand_in), torch.full((3,), 2.0)
    assert isinstance(there, DeviceTensor) and there.device.type == stand_in
    assert torch.equal((there + here.to(there.device)).cpu(), torch.full((3,), 3.0))
    assert torch.equal((there * torch.tensor(2.0)).cpu(), here)  # a number of the host may meet a tensor, as on a GPU
    for mixed in (lambda: there + here, lambda: here.add_(there), lambda: torch.cat([there, here])):
        with pytest.raises(RuntimeError, match="beside one of standin"):
            mixed()


def test_check_names_the_operation_that_mixes_rows(stand_in):
    """It is looked for on the host, with what the device holds."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = centre(layer(x) + torch.arange(WIDTH) * 1.0)
            return x

    with pytest.raises(CheckError, match=r"segment 'layers.0'.*l2l_check.centre.default mixes the rows"):
        compiled(Mixing().double(), check=True, device=stand_in)(rows(6, WIDTH))


def test_check_of_random_draws(stand_in):
    step = compiled(Stack(2, dropout=0.5).double(), check=True, device=stand_in)
    step(rows(6)).sum().backward()
