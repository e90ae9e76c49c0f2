"""A step that is timed by the nodes of its program takes as long as the simulated one, which runs the executor tensor by tensor."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from l2l_compile import Machine, OptionError, explain, simulate
from l2l_compile.estimate.optimizer_times import optimizer_times
from l2l_compile.estimate.step_time import RankPrograms, step_time, times_of_stages
from l2l_compile.ir.rank_layout import Layout
from models import WIDTH, Layer, Shared, Stack, TwoHeads, UNet, rows

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 128}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
}


def llama(**more):
    tokens = torch.zeros(12, 16, dtype=torch.long)
    return LlamaForCausalLM(LlamaConfig(**SMALL, use_cache=False, **more)), {"input_ids": tokens, "labels": tokens}


def of_rows(model):
    return model, {"input": rows(12, dtype=torch.float32)}


class InBatches(nn.Module):
    """A part that mixes rows, so that it runs on the whole batch, and dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.last = Stack(2), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 5)

    def forward(self, input):
        return self.last(self.drop(self.norm(self.first(input))))


MODELS = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "skips": lambda: of_rows(nn.Sequential(nn.Linear(5, WIDTH), UNet(4))),
    "shared": lambda: of_rows(nn.Sequential(Shared(), nn.Linear(WIDTH, 5), TwoHeads())),
    "whole batch": lambda: of_rows(InBatches()),
    "wide": lambda: of_rows(nn.Sequential(Stack([Layer(256) for _ in range(3)], width=256))),
}
SETS = [
    {},
    {"micro_batches": 1},
    {"micro_batches": 5},
    {"micro_batches": 12},
    {"prefetch": 0},
    {"prefetch": 2},
    {"stash": "device"},
    {"stash": "device", "prefetch": 2},
    {"resident": "100KB"},
    {"resident": "1GB"},
    {"resident": "1GB", "stash": "device"},
    {"keep": "1MB"},
    {"keep": "1GB"},
    {"keep_on_host": "1MB"},
    {"keep_on_host": "1MB", "prefetch": 0},
    {"keep": "100KB", "keep_on_host": "1MB"},
    {"update": "at_step"},
    {"update": "at_step", "keep": "1GB"},
    {"update": "in_backward"},
    {"update": "in_backward", "stash": "device"},
    {"update": "in_backward", "precision": "fp32"},
    {"delay": 1},
    {"delay": 1, "precision": "fp32"},
    {"delay": 1, "prefetch": 2},
    {"precision": "fp32"},
    {"precision": "fp32", "update": "at_step"},
    {"precision": "fp16"},
    {"gradient_wire": "fp32"},
    {"max_grad_norm": 1.0},
    {"outputs": "all"},
    {"block_compiler": "eager"},
]


def both(model, batch, machine, optimizer="adamw", **options):
    """Seconds of a step by its nodes, and of the simulated one."""
    chosen = {"precision": "bf16", "micro_batches": 4, "update": "in_forward", "device": "cpu", **options}
    if optimizer is not None:
        chosen["optimizer"] = OPTIMIZERS[optimizer](model.parameters())
    report = explain(model, chosen)(**batch).on(machine)
    times = optimizer_times(model, report.options, machine)
    found = step_time(report.programs, report.options, machine, report.levels, times)
    step = simulate(model, machine, chosen)(**batch)
    assert found.steady == step.steady
    return found.seconds, step.seconds


@pytest.mark.parametrize("options", SETS, ids=lambda options: ", ".join(f"{k}={v}" for k, v in options.items()) or "default")
@pytest.mark.slow(but=("keep_on_host=1MB", "update=at_step", "delay=1"))
def test_nodes_take_as_long_as_a_simulated_step(options):
    by_nodes, simulated = both(*llama(), Machine.load("rtx4090"), **options)
    assert math.isclose(by_nodes, simulated, rel_tol=2e-3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("machine", ["h200", "cpu"])
@pytest.mark.slow(but=("h200-shared", "cpu-skips"))
def test_nodes_of_any_model_are_timed(name, machine):
    model, batch = MODELS[name]()
    for options in ({"update": "in_backward"}, {"stash": "device"}):
        by_nodes, simulated = both(model, batch, Machine.load(machine), **options)
        assert math.isclose(by_nodes, simulated, rel_tol=2e-3), options


@pytest.mark.parametrize("optimizer", ["momentum", "adafactor"])
@pytest.mark.parametrize("update", ["at_step", "in_forward"])
@pytest.mark.slow(but="in_forward-adafactor")
def test_an_optimizer_of_any_class_is_timed(optimizer, update):
    by_nodes, simulated = both(*llama(), Machine.load("h100"), optimizer, update=update)
    assert math.isclose(by_nodes, simulated, rel_tol=2e-3)


def test_a_step_that_nodes_cannot_time_is_refused():
    model, batch = llama()
    report = explain(model, {"micro_batches": 2, "device": "cpu", "pinned_memory": "8GB"})(**batch)
    machine = Machine.load("h100")
    with pytest.raises(OptionError, match="is not timed by its nodes: simulate it"):
        step_time(report.programs, report.options, machine, None, optimizer_times(model, report.options, machine))


def test_steps_of_ranks_that_nodes_cannot_time_are_refused():
    model, batch = llama()
    options = {"micro_batches": 2, "device": "cpu", "optimizer": OPTIMIZERS["adamw"](model.parameters())}
    machine = replace(Machine.load("h100"), devices=2)
    report = explain(model, options)(**batch).on(machine)
    (stage,) = report.of_stages([report.options], Layout(shards=2), {}, machine)
    times, programs = optimizer_times(model, report.options, machine), [RankPrograms(stage.programs)]
    with pytest.raises(OptionError, match="several ranks with update='at_step' is not timed"):
        times_of_stages(programs, Layout(shards=2), stage.options, machine, times)
    with pytest.raises(OptionError, match="several ranks is not timed by the nodes of one"):
        step_time(stage.programs, stage.options, machine, None, times)
