"""Pipelines in virtual time: the bubble of equal stages, what messages add, and stages that are sharded or copied.

This process is the first of the ranks; all ranks of its pipeline are simulated.
"""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from test_schedule import ROWS, WIDTH, Layers
from test_sharded import joined, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile import L2LError, simulate
from l2l_compile.simulation.turns import Turns

MESSAGE = 4 * ROWS * WIDTH  # bytes of a micro-batch between layers
FREE = {"h2d": 1e30, "d2h": 1e30, "pageable": 1e30, "host_bandwidth": 1e30, "link": 1e30, "link_latency": 0.0, "devices": 8}


class Equal(Layers):
    """Equal layers, whose inputs and outputs all take a gradient. Beginning and end cost nothing."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.begin, self.end = (nn.ParameterList([torch.ones(())]) for _ in range(2))

    def forward(self, x):
        x = x * self.begin[0]
        for layer in self.layers:
            x = layer(x)
        return (x * self.end[0]).square().mean()


def stages(depth: int) -> list[list[str]]:
    return [["begin", "layers.0"], *([f"layers.{i}"] for i in range(1, depth - 1)), [f"layers.{depth - 1}", "end"]]


def step(
    ranks: int, turns: int, loops: int, schedule: str = "breadth_first", delay: int = 0, **figures
) -> l2l_compile.Simulation:
    """A step of a pipeline whose layers take a second forward for each micro-batch."""
    model = Equal(ranks * loops)
    with world(ranks) as mesh:
        l2l_compile.pipeline(model, mesh, stages=stages(ranks * loops))
        on = dataclasses.replace(joined(), **{**FREE, **figures})
        options = {"micro_batches": turns, "schedule": schedule}
        if delay:
            options |= {"update": "in_forward", "delay": delay, "optimizer": torch.optim.AdamW(model.parameters())}
        return simulate(model, on, options)(torch.empty(ROWS * turns, WIDTH))


def turn(found: l2l_compile.Simulation, turns: int, loops: int) -> float:
    """Seconds of a micro-batch in a layer, forward and backward."""
    return found.timeline.busy("compute") / (turns * loops)


FEW = [(2, 2, 1), (4, 4, 2)]
MANY = [(d, m, v) for d in (2, 4, 8) for m in (d, 4 * d) for v in (1, 2, 4) if (d, m, v) not in FEW]


@pytest.mark.parametrize(("ranks", "turns", "loops"), [*FEW, *(pytest.param(*c, marks=pytest.mark.slow) for c in MANY)])
def test_the_bubble_is_that_of_the_formula(ranks, turns, loops):
    found = step(ranks, turns, loops)
    formula = (ranks - 1) / (loops * turns + ranks - 1)
    assert found.steady and len(found.stages) == ranks
    for stage in found.stages:
        assert stage.seconds == found.seconds
        assert 1 - stage.busy("compute") == pytest.approx(formula, abs=0.005 * formula)


@pytest.mark.parametrize(
    ("ranks", "turns"), [(2, 4), *(pytest.param(*c, marks=pytest.mark.slow) for c in [(2, 2), (3, 12), (4, 4), (4, 16)])]
)
def test_one_forward_one_back_has_the_bubble_of_the_formula(ranks, turns):
    found = step(ranks, turns, 1, schedule="1f1b")
    assert found.steady and len(found.stages) == ranks
    for stage in found.stages:
        assert 1 - stage.busy("compute") == pytest.approx((ranks - 1) / (turns + ranks - 1), rel=0.005)


@pytest.mark.parametrize(
    ("ranks", "turns"), [(2, 4), *(pytest.param(*c, marks=pytest.mark.slow) for c in [(2, 2), (3, 4), (4, 4), (4, 8), (8, 8)])]
)
def test_without_a_flush_no_rank_is_idle(ranks, turns):
    """A step takes what its turns take, and one with a flush (m + d - 1) / m of that, as breadth first with one stage a rank."""
    found = step(ranks, turns, 1, schedule="1f1b", delay=1)
    seconds = turns * turn(found, turns, 1)
    assert found.steady
    assert all(stage.seconds == pytest.approx(seconds, rel=0.01) for stage in found.stages)
    for schedule in ("1f1b", "breadth_first"):
        flushed = step(ranks, turns, 1, schedule=schedule)
        assert flushed.seconds / found.seconds == pytest.approx((turns + ranks - 1) / turns, rel=0.01)


def test_memory_of_one_forward_one_back_does_not_grow_with_turns():
    peaks = [[stage.peak_device_bytes for stage in step(2, turns, 1, schedule="1f1b").stages] for turns in (4, 8, 16)]
    assert all(max(of_stage) - min(of_stage) < 1000 for of_stage in zip(*peaks, strict=True))


@pytest.mark.parametrize(
    ("ranks", "turns", "loops"),
    [
        (2, 4, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 8, 4), (4, 8, 2), (4, 4, 1), (4, 16, 4), (8, 16, 2)]),
    ],
)
def test_messages_add_those_of_one_way_there_and_back(ranks, turns, loops):
    """All others travel while layers are computed."""
    found = step(ranks, turns, loops, link=MESSAGE / 0.1)
    formula = (loops * turns + ranks - 1) * turn(found, turns, loops)
    assert found.seconds == pytest.approx(formula + 2 * (ranks - 1) * 0.1, rel=1e-4)


def test_as_few_turns_as_ranks_wait_for_each_message():
    """A micro-batch comes back to a rank just when that rank could go on: each of its messages is waited for."""
    ranks = turns = 4
    found = step(ranks, turns, 2, link=MESSAGE / 0.1)
    formula = (2 * turns + ranks - 1) * turn(found, turns, 2)
    assert found.seconds == pytest.approx(formula + 2 * (2 * ranks - 1) * 0.1, rel=1e-4)


def test_messages_between_hosts_cross_the_network():
    near = step(2, 2, 1, network=MESSAGE / 0.5, network_latency=0.25)
    far = step(2, 2, 1, network=MESSAGE / 0.5, network_latency=0.25, devices=1)
    told = 3 * 0.25  # the loss, and what ranks announce before forward and backward
    assert far.seconds - near.seconds == pytest.approx(2 * 0.75 + told, rel=1e-3)
    assert near.timeline.busy("send") == 0.0 and far.timeline.busy("send") == pytest.approx(2 * 0.75)


def test_a_step_is_shown_for_all_ranks(tmp_path):
    found = step(2, 2, 1, link=MESSAGE / 0.1)
    shown = str(found)
    assert shown.startswith("simulated on a pipeline of 2 ranks on test:")
    found.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "rank 0, simulated on test",
        "rank 1, simulated on test",
    ]


UPDATES = [{"update": "at_step"}, {"update": "in_backward"}, {"update": "in_forward", "max_grad_norm": 1.0}, {"delay": 1}]


@pytest.mark.parametrize("update", UPDATES, ids=str)
def test_each_rank_updates_its_own_parameters(update):
    model = Equal(4)
    with world(2) as mesh:
        l2l_compile.pipeline(model, mesh, stages=stages(4))
        more = {"update": "in_forward", **update} if "delay" in update else update
        options = {"micro_batches": 2, "optimizer": torch.optim.AdamW(model.parameters()), **more}
        found = simulate(model, joined(), options)(torch.empty(ROWS, WIDTH))
    assert found.steady
    for stage in found.stages:
        assert stage.stats.pushed_bytes == pytest.approx(found.stats.pushed_bytes, rel=0.01)
        assert stage.timeline.busy("host") + stage.timeline.busy("update") + stage.timeline.busy("caller") > 0


@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_stages_may_be_sharded_or_copied(kind):
    """Four ranks: two stages, each on two ranks with rows of their own."""
    model, names = Equal(4), ("dp", "pp") if kind == "shards" else ("replicate", "shard", "pp")
    with world(4):
        mesh = init_device_mesh("cpu", (2, 2) if kind == "shards" else (2, 1, 2), mesh_dim_names=names)
        l2l_compile.pipeline(model, mesh["pp"], stages=stages(4))
        l2l_compile.shard(model, mesh["dp"] if kind == "shards" else mesh["replicate", "shard"])
        found = simulate(model, joined(link=1e10), {"micro_batches": 2, "precision": "fp32"})(torch.empty(ROWS, WIDTH))
    assert found.ranks == 2 and found.steady
    for stage in found.stages:
        assert (stage.timeline.busy("comm") > 0) == (kind == "shards")
        assert stage.timeline.busy("send") > 0 and stage.timeline.busy("recv") > 0


def test_ranks_that_wait_for_one_another_are_told_so():
    turns = Turns(2)
    with pytest.raises(L2LError, match="the simulated ranks wait for one another"):
        turns.run([lambda: turns.wait(0, lambda: False), lambda: turns.wait(1, lambda: False)])


def test_an_error_of_a_simulated_rank_is_raised():
    turns = Turns(2)

    def fails():
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        turns.run([lambda: turns.wait(0, lambda: False), fails])


def test_the_page_has_the_lanes_of_all_ranks():
    model, batch = Equal(4), torch.empty(ROWS * 2, WIDTH)
    with world(2) as mesh:
        l2l_compile.pipeline(model, mesh, stages=stages(4))
        report = l2l_compile.explain(model, {"device": "cpu", "micro_batches": 2})(batch)
        page = report.page(joined(link=MESSAGE / 0.1))
    data = json.loads(re.search(r"const data = (\{.*?\});\n", page).group(1))
    lanes = [f"{rank} {lane}" for rank in range(2) for lane in ("compute", "send", "recv")]
    assert data["timeline"]["lanes"][-6:] == lanes
    rows = {data["timeline"]["lanes"][row] for row, *_ in data["timeline"]["spans"]}
    assert rows.issuperset(lanes)
