"""Steps that are left out: `optimizer.zero_grad()` after a backward, in the place of `optimizer.step()`."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from test_beside_others import assert_same

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.host.hooks import remove_left
from models import Stack, compiled, rows

B, Z, S = "backward", "zero_grad", "step"
LOOPS = {
    "one left out": (1, [B, S, Z, B, Z, B, S, Z, B, S, Z]),
    "the first": (1, [B, Z, Z, B, S, Z]),
    "half a step": (2, [B, B, S, Z, B, Z, B, B, S, Z]),
    "a whole one": (2, [B, B, S, Z, B, B, Z, B, B, S, Z]),
}


def run(calls, step, optimizer):
    for number, call in enumerate(calls):
        if call == B:
            torch.manual_seed(number)
            step(rows(4)).pow(2).mean().backward()
        elif call == S:
            optimizer.step()
        else:
            optimizer.zero_grad()


def pair(update, accumulate, momentum=0.9):
    plain = Stack(2).double()
    streamed = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=momentum) for m in (plain, streamed)]
    step = compiled(streamed, optimizer=optimizers[1], update=update, accumulate=accumulate, compile_update=False)
    return plain, optimizers[0], step, optimizers[1]


@pytest.mark.parametrize("loop", LOOPS)
def test_its_gradients_are_dropped(loop):
    accumulate, calls = LOOPS[loop]
    plain, optimizer, step, streamed = pair("in_forward", accumulate)
    run(calls, plain, optimizer), run(calls, step, streamed)
    assert_same(plain, step)


@pytest.mark.parametrize("update", ["in_forward", "in_backward"])
def test_a_discriminator_drops_gradients_of_the_other_turn(update):
    """The loop of PyTorch's DCGAN tutorial: `netD.zero_grad()` drops what the generator's loss has left."""
    plain, optimizer, step, streamed = pair(update, 2)
    generators = [torch.nn.Linear(5, 5).double() for _ in range(2)]
    generators[1].load_state_dict(generators[0].state_dict())
    for number in range(3):
        for discriminator, own, generator in zip((plain, step), (optimizer, streamed), generators, strict=True):
            torch.manual_seed(number)
            discriminator.zero_grad()
            discriminator(rows(4)).pow(2).mean().backward()
            made = generator(rows(4))
            discriminator(made.detach()).mean().backward()
            own.step()
            generator.zero_grad()
            discriminator(made).mean().neg().backward()
    assert_same(plain, step)
    assert_same(*generators)


@pytest.mark.parametrize("update", ["in_forward", "in_backward"])
def test_two_losses_through_one_forward_are_refused(update):
    _, _, step, _optimizer = pair(update, 1)
    output = step(rows(4))
    output.pow(2).mean().backward(retain_graph=True)
    with pytest.raises(L2LError, match="backward ran twice through one forward.* use update='at_step' for retain_graph=True"):
        output.mean().backward()


def test_a_part_of_the_model_cannot_be_left_out():
    _, _, step, streamed = pair("in_forward", 2)
    run([B], step, streamed)
    with pytest.raises(L2LError, match=r"zero_grad\(\) of a module with 2 of the optimizer's"):
        step.head.zero_grad()
    step.zero_grad()
    run([B, B, S, Z], step, streamed)


def test_in_backward_they_are_until_its_updates_have_begun():
    plain, optimizer, step, streamed = pair("in_backward", 2)
    calls = [B, Z, B, B, S, Z]
    run(calls, plain, optimizer), run(calls, step, streamed)
    assert_same(plain, step)
    run([B, B], step, streamed)
    with pytest.raises(L2LError, match=r"update='in_backward' has made its updates already: call optimizer.step\(\)"):
        streamed.zero_grad()
    run([S, Z], step, streamed)
    run([B, B, S, Z], step, streamed)
    for _ in range(2):
        run([B, B, S, Z], plain, optimizer)
    assert_same(plain, step)


@pytest.mark.parametrize("update, remedy", [("in_forward", "optimizer.zero_grad()"), ("in_backward", "optimizer.step()")])
def test_the_error_of_a_step_without_an_end_says_how_to_go_on(update, remedy):
    *_, step, streamed = pair(update, 1)
    run([B], step, streamed)
    with pytest.raises(L2LError) as raised:
        run([B], step, streamed)
    assert remedy in str(raised.value)
    getattr(streamed, remedy.removeprefix("optimizer.").removesuffix("()"))()
    run([B, S, Z], step, streamed)


@pytest.mark.parametrize("update", ["in_forward", "in_backward"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_forward_forgotten_after_the_backward_of_another(update, accumulate):
    plain, optimizer, step, streamed = pair(update, accumulate)
    for module, own in ((plain, optimizer), (step, streamed)):
        for _ in range(2):
            torch.manual_seed(0)
            for _ in range(accumulate):
                one, other = module(rows(4)), module(rows(4))
                one.pow(2).mean().backward()
                del one, other
            own.step()
            own.zero_grad()
    assert_same(plain, step)


def test_the_optimizer_is_left_as_it_was():
    model = Stack(1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(model, optimizer=optimizer, update="in_forward")
    run([B, S, Z], step, optimizer)
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 0.1
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    l2l_compile.synchronize(step)  # no work of the host lane is under way
    optimizer.zero_grad(set_to_none=False)
    assert not model.embed.weight.grad.any()
    del step
    torch._dynamo.reset()
    gc.collect()
    remove_left()  # as the next forward of any compiled model does
    assert "zero_grad" not in vars(optimizer)

    alive = weakref.ref(optimizer)
    step = compiled(model, optimizer=optimizer, update="in_forward")
    run([B, S, Z], step, optimizer)
    l2l_compile.synchronize(step)
    del optimizer, step, model
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


def test_a_step_that_has_updated_is_left_out_by_a_checkpoint():
    """A backward, and no step: interrupted, say. What is loaded replaces its updates."""
    plain, optimizer, step, streamed = pair("in_backward", 1)
    saved = copy.deepcopy((plain.state_dict(), optimizer.state_dict()))
    run([B], step, streamed)
    with pytest.raises(L2LError, match="load a checkpoint into the optimizer"):
        streamed.zero_grad()
    step.load_state_dict({f"_orig_mod.{name}": value for name, value in saved[0].items()})
    streamed.load_state_dict(saved[1])
    run([Z, B, S, Z, B, S], plain, optimizer), run([Z, B, S, Z, B, S], step, streamed)
    assert_same(plain, step)
