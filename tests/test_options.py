"""Options and where the model must be."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from importlib.metadata import entry_points

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import l2l_compile
from l2l_compile import DeviceError, OptionError, Options
from l2l_compile.frontend.capture import capture
from models import Stack, compiled, rows


def test_unknown_option_names_the_known_ones_and_the_nearest():
    with pytest.raises(OptionError) as caught:
        Options.build({"micro_batch": 3})
    for name in ("micro_batches", "device", "stash", "prefetch", "block_compiler"):
        assert name in str(caught.value)
    assert "Did you mean 'micro_batches'?" in str(caught.value)
    assert "'micro_batch'" in str(caught.value)


@pytest.mark.parametrize(
    "bad",
    [
        {"micro_batches": 0},
        {"micro_batches": 2.0},
        {"micro_batches": True},
        {"micro_batches": "2"},
        {"prefetch": -1},
        {"prefetch": None},
        {"stash": "disk"},
        {"stash": ["host"]},
        {"block_compiler": "none"},
        {"device": "meta"},
        {"device": "no such thing"},
        {"device": 3.5},
        {7: 1},
    ],
    ids=str,
)
def test_bad_value_is_a_value_error_that_names_the_option(bad):
    with pytest.raises(ValueError) as caught:
        Options.build(bad)
    assert str(next(iter(bad))) in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(OptionError, match="cuda"):
        Options.build({"device": "cuda"})


def test_defaults():
    found = Options.build()
    assert (found.micro_batches, found.stash, found.prefetch, found.block_compiler) == (1, "host", 1, "inductor")
    assert Options.build({"device": "cpu"}).device == torch.device("cpu")


@pytest.mark.parametrize("fullgraph", [False, True])
def test_bad_option_is_an_error_of_torch_compile(fullgraph):
    for compile in (torch.compile, torch.nn.Module.compile):
        with pytest.raises(OptionError, match="Did you mean 'prefetch'"):
            compile(Stack(), backend="l2l", options={"prefech": 1}, fullgraph=fullgraph)


def test_a_bad_option_is_an_error_of_the_first_torch_compile():
    code = """
import torch
try:
    torch.compile(torch.nn.Linear(2, 2), backend="l2l", options={"prefech": 1})
except ValueError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "Did you mean 'prefetch'?" in found


def test_an_option_that_went_bad_is_an_error_of_the_first_call():
    options = {"prefetch": 1}
    model = torch.compile(Stack(), backend="l2l", options=options)
    options["prefetch"] = -1
    with pytest.raises(OptionError, match="option 'prefetch' must be an int") as caught:
        model(rows(4, dtype=torch.float32))
    assert str(caught.value).endswith("got -1")  # without Dynamo's advice on TORCHDYNAMO_VERBOSE


def test_mode_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match="no modes.*max-autotune.*options="):
        torch.compile(Stack(), backend="l2l", mode="max-autotune")


def test_a_parameter_off_the_host_is_named_with_a_remedy():
    model = Stack().to("meta")
    with pytest.raises(DeviceError, match="parameter '.*' is on meta, without values.*model.to_empty"):
        compiled(lambda: model.head(model.embed.weight[:, 0]))()


def test_an_input_on_an_accelerator_is_an_error_with_a_remedy():
    graph = torch.fx.Graph()
    with FakeTensorMode():
        graph.placeholder("x").meta["example_value"] = torch.empty(4, device="cuda")
    graph.output(())
    with pytest.raises(DeviceError, match="input 'x' is on cuda.*leave the model and its inputs on the host.*option 'device'"):
        capture(torch.fx.GraphModule({}, graph))


def test_input_that_is_not_on_the_host_is_an_error_that_names_it():
    with pytest.raises(DeviceError, match="input 'x' is on meta"):
        compiled(lambda x: x * 2)(torch.ones(4, 5, device="meta"))


def test_entry_point_is_registered():
    (found,) = entry_points(group="torch_dynamo_backends", name="l2l")
    assert found.load() is l2l_compile.backend.l2l


def test_backend_works_in_a_program_that_imports_only_torch():
    code = (
        "import sys, torch\n"
        "m = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])\n"
        "assert 'l2l_compile' not in sys.modules\n"
        "c = torch.compile(m, backend='l2l', options={'micro_batches': 2, 'device': 'cpu', 'block_compiler': 'eager'})\n"
        "c(torch.ones(4, 4)).sum().backward()\n"
        "assert all(p.grad is not None for p in m.parameters())\n"
        "assert 'l2l_compile' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


ODD = [
    None, True, False, 0, 1, -1, 2, 10**13, 1.0, 0.5, -0.5, math.nan, math.inf, -math.inf, "", "1", "0.5", "auto", "cpu", "8GB", "1..5GB",
    "9" * 400 + "GB", b"x", [], [1], (), (1,), {}, {"a": 1}, set(), np.int64(2), np.float32(0.5), np.bool_(True), np.array([1, 2]),
    np.array(3), torch.tensor(2), torch.tensor([1, 2]), torch.tensor(True), torch.device("cpu"), torch.float16, object(), object, int,
    lambda: True, lambda x: x, print, ..., 1j, "cpu:0", "meta", "\n", range(3), iter([1]),
]  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Options)])
def test_odd_values_are_option_errors_or_have_a_meaning(name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    for value in ODD:
        for others in ({}, {"optimizer": optimizer, "update": "in_forward"}):
            try:
                built = getattr(Options.build({**others, name: value}), name)
            except OptionError as error:
                assert len(str(error)) < 500 + len(repr(value))
                continue
            if name in ("check", "compile_update"):
                assert type(built) is bool
            elif name in ("micro_batches", "prefetch", "delay"):
                assert type(built) is int


@pytest.mark.parametrize(
    "odd",
    [[], [1], [("micro_batches", 2)], "micro_batches", "", 1, 1.5, True, Options(), object()],
    ids=lambda odd: type(odd).__name__,
)
def test_options_that_are_no_dictionary_are_option_errors(odd):
    with pytest.raises(OptionError, match="must be a dictionary"):
        Options.build(odd)


@pytest.mark.parametrize(
    "name, nearest",
    [("gradient_accumulation_steps", "accumulate"), ("gradient_clip_val", "max_grad_norm"), ("mixed_precision", "precision")],
)
def test_names_of_other_libraries_lead_to_the_option(name, nearest):
    with pytest.raises(OptionError, match=f"Did you mean '{nearest}'"):
        Options.build({name: 1})


@pytest.mark.parametrize("name", ["prefetch", "micro_batches"])
def test_huge_counts_train(name):
    step = compiled(Stack(2).double(), **{name: 10**13})
    step(rows(3)).sum().backward()
