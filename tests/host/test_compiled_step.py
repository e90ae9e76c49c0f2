"""Updates compiled into one pass are those of the optimizer's own step, and the wire is their copy."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from test_updates import MODES, OPTIMIZERS, data, frozen_in_the_middle, same_training
from torch import nn

from l2l_compile import L2LError, synchronize
from l2l_compile.host.compiled_step import compiled_step
from l2l_compile.host.compiled_step.compiled_step import CompiledStep, why_not_compiled
from l2l_compile.host.compiled_step.record import record
from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.step.torch_step import hyperparameters, step_on
from l2l_compile.host.wire import Wires
from l2l_compile.memory.pages import unlocked
from l2l_compile.session import session_of
from models import Shared, Stack, compiled

SHAPES = [(300, 257), (70000,), (5,), (1, 1)]
ELEMENTWISE = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw, other betas": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.3, 0.4)),
    "adamw maximize": lambda p: torch.optim.AdamW(p, lr=1e-2, maximize=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd dampening": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients_of(owners, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + seed)
    return {p: torch.randn(p.shape, generator=generator).to(dtype) for p in owners}


def relative(found, expected):
    found, expected = found.double(), expected.double()
    return ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()


@torch.no_grad()
@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_pass_is_the_step_and_the_cast(name, dtype):
    ours, theirs = parameters(), parameters()
    optimizer, reference = ELEMENTWISE[name](ours), ELEMENTWISE[name](theirs)
    assert why_not_compiled(optimizer) is None
    wires = Wires(unlocked())
    widths = [dtype if p.dim() > 1 else torch.float32 for p in ours]
    wire = wires.load(ours, widths)
    step = CompiledStep(optimizer, wires, threads=2, memory=GradientMemory())
    for number in range(8):
        given, expected = gradients_of(ours, number, dtype), gradients_of(theirs, number, dtype)
        before = [p._version for p in ours]
        step.on(hyperparameters(optimizer), given, 0.5)
        step_on(reference, hyperparameters(reference), {p: g.float() * 0.5 for p, g in expected.items()})
        assert all(p._version > version for p, version in zip(ours, before, strict=True))
        wires.begin_forward()
        wires.load(ours, widths)
        assert all(torch.equal(view, p.to(view.dtype)) for view, p in zip(wire.views, ours, strict=True))
    for p, q in zip(ours, theirs, strict=True):
        assert relative(p, q) < 1e-6
        assert optimizer.state[p].keys() == reference.state[q].keys()
        for key, value in reference.state[q].items():
            assert relative(torch.as_tensor(optimizer.state[p][key]), torch.as_tensor(value)) < 1e-6, key


@torch.no_grad()
def test_fp16_is_rounded_as_pytorch_rounds_it():
    """Every number of fp16 as a gradient; as parameters, float32 numbers of every sign and exponent, with roundings of all kinds."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    ends = torch.tensor(
        [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x5000, 0x7FEFFF, 0x7FF000, 0x7FFFFF], dtype=torch.int32
    )
    some = torch.randint(1 << 23, (500,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    exponents = torch.arange(-256, 256, dtype=torch.int32) << 23
    wide = (exponents[:, None] | torch.cat([ends, some])).flatten().view(torch.float32)
    ours = [nn.Parameter(torch.zeros(every.numel())), nn.Parameter(wide.clone().view(-1, 1))]
    wires = Wires(unlocked())
    wire = wires.load(ours, [torch.float32, torch.float16])
    optimizer = torch.optim.SGD(ours, lr=1.0)
    step = CompiledStep(optimizer, wires, threads=1, memory=GradientMemory())
    step.on(hyperparameters(optimizer), {ours[0]: every, ours[1]: torch.zeros(wide.numel(), 1).half()}, 1.0)
    torch.testing.assert_close(ours[0].data, -every.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(wire.views[1], wide.view(-1, 1).half(), rtol=0, atol=0, equal_nan=True)


def test_steps_that_are_not_elementwise_say_why():
    lamb = pytest.importorskip("pytorch_optimizer").Lamb
    weights = parameters()
    assert "norm" in why_not_compiled(lamb(weights))
    assert "row_var" in why_not_compiled(torch.optim.Adafactor(weights))


class Odd(torch.optim.Optimizer):
    """Runs a function of parameter, gradient, state and number of the step."""

    def __init__(self, parameters, function):
        self.function = function
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    state.setdefault("x", torch.ones_like(p))
                    self.function(p, p.grad, state["x"], state["step"], group["lr"])


OPERATIONS = {
    "out of a comparison": lambda p, g, x, n, lr: p.copy_(torch.where(g > 0, p - lr * g, x * p)),
    "clamp": lambda p, g, x, n, lr: p.add_(g.clamp(-0.5, 0.25)),
    "clamp_min": lambda p, g, x, n, lr: p.sub_(g.clamp_min(0.1), alpha=lr),
    "maximum, minimum": lambda p, g, x, n, lr: (torch.maximum(x, g.abs(), out=x), p.sub_(torch.minimum(x, p))),
    "sign": lambda p, g, x, n, lr: p.sub_(g.sign(), alpha=lr),
    "powers": lambda p, g, x, n, lr: p.sub_(g.pow(2).pow(0.5) * (1 + x.square()).rsqrt() * (2 + x).reciprocal()),
    "rsub, neg": lambda p, g, x, n, lr: p.copy_(1.5 - (-p)),
    "lerp by a tensor of numbers": lambda p, g, x, n, lr: p.lerp_(g, torch.tensor(0.7)) if n % 2 else p.lerp_(g, 0.7),
    "addcmul, addcdiv": lambda p, g, x, n, lr: (p.addcmul_(g, x), p.addcdiv_(g, x + 2, value=-lr)),
    "fill and zero": lambda p, g, x, n, lr: (x.zero_(), x.add_(g), p.fill_(0.25), p.mul_(x)),
    "a way that depends on the step": lambda p, g, x, n, lr: p.sub_(g * lr) if n < 3 else p.sub_(g * lr / n),
    "a number from the shape": lambda p, g, x, n, lr: p.sub_(g * (lr / p.shape[0])),
    "a number from numel": lambda p, g, x, n, lr: p.sub_(g, alpha=lr / p.numel() ** 0.5),
    "writes into the gradient": lambda p, g, x, n, lr: (g.mul_(2).add_(p), p.sub_(g, alpha=lr)),
    "what cannot be recorded": lambda p, g, x, n, lr: p.sub_(g * g.norm()),
    "a look at the numbers": lambda p, g, x, n, lr: p.sub_(g, alpha=lr if g.max() > 1 else 2 * lr),
    "half a state": lambda p, g, x, n, lr: x[:1].copy_(p[:1]),
}


@torch.no_grad()
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    ours, theirs = parameters(), parameters()
    optimizer, reference = Odd(ours, OPERATIONS[name]), Odd(theirs, OPERATIONS[name])
    step = CompiledStep(optimizer, Wires(unlocked()), threads=2, memory=GradientMemory())
    for number in range(4):
        step.on(hyperparameters(optimizer), gradients_of(ours, number), 1.0)
        step_on(reference, hyperparameters(reference), gradients_of(theirs, number))
        for p, q in zip(ours, theirs, strict=True):
            assert relative(p, q) < 1e-6
            assert relative(optimizer.state[p]["x"], reference.state[q]["x"]) < 1e-6
            assert optimizer.state[p]["step"] == reference.state[q]["step"]


class OfLists(torch.optim.Optimizer):
    """Adds to lists of tensors in another order than to one tensor after another. The lists' way is the default."""

    def __init__(self, parameters, foreach=None):
        super().__init__(parameters, {"lr": 0.1, "foreach": foreach})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            if group["foreach"] is not False and held:
                sums = torch._foreach_add([p.grad for p in held], 1e3)
                torch._foreach_sub_(sums, torch.full((), 1e3, device=held[0].device))
                torch._foreach_addcmul_(sums, sums, sums, [0.5] * len(held))
                torch._foreach_lerp_(held, sums, group["lr"])
            else:
                for p in held:
                    p.lerp_(p.grad + 0.5 * p.grad.square(), group["lr"])


@torch.no_grad()
@pytest.mark.parametrize("foreach", [None, True, False])
def test_operations_on_lists_round_as_they_do(foreach):
    ours, theirs = parameters(), parameters()
    optimizer, reference = OfLists(ours, foreach), OfLists(theirs, foreach)
    assert why_not_compiled(optimizer) is None
    step = CompiledStep(optimizer, Wires(unlocked()), threads=1, memory=GradientMemory())
    for number in range(4):
        step.on(hyperparameters(optimizer), gradients_of(ours, number), 1.0)
        step_on(reference, hyperparameters(reference), gradients_of(theirs, number))
    assert all(relative(p, q) < 1e-6 for p, q in zip(ours, theirs, strict=True))
    assert optimizer.param_groups[0]["foreach"] is foreach


PAIRS = [(name, Stack) for name in OPTIMIZERS] + [(n, m) for n in ("adamw", "lamb") for m in (Shared, frozen_in_the_middle)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer, make", PAIRS)
@pytest.mark.slow(but=("adamw-Stack-bf16", "lamb-Shared-fp32"))
def test_training_equals_updates_at_step(optimizer, make, precision):
    same_training(make, optimizer, MODES, precision=precision)


def trained(update="in_backward", make_optimizer=torch.optim.AdamW, **options):
    """A model after three steps, its compiled form, and a function that does one more."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack()
    optimizer = make_optimizer(model.parameters(), lr=1e-2)
    step = compiled(model, optimizer=optimizer, update=update, precision="bf16", **options)

    def once(number=0):
        step(data(number)).pow(2).mean().backward()
        optimizer.step()

    for number in range(3):
        once(number)
    return model, step, once


def test_a_step_is_recorded_once_for_all_parameters(monkeypatch):
    """Dynamo leaves attributes on the parameters of a model, which no optimizer looks at."""
    model, step, once = trained()
    synchronize(step)
    assert any(vars(p) for p in model.parameters())
    recorded = []
    monkeypatch.setattr(compiled_step, "record", lambda *given: recorded.append(given) or record(*given))
    once()
    synchronize(step)
    assert len(recorded) == 1


@pytest.mark.parametrize("update", MODES)
def test_writes_of_others_reach_the_next_forward(update):
    model, step, once = trained(update)
    saved = copy.deepcopy(model.state_dict())
    before = step(data(9))
    other = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    weight = model.layers[1].up.weight
    writes = {
        "load_state_dict": lambda: model.load_state_dict({k: v * 2 for k, v in saved.items()}),
        "no_grad": lambda: weight.mul_(2),
        "data": lambda: weight.data.mul_(2),
        "a row of data": lambda: weight.data[1].fill_(9.0),
        "a new tensor": lambda: setattr(weight, "data", weight.detach() * 3),
        "another optimizer": lambda: (
            setattr(weight, "grad", torch.ones_like(weight)),
            other.step(),
            setattr(weight, "grad", None),
        ),
    }
    for name, write in writes.items():
        synchronize(step)
        with torch.no_grad():
            write()
        assert not torch.allclose(step(data(9)), before, rtol=1e-3), name
        once()
        model.load_state_dict(saved)
        torch.testing.assert_close(step(data(9)), before, rtol=0, atol=0, msg=name)


def test_a_write_between_forward_and_update_is_an_error():
    model, step, _ = trained()
    loss = step(data(0)).pow(2).mean()
    model.layers[1].up.weight.data[0, 0] += 1.0
    with pytest.raises(L2LError, match="does not record"):  # in backward, if the update is done by then
        loss.backward()
        synchronize(step)


def test_a_write_by_an_alias_while_an_update_is_pending_raises(monkeypatch):
    """A write into the parameter itself waits for the update."""
    model, step, once = trained("in_forward")
    alias = model.head.weight.data
    gate, updates = threading.Event(), session_of(step).server.updates
    look = updates._look_at
    monkeypatch.setattr(updates, "_look_at", lambda *step: gate.wait(10) and look(*step))
    once()
    alias.mul_(2)
    gate.set()
    with pytest.raises(L2LError, match="synchronize"):
        step(data(0))


def test_without_a_compiler(monkeypatch):
    from l2l_compile.host.compiled_step import kernel, library

    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    kernel.address_of.cache_clear()
    with pytest.raises(L2LError, match="no C compiler.*compile_update=False"):
        _, step, _ = trained()
        synchronize(step)


def test_no_update_runs_while_something_is_compiled():
    """Optimizers ask `torch.compiler.is_compiling()`, which is one flag for all threads, and then compute otherwise."""
    from torch._dynamo.convert_frame import compile_lock

    model, step, once = trained("in_forward")
    synchronize(step)
    before = copy.deepcopy(dict(model.named_parameters()))
    with compile_lock:
        once()  # puts the updates off
        time.sleep(0.3)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    synchronize(step)
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
