"""Training of weights that `load_pretrained(disk=...)` has put on disk: equal bits, and figures that say where they are."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import l2l_compile
from l2l_compile.disk.disk_store import range_of
from l2l_compile.host import disk_plan
from models import compiled
from slow_disk import Faults, slow_disk
from stored_training import LAYERS, SLOW, WIDTH, Adapted, Training, matrices, same, training

MODES = {
    "in_backward": {"update": "in_backward"},
    "in_forward": {"update": "in_forward"},
    "delayed": {"update": "in_forward", "delay": 1},
}
MATRIX = WIDTH * WIDTH * 4
QUICKER = 6e7  # bytes a second: slow enough to lag behind a small model


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "weights"
    made.mkdir()
    save_file(matrices().state_dict(), made / "model.safetensors")
    return made


def loaded(folder: Path, disk: Path | None) -> nn.Module:
    with torch.device("meta"):
        model = matrices()
    l2l_compile.load_pretrained(model, folder, disk=disk)
    assert sum(range_of(p) is not None for p in model.parameters()) == (LAYERS if disk is not None else 0)
    return model


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bits_are_those_of_weights_in_memory(mode, precision, folder, tmp_path):
    """With all of it on disk; and with parameters there alone, for whose state there is room."""
    options = {**MODES[mode], "precision": precision}
    expected = training(model=loaded(folder, None), **options)
    expected.step(3)
    wanted = expected.tensors()
    for rate in (SLOW, None):
        for spare in (200_000, 1 << 30):
            with slow_disk(Faults(rate=rate)):
                made = training(model=loaded(folder, tmp_path), disk=tmp_path, spare=spare, **options)
                made.step(3)
                assert same(wanted, made.tensors()), f"at {rate} bytes a second, {spare} bytes in memory"
                assert any(made.stored.plan.placement.states) == (spare == 200_000)


@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
def test_own_steps_take_loaded_parameters_whole(optimizer, folder, tmp_path):
    options = {"update": "in_backward", "compile_update": False}
    expected = training(optimizer, model=loaded(folder, None), **options)
    expected.step(3)
    with slow_disk(Faults(rate=QUICKER)):
        made = training(optimizer, model=loaded(folder, tmp_path), disk=tmp_path, **options)
        made.step(3)
        assert same(expected.tensors(), made.tensors())


@pytest.mark.parametrize("update", ["at_step", "in_backward"])
def test_training_without_the_option_disk_has_equal_bits(update, folder, tmp_path):
    found = []
    for disk in (None, tmp_path):
        made = training(model=loaded(folder, disk), update=update, precision="bf16")
        made.step(3)
        found.append(made.tensors())
    assert same(*found)


def test_loaded_parameters_stay_on_disk_whatever_the_budget(folder, tmp_path):
    """What the plan says, `explain` shows, and a step moves: the parameters, and no state."""
    made = training(model=loaded(folder, tmp_path), disk=tmp_path, spare=1 << 30, update="in_backward")
    report = l2l_compile.explain(made.call)(torch.ones(6, 5)).host_memory
    places = [p.data_ptr() for p in made.model.parameters()]
    made.step(3)
    of_step, placed = l2l_compile.stats(made.call), made.stored.plan.placement
    assert places == [p.data_ptr() for p in made.model.parameters()]
    assert report.disk.placement == placed and placed.on_disk == made.stored.plan.masters == LAYERS * MATRIX
    assert of_step.disk_read_bytes == of_step.disk_written_bytes == placed.on_disk
    held = [v for p in made.model.parameters() for v in made.optimizer.state[p].values()]
    assert all(range_of(v) is None for v in held) and report.stored == 0
    assert report.master == sum(p.nbytes for p in made.model.parameters()) - LAYERS * MATRIX


def test_the_file_of_the_training_has_room_for_its_state_alone(folder, tmp_path):
    made = training(model=loaded(folder, tmp_path), disk=tmp_path, update="in_backward")
    made.step()
    size = made.stored.store.file.size
    assert 2 * LAYERS * MATRIX <= size < 2.5 * LAYERS * MATRIX
    made.step(2)
    assert made.stored.store.file.size == size, "all was allocated before the first step"


def test_the_default_budget_counts_memory_that_parameters_free(folder, tmp_path, monkeypatch):
    """Those that are on disk free none when they are placed."""
    monkeypatch.setattr(disk_plan, "own_memory", lambda: 1 << 30)
    for model, freed in ((matrices(), LAYERS * MATRIX), (loaded(folder, tmp_path), 0)):
        small = sum(p.nbytes for p in model.parameters() if p.nbytes < MATRIX)
        optimizer = torch.optim.AdamW(model.parameters())
        options = {"optimizer": optimizer, "disk": tmp_path, "update": "in_backward"}
        report = l2l_compile.explain(model, options)(torch.ones(6, 5))
        assert report.host_memory.disk.budget == int(0.8 * ((1 << 30) + small + freed))


@pytest.mark.parametrize("mode", MODES)
def test_one_entry_that_is_loaded_between_steps_is_trained(mode, folder, tmp_path):
    """The copies that cross the link are made anew: the entry is on none of the pages that a forward compares."""

    def trained(disk):
        made = training(model=loaded(folder, disk), disk=disk, precision="bf16", **MODES[mode])
        made.step(2)
        weights = {name: value.clone() for name, value in made.model.state_dict().items()}
        weights["2.0.weight"][100, 7] += 1.0
        save_file(weights, folder / "model.safetensors")
        l2l_compile.load_pretrained(made.model, folder)
        made.step(2)
        save_file(matrices().state_dict(), folder / "model.safetensors")
        return made.tensors()

    expected = trained(None)
    with slow_disk(Faults(rate=QUICKER)):
        assert same(expected, trained(tmp_path))


@pytest.mark.parametrize("option", [False, True], ids=["without the option", "with the option"])
@pytest.mark.parametrize("mode", MODES)
def test_adapters_of_a_base_on_disk_have_equal_bits(mode, option, tmp_path):
    weights = tmp_path / "weights"
    weights.mkdir()
    torch.manual_seed(0)
    save_file(Adapted().state_dict(), weights / "model.safetensors")

    def trained(disk):
        torch._dynamo.reset()
        with torch.device("meta"):
            model = Adapted()
        l2l_compile.load_pretrained(model, weights, disk=disk)
        assert all((range_of(base.weight) is not None) == (disk is not None) for base in model.base)
        own = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(own, lr=1e-2)
        options = {**MODES[mode], "precision": "bf16", **({"disk": disk} if option and disk is not None else {})}
        made = Training(model, optimizer, compiled(model, optimizer=optimizer, **options))
        stored = l2l_compile.explain(made.call)(torch.ones(6, 5)).host_memory.stored
        assert stored == (sum(base.weight.nbytes for base in model.base) if disk is not None else 0)
        made.step(3)
        return copy.deepcopy(made.tensors())

    with slow_disk(Faults(rate=QUICKER)):
        assert same(trained(None), trained(tmp_path))
