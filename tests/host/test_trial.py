"""Optimizers that hold their state in any way: equal steps layer by layer, or a refusal with the true reason that changes nothing."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections import deque
from dataclasses import dataclass

import pytest
import torch
from test_updates import MODES, data, step_of
from torch import nn

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.host.compiled_step.compiled_step import CompiledStep
from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.step.groups import Groups
from l2l_compile.host.step.small_copies import held_attributes, own_step
from l2l_compile.host.step.torch_step import TorchStep, hyperparameters
from l2l_compile.host.step.trial import check_layers_are_independent, check_steps_on_the_host
from l2l_compile.host.wire import Wires
from l2l_compile.memory.pages import unlocked
from l2l_compile.object_copies import copied, same, tensors_within
from models import Stack


class Plain(torch.optim.Optimizer):
    """SGD whose parts are replaced by the kinds below: what a step does first, for a group, and for a parameter."""

    def __init__(self, parameters, lr=0.1, **settings):
        super().__init__(parameters, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure=None):
        self.begin()
        for group in self.param_groups:
            self.begin_group(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p, self.state[p], group), alpha=group["lr"])

    def begin(self):
        pass

    def begin_group(self, group):
        pass

    def direction(self, p, state, group):
        return p.grad

    def gradients(self):
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]


class ListState(Plain):
    def direction(self, p, state, group):
        momenta = state.setdefault("momenta", [torch.zeros_like(p) for _ in range(2)])
        for momentum, beta in zip(momenta, (0.5, 0.9), strict=True):
            momentum.mul_(beta).add_(p.grad)
        return momenta[0] + momenta[1]


class TupleState(Plain):
    def direction(self, p, state, group):
        first, second = state.get("momenta", (torch.zeros_like(p), torch.zeros_like(p)))
        state["momenta"] = first * 0.5 + p.grad, second * 0.9 + p.grad
        return state["momenta"][0] + state["momenta"][1]


class DictState(Plain):
    def direction(self, p, state, group):
        momenta = state.setdefault("momenta", {})
        for beta in (0.5, 0.9):
            momenta.setdefault(beta, torch.zeros_like(p)).mul_(beta).add_(p.grad)
        return momenta[0.5] + momenta[0.9]


class DequeState(Plain):
    def direction(self, p, state, group):
        state.setdefault("last", deque(maxlen=3)).append(p.grad.clone())
        return sum(state["last"])


@dataclass
class Momentum:
    value: torch.Tensor
    steps: int = 0


class ObjectState(Plain):
    def direction(self, p, state, group):
        momentum = state.setdefault("momentum", Momentum(torch.zeros_like(p)))
        momentum.value.mul_(0.9).add_(p.grad)
        momentum.steps += 1
        return momentum.value / momentum.steps


class NamedCount(Plain):
    def begin(self):
        self.state["k"] = self.state.get("k", 0) + 1

    def direction(self, p, state, group):
        return p.grad / self.state["k"]


class NamedTensor(Plain):
    def begin(self):
        if "k" not in self.state:
            self.state["k"] = torch.zeros(1)
        self.state["k"] += 1

    def direction(self, p, state, group):
        return p.grad / self.state["k"].item()


class TensorCountInGroup(Plain):
    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr, count=torch.zeros(()))
        for group in self.param_groups:
            group["count"] = self.own(group["count"])

    def own(self, count):
        return count.clone()

    def begin_group(self, group):
        group["count"] += 1

    def direction(self, p, state, group):
        return p.grad / group["count"].item()


class OneTensorInAllGroups(TensorCountInGroup):
    """As PyTorch makes it of a default: every group counts with the same tensor."""

    def own(self, count):
        return count


class CountOfGroupsWithGradients(Plain):
    def begin_group(self, group):
        if any(p.grad is not None for p in group["params"]):
            group["count"] = group.get("count", 0) + 1

    def direction(self, p, state, group):
        return p.grad / group["count"]


class StateOfTheConstructor(Plain):
    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["factors"] = [torch.ones(size) for size in p.shape]

    def direction(self, p, state, group):
        for dim, factor in enumerate(state["factors"]):
            factor.mul_(0.9).add_(p.grad.square().mean([d for d in range(p.dim()) if d != dim] or [0]).expand_as(factor))
        return p.grad / state["factors"][-1].sqrt()


EQUAL = [
    ListState,
    TupleState,
    DictState,
    DequeState,
    ObjectState,
    NamedCount,
    NamedTensor,
    TensorCountInGroup,
    OneTensorInAllGroups,
    CountOfGroupsWithGradients,
    StateOfTheConstructor,
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def two_groups(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.05}]


def made(kind, model=None):
    model = model or Net()
    return model, kind(two_groups(model))


class LayerByLayer:
    """The steps of overlapped updates, without a device."""

    def __init__(self, optimizer, is_compiled):
        check_layers_are_independent(optimizer)
        memory = GradientMemory()
        self.optimizer, self.groups = optimizer, Groups(optimizer)
        self.ways = CompiledStep(optimizer, Wires(unlocked()), 1, memory) if is_compiled else TorchStep(optimizer, memory)

    @torch.no_grad()
    def step(self, model):
        shared = hyperparameters(self.optimizer)
        for layer in reversed(model.layers):
            gradients = {p: p.grad for p in layer.parameters()}
            for p in gradients:
                p.grad = None
            self.groups.counted(shared, self.ways.on(shared, gradients, 1.0))
        self.groups.commit()
        self.groups.begin_own_step()
        own_step(self.optimizer)()
        self.groups.end_own_step()


def trained(model, step, numbers):
    for number in numbers:
        model(data(number)).pow(2).sum().backward()
        step()
        for p in model.parameters():
            p.grad = None


def held(model, optimizer):
    state = [optimizer.state.get(p, {}) for p in model.parameters()]
    shared = hyperparameters(optimizer)
    return copied(([p.detach() for p in model.parameters()], state, shared.groups, shared.named))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", EQUAL)
def test_state_of_any_kind_is_that_of_whole_steps(kind, is_compiled):
    """Also where it is loaded into a new optimizer, before the trial."""
    (model, optimizer), (reference, plain) = made(kind), made(kind)
    for numbers in (range(3), range(3, 6)):
        apart = LayerByLayer(optimizer, is_compiled)
        trained(model, functools.partial(apart.step, model), numbers)
        trained(reference, plain.step, numbers)
        exact = {"rtol": 1e-6, "atol": 1e-8} if is_compiled else {"rtol": 0, "atol": 0}
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, **exact)
        assert is_compiled or same(held(model, optimizer), held(reference, plain))
        (model, optimizer), (reference, plain) = resumed(model, optimizer), resumed(reference, plain)


def resumed(model, optimizer):
    """A new model and a new optimizer, with their state."""
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert not any(t.is_meta for t in tensors_within(saved))
    new, loaded = made(type(optimizer))
    new.load_state_dict(saved[0])
    loaded.load_state_dict(saved[1])
    return new, loaded


class SumInGroups(Plain):
    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr, total=torch.zeros(()))

    def begin(self):
        norms = torch.stack([g.norm() for g in self.gradients()]).sum() if self.gradients() else torch.zeros(())
        for group in self.param_groups:
            group["total"] += norms


class NamedSum(Plain):
    def begin(self):
        self.state["total"] = self.state.get("total", 0.0) + sum(g.norm().item() for g in self.gradients())

    def direction(self, p, state, group):
        return p.grad / self.state["total"]


class Counter:
    def __init__(self):
        self.taken = 0


class CountInObject(Plain):
    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr)
        self.counter = Counter()

    def begin(self):
        self.counter.taken += 1


class CountInFunction(Plain):
    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr)
        taken = 0

        def count():
            nonlocal taken
            taken += 1

        self.count = count

    def begin(self):
        self.count()


class CountOfTheClass(Plain):
    taken: list[int] = []

    def begin(self):
        self.taken.append(1)


class Schedule(Plain):
    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr)
        self.rates = (0.1 / n for n in itertools.count(1))


class NormBehindWarmUp(Plain):
    """`after` steps without, and then a norm of all gradients in every step, or in each of as many steps."""

    after, is_kept = 1000, True

    def direction(self, p, state, group):
        state["step"] = state.get("step", 0) + 1
        mixes = state["step"] > self.after if self.is_kept else state["step"] % self.after == 0
        return p.grad / torch.stack([g.norm() for g in self.gradients()]).norm() if mixes else p.grad


class NormNowAndThen(NormBehindWarmUp):
    after, is_kept = 20, False


class LargeBoundOnTheNorm(Plain):
    """Gradients of ordinary size never reach it."""

    def direction(self, p, state, group):
        return p.grad * torch.clamp(1000.0 / torch.stack([g.norm() for g in self.gradients()]).norm(), max=1.0)


class Noise(Plain):
    def direction(self, p, state, group):
        return p.grad + torch.randn_like(p)


class PythonsNoise(Plain):
    def direction(self, p, state, group):
        return p.grad * random.random()


class OneCountForAll(Plain):
    """The state of every parameter holds the same tensor."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr)
        count = torch.zeros(())
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = count

    def direction(self, p, state, group):
        state["count"] += 1
        return p.grad / state["count"]


class ListOfItsOwn(Plain):
    """Steps on parameters that it keeps beside its groups."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr)
        self.everything = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.everything:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


REFUSED = {
    SumInGroups: "keeps 'total' in param_groups.*sum over all",
    NamedSum: "keeps 'total' in its state beside that of the parameters.*sum over all",
    CountInObject: "attribute 'counter'",
    CountInFunction: "attribute 'count'",
    CountOfTheClass: "attribute 'taken'",
    Schedule: "attribute 'rates'.*is an iterator",
    NormBehindWarmUp: r"independently.*from step 2,520 on",
    NormNowAndThen: r"independently.*from step 20 on",
    LargeBoundOnTheNorm: "independently",
    Noise: "draws random numbers",
    PythonsNoise: "draws random numbers",
    OneCountForAll: "independently",
    ListOfItsOwn: "other parameters than those of its param_groups",
}


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_has_the_true_reason_and_changes_nothing(kind, is_resumed):
    model, optimizer = made(kind)
    if is_resumed:
        trained(model, optimizer.step, range(3))
        saved = copy.deepcopy(optimizer.state_dict())
        model, optimizer = made(kind)
        optimizer.load_state_dict(saved)
    taken = list(CountOfTheClass.taken)
    attributes = {name: value for name, value in held_attributes(optimizer).items() if name != "rates"}
    before = copied((held(model, optimizer), attributes))
    drawn = torch.get_rng_state(), random.getstate()
    with pytest.raises(L2LError, match=REFUSED[kind] + ".*update='at_step'"):
        check_layers_are_independent(optimizer)
    assert same(before, (held(model, optimizer), attributes))
    assert CountOfTheClass.taken == taken
    assert torch.equal(drawn[0], torch.get_rng_state()) and drawn[1] == random.getstate()


class OfPairs(Plain):
    """Steps on each two parameters that follow each other, whose product is a matrix of the model's."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for a, b in zip(group["params"][::2], group["params"][1::2], strict=False):
                if a.grad is not None and b.grad is not None:
                    size = (b.grad @ a.grad).norm()
                    a.sub_(a.grad / size, alpha=group["lr"])
                    b.sub_(b.grad / size, alpha=group["lr"])


def test_an_optimizer_of_pairs_is_refused_for_that_reason():
    pairs = [nn.Parameter(torch.randn(shape)) for _ in range(3) for shape in ((4, 20), (30, 4))]
    check_steps_on_the_host(OfPairs(pairs))
    with pytest.raises(L2LError, match="does not update parameters independently of each other"):
        check_layers_are_independent(OfPairs(pairs))


def test_an_error_without_a_message_is_named_by_its_class():
    class NotWritten(Plain):
        def begin(self):
            raise NotImplementedError

    with pytest.raises(L2LError, match=r"small tensors failed.*: NotImplementedError\. Use update='at_step'"):
        check_layers_are_independent(NotWritten(Net().parameters()))


def test_a_rate_of_zero_hides_nothing():
    class Coupled(Plain):
        def direction(self, p, state, group):
            return p.grad / torch.stack([g.norm() for g in self.gradients()]).norm()

    model = Net()
    for zero in (0.0, torch.tensor(0.0)):
        with pytest.raises(L2LError, match="independently"):
            check_layers_are_independent(Coupled(model.parameters(), lr=zero))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_names_of_parameters_are_those_of_the_layer(is_compiled):
    class ByName(Plain):
        def direction(self, p, state, group):
            names = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
            return p.grad * (2 if "1.0" in names[id(p)] else 1)

    models = Net(), Net()
    optimizer, plain = (ByName(model.named_parameters()) for model in models)
    apart = LayerByLayer(optimizer, is_compiled)
    trained(models[0], lambda: apart.step(models[0]), range(3))
    trained(models[1], plain.step, range(3))
    assert same(held(models[0], optimizer), held(models[1], plain))


def test_lbfgs_is_refused_with_the_call_that_works():
    model = Net()
    with pytest.raises(L2LError, match=r"LBFGS.step needs a closure.*optimizer.step\(closure\)"):
        check_layers_are_independent(torch.optim.LBFGS(model.parameters()))


class SharpnessAware(torch.optim.SGD):
    """Its step takes no closure by default, and then raises."""

    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("SharpnessAware requires a closure")
        with torch.enable_grad():
            closure()
        return super().step(closure)


def test_a_closure_that_only_the_step_asks_for_is_named():
    optimizer = SharpnessAware(Net().parameters(), lr=0.1)
    with pytest.raises(L2LError, match=r"SharpnessAware.step needs a closure.*optimizer.step\(closure\)"):
        check_layers_are_independent(optimizer)


class OneStep(torch.optim.SGD):
    """Its second step fails, and says something about closures."""

    def step(self, closure=None):
        if self.state[self.param_groups[0]["params"][0]].setdefault("steps", 0):
            raise RuntimeError("a second step, with or without a closure")
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["steps"] = 1


def test_a_failure_that_no_closure_helps_is_told_as_it_is():
    with pytest.raises(L2LError, match="failed, so it cannot update layer by layer: RuntimeError: a second step"):
        check_layers_are_independent(OneStep(Net().parameters(), lr=0.1))


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize("kind", [DictState, NamedTensor, TensorCountInGroup])
@pytest.mark.slow(but=("DictState-in_backward", "NamedTensor-in_forward"))
def test_training_behind_the_device_keeps_state_of_any_kind(kind, update):
    found = []
    for way in (update, "at_step"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Stack()
        step, optimizer = step_of(model, way, kind(two_groups(model)))
        for number in range(4):
            step(data(number)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        l2l_compile.synchronize(step)
        found.append(held(model, optimizer))
    for ours, theirs in zip(*(torch.utils._pytree.tree_leaves(each) for each in found), strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("update", MODES)
def test_counts_of_a_step_outside_of_the_compiled_model_stay(update):
    model = Stack()
    step, optimizer = step_of(model, update, CountOfGroupsWithGradients(two_groups(model)))
    step(data(0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    l2l_compile.synchronize(step)
    model(data(1)).sum().backward()  # the plain model
    optimizer.step()
    assert [group["count"] for group in optimizer.param_groups] == [2, 2]
