"""A compiled model inside of `torch.utils.checkpoint` and other hooks on what autograd saves: eager's under the same wrapping."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import l2l_compile
from l2l_compile.testing import Pair
from models import WIDTH, Broken, Layer, Stack, assert_parity, assert_same_state, compiled, pair_of, rows


class Checkpointed(nn.Module):
    """An eager model around compiled parts, each under a checkpoint of its own."""

    def __init__(self, parts, reentrant, **arguments):
        super().__init__()
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.parts = nn.ModuleList(parts)
        self.calls = list(self.parts)
        self.arguments = {"use_reentrant": reentrant, **arguments}

    def forward(self, x):
        x = torch.tanh(self.embed(x))
        for part in self.calls:
            x = checkpoint(part, x, **self.arguments)
        return self.head(x)


def middle(**layer):
    return nn.Sequential(*(Layer(**layer) for _ in range(2)))


def assert_steps(pair, x, *, wrapped=lambda call: call, around=contextlib.nullcontext):
    """Steps of `wrapped(call)` whose forward runs in the context that `around` makes. Gradients accumulate, that of the input does not."""

    def two_steps(call, x):
        outputs, gradients = [], []
        for _ in range(2):
            with around():
                outputs.append(wrapped(call)(x))
            outputs[-1].pow(2).mean().backward()
            gradients.append(x.grad)
            x.grad = None
        return outputs, gradients

    pair.run(two_steps, x.requires_grad_()).check()


def under_a_checkpoint(**how):
    return lambda call: lambda x: checkpoint(call, x, **how)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_compiled_model_under_a_checkpoint(reentrant, early_stop):
    with set_checkpoint_early_stop(early_stop):
        assert_steps(pair_of(Stack(3).double()), rows(6), wrapped=under_a_checkpoint(use_reentrant=reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_with_a_graph_break_under_a_checkpoint(reentrant):
    assert_steps(pair_of(Broken().double()), rows(6), wrapped=under_a_checkpoint(use_reentrant=reentrant))


@pytest.mark.slow
def test_under_a_checkpoint_with_inductor():
    pair = pair_of(Stack(3).double(), block_compiler="inductor")
    assert_steps(pair, rows(6), wrapped=under_a_checkpoint(use_reentrant=False))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_parts_of_an_eager_model_under_checkpoints_of_their_own(reentrant, shared):
    parts = [middle()] if shared else [middle() for _ in range(3)]
    model = Checkpointed(parts, reentrant).double()
    model.calls = list(model.parts) * (3 if shared else 1)
    reference = copy.deepcopy(model)
    reference.calls = list(reference.parts) * (3 if shared else 1)
    streamed = [compiled(part) for part in model.parts]
    model.calls = streamed * (3 if shared else 1)
    assert_steps(Pair(model, reference, model, tolerance=1e-10), rows(6))


@pytest.mark.parametrize("reentrant", [True, False])
def test_masks_of_the_recompute_are_those_of_forward(reentrant):
    """Under a checkpoint, a seed gives the output and gradients that it gives without one."""
    model = Stack(3, dropout=0.4).double()
    step, x = compiled(model), rows(6).requires_grad_()
    found = []
    for call in (step, lambda x: checkpoint(step, x, use_reentrant=reentrant)):
        model.zero_grad()
        torch.manual_seed(7)
        output = call(x)
        output.pow(2).mean().backward()
        found.append([output.detach(), *(p.grad for p in model.parameters()), torch.rand(())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@contextlib.contextmanager
def doubled():
    """Hooks that hand on a copy of what is saved."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        yield


@pytest.mark.parametrize("around", [torch.autograd.graph.save_on_cpu, doubled])
def test_other_hooks_on_what_is_saved(around):
    assert_steps(pair_of(Stack(3).double()), rows(6), around=around)


class Masked(Stack):
    """Its graph is rewritten when it is compiled, by operations on stand-ins that record gradients."""

    def forward(self, x):
        y = super().forward(x)
        y[y > 0.5] = y.detach().amax()
        return y


@pytest.mark.parametrize("kind", [Stack, Masked])
def test_hooks_see_the_same_tensors_in_every_call(kind):
    """The first call compiles, and traces its blocks with gradients: none of that is the user's."""
    seen = []

    def pack(tensor):
        seen[-1].append((tensor.shape, type(tensor)))
        return tensor

    step = compiled(kind(3).double())
    for _ in range(2):
        seen.append([])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            step(rows(6)).sum().backward()
    assert seen[0] == seen[1]


class Trained:
    """A model with an optimizer, some steps of which go through a checkpoint."""

    def __init__(self, model, **options):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.call = compiled(model, optimizer=self.optimizer, **options) if options else model

    def step(self, x, reentrant):
        checkpoint(self.call, x, use_reentrant=reentrant).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("update", ["in_backward", "in_forward", "at_step"])
def test_a_forward_that_runs_again_is_no_step_of_its_own(update, reentrant, early_stop):
    """The recompute is a use of the parameters that no backward follows: updates do not wait for it."""
    eager = Trained(Stack(3).double())
    ours = Trained(copy.deepcopy(eager.model), update=update, compile_update=False)
    gc.disable()  # a use must be gone when its forward is, not when somebody collects
    try:
        with set_checkpoint_early_stop(early_stop):
            for _ in range(3):
                x = rows(6).requires_grad_()
                ours.step(x, reentrant)
                eager.step(x, reentrant)
    finally:
        gc.enable()
    l2l_compile.synchronize(ours.call)
    assert_same_state(ours.model, eager.model)
    assert l2l_compile.stats(ours.call).gradient_norm > 0 and l2l_compile.stats(ours.call).pushed_bytes > 0


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
def test_one_model_under_two_checkpoints_in_a_step(update):
    eager = Trained(nn.Sequential(*(Layer() for _ in range(2))).double())
    ours = Trained(copy.deepcopy(eager.model), update=update, compile_update=False)
    for _ in range(3):
        x = rows(6, WIDTH)
        for trained in (ours, eager):
            y = checkpoint(trained.call, x, use_reentrant=False)
            checkpoint(trained.call, y, use_reentrant=False).pow(2).mean().backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
    l2l_compile.synchronize(ours.call)
    assert_same_state(ours.model, eager.model)


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
def test_a_forward_whose_output_dies_is_no_step(update):
    eager = Trained(Stack(3).double())
    ours = Trained(copy.deepcopy(eager.model), update=update, compile_update=False)
    for _ in range(2):
        x = rows(6).requires_grad_()
        checkpoint(ours.call, x, use_reentrant=False)
        ours.step(x, False)
        eager.step(x, False)
    l2l_compile.synchronize(ours.call)
    assert_same_state(ours.model, eager.model)


def test_gradients_in_16_bits_survive_an_earlier_recompute():
    """With `at_step`, a wire may lie where gradients go later: the recompute casts it anew while gradients of another part are there."""
    torch.manual_seed(0)
    part = nn.Sequential(*(Layer() for _ in range(2)))
    reference, x = copy.deepcopy(part), rows(6, WIDTH, dtype=torch.float32)
    step, plain = compiled(part, precision="bf16"), compiled(reference, precision="bf16")
    checkpoint(step, checkpoint(step, x, use_reentrant=False), use_reentrant=False).pow(2).mean().backward()
    plain(plain(x)).pow(2).mean().backward()
    for (name, a), (_, e) in zip(part.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(a.grad, e.grad), name


def test_a_checkpoint_inside_of_the_model_and_around_it():
    class Inside(Stack):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Inside(3).double()
        assert_parity(copy.deepcopy(model), rows(6))
        assert_steps(pair_of(model), rows(6), wrapped=under_a_checkpoint(use_reentrant=False))
