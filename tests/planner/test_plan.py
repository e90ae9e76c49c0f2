"""The planner picks what is fastest by `simulate` among what fits, says what does not, and changes nothing that is given."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import l2l_compile
from l2l_compile import L2LError, Machine, OptionError, explain, plan, simulate
from l2l_compile.ir.rank_layout import Layout
from l2l_compile.lowering.code_cache import Store
from l2l_compile.planner.fit import Fit, Need
from l2l_compile.planner.most_rows import most_rows
from l2l_compile.planner.search import _rounded
from l2l_compile.planner.trials import Traces, Trials

TINY = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 256}
MACHINE = replace(Machine.load("rtx4090"), device_reserve=0.0, host_reserve=0.0)
BF16 = {"precision": "bf16", "outputs": "loss"}


def tiny(rows=16, length=64):
    tokens = torch.zeros(rows, length, dtype=torch.long)
    return LlamaForCausalLM(LlamaConfig(**TINY, use_cache=False)), {"input_ids": tokens, "labels": tokens}


def planned(machine, options=BF16, rows=16, **more):
    model, batch = tiny(rows)
    return plan(model, machine, options, optimizer=torch.optim.AdamW(model.parameters()), **more)(**batch)


GRID = {
    "micro_batches": (2, 4, 16),
    "update": ("in_forward", "in_backward"),
    "stash": ("host", "device"),
    "keep": (0, "auto"),
    "keep_on_host": (0, "auto"),
    "prefetch": (0, 1),
}


def fastest_of_grid(machine, steps):
    """The least seconds of a hand-made grid, by `simulate`, of what fits. `steps` takes each so many sets."""
    model, batch = tiny()
    optimizer, found = torch.optim.AdamW(model.parameters()), []
    for values in list(itertools.product(*GRID.values()))[::steps]:
        options = {**BF16, "optimizer": optimizer, **dict(zip(GRID, values, strict=True))}
        if Fit.of(explain(model, {**options, "device": "cpu"})(**batch).on(machine), machine).fits:
            found.append(simulate(model, machine, options)(**batch).seconds)
    assert found, "something of the grid fits"
    return min(found)


@pytest.mark.parametrize("device", [24e6, 60e6], ids=["narrow", "wide"])
@pytest.mark.parametrize("steps", [19, 1], ids=["some", "all"])
@pytest.mark.slow(but="some-narrow")
def test_no_set_of_a_grid_is_faster(device, steps):
    machine = replace(MACHINE, device_memory=device, host_memory=1e9)
    found = planned(machine)
    assert found.simulated is not None and abs(found.simulated / found.best.seconds - 1) < 0.01
    assert found.simulated <= 1.02 * fastest_of_grid(machine, steps)


def test_memory_of_a_plan_is_that_of_explain():
    found = planned(MACHINE)
    model, batch = tiny()
    options = {**found.best.options, "optimizer": torch.optim.AdamW(model.parameters()), "device": "cpu"}
    report = explain(model, options)(**batch).on(MACHINE)
    device, host = found.best.needs
    assert device.bytes == report.device_memory.peak and host.bytes == report.host_memory.total
    assert device.bytes <= device.room == MACHINE.device_room


@pytest.mark.parametrize("slower", [1, 100], ids=["as it is", "slow memory"])
@pytest.mark.parametrize("keep", [0, "auto"])
def test_device_bytes_of_a_plan_are_those_of_a_run(keep, slower):
    """A run does not know the figures of the machine, so they do not decide on the values that are kept."""
    host = Machine.load("cpu")
    machine = replace(host, memory_bandwidth=host.memory_bandwidth / slower)
    model, batch = tiny(rows=4, length=16)
    given = {"outputs": "loss", "keep": keep, "block_compiler": "eager"}
    best = plan(model, machine, given, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), simulated=False)(**batch).best
    report = explain(model, {**best.options, "device": "cpu"})(**batch).on(machine)
    step = torch.compile(model, backend="l2l", options={**best.options, "device": "cpu"})
    step(**batch).loss.backward()
    peak = l2l_compile.stats(step).peak_device_bytes
    assert peak == report.device_memory.peak
    assert best.needs[0].bytes == report.host_memory.total + peak - report.device_memory.weights


def test_the_code_of_a_plan_trains():
    model, batch = tiny(rows=4, length=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = plan(model, "cpu", {"outputs": "loss"}, optimizer=optimizer, simulated=False)(**batch)
    names = {"torch": torch, "model": model, "optimizer": optimizer}
    exec(found.best.code.replace("options = {", 'options = {"block_compiler": "eager", "device": "cpu",'), names)
    before = model.lm_head.weight.detach().clone()
    names["model"](**batch).loss.backward()
    optimizer.step()
    l2l_compile.synchronize(names["model"])
    assert not torch.equal(before, model.lm_head.weight)


def test_what_is_given_stays_as_it_is():
    found = planned(MACHINE, {**BF16, "prefetch": 2, "stash": "device", "max_grad_norm": 1.0}, simulated=False)
    assert found.plans
    for each in found.plans:
        given = {name: each.options[name] for name in ("prefetch", "stash", "max_grad_norm", "update", "precision")}
        assert given == {"prefetch": 2, "stash": "device", "max_grad_norm": 1.0, "update": "in_forward", "precision": "bf16"}
        assert "delay" not in each.options


@pytest.mark.parametrize("given", ["1MB", 10**6, None])
def test_weights_that_stay_may_be_given(given):
    found = planned(MACHINE, {**BF16, "resident": given}, simulated=False)
    assert found.plans and all(each.options["resident"] == given for each in found.plans)


def test_objects_among_the_options_have_names_in_the_code():
    found = planned(MACHINE, {**BF16, "accumulate": lambda: True}, simulated=False)
    assert '"accumulate": accumulate,' in found.best.code and '"optimizer": optimizer,' in found.best.code


def test_late_updates_are_chosen_only_if_they_are_allowed():
    slow = replace(MACHINE, host_bandwidth=2e8)  # updates take long
    assert all("delay" not in each.options for each in planned(slow, simulated=False).plans)
    assert planned(slow, simulated=False).plans
    late = planned(slow, simulated=False, delay=True)
    assert late.best.options["delay"] == 1 and late.best.options["update"] == "in_forward"
    assert "at the weights of the step before" in str(late)
    with pytest.raises(OptionError, match="needs the optimizer of the training loop"):
        plan(torch.nn.Linear(2, 2), slow, delay=True)


def test_nothing_fits_is_told_with_bytes():
    machine = replace(MACHINE, host_memory=5e6)
    found = planned(machine)
    assert found.plans == () and found.simulated is None
    assert "nothing fits. The nearest, " in str(found) and "too large host memory" in str(found)
    with pytest.raises(OptionError, match=r"nothing fits.* too much"):
        _ = found.best


def test_why_others_are_out_is_told():
    least = min(trial.fit.needs[0].bytes for trial in planned(MACHINE, simulated=False).tried)
    found = planned(replace(MACHINE, device_memory=1.05 * least), simulated=False)
    out = [trial for trial in found.tried if not trial.fits]
    assert out and f"out: {len(out)} for want of device memory, by " in str(found)


def test_rows_other_than_those_of_the_arguments_are_planned():
    few = planned(MACHINE, rows=4, simulated=False)
    many = plan(*_model_and(MACHINE), rows=64, simulated=False)(**tiny(4)[1])
    assert many.best.tokens == 64 * 64 and many.best.seconds > few.best.seconds
    assert many.best.needs[1].bytes > few.best.needs[1].bytes or many.best.needs[0].bytes > few.best.needs[0].bytes


def _model_and(machine):
    model, _ = tiny()
    return model, machine, {**BF16, "optimizer": torch.optim.AdamW(model.parameters())}


def test_without_an_optimizer_updates_are_the_loops_own():
    model, batch = tiny()
    found = plan(model, MACHINE, BF16, simulated=False)(**batch)
    assert {each.options["update"] for each in found.plans} == {"at_step"}


def test_a_compiled_model_keeps_options_that_are_not_decided():
    model, batch = tiny()
    options = {"precision": "bf16", "outputs": "loss", "micro_batches": 16, "prefetch": 0, "device": "cpu"}
    found = plan(torch.compile(model, backend="l2l", options=options), MACHINE, simulated=False)(**batch)
    assert found.best.options["precision"] == "bf16" and found.best.options["micro_batches"] != 16


def test_a_machine_without_a_figure_is_refused():
    with pytest.raises(L2LError, match="has no figure for FLOP/s in bfloat16"):
        planned(replace(MACHINE, flops={"float32": 1e12}))


@pytest.mark.parametrize("most", [0, 1, 2, 3, 100, 4097])
def test_the_most_rows_are_found(most):
    def fit_of(rows):
        return Fit((Need("device memory", rows, most, (0, "")),))

    assert most_rows(fit_of) == most


def test_seconds_do_not_depend_on_what_was_tried_before():
    """Overlapped updates are one compiled pass over memory, and updates at the step are the optimizer's own."""
    model, batch = tiny()
    given = {**BF16, "optimizer": torch.optim.AdamW(model.parameters())}

    def seconds(*modes):
        def trace(chosen):
            return explain(model, {**chosen, "device": "cpu"})(**batch)

        trials = Trials(model, Traces(trace, trace), given, MACHINE, 16, 16, print)
        return {mode: trials.of(Layout(), micro_batches=2, update=mode).seconds for mode in modes}

    assert seconds("at_step", "in_forward") == seconds("in_forward", "at_step")


@pytest.mark.parametrize("size", [1, 99, 123_456_789])
def test_weights_that_stay_are_counted_in_round_numbers(size):
    down, up = _rounded(size), _rounded(size, up=True)
    assert down <= size <= up and len(str(down).rstrip("0")) <= 2 and len(str(up).rstrip("0")) <= 2


def test_what_a_plan_keeps_does_not_depend_on_other_sizes(monkeypatch):
    """The values that are kept are chosen for the sizes of a run, whatever a planner has tried before."""
    config = LlamaConfig(**{**TINY, "num_hidden_layers": 2, "intermediate_size": 1024}, use_cache=False)
    model, tokens = LlamaForCausalLM(config), torch.zeros(16, 128, dtype=torch.long)

    def peaks(*rows):
        monkeypatch.setattr("l2l_compile.lowering.savings._joints", Store(256))
        traced = explain(model, {"micro_batches": 2, "keep": "auto", "device": "cpu"})(input_ids=tokens, labels=tokens)
        return [traced.streamed(traced.options, count).device_memory.peak for count in rows]

    assert peaks(16, 32)[1] == peaks(32)[0] and peaks(32, 16)[1] == peaks(16)[0]
