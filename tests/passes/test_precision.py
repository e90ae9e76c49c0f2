"""Cross mixed precision: 16 bits on the link and on the device, fp32 on the host."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as T
from torch.fx.experimental.proxy_tensor import make_fx

import l2l_compile
from l2l_compile import L2LError, LoweringError, OptionError, Options
from l2l_compile.lowering.inductor import compile_graph
from models import Stack, compiled, rows
from narrow_errors import Errors, gradient_errors
from test_huggingface import ROWS, VOCAB, bert, gemma2, gpt2, language, llama, t5

FOLDER = Path(__file__).parents[2]


def wide_t5():
    """Wide enough to be measured: one element that rounding carries over a ReLU's edge is all of a tiny T5's error in fp16."""
    return t5(d_model=64, d_kv=16, d_ff=256, num_layers=2, num_heads=4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("make", [llama, gpt2, gemma2, bert, wide_t5])
@pytest.mark.slow(but="llama-*")
def test_gradients_are_about_as_good_as_those_of_autocast(make, precision):
    """Of the mean over three draws of weights and data: in one, the rounding of either may happen to cancel."""
    found, expected, errors = 0.0, 0.0, Errors(make()[0], precision, micro_batches=ROWS)  # one size of blocks to trace
    for seed in range(3):
        torch.manual_seed(seed)
        ours, theirs = errors.of(*make())
        found, expected = found + ours, expected + theirs
    assert found <= 1.5 * expected


@pytest.mark.slow
def test_compiled_blocks_are_as_good():
    found, expected = gradient_errors(*bert(), "bf16", block_compiler="inductor", micro_batches=ROWS)
    assert found <= 1.5 * expected


class Residual(torch.nn.Module):
    """Layers around a sum that autocast keeps in fp32, since it begins with an embedding."""

    def __init__(self, layers: int, width: int = 64):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(50, width), torch.nn.Linear(width, 8)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(width), torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
            )
            for _ in range(layers)
        )

    def forward(self, x, labels):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).float(), labels)


DEPTHS = re.findall(r"^\| (\d+) \| ([\d.]+) \|$", (FOLDER / "docs/updates.md").read_text(), re.M)


@pytest.mark.parametrize(("layers", "written"), DEPTHS)
@pytest.mark.slow(but="12-*")
def test_the_error_grows_with_depth_as_documented(layers, written):
    found = expected = 0.0
    for seed in range(3):
        torch.manual_seed(seed)
        model = Residual(int(layers))
        batch = {"x": torch.randint(0, 50, (64,)), "labels": torch.randint(0, 8, (64,))}
        ours, theirs = gradient_errors(model, batch, "bf16", micro_batches=2)
        found, expected = found + ours, expected + theirs
    assert found / expected == pytest.approx(float(written), abs=0.2)


def test_the_documented_depths_are_there():
    assert len(DEPTHS) == 4


@torch.library.custom_op("l2l_tests::times", mutates_args=())
def times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight.t()).to(x.dtype)


times.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]))
times.register_autograd(
    lambda ctx, g: (times(g, ctx.saved_tensors[1].t()), g.flatten(0, -2).t() @ ctx.saved_tensors[0].flatten(0, -2)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class WithoutAutocast(torch.nn.Module):
    """Layers of operations that autocast does not know, and that want operands of one dtype."""

    OPERATIONS = {
        "custom": lambda x, w: times(x, w),
        "index_add": lambda x, w: x.clone().index_add(1, torch.arange(4), w[:4].expand(x.shape[0], -1, -1)),
        "lerp": lambda x, w: torch.lerp(x, w[0].expand_as(x), 0.3),
        "bilinear": lambda x, w: F.bilinear(x, x, w.view(1, 8, 8)).expand_as(x),
        "matrix_exp": lambda x, w: x @ torch.linalg.matrix_exp(w * 0.1),
    }

    def __init__(self, operation: str):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.randn(8, 8) for _ in range(3)])
        self.norm, self.apply_it = torch.nn.LayerNorm(8), self.OPERATIONS[operation]

    def forward(self, x):
        for weight in self.weights:
            x = x + self.apply_it(self.norm(x), weight)
        return T.modeling_outputs.MaskedLMOutput(loss=x.pow(2).mean())


@pytest.mark.parametrize("operation", WithoutAutocast.OPERATIONS)
def test_operations_that_autocast_does_not_know(operation):
    """Autocast computes them in fp32 on weights in fp32, here the weights have crossed the link in bf16: 2**-9 of each."""
    found, expected = gradient_errors(WithoutAutocast(operation), {"x": rows(6, 5, 8, dtype=torch.float32)}, "bf16")
    assert found <= 3 * expected + 3e-2


@pytest.mark.skipif(
    not hasattr(T.integrations.moe, "_grouped_mm_fallback_backward_fake"),
    reason="this transformers reads numbers from tensors to differentiate its product in groups: it cannot be traced",
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_experts_that_are_multiplied_in_groups(precision):
    model, inputs = language(
        T.MixtralForCausalLM(
            T.MixtralConfig(
                vocab_size=VOCAB,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_local_experts=4,
                use_cache=False,
            )
        )
    )
    found, expected = gradient_errors(model, inputs, precision, micro_batches=ROWS)
    assert (
        found <= 3 * expected + 1e-2
    )  # a token that rounding sends to another expert is all of the error, of ours or of autocast's


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_matrices_of_16_bits_are_read_as_they_arrive(which):
    """Widened for what autocast does not know, they cost nothing where it narrows them again; so their gradients."""
    step = compiled(llama()[0], precision="bf16")
    (program,) = l2l_compile.explain(step, {"micro_batches": 3, "precision": "bf16", "block_compiler": "eager"})(
        **llama()[1]
    ).programs
    block = next(b for b in program.blocks if b.repeats > 1)
    graph = getattr(program, f"{which}_of")(block).graph
    operands = [p for p in graph.find_nodes(op="placeholder") if isinstance(p.meta["val"], torch.Tensor)]
    matrices = [p for p, spec in zip(operands, block.weights, strict=False) if len(spec.shape) == 2]
    assert len(matrices) == 7 and all(p.meta["val"].dtype is torch.bfloat16 for p in matrices)
    casts = [n for n in graph.nodes if n.target is torch.ops.aten._to_copy.default]
    assert casts and not any(c.args[0] in matrices for c in casts)
    if which == "backward":
        made = [
            r.meta["val"].dtype
            for r, spec in zip(graph.output_node().args[0], block.weights, strict=False)
            if len(spec.shape) == 2
        ]
        assert made == [torch.bfloat16] * 7


def test_compiled_blocks_refuse_operands_of_other_dtypes():
    graph = make_fx(lambda x: (x * 2,), tracing_mode="fake")(torch.ones(3))
    run = compile_graph(graph, torch.device("cpu"))
    assert torch.equal(run(torch.ones(3))[0], torch.full((3,), 2.0))
    with pytest.raises(LoweringError, match="compiled for operands of .*float32.* called with .*float64"):
        run(torch.ones(3, dtype=torch.float64))


def test_the_wire_carries_two_bytes_a_parameter():
    model = Stack(4, width=128)
    step = compiled(model, precision="bf16")
    step(rows(6, dtype=torch.float32)).sum().backward()
    fetched = 2 * sum(p.numel() for p in model.parameters())  # in forward, and again in backward
    vectors = 2 * sum(p.numel() for p in model.parameters() if p.dim() < 2)
    assert l2l_compile.stats(step).fetched_bytes == 2 * fetched + 2 * vectors
    assert l2l_compile.stats(step).pushed_bytes == fetched + vectors


def test_gradients_may_cross_the_link_in_another_precision():
    model = Stack()
    step = compiled(model, precision="bf16", gradient_wire="fp32")
    step(rows(6, dtype=torch.float32)).sum().backward()
    assert l2l_compile.stats(step).pushed_bytes == 4 * sum(p.numel() for p in model.parameters())


def test_evaluation_gives_what_training_gives():
    model = Stack()
    step, x = compiled(model, precision="bf16"), rows(6, dtype=torch.float32)
    trained = step(x)
    with torch.no_grad():
        assert torch.equal(step(x), trained)


@pytest.mark.parametrize("update", ["at_step", "in_forward"])
def test_an_overflow_skips_one_step_and_halves_the_scale(update):
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = compiled(model, precision="fp16", optimizer=optimizer, update=update)

    def train(factor):
        (step(rows(6, dtype=torch.float32)).pow(2).mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        l2l_compile.synchronize(step)

    train(1.0)
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    scale = l2l_compile.stats(step).loss_scale
    train(1e8)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(torch.equal(a, state["state"][i][n]) for i, s in optimizer.state_dict()["state"].items() for n, a in s.items())
    assert l2l_compile.stats(step).skipped_steps == 1
    assert l2l_compile.stats(step).loss_scale == scale / 2
    train(1.0)
    assert l2l_compile.stats(step).skipped_steps == 1
    assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])


def test_scaling_has_the_rules_of_grad_scaler():
    from l2l_compile.host.updates.loss_scale import LossScale

    ours, theirs = LossScale(growth_interval=3), torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs.scale(torch.ones(()))
    for overflow in (False, True, False, False, False, False, True, True, False, False, False):
        weight.grad = torch.tensor([float("inf") if overflow else 1.0])
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow)
        assert ours.value == theirs.get_scale()


def test_what_is_refused():
    x = rows(4, dtype=torch.float32)
    with pytest.raises(L2LError, match="torch.autocast is on.*precision='bf16'"), torch.autocast("cpu"):
        compiled(Stack(), precision="bf16")(x)
    with pytest.raises(L2LError, match="float64"):
        compiled(Stack().double(), precision="bf16")(x.double())
    with pytest.raises(L2LError, match="needs the option 'optimizer'"):
        compiled(Stack(), precision="fp16")(x)
    optimizer = torch.optim.SGD(Stack().parameters(), lr=0.1)
    for bad, words in (
        ({"precision": "int8"}, "precision"),
        ({"update": "in_forward"}, "needs the option 'optimizer'"),
        ({"update": "in_backward", "optimizer": optimizer, "precision": "fp16"}, "in_forward"),
        ({"update": "in_backward", "optimizer": optimizer, "max_grad_norm": 1.0}, "Use update='in_forward'"),
        ({"max_grad_norm": 1.0}, "clip_grad_norm_"),
        ({"accumulate": 2}, "at_step accumulates"),
        ({"optimizer": torch.optim.SGD}, "already built"),
    ):
        with pytest.raises(OptionError, match=words):
            Options.build(bad)


def test_of_models_with_one_optimizer_that_which_ran_overflows():
    model, idle = Stack(), Stack()
    optimizer = torch.optim.SGD([*idle.parameters(), *model.parameters()], lr=0.1)
    steps = [compiled(m, precision="fp16", optimizer=optimizer, micro_batches=n) for n, m in ((2, idle), (3, model))]
    for step in steps:
        step(rows(6, dtype=torch.float32))
    (steps[1](rows(6, dtype=torch.float32)).pow(2).mean() * 1e8).backward()
    optimizer.step()
    assert [l2l_compile.stats(step).loss_scale for step in steps] == [65536.0, 32768.0]


def test_closures_are_refused_in_fp16():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(model, precision="fp16", optimizer=optimizer)(rows(6, dtype=torch.float32)).sum().backward()
    with pytest.raises(L2LError, match="closure"):
        optimizer.step(lambda: None)


def test_a_model_in_16_bits_has_no_wider_copy():
    with pytest.warns(UserWarning, match="have 16 bits on the host"):
        compiled(Stack(3).bfloat16(), precision="bf16")(rows(6, dtype=torch.bfloat16))
