"""The planner on several devices: it divides the model among them, and its code, memory and seconds hold."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from l2l_compile import Machine, OptionError, explain, plan, simulate
from l2l_compile.ir.rank_layout import Layout
from l2l_compile.planner.divisions import Devices
from l2l_compile.planner.fit import Fit
from l2l_compile.planner.trials import Traces, Trials
from marked_tables import assert_written
from placed import placed, world

ROOT = Path(__file__).parents[2]
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 256}
CARD = Machine.load("rtx4090")
GIVEN = {"precision": "bf16", "outputs": "loss"}


def tiny(rows=16):
    torch.manual_seed(0)
    tokens = torch.zeros(rows, 64, dtype=torch.long)
    return LlamaForCausalLM(LlamaConfig(**TINY, use_cache=False)), {"input_ids": tokens, "labels": tokens}


def planned(rows=16, machine=CARD, given=GIVEN, **more):
    model, batch = tiny(rows)
    return plan(model, machine, given, optimizer=torch.optim.AdamW(model.parameters()), **more)(**batch)


@pytest.fixture(scope="module")
def found():
    return planned(devices=4)


def options_of(found, model):
    """The options of the best plan, with an optimizer of this rank's parameters."""
    return {**found.best.options, "optimizer": torch.optim.AdamW(model.parameters())}


def test_a_step_of_the_pick_takes_as_long_by_simulate(found):
    model, batch = tiny(16 // found.best.layout.batches)
    with placed(model, batch, found.best.layout):
        step = simulate(model, found.machine, options_of(found, model))(**batch)
    assert step.seconds == pytest.approx(found.best.seconds, rel=0.01)


def test_memory_of_the_pick_is_that_of_its_ranks(found):
    layout, of_stages = found.best.layout, []
    for stage in range(layout.depth):
        model, batch = tiny(16 // layout.batches)
        with placed(model, batch, layout, stage):
            report = explain(model, {**options_of(found, model), "device": "cpu"})(**batch)
            of_stages.append(report.on(found.machine.shared_by(layout.ranks)))
    assert Fit.of_stages(of_stages, layout, found.machine).needs == found.best.needs


@pytest.mark.parametrize("counts", [(4,), (1, 2, 4, 8)], ids=["some", "all"])
@pytest.mark.slow(but="some")
def test_no_division_is_faster_by_simulate(found, counts):
    times = []
    cases = {(layout, min(count, 16 // layout.batches)) for layout, count in itertools.product(Devices(4).layouts(), counts)}
    for layout, count in sorted(cases, key=str):
        model, batch = tiny(16 // layout.batches)
        options = {**GIVEN, "micro_batches": count, "update": "in_backward", "stash": "device"}
        with placed(model, batch, replace(layout, loops=1)):
            options["optimizer"] = torch.optim.AdamW(model.parameters())
            times.append(simulate(model, found.machine, options)(**batch).seconds)
    assert len(times) == len(cases) >= 5 and found.best.seconds <= 1.02 * min(times)


QUICK = dict.fromkeys(("node", "launch", "micro_batch", "latency", "link_latency"), 1e-9)
ON_HOST = {"micro_batches": 4, "update": "in_backward", "stash": "device", "keep_on_host": "auto"}


@pytest.mark.parametrize(
    "slower, link, host, keeps",
    [(300, 1, 64e9, True), (3, 300, 6e8, True), (100, 1, 64e9, False)],
    ids=["compute", "waits", "parts"],
)
def test_ranks_keep_on_the_host_what_they_do_by_simulate(slower, link, host, keeps):
    """Seconds in which a rank waits for others have room on its link, and bytes are rounded to parts of the memory."""
    flops = {name: rate / slower for name, rate in CARD.flops.items()}
    memory = {"host_memory": host, "host_reserve": 0.0, "memory_bandwidth": CARD.memory_bandwidth / slower}
    machine = replace(CARD, devices=4, flops=flops, link=CARD.link / link, **memory, **QUICK)
    model, batch = tiny()
    given, layout = {**GIVEN, "optimizer": torch.optim.AdamW(model.parameters())}, Layout(depth=2, loops=2)
    traces = Traces(*[lambda chosen: explain(model, {**chosen, "device": "cpu"})(**batch)] * 2)
    trials = Trials(model, traces, given, machine, 16, 16, lambda what: None)
    trial = trials.of(layout, **ON_HOST)
    with placed(model, batch, layout):
        step = simulate(model, machine, {**GIVEN, **ON_HOST, "optimizer": torch.optim.AdamW(model.parameters())})(**batch)
    kept = [stage.stats.kept_on_host_bytes for stage in step.stages]
    assert [report.kept.on_host for report in trials.reports(layout, ON_HOST)] == kept and any(kept) == keeps
    assert trial.seconds == pytest.approx(step.seconds, rel=1e-5)


def test_the_code_of_a_plan_divides_the_model(found):
    model, batch = tiny(16 // found.best.layout.batches)
    with placed(*tiny(16 // found.best.layout.batches), found.best.layout) as divided:
        mine = {name: parameter.shape for name, parameter in divided.named_parameters()}
    lines = found.best.code.split("\n")
    assert lines[0] == "from torch.distributed.device_mesh import init_device_mesh"
    assert any(line.startswith("optimizer = ...") for line in lines)
    code = found.best.code.replace("optimizer = ...", "optimizer = torch.optim.AdamW(model.parameters())")
    names = {"torch": torch, "model": model, "batch": batch}
    with world(found.best.layout):
        exec(code, names)
    given = {name: value for name, value in found.best.options.items() if name in names["options"]}
    assert names["options"] == {**given, "optimizer": names["optimizer"]}
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == mine


def test_divisions_that_the_rows_do_not_allow_are_left_out():
    found = planned(rows=6, devices=4, simulated=False)
    assert found.plans and all(6 % trial.layout.batches == 0 for trial in found.tried)


def test_a_batch_of_one_row_is_planned_for_several_devices():
    found = planned(rows=4, devices=4)
    assert {trial.layout.batches for trial in found.tried if trial.fits} == {1, 2, 4}


def test_what_several_devices_lack_is_told():
    found = planned(devices=4, machine=replace(CARD, host_memory=4.31e9, host_reserve=4.3e9))
    assert not found.plans and set(found.lacking) == {"host"}
    enough = planned(devices=4, machine=replace(CARD, host_memory=found.lacking["host"], host_reserve=4.3e9))
    assert enough.plans
    with pytest.raises(OptionError, match=r"nothing fits. The nearest, .*: too large host memory"):
        assert found.best


def test_late_updates_may_leave_out_the_flush():
    found = planned(devices=2, delay=True)
    tried = {(trial.options["schedule"], trial.options.get("delay")) for trial in found.tried if trial.fits}
    assert ("1f1b", 1) in tried and ("1f1b", 0) in tried
    assert not any(trial.options.get("delay") for trial in planned(devices=2).tried)


def test_a_pipeline_with_an_idle_rank_is_told():
    """Six pieces of the model that may be apart, and eight devices."""
    found = planned(devices=8)
    refused = {trial.layout.depth for trial in found.tried if "nothing to train" in trial.why_not}
    assert refused == {8} and not any(trial.layout.depth == 8 for trial in found.tried if trial.fits)


def test_shards_with_updates_of_their_own_step_are_told():
    found = planned(devices=2, given={**GIVEN, "compile_update": False})
    whys = {trial.layout.shards: trial.why_not for trial in found.tried if trial.why_not}
    assert "own step of AdamW are not timed" in whys[2] and found.best.layout.shards == 1


class Broken(torch.nn.Module):
    """A model that Dynamo cuts into two graphs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))) for _ in range(2))

    def forward(self, input):
        x = self.first(input)
        torch._dynamo.graph_break()
        return self.last(x).square().mean()


def test_a_model_of_two_programs_is_planned_without_pipelines():
    model = Broken()
    optimizer = torch.optim.AdamW(model.parameters())
    found = plan(model, CARD, {}, optimizer=optimizer, devices=2)(torch.randn(8, 64))
    assert found.best.layout.shards == 2
    assert any("captured as 2 programs" in trial.why_not for trial in found.tried)


class OfOneSize(torch.nn.Module):
    """The batch is not known to be one: its size is in the shape of a parameter."""

    def __init__(self):
        super().__init__()
        self.offset, self.layer = torch.nn.Parameter(torch.randn(8, 16)), torch.nn.Linear(16, 4)

    def forward(self, tokens):
        return self.layer(torch.nn.functional.one_hot(tokens, 16).float().sum(1) + self.offset).square().mean()


def test_tokens_and_rows_of_a_batch_of_fixed_size_are_right():
    model, tokens = OfOneSize(), torch.zeros(8, 5, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    found = plan(model, CARD, {}, optimizer=optimizer, devices=2)(tokens)
    assert found.best.tokens == tokens.numel()
    assert all(trial.layout.batches == 1 for trial in found.tried if trial.fits)
    assert any("rows of this batch cannot be changed" in trial.why_not for trial in found.tried)


def test_a_function_is_planned_for_one_device():
    layer = torch.nn.Linear(4, 4)
    with pytest.raises(OptionError, match="several devices divide a model that is a module"):
        plan(lambda x: layer(x).sum(), CARD, {}, devices=2)


def test_a_machine_without_links_is_refused():
    with pytest.raises(OptionError, match="has no figure 'link'"):
        planned(devices=2, machine=replace(CARD, link=None)).best  # noqa: B018


def test_the_table_of_eight_devices_is_that_of_the_run():
    rows = json.loads((ROOT / "examples" / "benchmarks" / "runs" / "planner-devices.json").read_text())["rows"]
    head = ["machine", "model, batch", "plan", "step", "over the best set", "shards alone, over the plan", "by `simulate`"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        simulated = f"{row['plan, simulated s']:.2f} s, {row['simulated ratio']:.2f}" if "simulated ratio" in row else "not run"
        ratios = f"{row['plan / brute force']:.3f} | {row['shards alone / plan']:.2f} | {simulated}"
        lines.append(f"| {row['machine']} | {row['model']}, {row['rows']} | {row['pick']} | {row['plan s']:.2f} s | {ratios} |")
    assert_written(ROOT / "docs" / "planning.md", "planner: devices", "\n".join(lines))
