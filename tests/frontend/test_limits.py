"""Models that are compiled again and again: up to which number of programs, and what the user hears of it."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile import L2LError, RecompileLimitError
from l2l_compile.frontend.dynamo import limits
from models import WIDTH, Broken, Stack, assert_same_state, compiled, pair_of, rows

DYNAMOS_LIMIT = 8


@pytest.fixture
def few(monkeypatch):
    """A limit that is reached soon, above Dynamo's own."""
    monkeypatch.setattr(limits, "LIMIT", 10)
    return 10


@pytest.fixture(autouse=True)
def untouched_config():
    """Nothing here leaves another limit behind for other backends."""
    yield
    assert torch._dynamo.config.recompile_limit == DYNAMOS_LIMIT
    assert torch._dynamo.config.accumulated_recompile_limit == 256


class Labelled(Stack):
    """A string is a constant of the program: each new one needs a program of its own."""

    def __init__(self, layers=2):
        super().__init__([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])

    def forward(self, x, label="0"):
        return super().forward(x) * len(label)


class Shallow(Stack):
    """Runs its first `depth` layers."""

    depth = 1

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers[: self.depth]:
            x = torch.tanh(layer(x))
        return self.head(x)


def run(step, label):
    return step(rows(6), str(label))


def streamed(output: torch.Tensor) -> bool:
    """Whether a program of ours made it."""
    return type(output.grad_fn).__name__ == "StreamedFunctionBackward"


def refused(step, label) -> str:
    with pytest.raises(RecompileLimitError) as caught:
        run(step, label)
    return str(caught.value)


# ---- a model that recompiles for ever --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:backend 'l2l' compiles")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_at_the_limit_an_error_tells_the_reason_and_the_remedy(few, fullgraph):
    step = torch.compile(Labelled().double(), backend="l2l", fullgraph=fullgraph, options={"block_compiler": "eager"})
    for label in range(few):
        run(step, label).sum().backward()
    for _ in range(2):  # Dynamo would say it once
        text = refused(step, "new")
        assert "Labelled.forward (" in text and "test_limits.py" in text
        assert "label was '9', '8', '7' and 7 other values" in text
        assert "hold label constant" in text
        assert "torch._dynamo.config.recompile_limit = 20" in text
    assert len(l2l_compile.programs(step)) == few


@pytest.mark.filterwarnings("ignore:backend 'l2l' compiles")
def test_the_line_that_the_error_names_lets_the_model_go_on(few):
    step = compiled(Labelled().double())
    for label in range(few):
        run(step, label)
    line = refused(step, "new").splitlines()[-1].split(": ")[-1]
    with torch._dynamo.config.patch(recompile_limit=DYNAMOS_LIMIT):  # for the line to be taken back
        exec(line)
        assert streamed(run(step, "new"))


@pytest.mark.filterwarnings("ignore:backend 'l2l' compiles")
def test_calls_that_a_program_fits_still_run_it_after_the_error(few):
    step = compiled(Labelled().double())
    for label in range(few):
        run(step, label)
    refused(step, "new")
    assert all(streamed(run(step, label)) for label in range(few))


def test_a_warning_tells_why_dynamos_own_limit_is_passed(few):
    step = compiled(Labelled().double())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for label in range(DYNAMOS_LIMIT):
            run(step, label)
    with pytest.warns(UserWarning, match=r"(?s)compiles Labelled.forward.*label was '7', '6'.*hold label constant") as caught:
        run(step, "new")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert streamed(run(step, "another"))


def test_a_number_given_as_a_tensor_needs_one_program():
    class Scaled(Stack):
        def forward(self, x, scale):
            return super().forward(x) * scale

    step = compiled(Scaled().double())
    for i in range(3):
        step(rows(6), 0.5 + i)
    assert len(l2l_compile.programs(step)) == 2  # for the first value, and for all others
    torch._dynamo.reset()
    step = compiled(Scaled().double())
    for i in range(3):
        step(rows(6), torch.tensor(0.5 + i))
    assert len(l2l_compile.programs(step)) == 1


@pytest.mark.filterwarnings("ignore:backend 'l2l' compiles")
def test_the_limit_of_a_function_behind_a_graph_break(few):
    class BreaksFirst(Broken):
        def forward(self, x, label):
            return super().forward(x) * len(label)

    step = compiled(BreaksFirst().double())
    for label in range(few):
        run(step, label)
    assert "label was '9'" in refused(step, "new")
    assert streamed(run(step, 0))


@pytest.mark.filterwarnings("ignore:backend 'l2l' (compiles|does not run)")
def test_the_limit_of_a_function_called_by_one_that_dynamo_skips(few):
    inner = Labelled().double()

    def outer(x, label):
        for _ in range(2):
            torch._dynamo.graph_break()
            y = inner(x, label)
        return y

    step = compiled(outer)
    for label in range(few):
        run(step, label)
    assert "Labelled.forward" in refused(step, "new")
    assert streamed(run(step, 0))


@pytest.mark.filterwarnings("ignore:backend 'l2l' compiles")
def test_explain_of_a_model_at_its_limit(few):
    model = Labelled().double()
    step = compiled(model)
    for label in range(few):
        run(step, label)
    report = l2l_compile.explain(step)(rows(6), "new")
    assert len(report.programs) == 1 and not report.uncompiled


def test_explain_is_silent_on_a_function_with_many_programs():
    inner = Labelled().double()

    def outer(x):
        for label in range(DYNAMOS_LIMIT + 2):
            torch._dynamo.graph_break()
            y = inner(x, str(label))
        return y

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = l2l_compile.explain(outer)(rows(6))
    assert len(report.programs) == DYNAMOS_LIMIT + 2


def test_programs_of_other_models_of_the_class_are_named(few):
    for layers in range(few):
        run(compiled(Labelled(layers + 1).double()), 0)
    text = refused(compiled(Labelled(few + 1).double()), 0)
    assert "torch._dynamo.reset() forgets" in text
    torch._dynamo.reset()
    assert streamed(run(compiled(Labelled(few + 1).double()), 0))


# ---- a model that needs many programs --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:backend 'l2l' compiles")
@pytest.mark.slow
def test_a_depth_that_changes_twenty_times_stays_compiled():
    model = Shallow([nn.Linear(WIDTH, WIDTH) for _ in range(20)]).double()

    def step(call, x):
        output = call(x)
        seen.append(streamed(output))
        output.pow(2).sum().backward()
        return output

    pair, seen = pair_of(model), []
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, pair.eager)]
    for depth in range(20, 0, -1):
        model.depth = pair.eager.depth = depth
        x = rows(6)
        pair.run(step, x).check()
        assert seen[-1] and len(seen) == 2 * (21 - depth)
        for optimizer in optimizers:
            optimizer.step()
    assert len(pair.programs) == 20
    assert_same_state(model, pair.eager, 1e-9)


# ---- limits of others, and the user's own ----------------------------------------------------------------------------


def test_other_backends_keep_dynamos_limit():
    graphs = []

    def other(gm, inputs):
        graphs.append(gm)
        return gm

    compiled(Stack().double())(rows(6))
    step = torch.compile(Labelled().double(), backend=other)
    for label in range(DYNAMOS_LIMIT + 4):
        run(step, label)
    assert len(graphs) == DYNAMOS_LIMIT


@pytest.mark.filterwarnings("ignore:backend 'l2l' compiles")
@pytest.mark.parametrize("own", [3, 12])
def test_a_limit_that_the_user_has_set_holds(few, own):
    step = compiled(Labelled().double())
    with torch._dynamo.config.patch(recompile_limit=own):
        for label in range(own):
            assert streamed(run(step, label))
        assert f"torch._dynamo.config.recompile_limit = {2 * own}" in refused(step, "new")


@pytest.mark.skipif("recompile_limit" not in inspect.signature(torch.compile).parameters, reason="an argument since PyTorch 2.13")
@pytest.mark.parametrize("own", [3, 12])
def test_a_limit_given_to_torch_compile_holds(few, own):
    step = torch.compile(Labelled().double(), backend="l2l", recompile_limit=own, options={"block_compiler": "eager"})
    for label in range(own):
        assert streamed(run(step, label))
    assert f"torch.compile(..., recompile_limit={2 * own})" in refused(step, "new")


def test_the_limit_over_all_models_holds():
    step = compiled(Labelled().double())
    with torch._dynamo.config.patch(accumulated_recompile_limit=3):
        for label in range(3):
            run(step, label)
        assert "torch._dynamo.config.accumulated_recompile_limit = 6" in refused(step, "new")


def test_the_error_is_one_of_ours():
    assert issubclass(RecompileLimitError, L2LError)
