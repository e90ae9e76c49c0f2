"""The option `plan`: the first training step decides on what is left open, says what, and leaves numbers and given options alone."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

import l2l_compile
import l2l_compile.planner.first_training_step as first_step
from l2l_compile import Machine, OptionError
from l2l_compile.ir.rank_layout import Layout
from l2l_compile.options import Options
from l2l_compile.planner.first_training_step import free_memory_of
from l2l_compile.planner.search import DECIDED
from l2l_compile.session import session_of
from models import Stack
from placed import placed

SLOW_HOST = replace(
    Machine.load("rtx4090"), overlaps=False, host_memory=64e9, device_memory=64e9, launch=1e-8, node=1e-8, micro_batch=1e-8
)


SMALL_HOST = replace(SLOW_HOST, host_memory=1e4, device_memory=1e4, host_reserve=0.0, device_reserve=0.0)


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """A machine whose figures are not measured anew. What it was measured for, in order."""
    asked = []
    monkeypatch.setattr(first_step, "measure_machine", lambda device: asked.append(device) or SLOW_HOST)
    return asked


def layers():
    torch.manual_seed(0)
    return Stack().double()


BATCH = torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def compiled(model, optimizer=None, **options):
    given = {"plan": "auto", "block_compiler": "eager", "device": "cpu", **options}
    return torch.compile(model, backend="l2l", options=given | ({} if optimizer is None else {"optimizer": optimizer}))


def step(call, optimizer, clip=None):
    call(BATCH).pow(2).mean().backward()
    if clip is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
    optimizer.step()
    optimizer.zero_grad()


def options_of(call):
    return session_of(call).options


def test_a_loop_that_clips_has_the_numbers_of_plain_pytorch():
    model, plain = layers(), layers()
    optimizer, other = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain))
    call = compiled(model, optimizer)
    with pytest.warns(
        UserWarning, match=r"has planned for .* options \{.*'keep': 'auto'.*\}, instead of plan.* takes about.*GiB"
    ):
        step(call, optimizer, clip=0.01)
    step(plain, other, clip=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            step(call, optimizer, clip=0.01)
            step(plain, other, clip=0.01)
    l2l_compile.synchronize(call)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:backend 'l2l' has planned")
@pytest.mark.parametrize(
    "given",
    [{"micro_batches": 4}, {"update": "in_backward"}, {"keep": 0, "update": "at_step"}, {"delay": 1, "update": "in_forward"}],
)
def test_options_that_are_given_stay_as_they_are(given):
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    call = compiled(model, optimizer, **given)
    step(call, optimizer)
    chosen = options_of(call)
    assert {name: getattr(chosen, name) for name in given} == given
    assert chosen.plan is None and chosen.delay == given.get("delay", 0) and chosen.precision == "fp32"
    assert given.get("update") == "in_backward" or chosen.mode.sees_all


@pytest.mark.filterwarnings("ignore:backend 'l2l' has planned")
def test_a_call_without_gradients_decides_on_nothing(measured):
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    call = compiled(model, optimizer)
    with torch.no_grad():
        torch.testing.assert_close(call(BATCH), model(BATCH))
    assert not measured and options_of(call).plan == "auto"
    step(call, optimizer)
    with torch.no_grad():
        torch.testing.assert_close(call(BATCH), model(BATCH))
    assert len(measured) == 1 and options_of(call).plan is None


@pytest.mark.filterwarnings("ignore:backend 'l2l' has planned")
@pytest.mark.parametrize("how", ["in place", "function"])
def test_whatever_is_compiled_is_planned(how):
    model = layers()
    if how == "in place":
        model.compile(backend="l2l", options={"plan": "auto", "block_compiler": "eager", "device": "cpu"})
        call = model
    else:
        call = compiled(lambda x: model(x).pow(2))
    call(BATCH).sum().backward()
    assert options_of(call).plan is None and all(p.grad is not None for p in model.parameters())


def test_where_nothing_fits_bytes_are_named_and_it_can_go_on(monkeypatch):
    model = layers()
    call = compiled(model)
    monkeypatch.setattr(first_step, "measure_machine", lambda device: SMALL_HOST)
    with pytest.raises(OptionError, match="nothing fits. The nearest, .*KiB too much"):
        call(BATCH)
    monkeypatch.setattr(first_step, "measure_machine", lambda device: SLOW_HOST)
    with pytest.warns(UserWarning, match="has planned"):
        call(BATCH).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:backend 'l2l' has planned")
def test_reports_need_the_first_step_and_then_show_its_options():
    model = layers()
    call = compiled(model)
    with pytest.raises(OptionError, match="leaves options to the first training step.*a report needs them before"):
        l2l_compile.explain(call)
    with pytest.raises(OptionError, match="a simulation needs them before"):
        l2l_compile.simulate(call, SLOW_HOST)
    found = l2l_compile.plan(call, SLOW_HOST, simulated=False)(BATCH)  # which decides on them itself
    assert found.best.options.keys() >= DECIDED.keys()
    call(BATCH).sum().backward()
    chosen = l2l_compile.explain(call)(BATCH).options
    assert {name: getattr(chosen, name) for name in DECIDED} == {name: getattr(options_of(call), name) for name in DECIDED}


@pytest.mark.parametrize("beside", [{"disk": "/"}, {"pinned_memory": "1GB"}], ids=lambda beside: next(iter(beside)))
def test_options_without_a_time_are_refused_beside_a_plan(beside):
    optimizer = torch.optim.SGD(layers().parameters())
    with pytest.raises(OptionError, match=f"plan='auto' does not go with '{next(iter(beside))}'"):
        compiled(layers(), optimizer, update="in_forward", **beside)


def test_a_model_of_several_ranks_is_refused():
    with (
        placed(layers(), {"x": BATCH}, Layout(shards=2)) as model,
        pytest.raises(OptionError, match="plan='auto' is for one device"),
    ):
        compiled(model)(BATCH)


def test_memory_of_the_model_is_free_to_its_plan(monkeypatch):
    """The plan counts it itself: what is in use beside it is in the way."""
    model = nn.Linear(1 << 10, 1 << 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1 << 10)).sum().backward()
    optimizer.step()
    options = Options.build({"optimizer": optimizer, "device": "cpu"})
    own = 4 * (4 << 20)  # the weight, its gradient and two moments, in fp32
    monkeypatch.setattr(first_step, "own_memory", lambda: 10 << 30)
    for planned in (model, lambda x: model(x)):
        found = free_memory_of(SLOW_HOST, planned, options)
        assert own <= found.host_room - (10 << 30) <= own + 64  # the step is counted in a small tensor
        assert found.device_room == found.host_room  # one memory
    card = replace(SLOW_HOST, overlaps=True, device_reserve=1e9)
    assert free_memory_of(card, model, options).device_reserve == 1e9
    monkeypatch.setattr(first_step, "_not_counted_as_available", lambda: 1 << 20)  # its pages are those of a file
    assert free_memory_of(SLOW_HOST, model, options).host_room == (10 << 30) + (1 << 20)


class Counting(Stack):
    """A forward with a counter, and with a list of losses beside that of the model."""

    def __init__(self):
        super().__init__()
        self.calls, self.losses, self.by_name = 0, [], {"first": []}

    def forward(self, x):
        self.calls += 1
        out = super().forward(x) * 0.5**self.calls
        self.losses.append(out.sum())
        self.by_name["first"].append(self.calls)
        return out


@pytest.mark.filterwarnings("ignore:backend 'l2l' has planned")
def test_planning_leaves_attributes_of_the_model_alone():
    torch.manual_seed(0)
    model = Counting().double()
    plain = copy.deepcopy(model)
    found, expected = compiled(model)(BATCH), plain(BATCH)
    torch.testing.assert_close(found, expected)
    assert model.calls == 1 and model.by_name == {"first": [1]}
    torch.testing.assert_close(model.losses, plain.losses)


@pytest.mark.filterwarnings("ignore:backend 'l2l' has planned")
@pytest.mark.parametrize("given", [{"accumulate": 2}, {"max_grad_norm": 0.01}, {"delay": 1}], ids=lambda given: next(iter(given)))
def test_options_of_later_updates_need_no_value_of_update(given):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = compiled(model, optimizer, **given)
    for _ in range(given.get("accumulate", 1)):
        call(BATCH).pow(2).mean().backward()
    optimizer.step()
    assert options_of(call).update == "in_forward" or given == {"accumulate": 2}


@pytest.mark.filterwarnings("ignore:backend 'l2l' has planned")
def test_hooks_on_gradients_leave_updates_to_the_loop():
    model, seen = layers(), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(CannotBeCopied().stepped)
    call = compiled(model, optimizer)
    step(call, optimizer)
    assert options_of(call).update == "at_step" and len(seen) == len(list(model.parameters()))


class CannotBeCopied:
    """The owner of a hook, such as a trainer."""

    steps = property(lambda self: 0)

    def __init__(self):
        self.__dict__["steps"] = 1  # a copy would set the property

    def stepped(self, optimizer, args, kwargs):
        pass


@pytest.mark.filterwarnings("ignore:backend 'l2l' has planned")
def test_decorated_forwards_are_planned_as_they_are_called():
    def twice(forward):
        @functools.wraps(forward)
        def call(self, x):
            return 2 * forward(self, x)

        return call

    class Doubled(Stack):
        forward = twice(Stack.forward)

    torch.manual_seed(0)
    model = Doubled().double()
    expected = model(BATCH)
    model.forward = compiled(model.forward)
    torch.testing.assert_close(model(BATCH), expected)
    assert options_of(model.forward).plan is None


def test_a_failed_plan_leaves_the_settings_of_dynamo_alone(monkeypatch):
    monkeypatch.setattr(first_step, "measure_machine", lambda device: SMALL_HOST)
    before = torch._dynamo.config.assume_static_by_default
    call = torch.compile(layers(), backend="l2l", dynamic=True, fullgraph=True, options={"plan": "auto", "device": "cpu"})
    with pytest.raises(OptionError, match="nothing fits"):
        call(BATCH)
    assert torch._dynamo.config.assume_static_by_default == before


def test_a_frozen_model_runs_with_the_options_that_are_given(measured):
    model = layers().requires_grad_(False)
    torch.testing.assert_close(compiled(model)(BATCH), model(BATCH))
    assert not measured


def test_what_cannot_be_planned_is_told():
    class OnHost(Stack):
        @torch.compiler.disable
        def forward(self, x):
            return super().forward(x)

    with pytest.raises(OptionError, match="no option set can be tried: Dynamo captures no graph"):
        compiled(OnHost().double())(BATCH)
    with pytest.raises(OptionError, match="a batch without rows cannot be planned"):
        compiled(layers())(BATCH[:0])

    class Branching(Stack):
        def forward(self, x):
            total = super().forward(x).sum().item()
            if total == 0:
                raise ValueError("zeros")
            return super().forward(x) * total

    with pytest.raises(OptionError, match="whose trace on zeros fails .ValueError: zeros.: leave out 'plan'"):
        compiled(Branching().double())(BATCH)


@pytest.mark.filterwarnings("ignore:backend 'l2l' has planned")
def test_a_planned_model_is_freed():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    call = compiled(model, optimizer)
    step(call, optimizer)
    l2l_compile.synchronize(call)
    gone = weakref.ref(model.layers[0].up.weight)
    del model, optimizer, call
    gc.collect()
    assert gone() is None
