"""Options and where the model must be."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

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


def test_bad_option_is_an_error_of_the_first_torch_compile_of_a_process():
    code = """
import torch
try:
    torch.compile(torch.nn.Linear(2, 2), backend="l2l", options={"prefech": 1})
except ValueError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "Did you mean 'prefetch'?" in found


def test_option_that_went_bad_is_an_error_of_the_first_call_as_itself():
    options = {"prefetch": 1}
    model = torch.compile(Stack(), backend="l2l", options=options)
    options["prefetch"] = -1
    with pytest.raises(OptionError, match="option 'prefetch' must be an int") as caught:
        model(rows(4, dtype=torch.float32))
    assert str(caught.value).endswith("got -1")  # without Dynamo's advice on TORCHDYNAMO_VERBOSE


def test_mode_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match="no modes.*max-autotune.*options="):
        torch.compile(Stack(), backend="l2l", mode="max-autotune")


def test_parameter_that_is_not_on_the_host_is_an_error_that_names_it_and_says_what_to_do():
    model = Stack().to("meta")
    with pytest.raises(DeviceError, match="parameter '.*' is on meta, without values.*model.to_empty"):
        compiled(lambda: model.head(model.embed.weight[:, 0]))()


def test_an_input_on_an_accelerator_is_an_error_that_says_what_to_do():
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
