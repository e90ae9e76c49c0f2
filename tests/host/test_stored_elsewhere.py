"""Parameters on disk that somebody else stores, reads or holds: another compiled model, code outside of it, a checkpoint, a process."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile.disk.disk_store import DiskStore, range_of
from l2l_compile.host.disk_plan import disk_plan
from l2l_compile.options import Options
from l2l_compile.session import session_of
from models import compiled
from slow_disk import Faults, slow_disk
from stored_training import LAYERS, RING, SLOW, WIDTH, Training, WithLoss, same, training, training_of

MODES = {
    "in_backward": {"update": "in_backward"},
    "in_forward": {"update": "in_forward"},
    "delayed": {"update": "in_forward", "delay": 1},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_model_compiled_again_finds_what_is_on_disk(mode, tmp_path):
    """The second call has a store of its own, and the tensors stay in the file of the first one, which need not be allocated twice."""

    def trained(disk):
        made = training("adamw", disk=disk, **MODES[mode])
        made.step(2)
        l2l_compile.synchronize(made.call)
        budget = session_of(made.call).options.host_memory
        on_disk = {} if disk is None else {"disk": disk, "host_memory": budget}
        torch._dynamo.reset()
        again = Training(made.model, made.optimizer, compiled(made.model, optimizer=made.optimizer, **on_disk, **MODES[mode]), 2)
        again.step(2)
        return made, again, again.tensors()

    *_, expected = trained(None)
    made, again, found = trained(tmp_path)
    assert same(expected, found)
    assert again.stored.store.file.size < made.stored.store.file.size / 2


@pytest.mark.parametrize("mode", ["in_forward", "delayed"])
def test_a_reader_outside_of_the_model_sees_the_update(mode, tmp_path):
    """Its parameter has a gradient from there, and so its update is made in `optimizer.step()`."""

    def trained(disk):
        made = training("sgd", disk=disk, **MODES[mode])
        weight, seen = made.model[LAYERS][0].weight, []
        for _ in range(3):
            penalty = weight.pow(2).sum()
            seen.append(float(penalty.detach()))
            (made.call(torch.ones(6, 5)).pow(2).mean() + penalty * 1e-2).backward()
            made.optimizer.step()
            made.optimizer.zero_grad()
        return seen, made.tensors()

    seen, expected = trained(None)
    with slow_disk(Faults(rate=SLOW)):
        found, tensors = trained(tmp_path)
    assert found == seen and same(expected, tensors)


@pytest.mark.parametrize("mode", MODES)
def test_state_of_a_loaded_checkpoint_goes_to_the_disk(mode, tmp_path):
    made = training("adamw", disk=tmp_path, **MODES[mode])
    made.step(2)
    made.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    made.step(2)
    l2l_compile.synchronize(made.call)
    large = [made.model[number][0].weight for number in range(1, LAYERS + 1)]
    held = [v for p in large for v in made.optimizer.state[p].values() if v.dim()]
    assert held and all(range_of(v) is not None for v in held)


def test_memory_shared_with_a_process_is_trained_in_place(tmp_path):
    """`share_memory()` moves the bytes of a storage, which had a place on the disk, and the other process is to see updates."""

    def trained(disk):
        made = training("adamw", disk=disk, update="in_backward")
        made.step(2)
        made.model.share_memory()
        places = [p.data_ptr() for p in made.model.parameters()]
        made.step(2)
        assert places == [p.data_ptr() for p in made.model.parameters()]
        return made.tensors()

    assert same(trained(None), trained(tmp_path))


class Stacked(nn.Module):
    """Layers whose weights are slices of one parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.Parameter(torch.randn(LAYERS, WIDTH, WIDTH) * 0.04)
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.first(x)
        for number in range(LAYERS):
            x = torch.tanh(x @ self.weights[number])
        return self.last(x)


@pytest.mark.parametrize("mode", MODES)
def test_slices_of_a_stored_parameter_are_taken_from_the_disk(mode, tmp_path):
    """Not from the memory that the parameter had before its first step."""

    def trained(disk):
        torch._dynamo.reset()
        model = Stacked()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        options = {**MODES[mode], "optimizer": optimizer}
        if disk is not None:
            asked = Options.build({**options, "disk": disk, "host_memory": "1TB"})
            options |= {"disk": disk, "host_memory": disk_plan(asked, largest=WIDTH * WIDTH).beside + RING + 200_000}
        made = Training(model, optimizer, compiled(model, **options))
        made.step(3)
        assert (range_of(model.weights) is not None) == (disk is not None)
        return made.tensors()

    assert same(trained(None), trained(tmp_path))


class FrozenBeside(Stacked):
    """A weight that is frozen, beside slices and a whole weight that are trained."""

    def __init__(self, width):
        super().__init__()
        self.frozen, self.whole = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.whole(torch.tanh(self.frozen(self.first(x))))
        for number in range(LAYERS):
            x = torch.tanh(x @ self.weights[number])
        return self.last(x)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize(("precision", "width"), [("fp32", WIDTH), ("bf16", 2 * WIDTH)])
def test_a_move_to_the_disk_is_no_write_of_the_user(precision, width, writes, tmp_path):
    """With `delay=1`, the next step still reads the weights of a step before: of whole parameters, and of slices.

    It reads an entry that the user writes before the move.
    """

    def trained(disk):
        torch._dynamo.reset()
        model = FrozenBeside(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        options = {**MODES["delayed"], "optimizer": optimizer, "precision": precision}
        if disk is not None:
            plan = disk_plan(Options.build({**options, "disk": disk, "host_memory": "1TB"}), largest=WIDTH * width)
            options |= {"disk": disk, "host_memory": plan.placement.in_memory + plan.beside + RING + 200_000}
        made = Training(model, optimizer, compiled(model, **options))
        made.step(3)
        moving = [model.weights, model.whole.weight]
        assert all(range_of(p) is None for p in moving), "there is room while a layer is frozen"
        if writes:
            l2l_compile.synchronize(made.call)
            with torch.no_grad():
                model.weights[1, 100, 7] += 1.0
                model.whole.weight[100, 7] += 1.0
        model.frozen.requires_grad_(True)
        torch._dynamo.reset()  # PyTorch 2.11 does not compile again by itself
        made.step(3)
        assert all((range_of(p) is not None) == (disk is not None) for p in moving)
        read = [p for versions in session_of(made.call).server.wires._versions.values() for p in versions.parameters]
        assert all((range_of(p) is not None) == (disk is not None) for p in read if p.nbytes >= 1 << 20), (
            "memory that was left is free"
        )
        return made.tensors()

    assert same(trained(None), trained(tmp_path))


def test_stored_tensors_take_no_file_descriptor_each(tmp_path):
    """A large model has more of them than a process may have descriptors."""
    store = DiskStore(str(tmp_path))
    store.reserve(64 << 12)
    before = len(os.listdir("/proc/self/fd"))
    held = [store.empty(torch.Size([1024]), torch.float32) for _ in range(64)]
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    for number, tensor in enumerate(held):
        tensor.fill_(number)
    assert [float(tensor[-1]) for tensor in held] == list(range(64))
    beyond = store.empty(torch.Size([3 << 10]), torch.float32)  # more than was reserved
    beyond.fill_(1.0)
    assert float(held[-1][-1]) == 63


@pytest.mark.parametrize("delay", [0, 1])
def test_turns_train_from_the_disk_with_equal_bits(delay, tmp_path):
    """Micro-batches go back one by one, and with `delay` the last ones in the next call, from where updates begin."""

    def trained(disk):
        torch._dynamo.reset()
        made = training_of(WithLoss(), "adamw", disk, update="in_forward", schedule="1f1b", delay=delay, outputs="loss")
        made.step(5)
        return made.tensors()

    expected = trained(None)
    for rate in (SLOW, None):
        with slow_disk(Faults(rate=rate)):
            assert same(expected, trained(tmp_path)), rate
