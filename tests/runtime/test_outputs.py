"""What a model returns: copied to the host micro-batch by micro-batch, or not made at all."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import l2l_compile
from models import Broken, Stack, TwoHeads, assert_parity, compiled, forward_alone, pair_of, rows


class Beginning(nn.Module):
    """Makes a cache, as libraries do: new entries behind an empty tensor."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        made = []
        for layer in self.layers:
            x = layer(x)
            made.append(torch.cat([torch.tensor([]), x.unflatten(-1, (2, 4)).transpose(1, 2)], -2))
        return made


@pytest.mark.slow
def test_compiled_blocks_return_the_strides_of_eager():
    """Inductor takes those of the other operand of `cat`."""
    model, x = Beginning(), torch.rand(3, 5, 8)
    step = torch.compile(model, backend="l2l", options={"device": "cpu", "block_compiler": "inductor"})
    with torch.no_grad():
        assert [t.stride() for t in step(x)] == [t.stride() for t in model(x)]


class Language(nn.Module):
    """Scores over a vocabulary next to their loss; the scores alone without targets."""

    def __init__(self, vocabulary: int = 50, depth: int = 3, width: int = 8):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Stack(1, width).layers[0] for _ in range(depth)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, labels=None):
        x = self.table(ids)
        states = [x]
        for layer in self.layers:
            states.append(x := layer(x))
        scores = self.head(x)
        if labels is None:
            return {"scores": scores}
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores, "states": states}


def ids(batch: int, tokens: int = 7, vocabulary: int = 50) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, tokens))


def loss_alone(call, *inputs):
    loss = call(*inputs)["loss"]
    loss.backward()
    return loss


def test_only_the_loss_is_made():
    pair, x = pair_of(Language().double(), outputs="loss", tolerance=1e-12), ids(6)
    pair.run(loss_alone, x, x).check()
    found = pair.compiled(x, x)
    assert found["scores"].is_meta and found["scores"].shape == (6, 7, 50) and found["scores"].dtype is torch.float64
    assert all(s.is_meta and s.shape == (6, 7, 8) for s in found["states"])
    assert pair.compiled(ids(4), ids(4))["scores"].shape == (4, 7, 50)  # the shape follows the batch


def test_without_a_loss_everything_is_made():
    """Evaluation without labels, and what one program hands to the next across a graph break."""
    pair_of(Language().double(), outputs="loss", tolerance=1e-12).run(forward_alone, ids(6)).check()
    assert_parity(Broken().double(), rows(6), outputs="loss")


class BrokenAfterALoss(Broken):
    """Beside the states, the first graph makes a number with a gradient."""

    def forward(self, x):
        y = self.first(x)
        auxiliary = y.pow(2).mean()
        torch._dynamo.graph_break()
        z = self.second(torch.cat([y, x[:, :2]], 1))
        return {"loss": z.pow(2).sum() + auxiliary, "states": z}


def test_what_the_next_graph_reads_is_made():
    pair, x = pair_of(BrokenAfterALoss().double(), outputs="loss"), rows(6)
    pair.run(loss_alone, x).check()
    assert pair.compiled(x)["states"].is_meta


def test_explain_knows_that_outputs_are_not_made():
    x = ids(6)
    report = l2l_compile.explain(Language(), {"micro_batches": 3, "device": "cpu", "outputs": "loss"})(x, x)
    assert [o.shape for o in report.outputs] == [()]


def peak(model: nn.Module, x: torch.Tensor, **options) -> int:
    step = compiled(model, **options)
    step(x, x)["loss"].backward()
    return l2l_compile.stats(step).peak_device_bytes


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_outputs_leave_the_device_micro_batch_by_micro_batch(micro_batches):
    """Scores of two micro-batches at most are there next to what the loss alone needs; the numbers are eager's."""
    vocabulary = 5000
    model, x = Language(vocabulary).double(), ids(8, 7, vocabulary)
    pair_of(model, micro_batches=micro_batches, tolerance=1e-12).run(forward_alone, x, x).check()
    more = peak(model, x, micro_batches=micro_batches) - peak(model, x, micro_batches=micro_batches, outputs="loss")
    assert more <= 2 * x.numel() * vocabulary * 8 / micro_batches + 20_000


def test_every_device_sends_outputs_in_order(threaded):
    """Scores, a result without gradient, hidden states that the next layer reads as well."""
    for _ in range(3):
        x = ids(6)
        assert_parity(Language().double(), (x, x), micro_batches=3, device="cuda" if torch.cuda.is_available() else "cpu")
        assert_parity(TwoHeads().double(), rows(7), micro_batches=3)


def peak_with_the_loss_outside(model: nn.Module, x: torch.Tensor, **options) -> int:
    step = compiled(model, **options)
    F.cross_entropy(step(x)["scores"].flatten(0, 1), x.flatten()).backward()
    return l2l_compile.stats(step).peak_device_bytes


def test_gradients_of_outputs_are_fetched_by_micro_batch():
    """A loss outside of the model: neither the scores nor their gradient are ever on the device for all rows."""
    vocabulary = 8000
    model = Language(vocabulary, depth=2)
    few, many = ids(4, 16, vocabulary), ids(32, 16, vocabulary)
    assert peak_with_the_loss_outside(model, many, micro_batches=16) <= 1.2 * peak_with_the_loss_outside(
        model, few, micro_batches=2
    )


def test_every_device_brings_gradients_in_order(threaded):
    """One result for the user alone and one that the next layers read, batches that micro-batches do not divide, rows in dimension 1."""

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = Stack(3), nn.Linear(8, 5)

        def forward(self, x):
            states = self.body.layers[0](x)
            return {"scores": self.head(states).transpose(0, 1), "states": states, "ends": self.body.layers[1](states)}

    def step(call, x):
        made = call(x)
        sum((value * torch.arange(value.numel()).view(value.shape)).sum() for value in made.values()).backward()
        return made

    model = Several().double()
    for count in (7, 2, 1):
        pair_of(model).run(step, rows(count, 4, 8)).check()


def test_a_batch_of_one_row_makes_no_scores_either():
    """A size of 1 is no symbol for Dynamo; a loss of shape [1] stays."""

    class Numbers(Language):
        def forward(self, x, labels):
            made = super().forward(x, labels)
            return {**made, "number": made["loss"].reshape(1)}

    pair = pair_of(Numbers().double(), outputs="loss", tolerance=1e-12)
    x = ids(1)
    made = pair.compiled(x, x)
    assert made["scores"].is_meta and made["scores"].shape == Numbers().double()(x, x)["scores"].shape
    assert torch.equal(made["number"], made["loss"].reshape(1)) and not made["number"].is_meta
    pair_of(Language().double(), outputs="loss", tolerance=1e-12).run(forward_alone, x, x).check()


def test_the_head_does_not_grow_with_the_batch():
    """Sixteen micro-batches need little more of the device than one of the same size."""
    vocabulary = 8000
    model = Language(vocabulary, depth=2)
    one, sixteen = ids(2, 16, vocabulary), ids(32, 16, vocabulary)
    assert peak(model, sixteen, micro_batches=16, outputs="loss") <= 1.2 * peak(model, one, outputs="loss", micro_batches=1)


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1)

    def forward(self, x):
        return self.head(self.inside(x).tanh())


@pytest.mark.parametrize("block_compiler", ["eager", "inductor"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.slow(only="*-inductor")
def test_memory_in_another_order_reaches_blocks_in_their_order(block_compiler, micro_batches):
    """Rows of a larger batch in channels_last, and a loss whose gradient has its channels last."""

    def step(call, x, labels):
        F.cross_entropy(call(x).permute(0, 2, 3, 1).reshape(-1, 5), labels).backward()

    pair = pair_of(Picture(), micro_batches=micro_batches, block_compiler=block_compiler, tolerance=1e-5)
    x, labels = torch.randn(9, 3, 6, 6).contiguous(memory_format=torch.channels_last)[:7], torch.randint(5, (7 * 36,))
    pair.run(step, x, labels).check()


def test_views_by_strides_of_a_transposed_part_of_a_value():
    class Windows(Stack):
        def forward(self, x):
            x = x.contiguous()
            return super().forward(x.as_strided((x.shape[0], 6, 5), (35, 5, 1)))

    assert_parity(Windows(2).double(), rows(9, 6, 5)[:7].transpose(0, 1), micro_batches=1)


class Images(nn.Module):
    """Convolutions, whose results have the memory layout of their input, and results that are transposed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        made = self.second(torch.relu(self.first(x)))
        return made, (x * 2).transpose(1, 2), made.sum()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_outputs_have_the_strides_of_eager(micro_batches):
    eager = Images().double().to(memory_format=torch.channels_last)
    streamed = copy.deepcopy(eager)
    step = compiled(streamed, micro_batches=micro_batches, block_compiler="eager")
    for rows_of_batch in (4, 6):
        x = torch.randn(rows_of_batch, 3, 6, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
        results = [model(x) for model in (eager, step)]
        for ours, theirs in zip(results[1], results[0], strict=True):
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs)
        for result in results:
            (result[0] * result[0]).sum().backward()
    for p, q in zip(eager.parameters(), streamed.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
