"""What a user of `torch.compile(model, backend="l2l")` may rely on, against eager in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile.testing import training_equivalent
from models import (
    WIDTH,
    Attention,
    BiasOfFirst,
    Broken,
    EncoderDecoder,
    Funnel,
    Layer,
    Shared,
    Stack,
    TwoHeads,
    UNet,
    assert_parity,
    compiled,
    forward_alone,
    functional,
    pair_of,
    rows,
)


def programs_of(model):
    return l2l_compile.programs(model)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_batch_size_changes_without_a_new_capture():
    model = assert_parity(Stack().double(), *(rows(n) for n in (6, 7, 12, 2, 6)))  # 7 is no multiple of 3, 2 is below 3
    assert len(programs_of(model)) == 1


def test_batch_of_one_row_runs_whole_with_its_reason():
    model = assert_parity(Stack().double(), rows(1))
    assert {s.block.reason for s in programs_of(model)[0].whole_batch} == {"a batch of one row cannot be split"}


class DividedByTheBatch(Stack):
    def forward(self, x):
        return super().forward(x) * (1.0 / x.shape[0])


def test_a_number_of_the_batch_size_keeps_one_segment_whole():
    step = assert_parity(DividedByTheBatch().double(), rows(6), rows(9))
    (program,) = programs_of(step)
    assert {s.block.reason for s in program.whole_batch} == {"aten.mul.Tensor uses the size of the batch as a number"}
    assert all(s.block.inner_looped for s in program.segments if s.name.startswith("layers."))


def test_differentiating_within_a_function_traces_no_backward():
    model = Stack().double()

    def penalty(x):
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.pow(2).sum()

    with pytest.raises(RuntimeError, match="first derivatives only.*create_graph"):
        compiled(penalty)(rows(6).requires_grad_())


@pytest.mark.parametrize("dynamic", [None, True])
def test_varying_sequence_length(dynamic):
    model = Stack([Attention() for _ in range(3)]).double()
    step = assert_parity(model, *(rows(b, t, 5) for b, t in ((6, 6), (6, 9), (4, 5), (7, 3))), dynamic=dynamic)
    assert len(programs_of(step)) == (1 if dynamic else 2)
    assert all(s.block.inner_looped for p in programs_of(step) for s in p.segments)


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batches": 1},
        {"micro_batches": 50},
        {"stash": "device"},
        {"prefetch": 0},
        {"prefetch": 3},
        {"block_compiler": "inductor"},
    ],
    ids=str,
)
def test_options_do_not_change_the_numbers(options):
    assert_parity(Stack(5).double(), rows(6), rows(8), **options)


@pytest.mark.parametrize(
    "make, shape",
    [
        (EncoderDecoder, (4, WIDTH)),
        (BiasOfFirst, (4, WIDTH)),
        (Shared, (5,)),
        (UNet, (WIDTH,)),
        (Funnel, (5,)),
        (TwoHeads, (5,)),
    ],
)
def test_shapes_of_model(make, shape):
    assert_parity(make().double(), rows(6, *shape), rows(5, *shape))


def test_float32_is_within_rounding():
    assert_parity(Stack(4), rows(6, dtype=torch.float32), tolerance=1e-5)


def test_functional_stack_gives_gradients_to_its_weights():
    weights = [torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    found = pair_of(functional).step(rows(6, WIDTH), weights).check()
    assert sum(d.key.kind == "gradient of input" for d in found.differences) == 4


# ---- several programs, several calls ---------------------------------------------------------------------------------


def test_autograd_joins_programs_on_both_sides_of_a_graph_break():
    model = assert_parity(Broken().double(), rows(6), rows(5))
    first, second = programs_of(model)
    assert "graph_break" in first.break_reason and second.break_reason is None
    assert l2l_compile.stats(model).pushed_bytes == sum(p.numel() * 8 for p in model.parameters())


def test_backward_calls_accumulate():
    def two_steps(call, *batches):
        for x in batches:
            call(x).pow(2).mean().backward()

    pair_of(Stack().double()).run(two_steps, rows(6), rows(4)).check()


def test_two_forwards_before_their_backwards():
    def step(call, one, two):
        a, b = call(one), call(two)
        (a.pow(2).mean() + b.pow(3).mean()).backward()
        return a, b

    pair_of(Stack().double()).run(step, rows(6), rows(5)).check()


@pytest.mark.parametrize("stash", ["host", "device"])
def test_a_retained_graph_has_a_second_backward_and_a_freed_not(stash):
    def twice(call, x):
        losses.append(call(x).pow(2).sum())
        losses[-1].backward(retain_graph=True)
        losses[-1].backward()

    losses = []
    pair_of(Stack().double(), stash=stash).run(twice, rows(6)).check()
    for loss in losses:
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_gradient_of_an_input():
    pair = pair_of(Stack().double())
    found = pair.run(lambda call, x: torch.autograd.grad(call(x).pow(2).sum(), x), rows(6).requires_grad_()).check()
    assert [str(d) for d in found.differences] == ["output [0]"]  # and none of a parameter
    found = pair.step(rows(6).requires_grad_()).check()
    assert sum(d.key.kind == "gradient of input" for d in found.differences) == 1


def test_double_backward_is_refused():
    x = rows(6).requires_grad_()
    loss = compiled(Stack().double())(x).pow(2).sum()
    with pytest.raises(RuntimeError, match="first derivatives only.*create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("which", ["parameter", "input"])
def test_write_between_forward_and_backward_is_refused(which):
    model, x = Stack().double(), rows(6)
    loss = compiled(model)(x).sum()
    with torch.no_grad():
        (model.layers[1].up.weight if which == "parameter" else x).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as found:
        loss.backward()
    name = "parameter 'layers.1.up.weight'" if which == "parameter" else "input 'x'"
    assert f"{name} was written after the forward" in found.value.__notes__[0]


def test_training_goes_on_like_eager():
    training_equivalent(
        Stack(),
        [rows(6)] * 5,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        updates=("at_step",),
        options={"micro_batches": 3, "block_compiler": "eager"},
        loss=lambda output: output.pow(2).mean(),
        max_grad_norm=0.1,
    )


# ---- no gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "frozen"])
def test_without_gradients_forward_runs_alone(how):
    def forward(call, x):
        output = call(x)
        assert not output.requires_grad
        return output

    pair = pair_of(Stack().double().requires_grad_(how != "frozen"), tolerance=1e-12)
    with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(how, torch.enable_grad)():
        pair.run(forward, rows(6)).check()
    (program,) = pair.programs
    assert program.backward is None and "stash" not in str(program).split("forward:")[1]
    stats = l2l_compile.stats(pair.compiled)
    assert stats.pushed_bytes == 0 and stats.backward_seconds == 0
    assert stats.offloaded_bytes == 6 * 3 * 8  # the output, and nothing kept


def test_training_and_evaluation_are_programs_of_their_own():
    pair = pair_of(Stack(dropout=0.5).double(), tolerance=1e-12)
    pair.compiled(rows(6)).sum().backward()
    pair.streamed.eval()
    pair.eager.eval()
    with torch.no_grad():
        pair.run(forward_alone, rows(6)).check()
    training, evaluation = pair.programs
    assert training.backward is not None and evaluation.backward is None


def test_frozen_segments_are_not_pushed_and_the_lowest_only_run():
    model = Stack(5).double()
    for part in (model.embed, model.layers[0], model.layers[3]):
        part.requires_grad_(False)
    step = assert_parity(model, rows(6))
    (program,) = programs_of(step)
    backward = str(program).split("backward:")[1]
    ran = [s.name for s in program.segments if f"= backward('{s.name}'" in backward]
    pushed = [s.name for s in program.segments if f"push_gradients('{s.name}'" in backward]
    assert ran == ["layers.1", "layers.2", "layers.3", "layers.4", "head"]  # through layer 3, not below layer 1
    assert pushed == ["layers.1", "layers.2", "layers.4", "head"]
    stats = l2l_compile.stats(step)
    assert stats.pushed_bytes == sum(p.numel() * 8 for p in model.parameters() if p.requires_grad)


def test_loss_beside_unused_logits_costs_no_gradient_of_them():
    pair = pair_of(TwoHeads().double())
    pair.run(lambda call, x: call(x)["loss"].backward(), rows(6)).check()
    gradients = [n for n in pair.programs[0].backward.graph.find_nodes(op="placeholder") if n.meta["kind"] == "gradient"]
    assert [tuple(n.meta["spec"].shape) for n in gradients] == [()]


def test_only_outputs_that_got_a_gradient_are_differentiated():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Stack(3), Stack(3)

        def forward(self, x):
            return self.one(x), self.two(x)

    def one_after_the_other(call, x, order):
        for used in order:
            call(x)[used].pow(2).sum().backward()

    pair = pair_of(Two().double())
    for order in ([0], [1], [0, 1], [0, 1, 0]):
        pair.run(one_after_the_other, rows(6), order).check()  # None where eager has None


# ---- state that forward changes --------------------------------------------------------------------------------------


def test_batch_norm_in_training_is_whole_batch_and_named():
    model = Stack([Layer(norm=nn.BatchNorm1d) for _ in range(3)]).double()
    step = assert_parity(model, rows(6), rows(8))  # running statistics too: once a step, not once more in recompute
    whole = programs_of(step)[0].whole_batch
    assert [s.name for s in whole] == [f"layers.{i}.norm" for i in range(3)]
    assert all("batch_norm" in s.block.reason and ".eval()" in s.block.reason for s in whole)
    assert int(model.layers[0].norm.num_batches_tracked) == 2


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batch_norm_with_other_prefetches(prefetch):
    """Running statistics come back to the device behind the last segment, only to be written back."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x.mean((2, 3))

    assert_parity(Net().double(), rows(6, 3, 4, 4), rows(8, 3, 4, 4), prefetch=prefetch)


def test_batch_norm_in_evaluation_is_inner_looped():
    model = Stack([Layer(norm=nn.BatchNorm1d) for _ in range(3)]).double().eval()
    step = assert_parity(model, rows(6))
    assert all(s.block.inner_looped for s in programs_of(step)[0].segments)


class Counting(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.calls += 1
        self.mean.mul_(0.9).add_(0.1)
        return super().forward(x) + self.mean


@pytest.mark.parametrize("block_compiler", ["eager", "inductor"])
def test_counters_count_once_a_step(block_compiler):
    model = Stack([Counting() for _ in range(3)]).double()
    assert_parity(model, rows(6), rows(6), block_compiler=block_compiler)
    assert [int(layer.calls) for layer in model.layers] == [2, 2, 2]


class Moving(Layer):
    """Its output depends on a buffer that it has just changed."""

    def __init__(self, first):
        super().__init__()
        self.first = first
        self.register_buffer("moving", torch.ones(WIDTH))

    def forward(self, x):
        if self.first == "write":
            self.moving.mul_(0.5).add_(0.1)
            return super().forward(x) * self.moving
        y = super().forward(x)
        self.moving.mul_(0.5).add_(0.1)
        return y * self.moving


@pytest.mark.parametrize("first", ["write", "compute"])
@pytest.mark.parametrize("stash", ["host", "device"])
def test_gradient_through_a_changed_buffer_sees_forwards_value(first, stash):
    assert_parity(Stack([Moving(first) for _ in range(3)]).double(), rows(6), rows(6), stash=stash)


def test_statistics_of_the_batch_are_eagers():
    class Average(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(WIDTH))

        def forward(self, x):
            self.seen.lerp_(x.detach().mean(0), 0.1)
            return super().forward(x)

    assert_parity(Stack([Average() for _ in range(3)]).double(), rows(6), rows(8))


def test_in_place_operations_across_boundaries():
    class InPlace(Stack):
        def forward(self, x):
            x, seen = self.embed(x), []
            for layer in self.layers:
                x.mul_(0.5)  # written in one layer, made in the one before
                x = layer(x).add_(0.1)
                seen.append(x * 1.0)
            return self.head(x), sum(seen)

    assert_parity(InPlace(4).double(), rows(6))


@pytest.mark.parametrize("turned", ["the detached name", "the name that is detached"])
@pytest.mark.parametrize("block_compiler", ["eager", "inductor"])
@pytest.mark.slow(only="inductor-the detached name")
def test_a_value_turned_in_place_keeps_its_shape_elsewhere(turned, block_compiler):
    class Turning(Layer):
        def forward(self, x):
            x = super().forward(x) * 1.0
            detached = x.detach()
            (detached if turned == "the detached name" else x).transpose_(1, 2)
            return x * 2.0 + detached.cos()

    assert_parity(Stack([Turning() for _ in range(2)]).double(), rows(6, WIDTH, 5), block_compiler=block_compiler)


def test_another_name_of_a_value_is_no_operation_of_a_block():
    class Renaming(Layer):
        def forward(self, x):
            return torch.ops.aten.alias(super().forward(x)) + x.detach()

    step = assert_parity(Stack([Renaming() for _ in range(3)]).double(), rows(6))
    program = programs_of(step)[0]
    graphs = [lower(block).graph for block in program.blocks for lower in (program.forward_of, program.backward_of)]
    called = {node.target for graph in graphs for node in graph.nodes}
    assert torch.ops.aten.addmm.default in called
    assert not called & {torch.ops.aten.alias.default, torch.ops.aten.detach.default}


def test_write_into_an_input_reaches_the_caller():
    class Writing(Stack):
        def forward(self, x):
            x.mul_(0.5)
            return super().forward(x)

    found = pair_of(Writing(3).double()).step(rows(6)).check()
    assert [d.error for d in found.differences if d.key.kind == "input"] == [0.0]


# ---- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["inside", "around"])
def test_autocast_keeps_the_casts_of_eager(where):
    class Inside(Stack):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x).float()

    def step(call, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "around"):
            output = call(x)
        output.float().pow(2).sum().backward()
        return output

    pair = pair_of((Inside if where == "inside" else Stack)(3), tolerance=2e-2)
    found = pair.run(step, rows(6, dtype=torch.float32)).check()  # bfloat16 has 8 bits; micro-batches are summed in float32
    assert [d.relative <= 1e-6 for d in found.differences if d.key.kind == "output"] == [True]


def test_no_grad_region_inside_of_a_layer():
    class Stopped(Layer):
        def forward(self, x):
            with torch.no_grad():
                scale = self.up(x).mean(-1, keepdim=True)
            return super().forward(x) * (1 + scale)

    assert_parity(Stack([Stopped() for _ in range(3)]).double(), rows(6))


def test_anomaly_detection_does_not_disturb_the_first_step():
    with torch.autograd.set_detect_anomaly(True):
        assert_parity(Stack().double(), rows(6))
