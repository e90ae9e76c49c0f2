"""`compare` and `assert_equivalent`: which models they take, what they compare, and that the model stays as it is."""

from __future__ import annotations

import copy
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.testing import Pair, assert_equivalent, compare, training_equivalent
from l2l_compile.testing.own_error import MOVES
from l2l_compile.testing.tolerances import Expected, Promise, SameUpdates, promise
from models import WIDTH, Attention, Layer, Stack, assert_parity, compiled, functional, rows
from test_huggingface import llama

OPTIONS = {"micro_batches": 3, "block_compiler": "eager", "device": "cpu"}


def keys(comparison, kind):
    return {d.key.name for d in comparison.differences if d.key.kind == kind}


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["compare", "training_equivalent"])
def test_the_model_stays_as_it_is(how):
    model = Stack([Layer(norm=nn.BatchNorm1d) for _ in range(2)])
    model.embed.weight.grad = torch.ones(WIDTH, 5)
    before, random, x = copy.deepcopy(model.state_dict()), torch.get_rng_state(), rows(6)
    random = torch.get_rng_state()
    if how == "compare":
        str(compare(model, OPTIONS)(x))
    else:
        training_equivalent(model, [x], lambda p: torch.optim.SGD(p, lr=0.1), options=OPTIONS, updates=("in_forward",))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.dtype is torch.float32 and p.is_leaf for p in model.parameters())
    assert torch.equal(model.embed.weight.grad, torch.ones(WIDTH, 5)) and model.head.weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)
    assert not hasattr(model, "_orig_mod") and model.training


def test_many_comparisons_of_one_class_compile_nothing_again():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            assert_equivalent(Stack(1), rows(3), options=OPTIONS)


def test_a_model_that_is_compiled_has_its_own_options():
    model = Stack(2)
    comparison = compare(compiled(model, micro_batches=2))(rows(6))
    assert [s.micro_batches for s in comparison.programs[0].segments] == [2] * 4 and comparison.passes
    model.compile(backend="l2l", options={**OPTIONS, "micro_batches": 4})
    assert [s.micro_batches for s in compare(model)(rows(6)).programs[0].segments] == [4] * 4


def test_gradients_of_a_functions_arguments_are_compared():
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(3)]
    comparison = assert_equivalent(functional, rows(6, WIDTH), weights, options=OPTIONS)
    assert keys(comparison, "gradient of input") == {"1[0]", "1[1]", "1[2]"}
    assert all(w.grad is None for w in weights)


def test_a_model_that_cannot_be_copied_is_named():
    model = Stack(2)
    model.layers[1].lock = threading.Lock()
    with pytest.raises(L2LError, match=r"layers.1 \(Layer\) cannot be copied: TypeError.*__deepcopy__"):
        compare(model, OPTIONS)(rows(6))


def test_an_optimizer_in_the_options_is_refused():
    model = Stack(2)
    options = {**OPTIONS, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(L2LError, match="copies of the model.*training_equivalent"):
        compare(model, options)(rows(6))


# ---- random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer, named",
    [
        (lambda: Layer(dropout=0.1), r"'layers.0.drop' \(Dropout\), "),
        (lambda: Attention(dropout=0.1), r"'layers.0' \(Attention\), "),
    ],
    ids=["module", "function"],
)
def test_a_model_that_draws_is_refused_and_the_module_named(layer, named):
    model, x = Stack([layer() for _ in range(6)]), rows(6, 4, 5)
    with pytest.raises(L2LError, match=rf"draws random numbers, in {named}.* and 2 more.*p=0.*model.eval\(\)"):
        assert_equivalent(model, x, options=OPTIONS)
    with pytest.raises(L2LError, match=named):
        training_equivalent(model, [x], lambda p: torch.optim.SGD(p, lr=0.1), options=OPTIONS)
    assert_equivalent(model.eval(), x, options=OPTIONS)


def test_a_draw_that_changes_nothing_is_none():
    class Skipping(Layer):
        def forward(self, x):
            return torch.where(torch.rand(()) < -1.0, x, super().forward(x))

    assert_equivalent(Stack([Skipping() for _ in range(2)]), rows(6), options=OPTIONS)


class Sharing(Stack):
    def forward(self, x, part, same):
        assert x is same
        part.mul_(0.5)
        return super().forward(x + same)


def test_inputs_that_are_one_tensor_or_share_memory_still_do():
    whole = rows(8)
    x = whole[:6]
    assert assert_equivalent(Sharing(2), x, rows(6), x, options=OPTIONS)
    with pytest.raises(L2LError, match="writes in place into 'part', whose memory 'x' shares"):
        compare(Sharing(2).double(), OPTIONS, dtype=None)(x, whole[2:4], x)


# ---- losses ----------------------------------------------------------------------------------------------------------


class Returning(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.stack, self.how = Stack(2), how

    def forward(self, x):
        y = self.stack(x)
        return self.how(y.pow(2).mean(), y)


@pytest.mark.parametrize(
    "how, others",
    [
        (lambda loss, y: loss, 0),
        (lambda loss, y: (loss, y), 1),
        (lambda loss, y: {"scores": y, "loss": loss}, 1),
        (lambda loss, y: SimpleNamespace(loss=loss, scores=(y, y * 2)), 2),
        (lambda loss, y: [y, y * 2, 3], 3),
    ],
    ids=["number", "tuple", "dict", "attribute", "none"],
)
def test_where_the_loss_is(how, others):
    model, x = Returning(how), rows(6)
    comparison = assert_equivalent(model, x, options=OPTIONS)
    assert len(keys(comparison, "loss")) == 1 and len(keys(comparison, "output")) == others
    loss = next(d for d in comparison.differences if d.key.kind == "loss")
    own = model.double()(x.double())
    has_own = others < 3
    assert (loss.norm == pytest.approx(model.stack(x.double()).pow(2).mean().item())) == has_own, own


def test_a_loss_outside_of_the_model_is_given():
    """Its targets are in the order of the rows: they meet the results of reversed rows in their own order."""
    target = torch.randn(6, 3, dtype=torch.float64)
    comparison = assert_equivalent(Stack(2), rows(6), options=OPTIONS, loss=lambda y: F.mse_loss(y, target))
    assert comparison.own.why is None and max(comparison.own.errors.values()) < 1e-13


# ---- what is compared ------------------------------------------------------------------------------------------------


def test_inputs_that_are_written_and_their_gradients():
    class Writing(Stack):
        def forward(self, x, seen):
            seen += 1
            return super().forward(x) * seen

    seen, x = torch.zeros(()), rows(6).requires_grad_()
    comparison = assert_equivalent(Writing(2), x, seen=seen, options=OPTIONS)
    assert keys(comparison, "input") == {"seen"} and keys(comparison, "gradient of input") == {"0"}
    assert float(seen) == 0 and x.grad is None


def test_frozen_parts_have_no_gradient_and_only_written_buffers():
    model = Stack([Layer(norm=nn.BatchNorm1d), Layer()])
    model.register_buffer("constant", torch.ones(3))
    model.head.requires_grad_(False)
    comparison = assert_equivalent(model, rows(6), options=OPTIONS)
    assert keys(comparison, "buffer") == {f"layers.0.norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}
    assert not any("head" in name for name in keys(comparison, "gradient"))


def test_outputs_that_are_not_made_have_their_shape():
    comparison = assert_equivalent(
        Returning(lambda loss, y: {"loss": loss, "y": y}), rows(6), options={**OPTIONS, "outputs": "loss"}
    )
    assert keys(comparison, "output") == {"['y']"}


def test_eager_that_gives_no_number_is_no_parity():
    model = Returning(lambda loss, y: {"loss": loss, "y": y.log()})
    text = str(compare(model, OPTIONS)(rows(6)))
    assert "1 of" in text and "eager's has entries that are not a number" in text


@pytest.mark.filterwarnings("ignore:backend 'l2l' does not run Stack.forward")
def test_programs_behind_graph_breaks_name_segments():
    class Breaking(Layer):
        def forward(self, x):
            y = super().forward(x)
            torch._dynamo.graph_break()
            return y

    comparison = compare(Stack([Breaking() for _ in range(2)]), OPTIONS)(rows(6))
    (program,) = comparison.programs  # of a layer, which does not know its place in the stack
    assert [s.name for s in program.segments] == ["norm", "up", "down"]
    assert comparison.passes and all(d.segments for d in comparison.differences if "layers." in d.key.name)


# ---- tolerances ------------------------------------------------------------------------------------------------------


def test_the_default_tolerance_is_the_promise():
    float64, float32 = torch.float64, torch.float32
    assert promise(float64, float64, None) == Promise(1e-10, 2**-52, fixed=False)
    assert promise(float64, float32, None) == Promise(1e-10, 2**-52, fixed=True)
    assert promise(float64, float32, None, "inductor") == Promise(1e-5, 2**-23, fixed=False)
    assert promise(float64, float64, None, "inductor") == Promise(1e-10, 2**-52, fixed=False)
    assert promise(float32, torch.bfloat16, None) == Promise(1e-5, 2**-23, fixed=False)
    assert promise(float32, float32, 1e-3) == Promise(1e-3, 2**-23, fixed=True)
    with pytest.raises(L2LError, match="no promise for a model in bfloat16.*dtype=torch.float32"):
        compare(Stack(2).bfloat16(), OPTIONS, dtype=None)(rows(6, dtype=torch.bfloat16))


@pytest.mark.parametrize("fixed", [False, True])
def test_what_is_allowed(fixed):
    def allowed(norm, own, noise=None):
        return rule.allowed(Expected(norm, largest, own, noise))

    rule, largest, rounding = Promise(1e-10, 2**-52, fixed), 2.0, 32 * 2**-52 * 2.0
    assert allowed(0.5, 1e-16) == 0.5e-10
    assert allowed(0.5, 1e-8) == (0.5e-10 if fixed else 1e-7)  # eager itself is off by 1e-8
    assert allowed(1e-6, 1e-15) == pytest.approx(1e-14)  # of the rounding at the size of the largest
    assert allowed(1e-6, 1e-14) == pytest.approx(1e-10 * 1e-4 * largest if fixed else 1e-13)
    assert allowed(1e-18, 1e-18) == rounding
    assert allowed(1e-18, 1e-30) == pytest.approx(1e-28)
    assert allowed(1e-18, None) == rounding and allowed(1.0, None) == 1e-10
    assert allowed(1e-18, 0.0, 1e-18) == allowed(1e-18, None, 1e-18) == rounding
    assert allowed(1e-18, None, 1e-30) == pytest.approx(1e-28)
    assert allowed(1e-9, 0.0, 1e-9) == rounding  # what moves tells that the tensor is zero, and not how far it may be off
    assert Promise(1e-10, 2**-23, fixed).allowed(Expected(1e-3, largest)) == pytest.approx(1e-14 * largest)


def test_what_is_allowed_among_ways_to_update():
    rule = SameUpdates(1e-6, noise=1e-2)
    assert rule.allowed(Expected(0.5, 2.0)) == rule.allowed(Expected(0.5, 2.0, 1e-16)) == 0.5e-6
    assert rule.allowed(Expected(0.5, 2.0, 1e-7)) == pytest.approx(1e-6)  # as far as reversed rows move it, ten times
    assert rule.allowed(Expected(0.5, 2.0, 0.5)) == 5.0 and rule.allowed(Expected(0.5, 2.0, 0.0)) == 0.5e-6
    assert SameUpdates(0.0, noise=1e-2).allowed(Expected(0.5, 2.0, 0.5)) == 0.0  # the same bits


def test_what_is_zero_but_for_rounding():
    rule, largest = Promise(1e-10, 2**-52, fixed=True), 2.0
    assert rule.is_zero(Expected(1e-18, largest, 1e-18)) and not rule.is_zero(Expected(1e-18, largest, 1e-30))
    assert rule.is_zero(Expected(1e-18, largest, 0.0, 1e-18)) and rule.is_zero(Expected(1e-18, largest, None, 1e-18))
    assert not rule.is_zero(Expected(1e-18, largest, None, 1e-30))  # as small as that, with all its digits
    assert rule.is_zero(Expected(1e-18, largest)) and not rule.is_zero(Expected(1e-12, largest))


class Cancelling(nn.Module):
    """Rows come in pairs whose gradients nearly cancel: few digits remain in float32, whichever way they are summed."""

    def __init__(self):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return (x * self.weight).sum() + (x.abs() * self.other).sum()


def test_more_is_allowed_where_reversed_rows_move_eager_by_more():
    x = torch.randn(64, WIDTH) * torch.tensor([1e-3, 1e3]).repeat(32)[:, None]
    x = torch.cat([x, -x + 1e-2 * torch.rand(64, WIDTH)])[torch.randperm(128)]
    comparison = assert_equivalent(Cancelling(), x, options={**OPTIONS, "micro_batches": 7}, dtype=None)
    worst = comparison.worst
    assert worst.difference.key.name == "weight" and worst.difference.relative > 1e-5
    assert worst.allowed == pytest.approx(10 * worst.own) and not worst.is_zero


class OrderMatters(Stack):
    def forward(self, x):
        return super().forward(x) * torch.arange(x.shape[0], dtype=x.dtype).view(-1, 1)


def test_an_error_of_eager_that_cannot_be_measured_is_said():
    comparison = assert_equivalent(OrderMatters(2), rows(6), options=OPTIONS)
    assert "eager, rows reversed: not known, since the numbers depend on the order of the rows" in str(comparison)
    assert all(comparison.verdict(d).own is None for d in comparison.differences)


class WithStates(nn.Module):
    """The states of a recurrent layer have the batch in the second dimension, wherever its inputs have it."""

    def __init__(self, batch_first):
        super().__init__()
        self.rnn, self.head = nn.GRU(5, WIDTH, num_layers=2, batch_first=batch_first), nn.Linear(WIDTH, 3)

    def forward(self, x, state):
        y, state = self.rnn(x, state)
        return self.head(y), state


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
def test_rows_in_the_second_dimension_are_reversed_there(batch_first):
    x = rows(6, 4, 5) if batch_first else rows(4, 6, 5)
    comparison = assert_equivalent(WithStates(batch_first), x, torch.randn(2, 6, WIDTH), options=OPTIONS)
    assert comparison.own.why is None and 0 < max(comparison.own.errors.values()) < 1e-13


def test_a_step_of_the_callers_own():
    def two_forwards(call, one, two):
        a, b = call(one), call(two)
        (a.pow(2).mean() + b.pow(3).mean()).backward()
        return a

    pair = Pair.of(Stack(2), OPTIONS)
    first = pair.run(two_forwards, rows(6), rows(5)).check()
    second = pair.run(two_forwards, rows(7), rows(4)).check()
    assert second.own.why is None and "next step" in first.own.why


def test_a_step_that_draws_its_batch_has_the_same_each_time():
    def step(call):
        drawn.append(rows(6))
        call(drawn[-1]).pow(2).mean().backward()

    drawn = []
    pair = Pair.of(Stack(2), OPTIONS)
    for _ in range(2):
        assert pair.run(step).check().own.why is None
    runs = 2 + 1 + MOVES  # eager and streamed, and the errors of eager
    assert len(drawn) == 2 * runs
    first, second = drawn[:runs], drawn[runs:]
    assert all(torch.equal(x, step[0]) for step in (first, second) for x in step)
    assert not torch.equal(first[0], second[0])


def test_measuring_eager_twice_gives_the_same():
    """Buffers are put back before the step is taken again."""
    pair = Pair.of(Stack([Layer(norm=nn.BatchNorm1d) for _ in range(2)]), OPTIONS)
    for _ in range(2):
        comparison = pair.step(rows(6)).check()
    assert max(comparison.own.errors.values()) < 1e-12 and comparison.measure() == comparison.own


class Rows(Stack):
    """A buffer that keeps rows of the batch: it depends on their order, and nothing else does."""

    def __init__(self):
        super().__init__(2)
        self.register_buffer("kept", torch.zeros(2, 5))

    def forward(self, x):
        self.kept.copy_(x[:2])
        return super().forward(x)


def test_a_buffer_of_rows_has_no_own_error_of_eager():
    comparison = assert_equivalent(Rows(), rows(6), options=OPTIONS)
    verdicts = {v.difference.key.kind: v for v in map(comparison.verdict, comparison.differences)}
    assert verdicts["buffer"].own is None and verdicts["gradient"].own is not None
    assert verdicts["buffer"].allowed == 1e-10 * verdicts["buffer"].difference.norm


def test_measuring_eager_leaves_it_as_its_step_did():
    pair = Pair.of(Rows(), OPTIONS)
    comparison, kept = pair.step(rows(6)), pair.eager.kept.clone()
    gradients = [p.grad for p in pair.eager.parameters()]
    assert comparison.own.errors and torch.equal(pair.eager.kept, kept)
    assert all(p.grad is g for p, g in zip(pair.eager.parameters(), gradients, strict=True))


def test_written_inputs_are_written_with_the_rows_reversed():
    class Halving(Stack):
        def forward(self, x, y):
            y.mul_(0.5).add_(self.embed(x))
            return super().forward(x) * y.sum(-1, keepdim=True)

    comparison = assert_equivalent(Halving(2), rows(6), rows(6, WIDTH), options=OPTIONS)
    written = next(d for d in comparison.differences if str(d.key) == "input 1")
    assert comparison.verdict(written).own < 1e-14 * written.norm


class Keys(nn.Module):
    """The bias of keys has no influence on a softmax."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention() for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Flat(nn.Module):
    """Norms of values that are all equal: a rounding that each row has by itself, in whatever order."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.sum(1, keepdim=True).expand_as(x).clone())
        return x


@pytest.mark.parametrize(
    "model, batch, names",
    [
        (Keys, lambda: rows(1, 4, WIDTH).expand(4, 4, WIDTH), [f"layers.{i}.k.bias" for i in range(2)]),
        (Flat, lambda: rows(6, WIDTH), [f"layers.{i}.norm.weight" for i in range(2)]),
    ],
    ids=["equal rows", "rounding of a row"],
)
def test_a_gradient_that_is_zero_but_for_rounding_in_any_order(model, batch, names):
    """Reversed rows give the same bits. Parameters that move by a rounding do not."""
    comparison = assert_equivalent(model(), batch().contiguous(), options=OPTIONS)
    verdicts = [v for v in map(comparison.verdict, comparison.differences) if v.difference.key.name in names]
    assert [v.is_zero for v in verdicts] == [True, True]
    assert any(v.own < 1e-2 * v.difference.norm for v in verdicts)


def test_a_gradient_that_is_small_is_not_zero():
    """It has all its digits, however small it is beside others."""

    class Small(Stack):
        def forward(self, x):
            return super().forward(x) + 1e-20 * self.extra(x)

    model = Small(2)
    model.extra = nn.Linear(5, 3)
    comparison = assert_equivalent(model, rows(6), options=OPTIONS)
    found = {v.difference.key.name: v for v in map(comparison.verdict, comparison.differences)}
    small = found["extra.weight"]
    assert small.difference.norm < 1e-18 and not small.is_zero
    assert small.allowed == 1e-10 * small.difference.norm


# ---- 16 bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_are_compared_with_autocast(precision):
    big = 1e6 if precision == "fp16" else 1.0  # the first scales of the loss are too large
    model = Returning(lambda loss, y: {"loss": loss * big, "y": y})
    comparison = assert_equivalent(model, rows(12), options={**OPTIONS, "precision": precision})
    together = comparison.worst
    assert together.difference.key.name == "all parameters together"
    assert 1e-5 < together.difference.relative < 1e-2 and together.own > 0
    assert "autocast" in str(comparison) and len(comparison.shown) == 16


def test_the_helpers_of_the_suite_stand_on_it():
    assert l2l_compile.programs(assert_parity(Stack(2).double(), rows(6)))


@pytest.mark.slow
def test_a_llama_with_default_options_keeps_the_promise():
    """Its norms compute in float32, which Inductor rounds otherwise than eager; with uncompiled blocks all digits are eager's."""
    model, batch = llama()
    compiled = assert_equivalent(model, **batch, options={"device": "cpu"})
    assert "in float64, parts of it in float32" in str(compiled)
    assert 1e-10 < compiled.worst.difference.relative < 1e-5
    exact = assert_equivalent(model, **batch, options=OPTIONS)
    assert exact.worst.difference.relative < 1e-10
