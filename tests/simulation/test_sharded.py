"""Models that are sharded over ranks, in virtual time: what collectives cost, what a rank moves, who waits for whom.

This process is the first of the ranks; nobody answers for the others.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from test_schedule import PARAMETERS, WIDTH, Layers, machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import l2l_compile
from l2l_compile import L2LError, Machine, OptionError, simulate
from l2l_compile.host.disk_plan import disk_plan
from l2l_compile.options import Options
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.ranks.shard_spec import ShardSpec
from l2l_compile.simulation.ring import ring_of
from l2l_compile.simulation.simulated_loop import SimulatedLoop
from models import Stack, rows
from stored_training import RING

ROWS = 64
UPDATES = [{}, {"update": "at_step"}, {"update": "in_backward"}, {"update": "in_forward", "max_grad_norm": 1.0}]


@contextmanager
def world(size: int):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        dist.destroy_process_group()


def joined(**figures) -> Machine:
    """The machine of the tests of the schedule, with links between four devices of a host, and between hosts."""
    between = {"devices": 4, "link": 1e12, "link_latency": 1e-6, "network": 1e11, "network_latency": 1e-5}
    return dataclasses.replace(machine(), **{**between, **figures})


def step(ranks: int | None, on: Machine, model: nn.Module | None = None, **options) -> l2l_compile.Simulation:
    """A step of one of so many ranks; None: of a model that is not sharded."""
    model = model or Layers(4)
    with world(ranks or 1) as mesh:
        if ranks is not None:
            l2l_compile.shard(model, mesh)
        if "update" in options:
            options["optimizer"] = torch.optim.AdamW(model.parameters())
        return simulate(model, on, {"micro_batches": 2, **options})(torch.empty(ROWS, WIDTH))


def test_a_collective_takes_as_long_as_a_ring():
    on = joined(devices=4, link=1e11, link_latency=1e-6, network=5e10, network_latency=1e-5)
    assert ring_of(on, 4).seconds(8_000_000_000) == pytest.approx(3 / 4 * 0.08 + 3e-6, rel=1e-12)
    assert ring_of(on, 8).seconds(8_000_000_000) == pytest.approx(7 / 8 * 0.16 + 6e-6 + 1e-5, rel=1e-12)  # on two hosts
    alone = dataclasses.replace(on, devices=1, link=None, link_latency=None)
    assert ring_of(alone, 2).seconds(8_000_000_000) == pytest.approx(1 / 2 * 0.16 + 1e-5, rel=1e-12)


@pytest.mark.parametrize(
    ("ranks", "figure"), [(2, "link"), (2, "link_latency"), (8, "network"), (8, "network_latency"), (2, "devices")]
)
def test_a_figure_that_a_machine_lacks_is_named(ranks, figure):
    with pytest.raises(OptionError, match=rf"machine 'test' has no figure '{figure}', which this simulation needs"):
        step(ranks, joined(**{figure: None}))


def test_collectives_take_the_seconds_of_their_rings_on_comm(tmp_path):
    on = joined(link=1e10)
    found = step(4, on, precision="fp32")
    ring = ring_of(on, 4)
    gather = ring.seconds(4 * (8 * WIDTH * WIDTH + 5 * WIDTH))  # all weights of a layer together: hops are waited for once
    reduce = ring.seconds(4 * PARAMETERS)
    spans = {span.label: span.seconds for span in found.timeline.of("comm")}
    assert spans["all_gather_weights layers.0"] == pytest.approx(gather, rel=1e-9)
    # buffers are filled and sums divided on the lane as well: here they cost next to nothing
    assert spans["reduce_scatter_gradients layers.0"] == pytest.approx(reduce, rel=1e-3)
    assert found.ranks == 4 and found.busy("comm") > 0 and str(found).startswith("simulated on one of 4 ranks on test: ")
    found.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"all_gather_weights layers.0", "reduce_scatter_gradients layers.3"} <= {
        e["name"] for e in events if e.get("cat") == "comm"
    }


@pytest.mark.parametrize("options", UPDATES, ids=str)
def test_one_rank_takes_as_long_as_a_model_that_is_not_sharded(options):
    alone, plain = step(1, machine(), **options), step(None, machine(), **options)
    exact = options.get("update") != "at_step"  # where a DTensor's operations are charged one by one: sums round otherwise
    assert alone.seconds == (plain.seconds if exact else pytest.approx(plain.seconds, rel=1e-12))
    assert [(p.lane, p.label) for p in alone.timeline.spans] == [(p.lane, p.label) for p in plain.timeline.spans]
    assert (alone.taken_bytes, alone.stats.fetched_bytes) == (plain.taken_bytes, plain.stats.fetched_bytes)
    assert not alone.timeline.of("comm")


@pytest.mark.parametrize("options", UPDATES[1:3], ids=str)
def test_twice_the_ranks_fetch_push_and_update_half(options):
    two, four = (step(ranks, joined(devices=1), precision="fp32", **options) for ranks in (2, 4))
    assert two.stats.fetched_bytes == 2 * four.stats.fetched_bytes > 0
    assert two.stats.pushed_bytes == pytest.approx(2 * four.stats.pushed_bytes, rel=1e-4)  # and the norms of each gradient
    whole = two.stats.fetched_bytes + two.stats.gathered_bytes
    assert whole == four.stats.fetched_bytes + four.stats.gathered_bytes
    lane = "caller" if options["update"] == "at_step" else "host"
    assert four.timeline.busy(lane) < 0.6 * two.timeline.busy(lane)


def test_ranks_of_a_host_share_its_disk():
    """Each keeps its own half of what one rank has there, at half of the rate: it takes as long."""
    machine = joined(devices=2, disk_read=1e9, disk_write=1e9)
    busy = []
    for ranks in (1, 2):
        layers = (nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Tanh()) for _ in range(4))
        with world(ranks) as mesh:
            model = l2l_compile.shard(nn.Sequential(*layers), mesh)
            optimizer = torch.optim.AdamW(model.parameters())
            options = {"update": "in_backward", "precision": "bf16", "optimizer": optimizer, "micro_batches": 2, "disk": "/"}
            asked = Options.build({**options, "host_memory": "1TB", "device": "cpu"})
            options["host_memory"] = disk_plan(asked, largest=1024**2 // ranks).beside + RING
            found = simulate(model, machine, options)(torch.empty(ROWS, 1024))
            report = l2l_compile.explain(model, {**options, "device": "cpu"})(torch.empty(ROWS, 1024))
        on_disk = report.host_memory.disk.placement.on_disk
        assert found.stats.disk_written_bytes == on_disk == 4 * 12 * 1024**2 // ranks
        busy.append(found.timeline.busy("disk_write"))
    assert busy == pytest.approx([on_disk * 2 / 1e9] * 2, rel=0.01)


def test_devices_of_a_host_share_its_bandwidth():
    """Half of the updates, at half of the bandwidth, take as long."""
    options = {"update": "in_backward", "precision": "fp32"}
    one, *shared = (
        step(ranks, joined(devices=devices), **options).timeline.busy("host") for ranks, devices in ((1, 4), (2, 4), (2, 1))
    )
    assert shared == pytest.approx([one, one / 2], rel=1e-3)


def test_compute_waits_for_a_gather_that_is_slower():
    found = step(4, joined(link=1e6))
    assert "all_gather_weights layers" in found.gaps("compute")[0].waited_for
    assert found.busy("comm") > 0.9 > found.busy("compute")


def test_tokens_are_those_of_all_ranks():
    model = nn.Sequential(nn.Embedding(8, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    with world(4) as mesh:
        found = simulate(l2l_compile.shard(model, mesh), joined(), {"micro_batches": 2})(torch.zeros(6, 10, dtype=torch.long))
    assert found.tokens_per_second == pytest.approx(4 * 60 / found.seconds)
    assert step(None, machine()).tokens_per_second is None


def test_global_rows_and_padding_of_a_large_world_are_simulated():
    """64 ranks have shards of a layer with 8 rows; the rows of all of them run in one segment."""
    found = []
    for batch in ("per_rank", "global"):
        with world(64) as mesh:
            model = l2l_compile.shard(Mixing(3).float(), mesh)
            found.append(simulate(model, joined(), {"micro_batches": 2, "batch_scope": batch})(rows(6, dtype=torch.float32)))
    labels = [{span.label.split()[0] for span in each.timeline.of("comm")} for each in found]
    assert "all_gather_rows" in labels[1] - labels[0] and labels[0] <= labels[1] | {"reduce_scatter_gradients"}
    assert found[1].timeline.busy("compute") > found[0].timeline.busy("compute")


class Mixing(Stack):
    """A statistic of the rows, which the rows read again."""

    def forward(self, x):
        x = super().forward(x)
        return ((x - x.mean(0)) * x.std(0)).pow(2).mean()


def test_other_meshes_are_refused():
    with world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = Layers(2)
        parallelize_module(model.layers[0], mesh["tp"], {"up": ColwiseParallel()})
        for shard in (False, True):
            with pytest.raises(
                L2LError, match=r"'layers.0.up.weight' is sharded over .*tp.*: simulate does not know the sums of parallel layers"
            ):
                simulate(l2l_compile.shard(model, mesh) if shard else model, joined())


def test_replicas_average_their_gradients_on_the_host():
    with world(4):
        replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = l2l_compile.shard(Layers(2), replicated)
        found = simulate(model, joined(), {"micro_batches": 2})(torch.empty(ROWS, WIDTH))
    alone = step(2, joined())
    assert found.ranks == 4
    assert found.timeline.busy("host") > alone.timeline.busy("host")


@pytest.mark.parametrize("count", [1, 5, 8, 9])
@pytest.mark.parametrize("width", [1, 4, 100])
def test_a_buffer_has_the_shards_of_each_rank_in_its_row(count, width):
    """Of a gradient with so many rows of three, and of one with five entries, on four ranks; a range of columns at a time."""
    ranks = Ranks.__new__(Ranks)
    ranks.shard_mesh_size = 4
    gradients = [(torch.rand(count, 3), ShardSpec((count, 3), 4)), (torch.rand(5), ShardSpec((5,), 4))]
    total = sum(spec.entries for _, spec in gradients)
    filled = []
    for first in range(0, total, width):
        columns = torch.full((4, min(width, total - first)), torch.nan)
        ranks._fill(columns, first, gradients)
        filled.append(columns)
    expected = [
        torch.zeros(4 * p.entries).index_copy(0, torch.arange(g.numel()), g.reshape(-1)).view(4, -1) for g, p in gradients
    ]
    assert torch.equal(torch.cat(filled, 1), torch.cat(expected, 1))


def test_host_memory_that_is_taken_is_that_of_a_ranks_shards(monkeypatch):
    taken, of_loop = [], SimulatedLoop._occupied
    monkeypatch.setattr(SimulatedLoop, "_occupied", lambda self: taken.append(of_loop(self)) or taken[-1])
    for ranks in (None, 4):
        step(ranks, joined(link=1e10), update="in_backward")
    assert taken[0] == 4 * taken[1] > 0
