"""What cannot be resumed or committed is an error before anything is changed, with the first difference and a remedy."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile import DiskError, L2LError, OptionError, Options
from l2l_compile.disk import manifest
from models import compiled
from slow_disk import Faults, slow_disk
from stored_training import WIDTH, matrices, same, training


def begun(folder, **options):
    made = training(disk=folder, **{"update": "in_forward", **options}, resumable=True)
    made.number = l2l_compile.resume(made.call).steps
    return made


@pytest.fixture
def left(tmp_path):
    """A folder with a run of two steps."""
    (folder := tmp_path / "run").mkdir()
    made = begun(folder)
    made.step(2)
    l2l_compile.commit(made.call, wait=True)
    return shutil.copytree(folder, tmp_path / "left")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"resumable": True}, "option 'resumable' keeps the file of the option 'disk': give 'disk' a folder"),
        ({"resumable": 1}, "'resumable' must be one of False, True"),
    ],
)
def test_options_that_do_not_go_with_it_are_named(options, said, tmp_path):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    full = {"disk": tmp_path, "resumable": True, "update": "in_forward", "optimizer": optimizer, **options}
    with pytest.raises(OptionError, match=said):
        Options.build(options if options == {"resumable": True} else full)


def test_a_forward_without_resume_says_what_to_call(tmp_path):
    made = training(disk=tmp_path, update="in_forward", resumable=True)
    with pytest.raises(L2LError, match=r"call l2l_compile.resume\(model\) behind torch.compile, before the first forward"):
        made.step()


def test_resume_without_the_option_is_refused(tmp_path):
    with pytest.raises(OptionError, match="compiled with the options 'disk' and resumable=True"):
        l2l_compile.resume(training(disk=tmp_path, update="in_forward").call)


def test_resume_behind_a_forward_or_twice_is_refused(tmp_path):
    made = begun(tmp_path)
    with pytest.raises(L2LError, match="called with this optimizer before"):
        l2l_compile.resume(made.call)
    made.step()
    with pytest.raises(L2LError, match="comes before the first forward"):
        l2l_compile.resume(made.call)


def test_a_commit_without_a_step_is_refused(tmp_path):
    made = begun(tmp_path)
    with pytest.raises(L2LError, match=r"call it behind optimizer.step\(\), once"):
        l2l_compile.commit(made.call)
    made.step()
    l2l_compile.commit(made.call)
    with pytest.raises(L2LError, match=r"call it behind optimizer.step\(\), once"):
        l2l_compile.commit(made.call)


def test_values_that_run_code_when_they_are_read_are_refused(tmp_path):
    made = begun(tmp_path)
    made.step()
    with pytest.raises(L2LError, match=r"extra\['state'\]\[1\] is of type Linear: .* no code runs"):
        l2l_compile.commit(made.call, {"state": [1, nn.Linear(1, 1)]})
    made.optimizer.param_groups[0]["hook"] = print
    with pytest.raises(L2LError, match=r"param_groups\[0\]\['hook'\] is of type builtin_function_or_method"):
        made.step()


def two_groups(model):
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}])


def named(model):
    return torch.optim.AdamW([*model.named_parameters()])


@pytest.mark.parametrize(
    ("change", "optimizer", "said"),
    [
        (lambda m: m, lambda m: torch.optim.SGD(m.parameters()), "optimizer is AdamW, and here it is SGD"),
        (lambda m: m, two_groups, r"param_groups have \[10\] parameters, and here it is \[1, 9\]"),
        (lambda m: m[:-1], named, r"param_groups have \[10\] parameters, and here it is \[8\]"),
        (
            lambda m: m.insert(2, nn.Linear(WIDTH, WIDTH, bias=False)),
            named,
            r"parameter 4 is '2.0.weight' of shape \[512, 512\] and torch.float32, and here it is '2.weight' of",
        ),
        (
            lambda m: m.__setitem__(4, nn.Linear(WIDTH, 7)) or m,
            named,
            r"parameter 8 is '4.weight' of shape \[3, 512\] and torch.float32, and here it is '4.weight' of shape \[7, 512\] and torch.float32",
        ),
        (lambda m: m.double(), named, r"parameter 0 is .* torch.float32, and here it is .* torch.float64"),
    ],
)
def test_another_model_or_optimizer_is_refused_and_not_changed(change, optimizer, said, left):
    model = change(matrices())
    made = optimizer(model)
    before = [p.detach().clone() for p in model.parameters()]
    call = compiled(model, optimizer=made, update="in_forward", disk=left, resumable=True)
    with pytest.raises(L2LError, match=said):
        l2l_compile.resume(call)
    assert not made.state and same(before, [p.detach() for p in model.parameters()])


def test_a_missing_buffer_is_named(tmp_path):
    def built(folder, *more):
        model = nn.Sequential(nn.Linear(5, WIDTH), *more)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        return optimizer, compiled(model, optimizer=optimizer, update="in_forward", disk=folder, resumable=True)

    optimizer, call = built(tmp_path, nn.BatchNorm1d(WIDTH, affine=False))
    l2l_compile.resume(call)
    call(torch.ones(6, 5)).sum().backward()
    optimizer.step()
    l2l_compile.commit(call, wait=True)
    left = shutil.copytree(tmp_path, f"{tmp_path}-left")
    with pytest.raises(L2LError, match=r"buffer '1.running_mean' is shape \[512\] and torch.float32, and here it is missing"):
        l2l_compile.resume(built(left)[1])


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
def test_a_commit_that_fails_ends_the_training_at_the_next_step(update, tmp_path, monkeypatch):
    (folder := tmp_path / "run").mkdir()
    made = begun(folder, update=update)
    made.step(3)
    l2l_compile.commit(made.call, wait=True)
    wanted = made.tensors()

    def fails(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(manifest.os, "write", fails)
    with pytest.raises(DiskError, match=f"{folder}/l2l-store.manifest: No space left on device while .* KiB of the manifest"):
        made.step(4)
    assert made.number <= 6, "within two steps"
    with pytest.raises(DiskError, match="No space left"):
        made.step()
    monkeypatch.undo()
    made = begun(shutil.copytree(folder, tmp_path / "left"), update=update)
    assert made.number == 3 and same(wanted, made.tensors())


def test_too_little_room_for_two_places_is_a_sentence(tmp_path):
    with slow_disk(Faults(room=13 << 20)), pytest.raises(DiskError, match="No space left on device while .* MiB were allocated"):
        begun(tmp_path).step()


def test_a_step_of_gradients_from_elsewhere_is_refused(tmp_path):
    made = begun(tmp_path)
    made.step()
    l2l_compile.commit(made.call, wait=True)
    made.model(torch.ones(6, 5)).sum().backward()
    with pytest.raises(L2LError, match="on gradients that are not of the compiled model would write into the last complete step"):
        made.optimizer.step()


def test_two_compiled_models_of_one_optimizer_are_refused(tmp_path):
    one, other = matrices(), nn.Linear(5, 3)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=1e-2)
    options = {"optimizer": optimizer, "update": "in_forward", "disk": tmp_path, "resumable": True}
    calls = [compiled(one, **options), compiled(other, **options)]
    l2l_compile.resume(calls[0])
    for call in calls:
        call(torch.ones(6, 5)).sum().backward()
    with pytest.raises(
        L2LError, match="two compiled models train parameters of one optimizer, and a resumable run is one of them"
    ):
        optimizer.step()
