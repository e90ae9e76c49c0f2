"""Models with weights in place (`load_pretrained(in_place=True)`): equal bits, files that stay as they are, figures that say where all is."""

from __future__ import annotations

import copy
import gc
import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import l2l_compile
from l2l_compile import DiskError, L2LError
from l2l_compile.disk.disk_store import has_place, is_in_place
from l2l_compile.disk.file_in_place import FileInPlace
from l2l_compile.host import disk_plan, enough_memory
from models import compiled
from stored_training import LAYERS, WIDTH, Adapted, Training, matrices, same, training

MODES = {
    "in_backward": {"update": "in_backward"},
    "in_forward": {"update": "in_forward"},
    "delayed": {"update": "in_forward", "delay": 1},
}
MATRIX = WIDTH * WIDTH * 4
BASE = 768 * 768 * 2


def saved(model: nn.Module, folder: Path) -> Path:
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture
def base(tmp_path) -> Path:
    torch.manual_seed(0)
    return saved(Adapted(), tmp_path / "base")


@pytest.fixture
def folder(tmp_path) -> Path:
    return saved(matrices(), tmp_path / "weights")


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def adapted(base: Path, in_place: bool) -> Adapted:
    torch._dynamo.reset()
    with torch.device("meta"):
        model = Adapted()
    l2l_compile.load_pretrained(model, base, in_place=in_place)
    assert [is_in_place(layer.weight) for layer in model.base] == [in_place] * 3
    return model


def loaded(folder: Path, in_place: bool) -> nn.Module:
    with torch.device("meta"):
        model = matrices()
    l2l_compile.load_pretrained(model, folder, in_place=in_place)
    assert sum(map(is_in_place, model.parameters())) == (LAYERS if in_place else 0)
    return model


def under_training(model: nn.Module, **options) -> Training:
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-2)
    return Training(model, optimizer, compiled(model, optimizer=optimizer, precision="bf16", **options))


@pytest.mark.parametrize("on", ["the host", "a device"])
@pytest.mark.parametrize("option", [False, True], ids=["without the option disk", "with the option disk"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow(but=("in_backward-*", "*delayed-with the option disk-a device*"))
def test_adapters_of_a_base_in_place_have_equal_bits(mode, option, on, base, tmp_path, request):
    if on == "a device":
        request.getfixturevalue("threaded")
    before = digest(base)

    def trained(in_place):
        options = {**MODES[mode], **({"disk": tmp_path} if option and in_place else {})}
        made = under_training(adapted(base, in_place), **options)
        report = l2l_compile.explain(made.call)(torch.ones(6, 5)).host_memory
        assert report.stored == report.in_place == (3 * BASE if in_place else 0)
        made.step(3)
        of_disk = l2l_compile.stats(made.call).disk_fetched_bytes
        assert (of_disk >= 2 * 3 * BASE) == (in_place and on == "a device"), "twice in a step, past the mapping"
        assert [is_in_place(layer.weight) for layer in made.model.base] == [in_place] * 3
        return copy.deepcopy(made.tensors())

    assert same(trained(False), trained(True)) and digest(base) == before


@pytest.mark.usefixtures("threaded")
def test_calls_without_gradients_read_weights_in_place(base):
    """Past the mapping, in each call."""
    found, x = [], torch.randn(6, 5)
    for in_place in (False, True):
        with torch.no_grad():
            call = compiled(adapted(base, in_place))
            found += [call(x).clone(), call(x).clone()]
            assert (l2l_compile.stats(call).disk_fetched_bytes >= 3 * BASE) == in_place
    assert all(torch.equal(found[0], each) for each in found)


def changed_data(model: Adapted) -> None:
    model.base[1].weight.data[700, 3] += 2.0


def merged(model: Adapted) -> None:
    """As `merge_and_unload` of an adapter."""
    for layer, low, high in zip(model.base, model.low, model.high, strict=True):
        layer.weight.data += (high.weight @ low.weight).to(layer.weight.dtype)


@pytest.mark.parametrize("change", [changed_data, merged])
@pytest.mark.parametrize("cache", [None, "1GB"], ids=["fetched", "kept on the device"])
def test_weights_that_were_written_are_fetched(change, cache, base, threaded):
    """Behind the first call, through `.data`: PyTorch records no write."""
    before, found, x = digest(base), [], torch.randn(6, 5)
    for in_place in (False, True):
        with torch.no_grad():
            model = adapted(base, in_place)
            call = compiled(model, **({"device_cache": cache} if cache else {}))
            first = call(x).clone()
            call(x)
            change(model)
            found.append(call(x).clone())
    assert torch.equal(*found) and digest(base) == before
    assert not torch.equal(first, found[0])


@pytest.mark.parametrize("resumable", [False, True], ids=["without a name", "resumable"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow(but=("in_backward-*", "delayed-resumable"))
def test_weights_in_place_that_are_trained_move_to_the_disk(mode, resumable, folder, tmp_path):
    """At the first forward; their own file stays as it is."""
    before, options = digest(folder), {**MODES[mode], "precision": "bf16"}
    expected = training(model=loaded(folder, False), **options)
    expected.step(3)
    disk = tmp_path / "disk"
    disk.mkdir()
    made = training(model=loaded(folder, True), disk=disk, resumable=resumable, **options)
    if resumable:
        assert l2l_compile.resume(made.call).steps == 0
    report = l2l_compile.explain(made.call)(torch.ones(6, 5)).host_memory
    assert report.in_place == report.stored == 0 and report.disk.masters == LAYERS * MATRIX
    assert report.disk.to_come >= 3 * LAYERS * MATRIX, "also for the parameters, beside their state"
    made.step(3)
    assert same(expected.tensors(), made.tensors()) and digest(folder) == before
    assert all(has_place(p) == (p.nbytes >= MATRIX) and not is_in_place(p) for p in made.model.parameters())


def test_a_run_goes_on_in_a_model_that_is_loaded_in_place(folder, tmp_path):
    """The weights are those of the last complete step, and not those of the files."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def begun() -> Training:
        made = training(model=loaded(folder, True), disk=disk, resumable=True, update="in_backward")
        made.number = l2l_compile.resume(made.call).steps
        return made

    before, made = digest(folder), begun()
    made.step(2)
    l2l_compile.commit(made.call, wait=True)
    made.step()
    expected = made.tensors()
    del made
    gc.collect()  # the first run leaves the folder
    again = begun()
    assert again.number in (2, 3)
    again.step(3 - again.number)
    assert same(expected, again.tensors()) and digest(folder) == before


@pytest.mark.parametrize("update", ["at_step", "in_backward"])
@pytest.mark.parametrize("spare", [None, 1 << 30], ids=["without the option disk", "with room in memory"])
def test_weights_in_place_may_be_trained_in_memory(update, spare, folder, tmp_path, threaded):
    """Updates write pages of the process, which fetches find."""
    if spare is not None and update == "at_step":
        pytest.skip("update='at_step' is not for the option disk")
    before, found = digest(folder), []
    for in_place in (False, True):
        torch._dynamo.reset()
        disk = {"disk": tmp_path, "spare": spare} if spare is not None and in_place else {}
        made = training(model=loaded(folder, in_place), update=update, **disk)
        report = l2l_compile.explain(made.call)(torch.ones(6, 5)).host_memory
        assert report.stored == 0 and report.master == sum(p.nbytes for p in made.model.parameters())
        made.step(3)
        found.append(made.tensors())
        assert l2l_compile.stats(made.call).disk_fetched_bytes == 0, "all of it is written by now"
    assert same(*found) and digest(folder) == before
    assert sum(map(is_in_place, made.model.parameters())) == LAYERS


def test_the_default_budget_counts_no_memory_of_weights_in_place(folder, tmp_path, monkeypatch):
    """None is free when they move to the disk."""
    monkeypatch.setattr(disk_plan, "own_memory", lambda: 1 << 30)
    for in_place, freed in ((False, LAYERS * MATRIX), (True, 0)):
        model = loaded(folder, in_place)
        small = sum(p.nbytes for p in model.parameters() if p.nbytes < MATRIX)
        options = {"optimizer": torch.optim.AdamW(model.parameters()), "disk": tmp_path, "update": "in_backward"}
        report = l2l_compile.explain(model, options)(torch.ones(6, 5))
        assert report.host_memory.disk.budget == int(0.8 * ((1 << 30) + small + freed))


def test_memory_for_trained_weights_in_place_is_asked_for(folder, monkeypatch):
    monkeypatch.setattr(enough_memory, "own_memory", lambda: 1 << 20)
    monkeypatch.setattr(enough_memory, "_swap_space", lambda: 0)
    for in_place, said in ((False, "in place"), (True, "3.0 MiB of parameters that are read in place")):
        made = training(model=loaded(folder, in_place), update="in_backward")
        with pytest.raises(L2LError, match="a step needs") as raised:
            made.step()
        assert (said in str(raised.value)) == in_place


@pytest.mark.parametrize("frozen", [False, True])
def test_explain_says_which_weights_are_in_place(frozen, base):
    """Also of weights that take gradients, in calls that take none."""
    models = [adapted(base, in_place).requires_grad_(not frozen) for in_place in (False, True)]
    with torch.no_grad():
        reports = [str(l2l_compile.explain(model, {})(torch.ones(6, 5)).host_memory) for model in models]
    assert "in place" not in reports[0]
    assert reports[1].endswith(
        "\non disk beside these: 3.4 MiB of parameters, which cross the link from there, 3.4 MiB of them in place in their safetensors files"
    )


@pytest.mark.parametrize("on", ["the host", "a device"])
def test_a_file_that_changes_between_steps_ends_the_training(on, base, request):
    if on == "a device":
        request.getfixturevalue("threaded")
    made = under_training(adapted(base, True), update="in_backward")
    made.step()
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes())
    for _ in range(2):
        with pytest.raises(DiskError, match=rf"{file} has changed since load_pretrained\(in_place=True\) opened it"):
            made.step()


@pytest.mark.usefixtures("threaded")
def test_a_disk_that_fails_under_weights_in_place_ends_the_call(base, monkeypatch):
    with torch.no_grad():
        call = compiled(adapted(base, True))
        call(torch.ones(6, 5))
        monkeypatch.setattr(FileInPlace, "_preadv", lambda *_: 0)
        with pytest.raises(DiskError, match=f"{base}/model.safetensors: 0 of .* the disk fails"):
            call(torch.ones(6, 5))
