"""Ranks that divide a model, from one trace: programs, memory and seconds are those of models that `shard` and `pipeline` divide."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from l2l_compile import L2LError, Machine, OptionError, explain, simulate
from l2l_compile.estimate.balanced_stages import ranks_of_names
from l2l_compile.estimate.optimizer_times import optimizer_times
from l2l_compile.estimate.step_time import RankPrograms, times_of_stages
from l2l_compile.ir.rank_layout import Layout
from l2l_compile.planner.divisions import Devices, lines_of, rows_of, with_loops
from l2l_compile.planner.fit import Fit
from models import Stack
from placed import placed

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 6}
MACHINE = replace(Machine.load("rtx4090"), devices=8, host_memory=1e12)


def llama(**more):
    torch.manual_seed(0)
    tokens = torch.zeros(16, 16, dtype=torch.long)
    config = LlamaConfig(**SMALL, vocab_size=128, use_cache=False, **more)
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def bert():
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SMALL, vocab_size=128))
    mask = torch.ones(16, 16, dtype=torch.long)
    return model, {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "labels": torch.zeros(16, dtype=torch.long)}


MODELS = {"llama": llama, "tied": lambda: llama(tie_word_embeddings=True), "bert": bert}
LAYOUTS = [
    Layout(shards=4),
    Layout(shards=3),
    Layout(shards=2, replicas=2),
    Layout(depth=2, loops=3),
    Layout(depth=4, loops=1),
    Layout(depth=2, loops=2, shards=2),
    Layout(depth=2, loops=1, replicas=2),
    Layout(depth=2, loops=2, shards=2, replicas=2),
]
OPTIONS = {"precision": "bf16", "micro_batches": 4, "outputs": "loss", "device": "cpu"}


def with_optimizer(model, options):
    chosen = {**OPTIONS, "update": "in_forward", **options}
    if chosen["update"] != "at_step":
        chosen["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return chosen


def divided(name, layout, options, machine=MACHINE):
    """The reports of a rank of each stage, from one trace."""
    model, batch = MODELS[name]()
    chosen = with_optimizer(model, options)
    report = explain(model, chosen)(**batch).on(machine)
    program = explain(model, {"device": "cpu"})(**batch).programs[0]
    rank_of = ranks_of_names(program, layout.depth, layout.loops) if layout.depth > 1 else {}
    return report.of_stages([report.options] * layout.depth, layout, rank_of, machine), optimizer_times(
        model, report.options, machine
    )


def timed(name, layout, options, machine=MACHINE):
    reports, optimizer = divided(name, layout, options, machine)
    stages = [RankPrograms(report.programs, report.levels) for report in reports]
    return times_of_stages(stages, layout, reports[0].options, machine, optimizer)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow(but=("llama-*", "bert-pipeline of 2, loops=2 x 2 shards"))
def test_programs_of_a_layout_are_those_of_its_ranks(name, layout):
    options = {"keep": "100KB", "stash": "device"} if layout.depth == 1 else {}
    reports, _ = divided(name, layout, options)
    share = replace(MACHINE.shared_by(min(layout.ranks, 8)))
    assert len(reports) == layout.depth
    for stage, report in enumerate(reports):
        model, batch = MODELS[name]()
        with placed(model, batch, layout, stage):
            real = explain(model, with_optimizer(model, options))(**batch).on(share)
            assert list(map(str, report.programs)) == list(map(str, real.programs))
            assert report.device_memory == real.device_memory
            assert replace(report.host_memory, parameters=0) == replace(real.host_memory, parameters=0)


TIMED = [
    (Layout(shards=4), {}),
    (Layout(shards=3), {"update": "in_backward"}),
    (Layout(shards=2), {"update": "at_step"}),
    (Layout(shards=2, replicas=2), {}),
    (Layout(shards=2), {"keep": "1MB", "delay": 1}),
    (Layout(depth=4, loops=1), {}),
    (Layout(depth=2, loops=3), {"update": "in_backward"}),
    (Layout(depth=2, loops=2), {"stash": "device", "prefetch": 2}),
    (Layout(depth=2, loops=2), {"delay": 1}),
    (Layout(depth=2, loops=2), {"keep": "1MB", "keep_on_host": "1MB"}),
    (Layout(depth=2, loops=2), {"resident": "100KB"}),
    (Layout(depth=2, loops=2, shards=2), {"max_grad_norm": 1.0}),
    (Layout(depth=2, loops=2, shards=2, replicas=2), {"update": "in_backward", "micro_batches": 2}),
    (Layout(depth=2, loops=1, replicas=2), {"update": "in_backward"}),
    (Layout(depth=2, loops=1), {"schedule": "1f1b"}),
    (Layout(depth=4, loops=1), {"schedule": "1f1b", "precision": "fp32"}),
    (Layout(depth=2, loops=1, shards=2), {"schedule": "1f1b"}),
    (Layout(), {"schedule": "1f1b"}),
    (Layout(depth=4, loops=1), {"schedule": "1f1b", "delay": 1, "micro_batches": 8}),
    (Layout(depth=2, loops=1, shards=2), {"schedule": "1f1b", "delay": 1}),
    (Layout(depth=2, loops=1, replicas=2), {"schedule": "1f1b", "delay": 1}),
]


def case(value):
    return str(value) if isinstance(value, Layout) else ", ".join(f"{k}={v}" for k, v in value.items()) or "default"


FEW = ("4 shards-*", "pipeline of 2, loops=2 x 2 shards x 2 replicas-*", "pipeline of 4, loops=1-schedule=1f1b, delay*")


@pytest.mark.parametrize(("layout", "options"), TIMED, ids=case)
@pytest.mark.slow(but=FEW)
def test_ranks_take_as_long_as_simulated_ones(layout, options):
    found = timed("llama", layout, options)
    model, batch = MODELS["llama"]()
    if layout.ranks == 1:
        step = simulate(model, MACHINE, with_optimizer(model, options))(**batch)
    else:
        with placed(model, batch, layout):
            step = simulate(model, MACHINE, with_optimizer(model, options))(**batch)
    assert len(found) == layout.depth and all(rank.steady == step.steady for rank in found)
    seconds = [stage.seconds for stage in step.stages] or [step.seconds]
    for rank, simulated in zip(found, seconds, strict=True):
        assert math.isclose(rank.seconds, simulated, rel_tol=3e-3)


@pytest.mark.parametrize("across", [False, True], ids=["inside", "across"])
def test_ranks_on_two_hosts_take_as_long_as_simulated_ones(across):
    machine = replace(MACHINE, devices=2, network=5e9, network_latency=1e-5)
    layout = Layout(depth=2, loops=2, shards=2, across_hosts=across)
    found = timed("llama", layout, {"update": "in_backward"}, machine)
    model, batch = MODELS["llama"]()
    with placed(model, batch, layout):
        step = simulate(model, machine, with_optimizer(model, {"update": "in_backward"}))(**batch)
    assert math.isclose(found[0].seconds, step.seconds, rel_tol=3e-3)


def test_layouts_are_all_divisions_of_the_devices():
    found = Devices(8).layouts()
    assert all(layout.ranks == 8 for layout in found) and len(set(found)) == len(found)
    named = {(layout.depth, layout.shards, layout.replicas) for layout in found}
    every = {(d, s, 8 // (d * s)) for d, s in itertools.product((1, 2, 4, 8), repeat=2) if 8 % (d * s) == 0}
    assert named == every - {(1, 1, 8)}  # the whole model on each rank
    assert sum(layout.across_hosts for layout in Devices(8, 2).layouts()) == 5
    assert [layout.loops for layout in with_loops(Layout(depth=2), 6)] == [1, 2, 4, 6]


@pytest.mark.parametrize(("count", "hosts"), [(0, 1), (2.5, 1), (True, 1), (8, 0), (8, 3)])
def test_impossible_numbers_of_devices_are_refused(count, hosts):
    with pytest.raises(OptionError, match="devices|hosts"):
        Devices(count, hosts)


def test_hosts_hold_the_ranks_that_are_on_them():
    """Four ranks on two hosts: with neighbours in the pipeline on one host, each host has all stages, else one of them."""
    machine = replace(MACHINE, devices=2)
    beside, across = (Layout(depth=2, loops=1, shards=2, across_hosts=each) for each in (False, True))
    reports, _ = divided("llama", beside, {}, machine)
    first, last = (report.host_memory.total for report in reports)
    assert first != last
    assert Fit.of_stages(reports, beside, machine).needs[-1].bytes == first + last
    assert Fit.of_stages(reports, across, machine).needs[-1].bytes == 2 * max(first, last)


def test_a_batch_is_divided_evenly_or_not_at_all():
    assert rows_of(Layout(shards=4, replicas=2, depth=2), 16) == 2 and rows_of(Layout(shards=3), 16) is None


def test_one_rank_needs_no_lines():
    assert lines_of(Layout()) == []


class Stacked(nn.Module):
    """A parameter that is read in parts."""

    def __init__(self):
        super().__init__()
        self.first, self.weight = Stack(2), nn.Parameter(torch.randn(4, 3, 3))

    def forward(self, input):
        x = self.first(input)
        for i in range(4):
            x = torch.tanh(x @ self.weight[i])
        return x.sum()


def test_shards_of_a_parameter_read_in_parts_are_refused():
    report = explain(Stacked(), {"device": "cpu"})(torch.randn(8, 5))
    assert any(i.slice is not None for i in report.programs[0].captured.derived)
    with pytest.raises(L2LError, match=r"'.*weight.*' is a part of a parameter: a plan knows no shards"):
        report.of_stages([report.options], Layout(shards=2), {}, MACHINE)
