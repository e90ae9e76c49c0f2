"""What a user can look at: `explain`, `programs`, `stats`."""

from __future__ import annotations

import copy
import io
import logging
import sys
import threading
import types

import pytest
import torch
from torch import fx, nn

import l2l_compile
from l2l_compile.torch_internals import calls
from models import WIDTH, Broken, Layer, Stack, TwoHeads, compiled, rows


def explain(model, *inputs, **options):
    return l2l_compile.explain(model, {"micro_batches": 3, "device": "cpu", **options})(*inputs)


def test_explain_runs_nothing_and_changes_nothing():
    ran = []

    @torch.library.custom_op("l2l_tests::spy", mutates_args=())
    def spy(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x.clone()

    spy.register_fake(torch.empty_like)

    class Spied(Layer):
        def forward(self, x):
            return super().forward(spy(x))

    model = Stack([Spied(norm=nn.BatchNorm1d, dropout=0.5) for _ in range(3)])  # draws, and changes buffers
    x = rows(6, dtype=torch.float32)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = explain(model, x)
    assert not ran
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert len(report.segments) >= 5


def test_explain_names_the_op_that_decided():
    report = explain(Stack([Layer(norm=nn.BatchNorm1d) for _ in range(3)]), rows(6, dtype=torch.float32))
    assert {w.segment for w in report.whole_batch} == {"layers.0.norm", "layers.1.norm", "layers.2.norm"}
    assert all("batch_norm" in w.reason for w in report.whole_batch)
    assert "batch_norm" in str(report) and "layers.0.norm" in str(report)


def test_explain_shows_blocks_breaks_and_outputs():
    report = explain(Stack(4), rows(6, dtype=torch.float32))
    assert [b.repeats for b in report.blocks] == [1, 4, 1] and not report.graph_breaks and not report.whole_batch
    assert [(o.shape, o.bytes) for o in report.outputs] == [((6, 3), 72)]
    assert "x4" in str(report) and "graph breaks: none" in str(report)
    broken = explain(Broken(), rows(6, dtype=torch.float32))
    assert len(broken.programs) == 2 and len(broken.graph_breaks) == 1
    assert "graph_break" in str(broken)


def test_explain_points_at_large_outputs():
    class Caching(Stack):
        def forward(self, x):
            return super().forward(x), (x @ torch.ones(5, 2**16)).sin()

    report = explain(Caching(2), rows(6, dtype=torch.float32))
    assert [o.shape for o in report.large_outputs] == [(6, 2**16)]


class BreaksBelowTheEmbedding(Stack):
    def forward(self, x):
        x = self.embed(x)
        torch._dynamo.graph_break()
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_explain_takes_no_value_between_programs_for_a_weight():
    model = BreaksBelowTheEmbedding(2)
    report = explain(model, rows(6, dtype=torch.float32))
    assert len(report.programs) > 1 and report.host_memory.parameters == sum(p.numel() for p in model.parameters())


def doubled(x):
    """A helper whose graph breaks, so that Dynamo compiles it alone, with a symbol for the width from the second call on."""
    x = x * 2
    torch._dynamo.graph_break()
    return x + 1


class CallsAHelperWithSeveralWidths(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(5, width) for width in (7, 3, 11, 4))
        self.back = nn.ModuleList(nn.Linear(width, 2) for width in (7, 3, 11, 4))

    def forward(self, x):
        return sum(back(doubled(wide(x))).sum() for wide, back in zip(self.wide, self.back, strict=True))


@pytest.mark.filterwarnings("ignore:.*backend 'l2l'")
def test_explain_gives_each_call_of_a_program_its_own_sizes():
    report = explain(CallsAHelperWithSeveralWidths(), rows(6, dtype=torch.float32))
    assert len(report.programs) > 2


def test_explain_takes_compiled_models_and_functions():
    x = rows(6, dtype=torch.float32)
    assert [b.repeats for b in explain(compiled(Stack(4)), x).blocks] == [1, 4, 1]
    assert len(explain(lambda x: x * 2, x).segments) == 1


def test_explain_leaves_a_compiled_model_as_it_was():
    model = compiled(Stack(3))
    x = rows(6, dtype=torch.float32)
    model(x).sum().backward()
    before = l2l_compile.programs(model), l2l_compile.stats(model)
    explain(model, x)
    model(x)
    assert l2l_compile.programs(model) == before[0]


class BreaksInEachLayer(Layer):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:.*backend 'l2l'")
def test_explain_compiles_functions_given_up_for_other_models():
    """Both models have one class, whose forward Dynamo leaves alone once it has met the second."""
    model, other = compiled(Stack(3)), compiled(Stack([BreaksInEachLayer() for _ in range(3)]))
    x = rows(6, dtype=torch.float32)
    model(x)
    before = l2l_compile.programs(model)
    other(x)
    explain(model, x)
    model(x)
    assert l2l_compile.programs(model) == before


def test_types_of_what_programs_gives():
    model = compiled(Stack(3))
    assert l2l_compile.programs(model) == ()
    model(rows(6, dtype=torch.float32)).sum().backward()
    (program,) = l2l_compile.programs(model)
    assert isinstance(program, l2l_compile.Program)
    assert isinstance(program.forward, fx.GraphModule) and isinstance(program.backward, fx.GraphModule)
    assert [s.name for s in program.segments] == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    for segment in program.segments:
        assert isinstance(segment, l2l_compile.Segment)
        assert segment.block in program.blocks and segment.micro_batches == 3
        named = dict(model._orig_mod.named_parameters())
        assert segment.parameter_bytes == sum(named[n].numel() * 4 for n in segment.parameter_names)
    for block in program.blocks:
        assert isinstance(block, l2l_compile.Block)
        assert block.repeats == sum(s.block is block for s in program.segments)
        for graph in (program.forward_of(block), program.backward_of(block)):
            assert isinstance(graph, fx.GraphModule)
            assert any(isinstance(n.target, torch._ops.OpOverload) for n in graph.graph.nodes)
    assert "forward('layers.1'" in str(program)


@pytest.mark.parametrize("ask", [l2l_compile.programs, l2l_compile.stats])
@pytest.mark.parametrize("other", ["module", "function", "number", "other backend"])
def test_anything_else_is_a_type_error(ask, other):
    things = {"module": Stack(), "function": len, "number": 3, "other backend": torch.compile(Stack(), backend="eager")}
    with pytest.raises(TypeError):
        ask(things[other])


def test_stats_count_every_byte_of_the_last_step():
    model = Stack(5).double()
    step, x = compiled(model, stash="host", prefetch=1), rows(6)
    assert l2l_compile.stats(step) == l2l_compile.Stats()
    parameters = sum(p.numel() * 8 for p in model.parameters())
    for _ in range(2):  # figures of one step, not sums over steps
        output = step(x)
        output.sum().backward()
        stats = l2l_compile.stats(step)
        assert isinstance(stats, l2l_compile.Stats)
        assert stats.fetched_bytes == 2 * parameters  # forward and backward
        assert stats.pushed_bytes == parameters
        assert 0 < stats.peak_device_bytes < parameters + 20 * 6 * 16 * 8
        assert stats.seconds == stats.forward_seconds + stats.backward_seconds > 0


def peak(depth: int, **options) -> int:
    step = compiled(Stack(depth, width=32), micro_batches=4, **options)
    for _ in range(2):
        step(rows(16, 5, dtype=torch.float32)).sum().backward()
    return l2l_compile.stats(step).peak_device_bytes


def test_peak_of_device_memory_does_not_depend_on_depth():
    assert peak(16, stash="host") == pytest.approx(peak(4, stash="host"), rel=0.01)


def test_peak_of_device_memory_grows_with_what_is_kept_there():
    extra = peak(16, stash="device") - peak(4, stash="device")
    assert extra == 12 * 16 * 32 * 4  # the inputs of twelve layers: 16 rows of 32 float32


def test_programs_of_two_compilations_of_one_model_are_apart():
    model, x = Stack(3), rows(6, dtype=torch.float32)
    one, two = compiled(model), compiled(model, micro_batches=2)
    one(x)
    two(x)
    assert [l2l_compile.programs(m)[0].segments[1].micro_batches for m in (one, two)] == [3, 2]


def test_printed_outputs_of_any_kind_come_back():
    model = TwoHeads()
    found = compiled(model)(rows(6, dtype=torch.float32))
    assert found["count"] == 3 and found["best"].dtype is torch.long and not found["best"].requires_grad


# ---- what does not run on the device is said --------------------------------------------------------------------------


logger = logging.getLogger("a model of the tests")


class BreaksInItsLoop(Stack):
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 1e9:
                x = x * 2
        return self.head(x)


def test_a_function_given_up_by_dynamo_warns_and_is_reported():
    model, x = BreaksInItsLoop(), rows(4, dtype=torch.float32)
    with pytest.warns(UserWarning, match=r"BreaksInItsLoop.forward.*uncompiled on the host.*test_inspection.py.*fullgraph"):
        compiled(model)(x)
    report = l2l_compile.explain(model)(x)
    assert any("BreaksInItsLoop.forward" in line and "test_inspection.py" in line for line in report.uncompiled)
    assert "run uncompiled, on the host" in str(report)


class PreparesInItsFirstCall(Stack):
    """Two functions that Dynamo cannot compile: the second call runs neither."""

    def forward(self, x):
        if not hasattr(self, "prepared"):
            with threading.Lock():
                self.prepare()
        return super().forward(x)

    def prepare(self):
        with threading.Lock():
            self.prepared = True


def test_the_remedy_for_uncompiled_functions_is_said_once(recwarn):
    compiled(PreparesInItsFirstCall())(rows(4, dtype=torch.float32))
    said = [str(w.message) for w in recwarn if "does not run" in str(w.message)]
    assert len(said) == 2 and ["call the plain model once" in line for line in said] == [True, False]


class Logs(Stack):
    def forward(self, x):
        logger.warning("the loss of %s", type(self).__name__)
        y = super().forward(x)
        if self.with_a_tensor:
            logger.warning(y)
        return y * 2


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_logging_breaks_a_graph_only_for_values_of_tensors(monkeypatch):
    said = []
    monkeypatch.setattr(
        logger, "handlers", [types.SimpleNamespace(level=0, handle=lambda record: said.append(record.getMessage()))]
    )
    monkeypatch.setattr(logger, "propagate", False)
    model, x = Logs(), rows(4, dtype=torch.float32)
    model.with_a_tensor = False
    step = compiled(model)
    torch.testing.assert_close(step(x), Stack.forward(model, x) * 2)
    assert len(l2l_compile.programs(step)) == 1 and set(said) == {"the loss of Logs"}
    model.with_a_tensor = True
    step = compiled(model)
    step(x)
    assert len(l2l_compile.programs(step)) == 2 and said[-1].startswith("tensor(")


def test_explaining_first_hides_nothing_from_a_compilation():
    """Dynamo remembers a function that it gave up on, and would say nothing of it the second time."""
    model, x = BreaksInItsLoop(), rows(4, dtype=torch.float32)
    assert l2l_compile.explain(model)(x).uncompiled
    with pytest.raises(Exception, match="Dynamo|graph|Unsupported"):
        torch.compile(model, backend="l2l", options={"device": "cpu"}, fullgraph=True)(x)
    assert l2l_compile.explain(model)(x).uncompiled
    with pytest.warns(UserWarning, match="BreaksInItsLoop.forward"):
        compiled(model)(x)


def test_fullgraph_makes_a_break_an_error_without_a_warning(recwarn):
    with pytest.raises(RuntimeError, match="branching"):
        torch.compile(BreaksInItsLoop(), backend="l2l", fullgraph=True)(rows(4, dtype=torch.float32))
    assert not [w for w in recwarn if "backend 'l2l'" in str(w.message)]


class ReadsANumber(Stack):
    def forward(self, x):
        y = super().forward(x)
        return y * (1 + y.sum().item())


def test_a_number_read_from_a_tensor_in_a_full_graph_is_refused():
    with pytest.raises(l2l_compile.L2LError, match=r"(?s)keep it a tensor.*y.sum\(\).item\(\)"):
        torch.compile(ReadsANumber(), backend="l2l", fullgraph=True)(rows(4, dtype=torch.float32))


def test_explain_of_a_compiled_model_takes_its_options():
    report = l2l_compile.explain(compiled(Stack(), micro_batches=2))(rows(4, dtype=torch.float32))
    assert {s.micro_batches for s in report.segments} == {2}


def test_a_module_compiled_in_place_can_be_looked_at():
    model = Stack()
    model.compile(backend="l2l", options={"block_compiler": "eager", "micro_batches": 2})
    model(rows(4, dtype=torch.float32)).sum().backward()
    (program,) = l2l_compile.programs(model)
    assert [s.name for s in program.segments][1] == "layers.0"
    assert [s.name for s in l2l_compile.explain(model)(rows(4, dtype=torch.float32)).segments] == [
        s.name for s in program.segments
    ]


def test_a_compiled_model_that_has_run_can_be_copied_and_saved():
    step = compiled(Stack())
    step(rows(4, dtype=torch.float32))
    twin = copy.deepcopy(step)
    twin(rows(4, dtype=torch.float32)).sum().backward()
    assert len(l2l_compile.programs(twin)) == 1
    torch.save(step, io.BytesIO())


def test_programs_print_short():
    step = compiled(Stack())
    step(rows(4, dtype=torch.float32))
    (program,) = l2l_compile.programs(step)
    assert all(len(repr(thing)) < 100 for thing in (program, *program.segments, *program.blocks))


def test_stats_print_by_the_names_that_users_read():
    step = compiled(Stack())
    step(rows(6, dtype=torch.float32)).sum().backward()
    stats = l2l_compile.stats(step)
    printed = dict(line.split() for line in str(stats).splitlines())
    assert printed["fetched_bytes"] == f"{stats.fetched_bytes:,}" and printed["loss_scale"] == "1"
    assert {"seconds", "peak_device_bytes", "skipped_steps"} < printed.keys()
    assert not {"gradient_squares", "forward_seconds", "gradient_norm"} & printed.keys()


@pytest.mark.parametrize("update", ["at_step", "in_forward", "in_backward"])
def test_a_norm_that_was_not_taken_is_none(update):
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(model, optimizer=optimizer, update=update)
    loss = step(rows(6, dtype=torch.float32)).sum()
    assert l2l_compile.stats(step).gradient_norm is None
    loss.backward()
    optimizer.step()
    assert l2l_compile.stats(step).gradient_norm > 0 and "gradient_norm" in str(l2l_compile.stats(step))


def test_the_stats_of_a_generation_are_those_of_its_last_call():
    """The prompt and the tokens behind it run as two programs."""
    model = Stack(2)
    step = compiled(model, dynamic=False)
    with torch.no_grad():
        step(rows(6, dtype=torch.float32)), step(rows(1, dtype=torch.float32))
        last = l2l_compile.stats(step)
        step(rows(1, dtype=torch.float32))
    assert len(l2l_compile.programs(step)) == 2
    assert last.fetched_bytes == l2l_compile.stats(step).fetched_bytes > 0


def figures(step, *actions) -> tuple[int, int]:
    """Bytes fetched and pushed in the last step, after some actions."""
    for act in actions:
        act()
    stats = l2l_compile.stats(step)
    return stats.fetched_bytes, stats.pushed_bytes


def of_length(length) -> torch.Tensor:
    """An input; with `dynamic=False`, each length has a program of its own."""
    return torch.rand(6, length, 5)


def test_the_stats_of_one_call_on_each_thread_do_not_add_up():
    step = compiled(Stack(2), dynamic=False)
    found = []
    for length in (2, 3, 4):
        thread = threading.Thread(target=torch.no_grad()(step), args=(of_length(length),))
        thread.start(), thread.join()
        found.append(figures(step))
    assert len(l2l_compile.programs(step)) == 3
    assert found == [(sum(p.nbytes for p in step.parameters()), 0)] * 3


class BrokenLayers(nn.Module):
    """A graph break behind every layer: all layers are runs of one program."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


@pytest.mark.filterwarnings("ignore:.*does not run BrokenLayers.forward")
@pytest.mark.parametrize("make", [Broken, BrokenLayers])
def test_all_programs_that_run_in_a_call_are_in_its_stats(make):
    step = compiled(model := make())
    x = torch.rand(6, 5 if make is Broken else WIDTH)
    size = sum(p.nbytes for p in model.parameters())
    for _ in range(2):
        assert figures(step, torch.no_grad()(lambda: step(x))) == (size, 0)
        assert figures(step, lambda: step(x).sum().backward()) == (2 * size, size)


def test_calls_within_a_compiled_function_are_steps():
    step = compiled(Stack(2), dynamic=False)
    lengths = iter((2, 3, 4))
    found = []

    @torch.compiler.disable
    def token(x):
        found.append(figures(step, torch.no_grad()(lambda: step(of_length(next(lengths))))))
        return x

    @torch.compile(backend="eager")
    def generate(x):
        return token(token(token(x + 1) + 1) + 1)

    generate(torch.ones(2))
    assert found == [(sum(p.nbytes for p in step.parameters()), 0)] * 3


def test_a_call_of_another_model_does_not_end_the_step():
    """Between the two programs of one call, another model runs twice."""
    inner = compiled(Stack(2))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.second(between(self.first(x)))

    @torch.compiler.disable
    def between(x):
        for _ in range(2):
            inner(rows(6, dtype=torch.float32))
        return x

    step, x = compiled(Outer(), prefetch=1), torch.rand(6, 3)
    assert figures(step, torch.no_grad()(lambda: step(x))) == (2 * 12 * 4, 0)


def test_a_backward_is_of_the_step_of_its_forward():
    """Two calls, each with a program of its own, before the backward of the first one."""
    step = compiled(Stack(2), dynamic=False)
    size = sum(p.nbytes for p in step.parameters())
    first, second = (step(of_length(n)).sum() for n in (2, 3))
    assert figures(step) == (size, 0)
    assert figures(step, first.backward) == figures(step, second.backward) == (2 * size, size)
    assert figures(step, lambda: step(of_length(3))) == (size, 0)


def test_a_call_that_could_not_end_is_forgotten():
    """A handler of a signal has raised in PyTorch's code around it."""
    found = calls._Calls()
    found.begins_or_ends((lambda: sys._getframe())(), print)
    found.begins_or_ends(sys._getframe(), print)
    assert list(found.running) == [sys._getframe()]


def test_a_report_with_other_options_lowers_its_blocks():
    """Its programs are made anew from the same segments."""
    report = explain(Stack(3), rows(6, dtype=torch.float32))
    (program,) = report.streamed(report.options).programs
    for block in program.blocks:
        assert program.forward_of(block).graph.find_nodes(op="output")
