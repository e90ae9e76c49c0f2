"""What a host optimizer cannot do right is refused with a sentence, and the next step works."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from test_updates import MODES, data, step_of

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.host.updates.optimizer_hooks import OptimizerHooks
from models import Broken, Stack, TwoHeads, compiled, loss_of


class Coupled(torch.optim.SGD):
    """Divides by the norm over all parameters."""

    def step(self, closure=None):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data -= group["lr"] * p.grad / norm


class Counting(torch.optim.SGD):
    """Counts its steps in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()


class DecaysAll(torch.optim.SGD):
    """Decays parameters without a gradient as well."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
        super().step()


class Remembering(torch.optim.SGD):
    """Counts its steps in an attribute, and steps by that."""

    taken = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.taken += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.taken)


class Wrapping(torch.optim.Optimizer):
    """Hands calls on to another optimizer."""

    def __init__(self, parameters, lr):
        self.inner = torch.optim.SGD(parameters, lr=lr)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step()


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
def test_an_optimizer_that_calls_the_step_of_another_is_refused(update):
    model = Stack(2)
    optimizer = Wrapping(model.parameters(), lr=0.1)
    step = compiled(model, optimizer=optimizer, update=update)
    with pytest.raises(L2LError, match=r"Wrapping holds another optimizer \(SGD\).*Give the option 'optimizer' the SGD"):
        step(torch.randn(6, 5))


def test_an_optimizer_that_couples_parameters_is_refused():
    model = Stack()
    with pytest.raises(L2LError, match="Coupled does not update parameters independently.*at_step"):
        step_of(model, optimizer=Coupled(model.parameters(), lr=0.1))[0](data(1))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (DecaysAll, "DecaysAll changes parameters, or their state, that have no gradient.*at_step"),
        (Remembering, "attribute 'taken'.*at_step"),
    ],
)
@pytest.mark.parametrize("update", MODES)
def test_optimizers_with_another_step_by_layers_are_refused(kind, sentence, update):
    model = Stack()
    with pytest.raises(L2LError, match=sentence):
        step_of(model, update, kind(model.parameters(), lr=0.1))[0](data(1))


@pytest.mark.parametrize("update", MODES)
def test_counts_of_a_group_are_counted_once_a_step(update):
    model = Stack()
    step, optimizer = step_of(model, update, Counting(model.parameters(), lr=0.1))
    for number in range(3):
        step(data(number)).sum().backward()
        optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["count"] == 3


@pytest.mark.parametrize("update", MODES)
def test_steps_of_layers_are_no_steps_of_another_optimizer(update, monkeypatch):
    """They call the step of the base class, which PyTorch has hooked, on the host lane beside the loop."""
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    told = []
    for name in ("before_step_of", "after_step_of"):
        monkeypatch.setattr(OptimizerHooks, name, lambda hooks, optimizer: told.append(optimizer))
    model = Stack()
    step, optimizer = step_of(model, update, Counting(model.parameters(), lr=0.1), compile_update=False)
    for number in range(2):
        step(data(number)).sum().backward()
        optimizer.step()
    l2l_compile.synchronize(step)
    assert told and all(each is optimizer for each in told)


@pytest.mark.parametrize("update", ["at_step", *MODES])
def test_an_optimizer_of_another_model_is_refused(update):
    step = compiled(Stack(), optimizer=torch.optim.SGD(Stack().parameters(), lr=0.1), update=update)
    with pytest.raises(L2LError, match="holds none of the 28 parameters"):
        step(data(1))


@pytest.mark.parametrize("update", MODES)
def test_parameters_without_the_optimizer_keep_their_gradients(update):
    model = TwoHeads()
    *most, last = model.parameters()
    step, _optimizer = step_of(model, update, torch.optim.SGD(most, lr=0.1))
    loss_of(step(data(1))).backward()
    assert last.grad is not None and not any(map(has_gradient, most))


def has_gradient(parameter):
    """Whether a gradient is in its place before anybody reads it there."""
    return torch._C.TensorBase.grad.__get__(parameter) is not None


def test_a_program_without_the_optimizer_keeps_its_gradients():
    model = Broken()
    step, _optimizer = step_of(model, optimizer=torch.optim.SGD(model.second.parameters(), lr=0.1))
    step(data(1)).sum().backward()
    assert all(p.grad is not None for p in model.first.parameters())
    assert not any(map(has_gradient, model.second.parameters()))


def test_an_optimizer_without_a_step_of_its_own_is_refused():
    model = Stack()
    step = compiled(model, optimizer=torch.optim.SparseAdam(model.parameters()), update="in_backward")
    with pytest.raises(L2LError, match="SparseAdam does not support dense gradients.*update='at_step'"):
        step(data(0))


@pytest.mark.parametrize("update", MODES)
def test_an_optimizer_that_has_state_in_float64_begins(update):
    """That of a run that goes on, for example."""
    model = Stack().double()
    optimizer = torch.optim.AdamW(model.parameters())
    model(data(1).double()).sum().backward()
    optimizer.step()
    step, _optimizer = step_of(model, update, optimizer)
    step(data(1).double()).sum().backward()


class Compiling(torch.optim.SGD):
    """Fails where anybody watches, as a step that calls `torch.compile` does."""

    def step(self, closure=None):
        if torch.overrides._get_current_function_mode_stack():
            raise RuntimeError("no compiled frames")
        super().step()


@pytest.mark.parametrize("update", MODES)
def test_an_optimizer_that_cannot_be_recorded_has_a_remedy(update):
    model = Stack()
    step, optimizer = step_of(model, update, Compiling(model.parameters(), lr=0.1))
    with pytest.raises(L2LError, match="Compiling fails where it is recorded.*no compiled frames.*compile_update=False"):
        for number in range(2):
            step(data(number)).sum().backward()
            optimizer.step()
    model = Stack()
    before = model.head.weight.detach().clone()
    step, optimizer = step_of(model, update, Compiling(model.parameters(), lr=0.1), compile_update=False)
    step(data(1)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["head.weight"], before)


def test_closures_are_refused():
    step, optimizer = step_of(Stack())
    step(data(1)).sum().backward()
    with pytest.raises(L2LError, match="closure"):
        optimizer.step(lambda: None)


@pytest.mark.parametrize("update", MODES)
def test_a_wrong_number_of_backward_calls_is_refused_for_a_step(update):
    model = Stack()
    step, optimizer = step_of(model, update, accumulate=2)
    step(data(1)).sum().backward()
    with pytest.raises(L2LError, match="after 1 backward calls.*accumulate is 2"):
        optimizer.step()
    before = copy.deepcopy(model.state_dict())
    for number in range(2):
        step(data(number)).sum().backward()
    with pytest.raises(L2LError, match="3 backward calls without optimizer.step.*accumulate"):
        step(data(3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])


@pytest.mark.parametrize("update", MODES)
def test_a_function_says_which_backward_call_is_the_last(update):
    """Steps of two calls and of one, as at the end of an epoch; then a call too few, and one too many."""
    last, model, reference = [False], Stack().double(), Stack().double()
    reference.load_state_dict(model.state_dict())
    step, optimizer = step_of(model, update, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=lambda: last[0])
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number, last[0] in enumerate((False, True, True)):
        step(data(number).double()).sum().backward()
        reference(data(number).double()).sum().backward()
        if last[0]:
            optimizer.step()
            plain.step()
            plain.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-10, atol=1e-12)
    last[0] = False
    step(data(1).double()).sum().backward()
    with pytest.raises(L2LError, match="after 1 backward calls.*has called number 1 not the last"):
        optimizer.step()
    last[0] = True
    step(data(1).double()).sum().backward()
    with pytest.raises(L2LError, match="2 backward calls without optimizer.step.*has called number 1 the last"):
        step(data(1).double()).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("update", MODES)
def test_a_copy_of_a_compiled_model_needs_its_optimizers_copy(update):
    step, optimizer = step_of(Stack(), update)
    step(data(1)).sum().backward()
    optimizer.step()
    copied, stepped = copy.deepcopy((step, optimizer))
    for number in range(2):
        copied(data(number)).sum().backward()
        stepped.step()

    copied = copy.deepcopy(step)
    other = torch.optim.SGD(copied.parameters(), lr=0.1)
    copied(data(1)).sum().backward()
    with pytest.raises(L2LError, match="SGD.step.. found no gradients of [0-9]+ parameters.*never stepped.*copy the plain model"):
        other.step()


@pytest.mark.parametrize("update", MODES)
def test_a_new_optimizer_needs_a_new_compilation(update):
    model = Stack()
    step, optimizer = step_of(model, update)
    step(data(1)).sum().backward()
    optimizer.step()
    new = torch.optim.SGD(model.parameters(), lr=0.1)
    new.step()  # has nothing to do, as in plain PyTorch
    step(data(2)).sum().backward()
    with pytest.raises(L2LError, match="Compile the model again with the optimizer that is stepped, or call step.. of the one"):
        new.step()
    optimizer.step()
    elsewhere = torch.optim.SGD(Stack().parameters(), lr=0.1)
    step(data(3)).sum().backward()
    elsewhere.step()
    optimizer.step()


@pytest.mark.parametrize("update", MODES)
def test_what_was_compiled_can_be_pickled_and_goes_on_elsewhere(update):
    model = Stack()
    step, optimizer = step_of(model, update)
    step(data(1)).sum().backward()
    optimizer.step()
    l2l_compile.synchronize(step)
    for whole in (model, step, optimizer):
        pickle.dumps(whole)
    model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    again = compiled(model, optimizer=optimizer, update=update)
    again(data(2)).sum().backward()
    optimizer.step()
    assert len(model.state_dict()) == len(Stack().state_dict())


def test_gradient_hooks_and_second_backwards_are_refused():
    model = Stack()
    step, _ = step_of(model)
    handle = model.head.weight.register_hook(lambda g: g)
    with pytest.raises(L2LError, match="gradient hooks"):
        step(data(1))
    handle.remove()
    loss = step(data(1)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(L2LError, match="backward ran twice"):
        loss.backward()


def test_a_nan_gradient_skips_in_forward_and_raises_in_backward():
    model = Stack()
    step, optimizer = step_of(model)
    before = copy.deepcopy(model.state_dict())
    (step(data(1)).sum() * float("nan")).backward()
    with pytest.warns(RuntimeWarning, match="the gradients' norm is nan, so this step updates nothing"):
        optimizer.step()
        l2l_compile.synchronize(step)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert l2l_compile.stats(step).skipped_steps == 1

    step, optimizer = step_of(Stack(), "in_backward")
    with pytest.raises(L2LError, match="not finite.*in_forward"):  # in backward already, or at the end of the step
        (step(data(1)).sum() * float("nan")).backward()
        optimizer.step()
    step(data(1)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("update", MODES)
def test_the_next_step_works_after_an_error_of_the_optimizer(update):
    model = Stack()
    step, optimizer = step_of(model, update)
    step(data(1)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = None  # no number
    with pytest.raises(TypeError):
        step(data(1)).sum().backward()
        optimizer.step()
        l2l_compile.synchronize(step)
    optimizer.param_groups[0]["lr"] = 0.1
    step(data(1)).sum().backward()
    optimizer.step()
    l2l_compile.synchronize(step)
