"""Random numbers: recompute sees what forward saw, seeds decide, and nothing is drawn in vain."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from l2l_compile.lowering.randomness import draws_random, hoist_draws
from models import Attention, Layer, Stack, compiled, rows


class Noisy(Layer):
    """Draws of several kinds in one layer."""

    def forward(self, x):
        keep = torch.bernoulli(torch.full_like(x, 0.7))
        return super().forward(x) * (1 + 0.1 * torch.randn_like(x)) * keep + 0.1 * torch.rand_like(x) * F.dropout(x, 0.3)


KINDS = {
    "dropout": lambda: Layer(dropout=0.5),
    "attention": lambda: Attention(dropout=0.3),
    "many draws": Noisy,
}


@pytest.mark.parametrize("block_compiler", ["eager", "inductor"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow(but=("*-eager", "many draws-inductor"))
def test_recompute_sees_the_masks_of_forward(kind, block_compiler):
    """Gradients equal finite differences of a forward with the same seed."""
    model, x = Stack([KINDS[kind]() for _ in range(3)]).double(), rows(6, 4, 5)
    step = compiled(model, block_compiler=block_compiler)

    def loss():
        torch.manual_seed(7)
        return step(x).pow(2).sum()

    loss().backward()
    for parameter in (model.embed.weight, model.layers[1].norm.weight, model.layers[2].norm.bias):
        direction = torch.randn_like(parameter)
        slope = []
        for sign in (1, -2):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * 1e-6)
            slope.append(loss().item())
        with torch.no_grad():
            parameter.add_(direction, alpha=1e-6)
        expected = (slope[0] - slope[1]) / 2e-6
        assert (parameter.grad * direction).sum().item() == pytest.approx(expected, rel=1e-6)


def test_same_seed_same_bits_and_another_seed_other_masks():
    model, x = Stack(dropout=0.5).double(), rows(6)
    step = compiled(model)
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        model.zero_grad()
        output = step(x)
        output.sum().backward()
        found.append((output.detach(), model.embed.weight.grad.clone()))
    assert all(map(torch.equal, found[0], found[1]))
    assert not torch.equal(found[0][0], found[2][0])


def test_masks_differ_between_steps_layers_and_micro_batches():
    class Masks(Stack):
        def forward(self, x):
            x, masks = self.embed(x), []
            for layer in self.layers:
                x = layer(x)
                masks.append(F.dropout(torch.ones_like(x), 0.5))
            return self.head(x), torch.stack(masks)

    step, x = compiled(Masks(3)), rows(6, dtype=torch.float32)
    one, two = step(x)[1], step(x)[1]
    assert not torch.equal(one, two)
    assert not torch.equal(one[0], one[1]) and not torch.equal(one[1], one[2])
    assert not torch.equal(one[0, :2], one[0, 2:4])  # rows of two micro-batches


def test_every_draw_of_a_step_has_a_mask_of_its_own():
    class Masks(Layer):
        def forward(self, x):
            one, two = F.dropout(torch.ones_like(x), 0.5), F.dropout(torch.ones_like(x), 0.5)
            return super().forward(x), one, two

    class Model(Stack):
        def forward(self, x):
            x, masks = self.embed(x), []
            for layer in self.layers:
                x, *drawn = layer(x)
                masks += drawn
            return self.head(x), torch.stack(masks)

    masks = compiled(Model([Masks() for _ in range(3)]), micro_batches=3)(rows(6, dtype=torch.float32))[1]
    pieces = masks.unflatten(1, (3, 2)).flatten(0, 1).flatten(1)  # [draws of all layers * micro-batches, elements]
    assert len(pieces) == 18 and len(pieces.unique(dim=0)) == 18


def test_dropout_keeps_the_mean():
    step = compiled(lambda x: F.dropout(x, 0.25))
    kept = step(torch.ones(600, 100))
    assert kept.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert kept.mean().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("kind", ["nothing random", "dropout of zero", "evaluation"])
def test_generator_of_the_user_stays_where_nothing_is_random(kind):
    model = Stack(dropout=0.5 if kind == "evaluation" else 0.0)
    step, x = compiled(model.train(kind != "evaluation")), rows(6, dtype=torch.float32)
    before = torch.get_rng_state()
    step(x).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_step_with_randomness_moves_the_generator_once():
    step, x = compiled(Stack(dropout=0.5)), rows(6, dtype=torch.float32)
    torch.manual_seed(1)
    output = step(x)
    after_forward = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(torch.get_rng_state(), after_forward)  # recompute draws nothing new
    torch.manual_seed(1)
    assert not torch.equal(torch.get_rng_state(), after_forward)


def test_draws_become_operands_in_the_order_of_the_operations():
    def draw(x):
        return torch.rand_like(x) + torch.bernoulli(x) + F.dropout(x, 0.5) + torch.randn(3)

    module = make_fx(draw)(torch.full((3,), 0.5))
    assert draws_random(module.graph)
    draws, remain = hoist_draws(module)
    assert [d.number for d in draws] == [0, 1, 2, 3] and not remain
    assert not draws_random(module.graph)
    generator = lambda: torch.Generator().manual_seed(3)  # noqa: E731
    operands = [d.make(generator()) for d in draws]
    assert all(torch.equal(a, d.make(generator())) for a, d in zip(operands, draws, strict=True))
    x = torch.full((3,), 0.5)
    found = module(x, *operands)
    expected = operands[0] + (operands[1] < x).float() + x * operands[2] * 2 + operands[3]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_draws_may_read_what_was_drawn():
    def draw(x):
        return F.dropout(F.dropout(torch.bernoulli(torch.bernoulli(x)), 0.5), 0.2)

    module = make_fx(draw)(torch.full((3,), 0.5))
    draws, remain = hoist_draws(module)
    assert len(draws) == 4 and not remain and not draws_random(module.graph)
    assert [d.fill for d in draws] == ["uniform_", "uniform_", "bernoulli_", "bernoulli_"]
    below, kept = torch.full((3,), 0.25), torch.tensor([True, True, False])
    torch.testing.assert_close(module(torch.full((3,), 0.5), below, below, kept, kept), 2 * 1.25 * kept)


def test_draw_that_nobody_reads_keeps_the_numbers_of_the_others():
    def draw(x):
        torch.rand_like(x)
        return torch.randn_like(x)

    draws, _ = hoist_draws(make_fx(draw)(torch.ones(3)))
    assert [d.number for d in draws] == [1]
