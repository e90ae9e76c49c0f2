"""Faults put into a lowered block on purpose: each is found, and named with its tensor and segment."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from l2l_compile.runtime import segment_run
from l2l_compile.testing import assert_equivalent, compare, training_equivalent
from models import WIDTH, Attention, Layer, Stack, assert_parity, rows
from test_huggingface import llama

OPTIONS = {"micro_batches": 3, "block_compiler": "eager", "device": "cpu"}


class Regression(nn.Module):
    """Layers and a loss that the model returns."""

    def __init__(self, depth=3, **layer):
        super().__init__()
        self.stack = Stack(depth, **layer)

    def forward(self, x):
        y = self.stack(x)
        return {"loss": (y - 1).pow(2).mean(), "scores": y}


class Counting(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.2)
        return super().forward(x)


@pytest.fixture
def inject(monkeypatch):
    """`inject(segment, which, fault)`: what a segment's lowered block gives goes through `fault(lowered, made, arguments)`."""
    original, waiting = segment_run._Run.lower, set()

    def inject(name, which, fault, turned=lambda lowered: lowered):
        def lower(run, number, bindings):
            lowered = original(run, number, bindings)
            if (run.segment.name, run.which) != (name, which):
                return lowered
            waiting.discard(name)
            return turned(replace(lowered, run=lambda *a: fault(lowered, list(lowered.run(*a)), a)))

        waiting.add(name)
        monkeypatch.setattr(segment_run._Run, "lower", lower)

    yield inject
    assert not waiting, "a fault was never put in"


def weight(lowered, made, name):
    """The place of a weight among the gradients: weights come first, in the order of their use."""
    return {"norm.weight": 0, "norm.bias": 1, "up.weight": 2, "up.bias": 3, "down.weight": 4, "down.bias": 5}[name]


def scaled(name, factor):
    def fault(lowered, made, arguments):
        made[weight(lowered, made, name)] *= factor
        return made

    return fault


def failing(model, *batch, **how):
    """The sentences of a failure; the table is behind them."""
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(model, *batch, **{"options": OPTIONS, **how})
    return str(caught.value).partition("\n\n")[0]


def test_nothing_is_found_without_a_fault():
    comparison = assert_equivalent(Regression(), rows(7), options=OPTIONS)
    assert comparison.passes and len(comparison.differences) == 2 + 4 + 3 * 6


@pytest.mark.parametrize("factor", [1 + 1e-9, -1.0, float("nan"), float("inf")])
def test_a_wrong_gradient(inject, factor):
    inject("stack.layers.1", "backward", scaled("up.weight", factor))
    text = failing(Regression(), rows(7))
    assert "1 of 24 tensors differ" in text
    assert "gradient of stack.layers.1.up.weight (segment 'stack.layers.1') is off by" in text
    assert "1.0e-10 is allowed; eager, rows reversed: " in text


def test_the_worst_gradient_comes_first_and_the_table_marks_it(inject):
    def fault(lowered, made, arguments):
        made[2] *= 1 + 1e-8
        made[5] *= 1 + 1e-4
        return made

    inject("stack.layers.2", "backward", fault)
    comparison = compare(Regression(), OPTIONS)(rows(7))
    assert [v.difference.key.name for v in comparison.failures] == ["stack.layers.2.down.bias", "stack.layers.2.up.weight"]
    assert comparison.worst == comparison.failures[0]
    assert comparison.worst.difference.segments == ("stack.layers.2",)
    assert comparison.worst.difference.relative == pytest.approx(1e-4, rel=1e-2)
    marked = [line.split()[:3] for line in str(comparison).splitlines() if line.endswith("differs")]
    assert marked == [["gradient", "of", v.difference.key.name] for v in comparison.failures]


def test_a_missing_gradient(inject):
    def dropped(lowered):
        present = list(lowered.present)
        present[2] = False
        return replace(lowered, traced=replace(lowered.traced, present=tuple(present)))

    def fault(lowered, made, arguments):
        return made[:2] + made[3:]

    inject("stack.layers.1", "backward", fault, dropped)
    assert "gradient of stack.layers.1.up.weight (segment 'stack.layers.1') is missing" in failing(Regression(), rows(7))


def test_a_gradient_that_eager_has_not():
    class Detached(Stack):
        def forward(self, x):
            frozen = torch.compiler.is_compiling()
            return super().forward(x) + (self.extra(x) if frozen else self.extra(x).detach())

    model = Detached(2)
    model.extra = nn.Linear(5, 3)
    assert "gradient of extra.weight (segment 'head..extra') is there, and eager has none" in failing(model, rows(6))


def one_ulp_of_float32(value):
    narrow = value.float()
    return (torch.nextafter(narrow, torch.full_like(narrow, torch.inf)) - narrow).to(value.dtype)


def test_a_loss_off_by_one_ulp_of_float32(inject):
    def fault(lowered, made, arguments):
        return [m + one_ulp_of_float32(m) if m.dim() == 0 else m for m in made]

    inject("stack.head", "forward", fault)
    text = failing(Regression(), rows(7))
    assert "1 of 24 tensors differ" in text
    assert "loss (segment 'stack.head') is off by" in text and "e-08" in text.splitlines()[1]


def test_a_loss_off_by_one_ulp_that_is_computed_in_float32(inject):
    """Eager itself is off by as much with its rows reversed: in float64 the promise holds all the same."""

    def fault(lowered, made, arguments):
        return [m + one_ulp_of_float32(m) if m.dim() == 0 else m for m in made]

    inject("nll_loss", "forward", fault)
    model, inputs = llama()
    assert "loss (segment 'nll_loss') is off by" in failing(model, **inputs)


def test_a_buffer_counted_twice(inject):
    def fault(lowered, made, arguments):
        again = [made[-1] if a.shape == made[-1].shape and torch.equal(a, before) else a for a in arguments]
        return [*made[:-1], lowered.run(*again)[-1]]

    before = torch.ones(WIDTH, dtype=torch.float64)
    model = Stack([Counting() for _ in range(3)])
    for layer in model.layers:  # other weights than the buffer have other numbers
        nn.init.normal_(layer.norm.weight)
    inject("layers.1", "forward", fault)
    text = failing(model, rows(7))
    assert "1 of 27 tensors differ" in text
    assert "buffer layers.1.mean (segment 'layers.1') is off by" in text


def test_a_counter_counted_twice(inject):
    def fault(lowered, made, arguments):
        return [m + 1 if m.dtype is torch.int64 else m for m in made]

    inject("layers.1.norm", "forward", fault)
    text = failing(Stack([Layer(norm=nn.BatchNorm1d) for _ in range(3)]), rows(7))
    assert "buffer layers.1.norm.num_batches_tracked (segment 'layers.1.norm') is 2, and eager's is 1" in text


class Keeping(nn.Module):
    """Keeps rows of the batch in a buffer and in an input: which ones, depends on their order."""

    def __init__(self):
        super().__init__()
        self.stack = Stack(2)
        self.register_buffer("kept", torch.zeros(2, WIDTH))

    def forward(self, x, seen):
        y = self.stack.embed(x)
        self.kept.copy_(y[:2].detach())
        seen.add_(x.sum(-1, keepdim=True))
        for layer in self.stack.layers:
            y = layer(y)
        return self.stack.head(y)


@pytest.mark.parametrize(
    "shape, named",
    [((2, WIDTH), "buffer kept (segment 'stack.layers.0')"), ((7, 1), "input 1")],
    ids=["buffer", "input"],
)
def test_a_write_of_rows_that_is_wrong(inject, shape, named):
    """Eager with its rows reversed writes other rows: that is no error of eager, and allows none."""

    def fault(lowered, made, arguments):
        return [m * (1 + 1e-9) if m.shape == shape else m for m in made]

    inject("stack.layers.0", "forward", fault)
    text = failing(Keeping(), rows(7), rows(7, 1))
    assert "1 of 20 tensors differ" in text and f"{named} is off by 1.0e-09" in text


def test_a_wrong_gradient_that_is_small_beside_others(inject):
    """It is no rounding, although it is less than that of others: it has all its digits."""

    class Small(Regression):
        def forward(self, x):
            found = super().forward(x)
            return found | {"loss": found["loss"] + 1e20 * self.stack.embed.bias.sum()}

    inject("stack.layers.1", "backward", scaled("up.weight", 1 + 1e-9))
    text = failing(Small(), rows(7))
    assert "1 of 24 tensors differ" in text
    assert "gradient of stack.layers.1.up.weight (segment 'stack.layers.1') is off by" in text


def test_a_wrong_gradient_in_the_helper_of_the_suite(inject):
    inject("stack.layers.1", "backward", scaled("up.weight", 1 + 1e-9))
    with pytest.raises(AssertionError, match=r"gradient of stack.layers.1.up.weight \(segment 'stack.layers.1'\) is off by"):
        assert_parity(Regression().double(), rows(7))


def test_a_wrong_gradient_of_a_value_names_its_first_segment(inject):
    def fault(lowered, made, arguments):
        made[-1] = made[-1] * 1.01
        return made

    inject("stack.layers.1", "backward", fault)
    text = failing(Regression(), rows(7))
    assert "8 of 24 tensors differ" in text and "gradient of stack.embed.weight (segment 'stack.embed')" in text
    assert text.endswith("backward reaches segment 'stack.layers.0' first of those whose gradients differ")


def test_a_micro_batch_that_is_left_out(monkeypatch):
    original = segment_run._Backward._gather

    def gather(run, made):
        left_out = [i in run.sums for i, _ in run._indices_and_specs()]
        original(run, [g * 0 if out else g for g, out in zip(made, left_out, strict=True)])

    monkeypatch.setattr(segment_run._Backward, "_gather", gather)
    assert "gradient of stack.layers.0.up.weight" in failing(Regression(), rows(7))


def test_a_wrong_output(inject):
    inject("stack.head", "forward", lambda lowered, made, arguments: [m * (1 + 1e-9) for m in made])
    text = failing(Regression(), rows(7))
    assert "output ['scores'] is off by 1.0e-09" in text


@pytest.mark.parametrize("size", [1e-10, 1e-3])
def test_a_gradient_where_eager_has_zero_but_for_rounding(inject, size):
    """The bias of keys has no influence on a softmax: its gradient is rounding. A wrong one is told by the size of the others."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Attention() for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Model(), rows(6, 4, WIDTH)
    fine = assert_equivalent(model, x, options=OPTIONS)
    biases = [v for v in map(fine.verdict, fine.differences) if v.is_zero]
    assert [v.difference.key.name for v in biases] == [f"layers.{i}.k.bias" for i in range(3)]
    assert all(v.difference.relative > 1e-3 or v.difference.error == 0 for v in biases)
    assert "zero but for rounding" in str(fine.table(None))

    def fault(lowered, made, arguments):
        vectors = [i for i, m in enumerate(made) if m.shape == (WIDTH,)]
        smallest = min(vectors, key=lambda i: made[i].norm())
        made[smallest] = made[smallest] + size
        return made

    torch._dynamo.reset()
    inject("layers.1", "backward", fault)
    text = failing(model, x)
    assert "gradient of layers.1.k.bias (segment 'layers.1') is zero but for rounding in eager" in text
    assert "1 of" in text.splitlines()[0]


def test_gradients_under_16_bits(inject):
    inject("stack.layers.1", "backward", scaled("up.weight", 1.5))
    text = failing(Regression(), rows(7, dtype=torch.float32), options={**OPTIONS, "precision": "bf16"})
    assert "gradient of all parameters together is off by" in text and "autocast: " in text
    first = str(compare(Regression(), {**OPTIONS, "precision": "bf16"})(rows(7))).splitlines()[4].split()
    assert first[:5] == ["gradient", "of", "all", "parameters", "together"] and first[-1] == "differs"


# ---- training --------------------------------------------------------------------------------------------------------


def train(update="at_step", optimizer=torch.optim.SGD, **how):
    batches = [rows(6) for _ in range(3)]
    return training_equivalent(Regression(), batches, lambda p: optimizer(p, lr=0.1), updates=(update,), options=OPTIONS, **how)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_gradient_that_is_wrong_in_one_step(inject, optimizer):
    count = []

    def fault(lowered, made, arguments):
        count.append(1)
        made[2] *= 1 + (1e-6 if len(count) == 5 else 0)  # three micro-batches a step
        return made

    inject("stack.layers.1", "backward", fault)
    with pytest.raises(AssertionError) as caught:
        train(optimizer=optimizer)
    text = str(caught.value).partition("\n\n")[0]
    assert "update at_step against eager in float64" in text
    assert "parameter stack.layers.1.up.weight (segment 'stack.layers.1') is off by" in text


def test_an_update_that_is_small_beside_its_parameter(inject):
    """Twice the step is less than 1e-5 of the parameter, which is the tolerance in float32."""
    inject("stack.layers.1", "backward", scaled("up.weight", 2.0))
    batches = [rows(6, dtype=torch.float32) for _ in range(2)]
    with pytest.raises(AssertionError, match=r"parameter stack.layers.1.up.weight \(segment 'stack.layers.1'\) is off by"):
        training_equivalent(Regression(), batches, lambda p: torch.optim.SGD(p, lr=3e-5), updates=(), options=OPTIONS, dtype=None)


@pytest.mark.parametrize("compile_update", [False, True])
@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
def test_an_update_that_is_made_twice(monkeypatch, update, compile_update):
    from l2l_compile.host.compiled_step import compiled_step
    from l2l_compile.host.step import torch_step

    of = compiled_step.CompiledStep if compile_update else torch_step.TorchStep
    original = of.on

    def on(self, groups, gradients, factor):
        for parameter in gradients:
            if parameter.shape == (8, 5):  # the embedding's
                parameter.data.add_(1e-4)
        return original(self, groups, gradients, factor)

    monkeypatch.setattr(of, "on", on)
    monkeypatch.setitem(OPTIONS, "compile_update", compile_update)
    with pytest.raises(AssertionError) as caught:
        train(update)
    text = str(caught.value).partition("\n\n")[0]
    assert f"update {update} against at_step" in text
    assert "parameter stack.embed.weight (segment 'stack.embed') is off by" in text
