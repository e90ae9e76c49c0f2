"""A step that fails leaves parameters, buffers and device memory as they were, and the next one works."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import l2l_compile.session
from l2l_compile import L2LError, programs
from models import WIDTH, Layer, Stack, assert_parity, compiled, pair_of, rows

POINTWISE = (torch.Tag.pointwise,)  # so that the layers are known to be row-wise, and run micro-batch by micro-batch
fail: dict = {"error": None, "at": 0, "calls": 0, "in": "forward"}

LIBRARY = torch.library.Library("l2l_test_failures", "DEF")
LIBRARY.define("first(Tensor x) -> Tensor")
LIBRARY.impl("first", lambda x: x[0].clone(), "CPU")


@torch.library.register_fake("l2l_test_failures::first")
def _(x):
    if type(x.shape[0]) is int and x.shape[0] not in (2, 3, 6):
        raise NotImplementedError(f"a batch of {x.shape[0]}")
    return x.new_empty(x.shape[1:])


@torch.library.custom_op("l2l_tests::fragile", mutates_args=(), tags=POINTWISE)
def fragile(x: torch.Tensor) -> torch.Tensor:
    _count("forward")
    return x.clone()


@torch.library.custom_op("l2l_tests::fragile_gradient", mutates_args=(), tags=POINTWISE)
def fragile_gradient(g: torch.Tensor) -> torch.Tensor:
    _count("backward")
    return g.clone()


def _count(where: str) -> None:
    if fail["error"] is not None and fail["in"] == where:
        fail["calls"] += 1
        if fail["calls"] == fail["at"]:
            error, fail["error"] = fail["error"], None
            raise error


fragile.register_fake(torch.empty_like)
fragile_gradient.register_fake(torch.empty_like)
fragile.register_autograd(lambda ctx, g: fragile_gradient(g))


class Fragile(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return super().forward(fragile(x))


class WithStatistics(nn.Module):
    """Whole-batch statistics before the layers: buffers that change before the failure."""

    def __init__(self):
        super().__init__()
        self.seen, self.body = nn.BatchNorm1d(5), Stack([Fragile() for _ in range(3)])

    def forward(self, x):
        return self.body(self.seen(x))


def arm(where: str, at: int, error: BaseException) -> None:
    fail.update({"error": error, "at": at, "calls": 0, "in": where})


@pytest.mark.parametrize(
    ("device", "stash", "where", "error"),
    [
        ("cpu", "host", "forward", ValueError("boom")),
        ("cpu", "device", "forward", KeyboardInterrupt()),
        ("cpu", "device", "backward", ValueError("boom")),
        ("cpu", "host", "backward", KeyboardInterrupt()),
        ("threaded", "device", "forward", ValueError("boom")),
        ("threaded", "host", "backward", MemoryError()),
    ],
)
def test_failure_in_a_middle_micro_batch(device, error, where, stash, request):
    if device == "threaded":
        request.getfixturevalue("threaded")
    model = WithStatistics().double()
    pair, x = pair_of(model, stash=stash), rows(6)
    step = pair.compiled
    state = copy.deepcopy(model.state_dict())
    arm(where, 5, type(error)(*error.args))  # three micro-batches a layer: the second of the second layer
    with pytest.raises(type(error)) as caught:
        step(x).sum().backward()
    if where == "forward":
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    else:
        assert all(torch.equal(p, state[k]) for k, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    if isinstance(error, Exception):
        assert any("body.layers.1" in note and "micro-batch 2" in note for note in caught.value.__notes__)
    del caught
    ledger = l2l_compile.session.session_of(step).device.ledger
    assert ledger.held == 0
    for buffer, other in zip(model.buffers(), pair.eager.buffers(), strict=True):
        other.copy_(buffer)
    pair.step(x).check()
    assert ledger.held == 0


def test_a_forgotten_forward_without_backward_keeps_nothing():
    step = compiled(Stack().double(), stash="device")
    output = step(rows(6))
    ledger = l2l_compile.session.session_of(step).device.ledger
    assert ledger.held > 0
    del output
    assert ledger.held == 0


@pytest.mark.parametrize("block_compiler", ["eager", "inductor"])
@pytest.mark.slow(only="inductor")
def test_token_out_of_range_is_an_index_error_with_the_segment(block_compiler):
    class Tokens(Stack):
        def __init__(self):
            super().__init__(3)
            self.embed = nn.Embedding(50, 8)

    pair, tokens = pair_of(Tokens().double(), block_compiler=block_compiler), torch.randint(50, (6, 4))
    wrong = tokens.clone()
    wrong[4, 2] = 77
    pair.compiled(tokens)
    with pytest.raises(IndexError) as caught:
        pair.compiled(wrong)
    assert any("'embed'" in note and "micro-batch 3" in note for note in caught.value.__notes__)
    pair.step(tokens).check()


@pytest.mark.parametrize("block_compiler", ["eager", "inductor"])
def test_label_out_of_range_is_an_index_error(block_compiler):
    class Loss(Stack):
        def forward(self, x, labels):
            return nn.functional.cross_entropy(super().forward(x), labels)

    pair, x, labels = pair_of(Loss(3).double(), block_compiler=block_compiler), rows(6), torch.randint(3, (6,))
    pair.compiled(x, labels)
    with pytest.raises(IndexError):
        pair.compiled(x, labels + 9)
    pair.step(x, labels).check()


def test_sparse_gradients_are_refused():
    model = Stack()
    model.embed = nn.Sequential(nn.Embedding(5, 8, sparse=True))
    step = compiled(model)
    with pytest.raises(L2LError, match="sparse gradient.*sparse=False"):
        step(torch.randint(5, (6,))).sum().backward()


class Mapped(nn.Module):
    """A layer whose operation inside of a `torch.vmap` cannot be traced for a batch of another size."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.linear(x)
        return torch.vmap(lambda row: row.tanh() + torch.ops.l2l_test_failures.first(x.detach()))(x)


def test_a_trace_that_fails_inside_of_a_vmap_leaves_none_open():
    model = nn.Sequential(Mapped(), Mapped()).double()
    step = assert_parity(model, rows(6, WIDTH), rows(6, WIDTH))
    (program,) = programs(step)  # Dynamo leaves a function uncompiled where a vmap is open
    assert all("a batch of 6 rows, but not with every number of rows" in block.reason for block in program.blocks)
