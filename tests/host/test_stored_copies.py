"""Copies that cross the link on disk, where `host_memory` has no room for them: equal bits, and each read and write counted."""

from __future__ import annotations

import errno

import pytest
import torch

import l2l_compile
from l2l_compile.disk.disk_store import range_of
from l2l_compile.host.disk_placement import TensorSizes, place_on_disk
from l2l_compile.session import session_of
from slow_disk import Faults, slow_disk
from stored_training import LAYERS, OPTIMIZERS, SLOW, WIDTH, same, training

MATRIX = WIDTH * WIDTH * 4
QUICKER = 6e7  # bytes a second


def cases():
    for optimizer in OPTIMIZERS:
        for update in ("in_backward", "in_forward"):
            for precision in ("bf16", "fp16") if update == "in_forward" else ("bf16",):
                is_quick = precision == "bf16" and optimizer in ("adamw", "adafactor")
                marks = () if is_quick else pytest.mark.slow
                yield pytest.param(optimizer, update, precision, id=f"{optimizer}-{update}-{precision}", marks=marks)


@pytest.mark.parametrize(("optimizer", "update", "precision"), list(cases()))
def test_bits_do_not_depend_on_where_copies_are(optimizer, update, precision, tmp_path, threaded):
    """On lanes that are threads, with a slow disk and a fast one."""
    options = {"update": update, "precision": precision}
    expected = training(optimizer, **options)
    expected.step(8 if precision == "fp16" else 4)  # the first in fp16 are skipped
    for rate in (SLOW, None):
        with slow_disk(Faults(rate=rate)):
            made = training(optimizer, disk=tmp_path, stored_copies=True, **options)
            made.step(expected.number)
            assert all(made.stored.has_copy(layer[0].weight) for layer in made.model[1:-1])
            assert same(expected.tensors(), made.tensors()), f"at {rate} bytes a second"


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
def test_a_host_that_is_the_device_waits_for_copies(update, tmp_path):
    """Its operations read them through their mappings."""
    options = {"update": update, "precision": "bf16"}
    expected = training("adamw", **options)
    expected.step(4)
    with slow_disk(Faults(rate=SLOW)):
        made = training("adamw", disk=tmp_path, stored_copies=True, **options)
        made.step(4)
        assert same(expected.tensors(), made.tensors())


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
def test_a_step_reads_a_copy_in_each_fetch_and_writes_it_once(update, tmp_path, threaded):
    made = training("adamw", disk=tmp_path, stored_copies=True, update=update, precision="bf16")
    made.step(4)
    of_step = l2l_compile.stats(made.call)
    plan = made.stored.plan
    assert plan.copies == LAYERS * MATRIX // 2 and all(p.itemsize == 4 for p in made.model.parameters())
    assert of_step.disk_written_bytes == plan.placement.on_disk == LAYERS * 3 * MATRIX + plan.copies
    assert of_step.disk_fetched_bytes == (2 * LAYERS - 1) * MATRIX // 2, "the last layer is in its slab when backward begins"
    samples = of_step.disk_read_bytes - plan.placement.on_disk
    assert samples == 0 if update == "in_backward" else 0 < samples <= LAYERS * 20 * 4096


def test_an_update_by_its_own_step_reads_no_copy(tmp_path, threaded):
    made = training("lamb", disk=tmp_path, stored_copies=True, update="in_backward", precision="bf16")
    made.step(3)
    of_step, plan = l2l_compile.stats(made.call), made.stored.plan
    assert of_step.disk_written_bytes == plan.placement.on_disk
    assert of_step.disk_read_bytes == plan.placement.on_disk - plan.copies


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
def test_writes_of_the_user_reach_copies_on_disk(update, tmp_path, threaded):
    """One that PyTorch records, and one that it does not, between steps and before an evaluation."""

    def written(disk):
        made = training("adamw", disk=disk, stored_copies=True, update=update, precision="bf16")
        made.step(2)
        l2l_compile.synchronize(made.call)
        with torch.no_grad():
            made.model[1][0].weight.clamp_(-0.01, 0.01)
            outputs = [made.call(torch.ones(6, 5)).clone()]
            made.model[2][0].weight.data.mul_(0.5)
            outputs.append(made.call(torch.ones(6, 5)).clone())
        made.step(2)
        return [*outputs, *made.tensors()]

    expected = written(None)
    with slow_disk(Faults(rate=QUICKER)):
        assert same(expected, written(tmp_path))


def test_a_write_between_forward_and_update_is_refused(tmp_path):
    """As without a disk: the update compares each entry of the copy with its parameter."""
    made = training("adamw", disk=tmp_path, stored_copies=True, update="in_backward", precision="bf16")
    made.step(2)
    loss = made.call(torch.ones(6, 5)).pow(2).mean()
    made.model[1][0].weight.data[7, 11] += 1.0
    with pytest.raises(l2l_compile.L2LError, match="in a way that PyTorch does not record"):
        loss.backward()
        made.optimizer.step()


def test_a_copy_of_a_shared_weight_is_there_once(tmp_path, threaded):
    spare = 200_000 - MATRIX // 2  # there is a gradient less
    made = training("adamw", disk=tmp_path, spare=spare, stored_copies=True, update="in_forward", precision="bf16")
    made.model[2][0].weight = made.model[1][0].weight
    made.optimizer.param_groups[0]["params"] = list(made.model.parameters())
    made.step(3)
    copies = session_of(made.call).server.updates.stored_copies._copies
    assert len(copies) == LAYERS - 1 and all(range_of(copy.view) is not None for copy in copies.values())


def test_copies_leave_memory_last():
    sizes = [TensorSizes(4 << 20, 8 << 20, copy=2 << 20) for _ in range(4)]
    for budget, expected in ((56, (0, 0, 0)), (24, (4, 0, 0)), (20, (4, 1, 0)), (8, (4, 4, 0)), (6, (4, 4, 1)), (0, (4, 4, 4))):
        placed = place_on_disk(sizes, budget << 20)
        assert tuple(map(sum, (placed.states, placed.masters, placed.copies))) == expected
        assert placed.in_memory <= budget << 20 and placed.in_memory + placed.on_disk == 56 << 20


def test_a_disk_that_fails_in_a_fetch_is_named(tmp_path, threaded):
    with slow_disk(Faults()) as faults:
        made = training("adamw", disk=tmp_path, stored_copies=True, update="in_backward", precision="bf16")
        made.step(2)
        faults.read_fails = (errno.EIO, 0)
        with pytest.raises(l2l_compile.DiskError, match=r"Input/output error while \d+ bytes at byte \d+ .* were read"):
            made.step()


def test_an_evaluation_before_the_first_step_leaves_no_copy(tmp_path, threaded):
    """No plan is made yet, so its copies are in memory: all of the model, beside `host_memory`."""
    expected = training("adamw", update="in_backward", precision="bf16")
    expected.step(3)
    made = training("adamw", disk=tmp_path, stored_copies=True, update="in_backward", precision="bf16")
    with torch.no_grad():
        made.call(torch.ones(6, 5))
    made.step(3)
    wires = session_of(made.call).server.wires
    assert sum(wire.buffer.numel() for wire in wires._wires.values()) < MATRIX // 2
    assert all(copy.is_stored for weight in made.model[1:-1].parameters() if weight.dim() == 2 for copy in wires._copies[weight])
    assert same(expected.tensors(), made.tensors())


class Normed(torch.optim.SGD):
    """Divides each gradient by its norm, and keeps a number alone."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / (p.grad.norm() + 1e-6))
                    self.state[p]["steps"] = self.state[p].get("steps", 0) + 1


def test_a_master_that_leaves_the_disk_still_writes_its_copy(tmp_path, monkeypatch):
    """`share_memory()` moves it. A step that changes a few rows is not seen by a sample."""
    monkeypatch.setitem(OPTIMIZERS, "normed", lambda parameters: Normed(parameters, lr=1.0))

    def trained(disk):
        made = training("normed", disk=disk, stored_copies=True, update="in_forward", precision="bf16")
        made.step(1)
        l2l_compile.synchronize(made.call)
        made.model.share_memory()
        made.step(3)
        return made.tensors()

    assert same(trained(None), trained(tmp_path))
