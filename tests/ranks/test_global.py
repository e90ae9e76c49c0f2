"""`batch_scope="global"`: the numbers of eager on the batch of all ranks together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from steps import OPTIONS, assert_same, sharded, whole
from test_mean import FLOOR, Odd, llama, numbers, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from models import Stack


class Convolutions(nn.Module):
    """BatchNorm in training, twice a block. A bias in front of it would have a gradient of zero."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3, 3, 3, padding=1, bias=False),
                nn.BatchNorm2d(3),
                nn.ReLU(),
                nn.Conv2d(3, 3, 3, padding=1, bias=False),
                nn.BatchNorm2d(3),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3))).pow(2).mean()


class Contrastive(nn.Module):
    """Two towers, and a loss over all pairs of rows with a learnt temperature."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.scale = Stack(2), Stack(2), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        a, b = F.normalize(self.left(x), dim=-1), F.normalize(self.right(x.flip(-1)), dim=-1)
        scores = a @ b.T * self.scale.exp()
        return F.cross_entropy(scores, torch.arange(len(x))) + F.cross_entropy(scores.T, torch.arange(len(x)))


class Bias(nn.Module):
    """A value without rows that a layer makes from weights and all layers read; a sum over rows that later rows read."""

    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(5, 5), nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x):
        bias = self.table(torch.arange(5)).cumsum(0)
        for layer in self.layers:
            x = x + torch.tanh(layer(x) @ bias)
        return (x * (x.pow(2).mean() + bias.sum())).sum()


class Centered(nn.Module):
    """Statistics of the rows that rows read again, in 1D, before each layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.shift = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x - x.mean(0) + self.shift)) * x.std()
        return x.pow(2).sum() / len(x), x


def mixture():
    """Experts with an auxiliary loss, which counts the tokens of each expert over the batch."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 31}
    config = MixtralConfig(
        **sizes, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, use_cache=False
    )
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")  # the default knows no float64
    return model


def images(rank, step):
    return torch.randn(5 + rank, 3, 4, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def masked(rank, step):
    """Targets of which another part is left out on each rank."""
    ids = tokens(rank, step, 31)
    labels = ids.clone()
    labels[:, : 1 + rank] = -100
    return {"input_ids": ids, "labels": labels}


def loss_of(out):
    return out.loss if hasattr(out, "loss") else out[0] if isinstance(out, tuple) else out


MODELS = {
    "convolutions": (Convolutions, images),
    "contrastive": (Contrastive, numbers),
    "bias": (Bias, numbers),
    "centered": (Centered, numbers),
    "odd": (Odd, lambda r, s: tokens(r, s, 11)),
    "llama": (llama, masked),
    "mixture": (mixture, masked),
}


def join(batches):
    if isinstance(batches[0], dict):
        return {key: torch.cat([b[key] for b in batches]) for key in batches[0]}
    return torch.cat(batches)


def call(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(batch)


def equals_eager_on_all_rows(rank, world, kind, options):
    build, batch = MODELS[kind]
    torch.manual_seed(0)
    eager, model, step = sharded(build().double(), world, batch_scope="global", **options)
    for number in range(2):
        model.zero_grad()
        eager.zero_grad()
        ours = loss_of(call(step, batch(rank, number)))
        theirs = loss_of(call(eager, join([batch(r, number) for r in range(world)])))
        torch.testing.assert_close(ours, theirs, rtol=FLOOR, atol=1e-14)
        ours.backward()
        theirs.backward()
        expected = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
        assert_same(whole(model, gradients=True), expected, FLOOR)
    for (name, ours), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=FLOOR, atol=1e-14, msg=name)
    (program,) = l2l_compile.programs(step)
    return str(program)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.slow(only=("convolutions", "llama", "mixture"))
def test_gradients_are_those_of_eager_on_the_rows_of_all_ranks(ranks, kind):
    ranks.run(equals_eager_on_all_rows, kind, {}, world=3 if kind in ("bias", "centered") else 2)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.slow(but=("bias", "odd", "contrastive"))
def test_ranks_keep_what_their_forwards_compute(ranks, kind):
    ranks.run(equals_eager_on_all_rows, kind, {"keep": 3000, "keep_on_host": "1MB"})


def test_one_micro_batch_a_rank(ranks):
    ranks.run(equals_eager_on_all_rows, "convolutions", {"micro_batches": 1})


def ranks_are_one_more_level_of_micro_batches(rank, world):
    """Dropout is on, and ranks have equal numbers of rows; the loss is a sum, outside of the model."""
    torch.manual_seed(0)
    batch = torch.randn(4 * world, 5, dtype=torch.float64)
    plain, model, step = sharded(Stack(3, dropout=0.5).double(), world, batch_scope="global")
    alone = torch.compile(plain, backend="l2l", options={**OPTIONS, "micro_batches": 2 * world})
    for compiled, rows in ((step, batch[4 * rank : 4 * rank + 4]), (alone, batch)):
        torch.manual_seed(1)
        compiled(rows).pow(2).sum().backward()
    assert_same(whole(model, gradients=True), {n: p.grad for n, p in plain.named_parameters()}, 1e-12)
    with torch.no_grad():
        assert (model(rows) - step(rows)).abs().max() > 0.01  # there are masks


def test_dropout_has_the_masks_of_a_single_process(ranks):
    ranks.run(ranks_are_one_more_level_of_micro_batches)


def updates_on_all_rows(rank, world, update):
    """Gradients that are the same on all ranks, parts and shards, through each way to update."""
    torch.manual_seed(0)
    model = Convolutions()
    l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {**OPTIONS, "batch_scope": "global", "optimizer": optimizer, "update": update, "compile_update": False}
    step = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    for number in range(3):
        step(images(rank, number).float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    l2l_compile.synchronize(step)
    return {name: p.tolist() for name, p in whole(model).items()}


@pytest.mark.slow
def test_all_ways_to_update_are_bit_equal_on_all_rows(ranks):
    expected, _ = ranks.run(updates_on_all_rows, "at_step")
    for update in ("in_backward", "in_forward"):
        assert ranks.run(updates_on_all_rows, update) == [expected, expected]
