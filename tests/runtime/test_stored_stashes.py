"""Stashes on disk: equal bits with any disk, memory that does not grow with depth, places that are free again."""

from __future__ import annotations

import errno
import gc
import os
from typing import Any

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile import DiskError, OptionError, Options
from l2l_compile.runtime.stored_stashes import StashesOnDisk
from l2l_compile.session import session_of
from models import compiled
from slow_disk import Faults, holders, slow_disk

WIDTH, ROWS = 64, 4200
STASH = 4 * WIDTH * ROWS  # bytes: a little more than the least that goes to the disk
SLOW = 3e7  # bytes a second: slower than the model
OPTIMIZER = {"update": "in_backward"}, {"update": "in_forward"}, {"update": "in_forward", "delay": 1}


def stack(layers: int = 8) -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(nn.Linear(5, WIDTH), *middle, nn.Linear(WIDTH, 3))


def inputs(number: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(number))


class Loop:
    """A model under training with these options."""

    def __init__(self, layers: int = 8, **options: Any):
        torch._dynamo.reset()
        self.model = stack(layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        needs = options.get("update", "at_step") != "at_step" or options.get("precision") == "fp16"
        self.call = compiled(self.model, **({"optimizer": self.optimizer} if needs else {}), **options)
        torch.manual_seed(1)
        self.number = 0

    def step(self, count: int = 1, rows: int = ROWS, forwards: int = 1) -> None:
        for _ in range(count):
            made = [self.call(inputs(self.number + 100 * each, rows)).pow(2).mean() for each in range(forwards)]
            for loss in made:
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.number += 1

    def parameters(self) -> list[torch.Tensor]:
        l2l_compile.synchronize(self.call)
        return [p.detach().clone() for p in self.model.parameters()]

    @property
    def on_disk(self):
        return session_of(self.call).stashes_on_disk

    @property
    def stats(self) -> l2l_compile.Stats:
        return l2l_compile.stats(self.call)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def cases():
    yield from (pytest.param({"precision": p}, id=f"at_step-{p}") for p in ("fp32", "bf16", "fp16"))
    for updates in OPTIMIZER:
        for precision in ("fp32", "bf16", "fp16"):
            if precision == "fp16" and updates["update"] == "in_backward":
                continue  # it sees no overflow
            name = f"{updates['update']}{'-delay' * updates.get('delay', 0)}-{precision}"
            marks = () if precision == "bf16" else pytest.mark.slow
            yield pytest.param({**updates, "precision": precision}, id=name, marks=marks)


@pytest.mark.parametrize("options", list(cases()))
def test_bits_do_not_depend_on_where_stashes_are(options, tmp_path, threaded):
    """On lanes that are threads, with a slow disk and a fast one."""
    expected, rows = Loop(**options), ROWS if options["precision"] == "fp32" else 2 * ROWS
    expected.step(3, rows)
    budget = {"host_memory": "1GB"} if "update" in options else {}
    for rate in (SLOW, None):
        with slow_disk(Faults(rate=rate)):
            made = Loop(stash="disk", disk=tmp_path, **budget, **options)
            made.step(3, rows)
            assert made.stats.disk_stash_bytes > 0
            assert same(expected.parameters(), made.parameters()), f"at {rate} bytes a second"


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_host_that_is_the_device_stores_its_stashes(micro_batches, tmp_path):
    expected = Loop(micro_batches=micro_batches)
    expected.step(3)
    with slow_disk(Faults(rate=SLOW)):
        made = Loop(micro_batches=micro_batches, stash="disk", disk=tmp_path)
        made.step(3)
        assert same(expected.parameters(), made.parameters())


def test_prefetch_zero_reads_ahead_too(tmp_path, threaded):
    expected = Loop(prefetch=0)
    expected.step(2)
    with slow_disk(Faults(rate=SLOW)):
        made = Loop(prefetch=0, stash="disk", disk=tmp_path)
        made.step(2)
        assert same(expected.parameters(), made.parameters())


def test_several_forwards_before_a_backward(tmp_path, threaded):
    """Also a second backward through one of them."""

    def gradients(**options: Any) -> list[torch.Tensor]:
        loop = Loop(**options)
        losses = [loop.call(inputs(number)).pow(2).mean() for number in range(3)]
        losses[1].backward(retain_graph=True)
        for loss in losses:
            loss.backward()
        return [p.grad.clone() for p in loop.model.parameters()]

    with slow_disk(Faults(rate=SLOW)):
        assert same(gradients(), gradients(stash="disk", disk=tmp_path))


def test_places_are_free_behind_backward(tmp_path, threaded):
    """The file holds the stashes of one step, whatever came before: other rows, forwards without backward, losses that are kept."""
    loop = Loop(stash="disk", disk=tmp_path)
    loop.step()
    size, losses = loop.on_disk.store.file.size, []
    for rows in (ROWS, ROWS - 20, ROWS - 7, ROWS):
        loss = loop.call(inputs(0, rows)).mean()
        loss.backward()
        losses.append(loss)
        loop.call(inputs(0, rows))
    gc.collect()
    loop.step(2)
    assert loop.on_disk.store.file.size == size == loop.stats.disk_stash_bytes


def test_the_file_has_no_name_and_is_gone_with_the_model(tmp_path):
    loop = Loop(stash="disk", disk=tmp_path)
    loop.step()
    assert os.listdir(tmp_path) == [] and holders(tmp_path)
    del loop
    torch._dynamo.reset()
    gc.collect()
    assert not holders(tmp_path)


def test_a_call_without_gradients_writes_nothing(tmp_path, threaded):
    loop = Loop(stash="disk", disk=tmp_path)
    with torch.no_grad():
        loop.call(inputs(0))
    assert loop.stats.disk_stash_bytes == 0 and loop.on_disk._store is None


def test_small_stashes_stay_in_memory(tmp_path, threaded):
    expected = Loop()
    expected.step(2, rows=60)
    loop = Loop(stash="disk", disk=tmp_path)
    loop.step(2, rows=60)
    assert loop.stats.disk_stash_bytes == 0 and same(expected.parameters(), loop.parameters())
    loop.step()
    assert loop.stats.disk_stash_bytes > 0


def test_an_output_that_is_a_stash_too_stays_in_memory(tmp_path):
    """On the host, both have the same memory, which the caller may write into when forward returns."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = stack()

        def forward(self, x):
            for layer in self.layers[:7]:
                x = layer(x)
            return self.layers[7:](x), x

    def gradients(micro_batches: int, **options: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = Twice()
        torch.manual_seed(1)
        call = compiled(model, micro_batches=micro_batches, **options)
        made, inner = call(inputs(0))
        with torch.no_grad():
            inner.detach().zero_()
        made.pow(2).mean().backward()
        assert l2l_compile.stats(call).disk_stash_bytes > 0 or not options
        return [p.grad.clone() for p in model.parameters()]

    for micro_batches in (1, 3):
        expected = gradients(micro_batches)
        with slow_disk(Faults(rate=SLOW)):
            assert same(expected, gradients(micro_batches, stash="disk", disk=tmp_path))


# ---- memory -------------------------------------------------------------------------------------------------------------


def test_host_memory_does_not_grow_with_depth(tmp_path, threaded):
    """With a disk that is slower than the device, each way. Without a disk, a layer adds a stash."""
    taken = {}
    with slow_disk(Faults(rate=6e7)):
        for layers in (16, 32):
            loop = Loop(layers, stash="disk", disk=tmp_path)
            loop.step(2)
            taken[layers] = threaded.devices[-1]._pool.size
            counted = l2l_compile.explain(stack(layers), {"micro_batches": 3, "stash": "disk", "disk": tmp_path})(
                inputs(0)
            ).host_memory
            assert loop.stats.disk_stash_bytes == counted.disk_stashes
            assert counted.stashes == 0 and counted.stash_buffers < 25 << 20
        assert loop.stats.disk_stash_wait_seconds > 0.3
    assert max(taken.values()) < 5 * STASH, (
        "three stashes, the gradients of small layers, and a buffer or two that is not free yet"
    )
    Loop(32).step(2)
    assert threaded.devices[-1]._pool.size > 28 * STASH


def test_a_slow_disk_is_waited_for_with_few_stashes_in_memory(tmp_path, threaded, monkeypatch):
    """Never more than the window are being written, and none is read far ahead."""
    most, put = [], StashesOnDisk.put
    monkeypatch.setattr(StashesOnDisk, "put", lambda self, *given: (put(self, *given), most.append(self.window.being_written))[0])
    with slow_disk(Faults(rate=2e7)):
        loop = Loop(12, stash="disk", disk=tmp_path)
        loop.step()
    assert len(most) > 8 and max(most) <= loop.on_disk.window.bytes * 2 // 3, "behind each, one more has room"


def test_the_budget_counts_the_buffers_of_stashes(tmp_path, threaded):
    with pytest.raises(l2l_compile.L2LError, match="host_memory=18.0 MiB is too small .* stashes on their way"):
        Loop(stash="disk", disk=tmp_path, update="in_backward", host_memory="18MiB").step()


def test_a_larger_batch_is_planned_for_anew(tmp_path, threaded):
    """Its buffers are larger: the error, if they leave too little, comes in the forward that needs them."""
    loop = Loop(stash="disk", disk=tmp_path, update="in_backward", host_memory="32MiB")
    loop.step()
    with pytest.raises(l2l_compile.L2LError, match=r"host_memory=32.0 MiB is too small"):
        loop.step(rows=4 * ROWS)


# ---- errors -------------------------------------------------------------------------------------------------------------


def test_too_little_room_is_an_error_before_the_first_step(tmp_path):
    with slow_disk(Faults(room=2 << 20)):
        loop = Loop(stash="disk", disk=tmp_path)
        with pytest.raises(
            DiskError, match=f"{tmp_path}: No space left on device while .* were allocated there for inputs of layers"
        ):
            loop.step()


def test_no_room_for_more_rows_is_an_error_of_that_forward(tmp_path, threaded):
    """Steps with fewer rows go on."""
    with slow_disk(Faults(room=8 * STASH)):
        loop = Loop(stash="disk", disk=tmp_path)
        loop.step()
        with pytest.raises(DiskError, match="No space left on device"):
            loop.step(rows=2 * ROWS)
        loop.step()
        assert loop.stats.disk_stash_bytes > 0


@pytest.mark.parametrize("way", ["write_fails", "read_fails"])
@pytest.mark.parametrize("behind", [0, 1, 4, 7])
def test_a_transfer_that_fails_is_an_error_of_its_step(way, behind, tmp_path, threaded):
    """And of every later one. Nothing waits for ever, and the process can go on with another model."""
    with slow_disk(Faults(**{way: (errno.EIO, behind * STASH)})):
        loop = Loop(stash="disk", disk=tmp_path)
        for _ in range(2):
            with pytest.raises(DiskError, match=f"{tmp_path}: Input/output error while .* inputs of layers .* The step is lost"):
                loop.step(2)
    Loop(stash="disk", disk=tmp_path).step()


def test_a_step_that_fails_frees_its_places(tmp_path, threaded):
    """An error of the loop's own, in the middle of forward, and of backward."""
    loop = Loop(stash="disk", disk=tmp_path)
    loop.step()
    size, device = loop.on_disk.store.file.size, threaded.devices[-1]

    def fails(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    for name in ("download", "upload"):
        before = getattr(device, name)
        setattr(device, name, fails)
        with pytest.raises(ArithmeticError):
            loop.step()
        setattr(device, name, before)
        loop.optimizer.zero_grad()
    gc.collect()
    loop.step(3)
    assert loop.on_disk.store.file.size == size


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stash": "disk"}, "give the option 'disk' a folder"),
        ({"stash": "disk", "disk": ".", "schedule": "1f1b"}, "does not go with a schedule of turns"),
        ({"stash": "disk", "disk": ".", "host_memory": "1GB"}, "'host_memory' is for parameters"),
        ({"stash": "disk", "disk": ".", "resumable": True}, "'resumable' is for parameters"),
        ({"disk": "."}, "With stash='disk', the inputs of layers alone are on disk"),
    ],
)
def test_options_that_do_not_go_together(options, said):
    with pytest.raises(OptionError, match=said):
        Options.build(options)


# ---- lanes --------------------------------------------------------------------------------------------------------------


def test_races_are_watched_on_the_disk_too(tmp_path):
    torch._dynamo.reset()
    model = stack()
    call = compiled(model, stash="disk", disk=tmp_path, check=True)
    session = None
    for number in range(2):
        call(inputs(number)).pow(2).mean().backward()
        session = session_of(call)
    assert session.device.accesses.watches and l2l_compile.stats(call).disk_stash_bytes > 0


def test_a_profile_shows_the_lanes_of_the_disk(tmp_path, threaded):
    loop = Loop(stash="disk", disk=tmp_path)
    loop.step()
    with slow_disk(Faults(rate=SLOW)), l2l_compile.profile(loop.call) as found:
        loop.step()
    shown = {
        lane: {span.label.split("(")[0] for span in found.timeline.spans if span.lane == lane}
        for lane in ("disk_write", "disk_read")
    }
    assert all(shown.values()), shown
