"""Floats that change from call to call: one program for all values, with eager's numbers."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import l2l_compile
from l2l_compile import explain
from l2l_compile.ir.program import Program
from l2l_compile.lowering.code_cache import store
from l2l_compile.session import session_of
from models import WIDTH, Layer, Stack, rows

EXACT = 1e-12  # of numbers of about 1 in float64


class Scaled(nn.Module):
    """Layers whose results go through `function` with the float `t`, an attribute of the model."""

    def __init__(self, function, layers=3):
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.function, self.t = function, 0.3

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = self.function(torch.tanh(layer(x)), self.t)
        return x


def pair(model, **options):
    """A model and a streamed copy of it, in float64."""
    torch._dynamo.reset()
    counters.clear()
    store.clear()
    torch.manual_seed(0)
    eager = model.double()
    streamed = copy.deepcopy(eager)
    chosen = {"block_compiler": "eager", "micro_batches": 2, **options}
    return eager, streamed, torch.compile(streamed, backend="l2l", options=chosen)


def programs_made() -> int:
    return counters["stats"]["unique_graphs"]


def assert_equal_steps(eager, streamed, step, *arguments, tolerance=EXACT):
    """One forward and backward of both, with equal numbers."""
    results = [model(*arguments) for model in (eager, step)]
    for result in results:
        result.sum().backward()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=tolerance)
    for (name, p), q in zip(eager.named_parameters(), streamed.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
        p.grad = q.grad = None


FUNCTIONS = {
    "divided": lambda x, t: (x / t).softmax(-1),
    "added_with_alpha": lambda x, t: torch.add(x, x * x, alpha=t),
    "power": lambda x, t: (x * x + 0.1) ** t,
    "base": lambda x, t: t**x,
    "clamped": lambda x, t: x.clamp(min=-t, max=t),
    "leaky": lambda x, t: F.leaky_relu(x, t),
    "elu": lambda x, t: F.elu(x, t),
    "written": lambda x, t: (x * 1).mul_(t),
    "filled": lambda x, t: x + torch.full((WIDTH,), t, dtype=x.dtype),
    "tensor": lambda x, t: x * torch.tensor(t, dtype=x.dtype),
    "where": lambda x, t: torch.where(x > t, x, t),
    "lerp": lambda x, t: torch.lerp(x, x * x, t),
    "masked": lambda x, t: x.masked_fill(x > 0.5, t),
    "python": lambda x, t: x * max(0.2, 1 - t * 0.1 * 3) * (-t) + abs(t - 0.5) * t**2 + t // 0.1,
    "added_to_many": lambda x, t: torch.addcmul(x, x, x, value=t) + torch.addcdiv(x, x, x * x + 1, value=t),
    "softplus": lambda x, t: F.softplus(x, t) + F.hardtanh(x, -t, t) + F.celu(x, t) + F.threshold(x, t, t),
    "subtracted": lambda x, t: (t - x) / (t + x * x) + t / (x * x + 1) + torch.sub(x, x * x, alpha=t) + (x * t).remainder(t),
    "shrunk": lambda x, t: F.hardshrink(x, t) + F.softshrink(x, t) + torch.clamp(x, -t, t) + x.clamp_min(t),
    "compared": lambda x, t: x * (x > t) + x * x.le(t) + torch.maximum(x, torch.full_like(x, t)),
    "matrices": lambda x, t: torch.addmm(x, x, torch.eye(WIDTH, dtype=x.dtype), beta=t, alpha=1 - t),
    "functions": lambda x, t: x * (0.5 * (1 + math.cos(math.pi * t))) * math.sqrt(t) + math.tanh(t),
    "whole": lambda x, t: x * int(t * 10),
    "of_sizes": lambda x, t: x * (t / math.sqrt(x.shape[-1])) / x.shape[0] * t,
    "added_in_place": lambda x, t: x.mul(1).add_(x, alpha=t),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_float_that_changes_has_two_programs(name):
    eager, streamed, step = pair(Scaled(FUNCTIONS[name]))
    for number in range(5):
        eager.t = streamed.t = 0.3 + 0.0937 * number
        assert_equal_steps(eager, streamed, step, rows(6))
    assert programs_made() == 2


@pytest.mark.parametrize("name", ["lerp", "softplus"])  # autograd computes with the values of these numbers
def test_code_for_one_value_of_a_float_is_not_kept(name):
    eager, streamed, step = pair(Scaled(FUNCTIONS[name]))
    counts = []
    for number in range(4):
        eager.t = streamed.t = 0.3 + 0.0937 * number
        assert_equal_steps(eager, streamed, step, rows(6))
        counts.append(sum(len(codes) for codes in store._codes.values()))
    assert counts[1] == counts[-1]


def many(x, t):
    """Operations with forms for Inductor, and one without (elu)."""
    x = torch.add(x / t, x * x, alpha=1 - t * 0.1)
    x = F.leaky_relu(x, t) + torch.where(x > t, x, t) + 0.3 * x.clamp(min=-t, max=t)
    return (x * 1).mul_(t) * (x < t) + F.elu(x, t) + torch.full((WIDTH,), t, dtype=x.dtype)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_compiled_blocks_take_floats_as_operands(precision):
    eager, streamed, step = pair(Scaled(many, layers=1), block_compiler="inductor", micro_batches=1, precision=precision)
    if precision == "bf16":
        eager, streamed = eager.float(), streamed.float()
    for number in range(4):
        eager.t = streamed.t = 0.3 + 0.0937 * number
        tolerance = EXACT if precision == "fp32" else 0.3
        assert_equal_steps(eager, streamed, step, rows(6).to(eager.embed.weight.dtype), tolerance=tolerance)
    assert programs_made() == 2


class Loss(Stack):
    """A loss with a coefficient, given as an argument."""

    def forward(self, x, beta):
        made = super().forward(x)
        return made.pow(2).mean() + beta * made.abs().mean()


def test_500_values_of_an_argument_have_two_programs():
    eager, streamed, step = pair(Loss([Layer() for _ in range(2)]))
    for number in range(500):
        assert_equal_steps(eager, streamed, step, rows(4), 1 / (1 + number))
    assert programs_made() == 2
    assert len(step_keys(step)) <= 4 * 4  # code is kept for sizes, not for values


def step_keys(step) -> list:
    """The requests for which the session of a compiled model keeps code."""
    lowering = session_of(step).lowering
    return [*lowering._done, *lowering._with_floats]


def test_backward_computes_with_the_value_of_its_forward():
    eager, streamed, step = pair(Scaled(FUNCTIONS["divided"]))
    x = rows(6)
    for number in range(4):
        eager.t = streamed.t = 0.5 + 0.1 * number
        results = [model(x) for model in (eager, step)]
        eager.t = streamed.t = 7.0
        for result in results:
            result[:, 0].sum().backward()
    for p, q in zip(eager.parameters(), streamed.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=EXACT)


def test_a_branch_on_a_float_has_a_program_each_way():
    eager, streamed, step = pair(Scaled(lambda x, t: x * t if t > 0.5 else x / t))
    for t in (0.1, 0.2, 0.3, 0.7, 0.8, 0.9, 0.25, 0.75):
        eager.t = streamed.t = t
        assert_equal_steps(eager, streamed, step, rows(6))
    assert programs_made() == 3


@pytest.mark.parametrize("name", ["dropout", "smoothing", "eps", "exponential"])
def test_floats_that_pytorch_fixes_are_right_at_each_value(name):
    functions = {
        "dropout": lambda x, t: F.dropout(x, t - t) * F.dropout(x, 0.0 * t),
        "smoothing": lambda x, t: x * F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.long), label_smoothing=t),
        "eps": lambda x, t: F.layer_norm(x, (WIDTH,), eps=t),
        "exponential": lambda x, t: x * math.exp(-t) + math.log(t),
    }
    eager, streamed, step = pair(Scaled(functions[name], layers=1))
    for t in (0.3, 0.4, 0.1, 0.3):
        eager.t = streamed.t = t
        assert_equal_steps(eager, streamed, step, rows(6))


SCALE = {"value": 1.0}


def test_floats_of_dictionaries_globals_and_modules_change():
    class Config(Stack):
        def forward(self, x):
            made = super().forward(x) * self.config["scale"] * SCALE["value"]
            return made / self.layers[1].scale

    eager, streamed, step = pair(Config([Layer() for _ in range(3)]))
    for number in range(4):
        for model in (eager, streamed):
            model.config = {"scale": 1 + 0.1 * number}
            model.layers[1].scale = 1 - 0.05 * number
        SCALE["value"] = 2 + 0.3 * number
        assert_equal_steps(eager, streamed, step, rows(6))
    assert programs_made() <= 3


def test_special_values_are_exact():
    eager, streamed, step = pair(Loss([Layer()]))
    for beta in (0.5, 0.25, 0.0, 1.0, -1.0, 1e-300, 1e300, 2, 0.75, -0.0):
        assert_equal_steps(eager, streamed, step, rows(4), beta, tolerance=1e-12 * max(1.0, abs(beta)))
    assert programs_made() <= 4


def test_infinite_floats_clamp():
    eager, streamed, step = pair(Scaled(lambda x, t: x.clamp(max=t)))
    for t in (0.5, 0.6, math.inf, 0.1):
        eager.t = streamed.t = t
        assert_equal_steps(eager, streamed, step, rows(6))


def test_layers_with_own_floats_share_a_block():
    class Depths(Stack):
        def forward(self, x):
            x = self.embed(x)
            for layer, t in zip(self.layers, self.rates, strict=True):
                x = x + t * (layer(x) - x)
            return self.head(x)

    eager, streamed, step = pair(Depths(4))
    for number in range(4):
        eager.rates = streamed.rates = [0.1 * depth + 0.01 * number + 0.2 for depth in range(4)]
        assert_equal_steps(eager, streamed, step, rows(6))
    assert programs_made() == 2
    [block] = [b for b in l2l_compile.programs(step)[-1].blocks if b.repeats > 1]
    assert block.repeats == 4 and block.inner_looped


@pytest.mark.parametrize("update", ["at_step", "in_backward", "in_forward"])
def test_overlapped_updates_follow_changing_floats(update):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Loss([Layer() for _ in range(2)]).double()
    streamed = copy.deepcopy(eager)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (eager, streamed)]
    behind = {"optimizer": optimizers[1], "update": update} if update != "at_step" else {}
    step = torch.compile(streamed, backend="l2l", options={"block_compiler": "eager", "micro_batches": 2, **behind})
    for number in range(6):
        x = rows(6)
        for model, optimizer in zip((eager, step), optimizers, strict=True):
            model(x, 1 / (number + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    l2l_compile.synchronize(step)
    for p, q in zip(eager.parameters(), streamed.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-10)


def test_floats_cross_a_graph_break():
    class Broken(Scaled):
        def forward(self, x):
            x = self.layers[0](self.embed(x)) * self.t
            torch._dynamo.graph_break()
            t = self.t * 2
            return self.layers[1](x) / t

    eager, streamed, step = pair(Broken(None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(5):
            eager.t = streamed.t = 0.3 + 0.1 * number
            assert_equal_steps(eager, streamed, step, rows(6))
    assert programs_made() <= 4


def test_printed_programs_carry_floats():
    eager, streamed, step = pair(Scaled(FUNCTIONS["divided"]))
    for number in range(3):
        eager.t = streamed.t = 0.3 + 0.1 * number
        assert_equal_steps(eager, streamed, step, rows(6))
    text = str(l2l_compile.programs(step)[-1])
    assert "= 0.5" in text
    assert str(Program.parse(text)) == text


def test_explain_reports_a_model_with_changing_floats():
    eager, streamed, step = pair(Scaled(FUNCTIONS["divided"]))
    for number in range(3):
        eager.t = streamed.t = 0.3 + 0.1 * number
        assert_equal_steps(eager, streamed, step, rows(6))
    report = str(explain(step)(rows(6)))
    assert "whole batch at once: none" in report


def test_a_checked_model_takes_changing_floats():
    eager, streamed, step = pair(Scaled(FUNCTIONS["divided"]), check=True)
    for number in range(4):
        eager.t = streamed.t = 0.3 + 0.1 * number
        assert_equal_steps(eager, streamed, step, rows(6))


def test_an_int_argument_that_changes_has_two_programs():
    class Counted(Stack):
        def forward(self, x, count):
            return super().forward(x) / (count + 1)

    eager, streamed, step = pair(Counted([Layer()]))
    for count in range(2, 12):
        assert_equal_steps(eager, streamed, step, rows(6), count)
    assert programs_made() == 2
