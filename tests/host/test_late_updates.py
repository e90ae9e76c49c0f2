"""`update="in_backward"` with a disk: some updates go on in the next forward, where the disk would be idle, with the same bits."""

from __future__ import annotations

import gc
import threading
import warnings

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.host.updates.in_backward import UpdatesInBackward
from l2l_compile.session import session_of
from slow_disk import Faults, slow_disk
from stored_training import LAYERS, OPTIMIZERS, SLOW, WIDTH, Training, same, training, training_of

MATRIX = WIDTH * WIDTH * 4
ROOM = 200_000 + MATRIX  # for the gradients of one of the three matrices


def late(optimizer: str = "adamw", **options) -> Training:
    return training(optimizer, update="in_backward", spare=ROOM, **options)


def names(made: Training) -> list[str]:
    return [name for name, p in made.model.named_parameters() if p in made.stored.late]


def deep() -> nn.Module:
    """Eight matrices, of which three are updated late."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(nn.Linear(5, WIDTH), *layers, nn.Linear(WIDTH, 3))


def slow_updates(monkeypatch) -> None:
    """Updates in backward lag behind."""
    apply = UpdatesInBackward._apply

    def slow(self, *given):
        threading.Event().wait(0.1)
        apply(self, *given)

    monkeypatch.setattr(UpdatesInBackward, "_apply", slow)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [o if o == "adamw" else pytest.param(o, marks=pytest.mark.slow) for o in OPTIMIZERS])
def test_late_updates_change_no_bit(optimizer, precision, tmp_path):
    expected = training(optimizer, update="in_backward", precision=precision)
    expected.step(5)
    for rate in (SLOW, None):
        with slow_disk(Faults(rate=rate)):
            made = late(optimizer, precision=precision, disk=tmp_path)
            made.step(5)
            assert names(made) == [f"{LAYERS}.0.weight"], "the last matrix of the model, one of three"
            assert same(expected.tensors(), made.tensors()), f"at {rate} bytes a second"


def test_the_step_returns_while_late_updates_are_to_come(tmp_path):
    """The caller then reads parameters: it waits for them."""
    expected = training(update="in_backward")
    expected.step(2)
    made = late(disk=tmp_path)
    made.step()
    updates, gate = session_of(made.call).server.updates, threading.Event()
    update = updates._update_late
    updates._update_late = lambda *given: (gate.wait(20), update(*given))
    made.step()
    assert not updates._tickets[next(iter(made.stored.late))].look()
    gate.set()
    wanted = dict(expected.model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no word of reading too early, behind the step
        assert all(torch.equal(p.detach() + 0.0, wanted[name]) for name, p in made.model.named_parameters())


def test_a_step_waits_for_all_gradients_that_are_late(tmp_path, monkeypatch):
    """Its updates of backward are slow: the last of them has put its gradients aside before any is queued."""
    made = late(disk=tmp_path)
    made.step(2)
    updates = session_of(made.call).server.updates
    slow_updates(monkeypatch)
    made.backward()
    made.optimizer.step()
    assert set(updates._tickets) == made.stored.late


def test_a_step_reads_each_byte_once(tmp_path):
    """What was read ahead at the end of backward is there in forward. Beside it, samples show whether other code has written."""
    made = late(disk=tmp_path)
    made.step(3)
    made.tensors()
    before = made.stored.store.read_bytes, made.stored.store.written_bytes
    made.step(2)
    made.tensors()
    moved = made.stored.store.read_bytes - before[0], made.stored.store.written_bytes - before[1]
    assert moved[1] == 2 * LAYERS * 3 * MATRIX
    assert moved[1] <= moved[0] <= moved[1] + 2 * 2 * 8 * 4096
    assert l2l_compile.stats(made.call).disk_written_bytes == LAYERS * 3 * MATRIX


@pytest.mark.parametrize("when", ["behind backward", "behind the step"])
def test_a_write_past_pytorch_is_refused(when, tmp_path):
    """Eager has the write in the step, or on its result. Here the disk has read the parameter ahead."""
    made = late(disk=tmp_path)
    made.step(2)
    (parameter,) = made.stored.late
    entries = parameter.data.numpy()
    updates, gate = session_of(made.call).server.updates, threading.Event()
    update = updates._update_late
    updates._update_late = lambda *given: (gate.wait(20), update(*given))
    made.backward()
    if when == "behind the step":
        made.optimizer.step()
    entries *= 0.5
    if when == "behind backward":
        made.optimizer.step()
    gate.set()
    with pytest.raises(L2LError, match="was written while its update was still to come"):
        l2l_compile.synchronize(made.call)


@pytest.mark.parametrize("look", ["evaluation", "reading"])
def test_a_look_before_the_step_sees_all_updates(look, tmp_path, monkeypatch):
    """As without a disk, where they are made in backward: never the updates of some layers alone."""
    slow_updates(monkeypatch)
    found = []
    for disk in (None, tmp_path):
        with slow_disk(Faults(rate=SLOW)):
            made = training(model=deep(), disk=disk, spare=400_000 + 3 * MATRIX, update="in_backward")
            made.step(2)
            if disk is not None:
                assert names(made) == ["2.0.weight", "5.0.weight", "8.0.weight"]
            made.backward()
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the read, which is early
                seen = [made.call(torch.ones(6, 5))] if look == "evaluation" else [p + 0.0 for p in made.model.parameters()]
            made.optimizer.step()
            made.optimizer.zero_grad()
            made.step()
            found.append([*seen, *made.tensors()])
    assert same(*found)


def test_recorded_writes_wait_for_late_updates(tmp_path):
    """As `in_backward` without a disk: behind the step, a write changes what the step has left."""
    found = []
    for disk in (None, tmp_path):
        with slow_disk(Faults(rate=SLOW)):
            made = training(update="in_backward") if disk is None else late(disk=disk)
            for _ in range(3):
                made.step()
                with torch.no_grad():
                    for p in made.model.parameters():
                        p.mul_(0.999)
            found.append(made.tensors())
    assert same(*found)


def test_a_gradient_that_is_not_finite_is_told_in_backward(tmp_path):
    """Also one whose update is late: its layer is as it was."""
    made = late(disk=tmp_path)
    made.step()
    (parameter,) = made.stored.late
    before = parameter.detach().clone()
    with pytest.raises(L2LError, match="is not finite"):
        (made.call(torch.ones(6, 5)) * torch.inf).sum().backward()
        made.optimizer.step()
    assert torch.equal(parameter, before)


def test_a_checkpoint_drops_gradients_that_wait(tmp_path):
    made = late(disk=tmp_path)
    made.step(2)
    model = {name: value.clone() for name, value in made.model.state_dict().items()}
    state = made.optimizer.state_dict()
    kept = {i: {k: v.clone() for k, v in of.items()} for i, of in state["state"].items()}
    wanted = made.tensors()
    made.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the read, which is early
        made.optimizer.load_state_dict({"state": kept, "param_groups": state["param_groups"]})
        made.model.load_state_dict(model)
    assert same(wanted, made.tensors())
    number, made.number = made.number, made.number - 1
    made.step()
    again = training(update="in_backward")
    again.step(3)
    assert number == 3 and same(again.tensors(), made.tensors())


def test_rounds_keep_gradients_without_more_memory(tmp_path):
    """With `accumulate`, all gradients are kept until the last round: the late ones take no room of their own."""
    found = []
    for disk in (None, tmp_path):
        with slow_disk(Faults(rate=SLOW)):
            options = {"accumulate": 2, "update": "in_backward"}
            made = training(**options) if disk is None else training(disk=disk, **options)
            for _ in range(3):
                made.backward()
                made.step()
            if disk is not None:
                assert len(names(made)) == 1 and made.stored.plan.late_gradients == 0
            found.append(made.tensors())
    assert same(*found)


class TwoWays(nn.Module):
    """Two branches, of which each forward takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        x = self.first(x)
        for branch in self.branches[2 * way : 2 * way + 2]:
            x = torch.tanh(branch(x))
        return self.last(x)


def test_a_late_update_that_no_forward_reads_is_made(tmp_path):
    found = []
    for disk in (None, tmp_path):
        torch.manual_seed(0)
        torch._dynamo.reset()
        with slow_disk(Faults(rate=SLOW)):
            made = training_of(TwoWays(), "adamw", disk, spare=ROOM, update="in_backward")
            for number in range(6):
                x = torch.randn(6, 5, generator=torch.Generator().manual_seed(number))
                made.call(x, number // 2 % 2).pow(2).mean().backward()
                made.optimizer.step()
                made.optimizer.zero_grad()
            if disk is not None:
                assert names(made) == ["branches.3.weight"]
            found.append(made.tensors())
    assert same(*found)


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
@pytest.mark.parametrize("who", ["its optimizer", "another one"])
def test_a_step_on_other_gradients_waits_for_late_updates(who, update, tmp_path):
    """With gradients that no compiled model has made, behind a step whose updates are under way."""
    found = []
    for disk in (None, tmp_path):
        with slow_disk(Faults(rate=5e6)):
            made = training(disk=disk, spare=ROOM, update=update)
            other = torch.optim.SGD(made.model.parameters(), lr=0.1) if who == "another one" else made.optimizer
            shapes = [p.shape for p in made.model.parameters()]
            made.step(2)
            for _ in range(2):
                made.step()
                threading.Event().wait(0.6)  # the first of its updates are over, and their writes are not
                for parameter, shape in zip(made.model.parameters(), shapes, strict=True):
                    parameter.grad = torch.full(shape, 0.01)
                other.step()
                other.zero_grad()
            found.append(made.tensors())
    assert same(*found)


@pytest.mark.parametrize(
    "options", [{"update": "in_backward"}, {"update": "in_forward"}, {"update": "in_forward", "delay": 1}], ids=str
)
def test_a_parameter_without_a_gradient_is_read_as_written(options, tmp_path):
    """Its last update is over, and on its way to the disk, when a step without it returns."""
    found = []
    for disk in (None, tmp_path):
        torch.manual_seed(0)
        torch._dynamo.reset()
        with slow_disk(Faults(rate=5e6)):
            made = training_of(TwoWays(), "adamw", disk, spare=ROOM if options["update"] == "in_backward" else 200_000, **options)
            seen = []
            for number in range(5):
                x = torch.randn(6, 5, generator=torch.Generator().manual_seed(number))
                made.call(x, number % 2).pow(2).mean().backward()
                made.optimizer.step()
                made.optimizer.zero_grad()
                seen.append(made.model.branches[2 * (1 - number % 2) + 1].weight.detach() + 0.0)
            found.append([*seen, *made.tensors()])
    assert same(*found)


class Counting(torch.optim.Optimizer):
    """Counts in a group the steps in which it had gradients."""

    def __init__(self, parameters):
        super().__init__([{"params": [p]} for p in parameters], {"step": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                group["step"] += 1
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                parameter.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=0.01 / group["step"])


def test_counts_of_groups_are_those_of_all_updates(tmp_path, monkeypatch):
    """Each step begins with the counts of the one before, and what the loop sets behind a step stays."""
    monkeypatch.setitem(OPTIMIZERS, "counting", Counting)
    found = []
    for disk in (None, tmp_path):
        with slow_disk(Faults(rate=SLOW)):
            made = training("counting", disk=disk, spare=ROOM, update="in_backward")
            made.step(3)
            made.tensors()
            counts = [group["step"] for group in made.optimizer.param_groups]
            made.step()
            for group in made.optimizer.param_groups[: -2 * 2]:  # not those of which an update is to come
                group["step"] = 7
            made.step()
            found.append([*made.tensors(), torch.tensor([counts, [g["step"] for g in made.optimizer.param_groups]])])
    assert same(*found) and counts == [3] * len(counts)


def test_counts_wait_for_updates_that_no_forward_reads(tmp_path, monkeypatch):
    """A step begins with the counts of a late update that is still to come when its backward begins."""
    monkeypatch.setitem(OPTIMIZERS, "counting", Counting)
    update, found = UpdatesInBackward._update_late, []
    monkeypatch.setattr(UpdatesInBackward, "_update_late", lambda *given: (threading.Event().wait(0.5), update(*given)))
    for disk in (None, tmp_path):
        torch.manual_seed(0)
        torch._dynamo.reset()
        with slow_disk(Faults(rate=SLOW)):
            made = training_of(TwoWays(), "counting", disk, spare=ROOM, update="in_backward")
            for number in range(8):
                x = torch.randn(6, 5, generator=torch.Generator().manual_seed(number))
                made.call(x, number // 2 % 2).pow(2).mean().backward()
                made.optimizer.step()
                made.optimizer.zero_grad()
            found.append([*made.tensors(), torch.tensor([group["step"] for group in made.optimizer.param_groups])])
    assert same(*found)


class Joined(nn.Module):
    """A layer of four matrices, whose gradients come together."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(torch.tanh(part(x)) for part in self.parts)


def test_a_gradient_that_waits_holds_no_other(tmp_path):
    """The gradients of a layer come in one buffer. What waits is no part of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, WIDTH), *(Joined() for _ in range(3)), nn.Linear(WIDTH, 3))
    on_the_way = 9 * MATRIX  # of gradients: a layer has four times the entries of those that `training` knows
    made = training(model=model, disk=tmp_path, spare=400_000 + on_the_way + 4 * MATRIX, update="in_backward")
    made.step(2)
    assert len(made.stored.late) == 4
    session, gate = session_of(made.call), threading.Event()
    update, pool = session.server.updates._update_late, session.device._pool
    session.server.updates._update_late = lambda *given: (gate.wait(20), update(*given))
    made.step()
    gc.collect()
    pool._take_back()
    try:
        assert not [lease for lease in pool._leased.values() if lease() is not None and lease.buffer], "of any layer"
        assert made.stored.plan.late_gradients == 4 * MATRIX
    finally:
        gate.set()
    made.tensors()


def test_explain_counts_gradients_that_wait(tmp_path):
    made = late(disk=tmp_path)
    report = l2l_compile.explain(made.call)(torch.ones(6, 5))
    made.step()
    assert report.host_memory.disk.late_gradients == made.stored.plan.late_gradients == MATRIX
    assert report.host_memory.gradients == MATRIX
