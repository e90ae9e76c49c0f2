"""`batch_scope="per_rank"`: gradients are the mean of those that each rank's eager model has on its own batch."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
import torch.distributed as dist
from steps import assert_same, mean_of_eager, sharded, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.ir import nodes
from l2l_compile.lanes import Lane
from l2l_compile.ranks import collectives
from models import Stack

FLOOR = 1e-10  # in float64


class Odd(nn.Module):
    """Parameters with fewer rows than ranks, without dimensions, frozen, shared; a buffer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Linear(7, 1)
        self.low, self.high = nn.Linear(7, 2, bias=False), nn.Linear(2, 7, bias=False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.table.weight
        for parameter in self.layers.parameters():
            parameter.requires_grad = False
        self.register_buffer("shift", torch.linspace(0, 1, 7))

    def forward(self, tokens):
        x = self.table(tokens) + self.shift
        for layer in self.layers:
            x = x + torch.tanh(layer(x) + self.high(self.low(x)))
        return self.head(x * self.scale + self.one(x)).logsumexp(-1).mean()


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 20, "intermediate_size": 33, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 31}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, tie_word_embeddings=True, use_cache=False, **sizes))


def tokens(rank: int, step: int, count: int) -> torch.Tensor:
    """A rank's own batch; ranks have different numbers of rows."""
    return torch.randint(0, count, (3 + rank, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def numbers(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3 + rank, 5, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def llama_loss(model, batch):
    return model(input_ids=batch, labels=batch).loss


def each_gradient_is_the_mean(rank, world, kind, options):
    build, loss, batch = {
        "stack": (lambda: Stack(3), lambda m, x: m(x).pow(2).mean(), numbers),
        "odd": (Odd, lambda m, x: m(x), lambda r, s: tokens(r, s, 11)),
        "llama": (llama, llama_loss, lambda r, s: tokens(r, s, 31)),
    }[kind]
    eager, model, step = sharded(build().double(), world, **options)
    assert sum(p._local_tensor.numel() for p in model.parameters()) < sum(p.numel() for p in eager.parameters())
    for number in range(2):
        model.zero_grad()
        loss(step, batch(rank, number)).backward()
        expected = mean_of_eager(eager, [lambda m, r=r, number=number: loss(m, batch(r, number)) for r in range(world)])
        assert_same(whole(model, gradients=True), expected, FLOOR)
    (program,) = l2l_compile.programs(step)
    assert len(program.segments) >= 4
    return str(program)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["stack", "odd", "llama"])
@pytest.mark.slow(only=("llama-*", "stack-3"))
def test_each_gradient_is_the_mean_of_the_ranks_eager_gradients(ranks, kind, world):
    first, *others = ranks.run(each_gradient_is_the_mean, kind, {}, world=world)
    collectives = [line.split("comm")[0].strip() for line in first.splitlines() if " comm " in line]
    assert sum("all_gather_weights" in line for line in collectives) and sum(
        "reduce_scatter_gradients" in line for line in collectives
    )
    for other in others:
        assert [line.split("comm")[0].strip() for line in other.splitlines() if " comm " in line] == collectives


def updates_as_eager_does(rank, world):
    eager, model, step = sharded(Stack(3).double(), world)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (eager, model)]
    for number in range(3):
        expected = mean_of_eager(eager, [lambda m, r=r, number=number: m(numbers(r, number)).pow(2).mean() for r in range(world)])
        for name, parameter in eager.named_parameters():
            parameter.grad = expected[name]
        step(numbers(rank, number)).pow(2).mean().backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (eager, model)]
        torch.testing.assert_close(norms[1].full_tensor(), norms[0], rtol=1e-12, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(whole(model), {n: p.detach() for n, p in eager.named_parameters()}, FLOOR)
    with torch.no_grad():
        torch.testing.assert_close(step(numbers(0, 9)), eager(numbers(0, 9)), rtol=1e-9, atol=1e-12)


def test_an_optimizer_steps_on_shards_as_it_does_on_the_whole(ranks):
    ranks.run(updates_as_eager_does)


def one_rank_is_as_no_mesh(rank, world):
    plain, model, step = sharded(Stack(3), world)
    expected = torch.compile(plain, backend="l2l", options={"device": "cpu", "micro_batches": 2, "block_compiler": "eager"})
    for compiled in (step, expected):
        compiled(numbers(0, 0).float()).pow(2).mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad)
    (program,), (other,) = l2l_compile.programs(step), l2l_compile.programs(expected)
    assert str(program) == str(other)
    assert not [n for graph in program.graphs.values() for n in graph.nodes if nodes.lane_of(n) == Lane.COMM]


def test_one_rank_has_the_bits_and_the_program_of_no_mesh(ranks):
    ranks.run(one_rank_is_as_no_mesh, world=1)


def gathers_also_without_compilation(rank, world):
    eager, model, _ = sharded(Stack(2).double(), world)
    model(numbers(rank, 0)).pow(2).mean().backward()
    expected = mean_of_eager(eager, [lambda m, r=r: m(numbers(r, 0)).pow(2).mean() for r in range(world)])
    assert_same(whole(model, gradients=True), expected, FLOOR)


def test_a_sharded_uncompiled_model_has_the_same_gradients(ranks):
    ranks.run(gathers_also_without_compilation)


def an_optimizer_of_before_is_an_error(rank, world):
    model = Odd()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
    with pytest.raises(L2LError, match="SGD holds .* parameters that l2l_compile.shard has replaced .* after l2l_compile.shard"):
        early.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_an_optimizer_made_before_the_division_is_an_error(ranks):
    ranks.run(an_optimizer_of_before_is_an_error)


def another_thread_talks_meanwhile(rank, world):
    """In the group of all ranks, as `torch.distributed.checkpoint.async_save` does."""
    _, _, step = sharded(Odd(), world)
    loss, stop, failed = (lambda m: m(tokens(rank, 0, 11))), threading.Event(), []

    def total_of(value):
        with collectives._giving:  # PyTorch itself hangs where two threads give one at the same time
            work = dist.all_reduce(value, async_op=True)
        work.wait()
        return value

    def talk():
        try:
            for number in itertools.count():
                assert (total_of(torch.ones(number % 7 + 1)) == world).all()
                if total_of(torch.tensor(float(stop.is_set()))).item() == world:
                    return
        except BaseException as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    thread = threading.Thread(target=talk)
    thread.start()
    for _ in range(3):
        loss(step).backward()
    stop.set()
    thread.join()
    assert not failed


def test_threads_of_the_user_may_talk_meanwhile(ranks):
    ranks.run(another_thread_talks_meanwhile)
