"""The command `l2l`, on configs of tiny models and of one that no machine holds."""

from __future__ import annotations

import json
import runpy
import sys

import pytest
import torch
from torch import nn

from l2l_compile import Machine
from l2l_compile.command.main import main

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path):
    def write(**changes):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
        return str(folder)

    return write


@pytest.fixture
def small_machine(tmp_path):
    """The path of a machine with this much memory."""

    def write(device_memory, host_memory):
        figures = {"flops": {"float32": 1e12, "bfloat16": 1e12}, "memory_bandwidth": 1e12, "h2d": 1e10, "d2h": 1e10}
        figures |= {"pageable": 1e9, "host_bandwidth": 1e10, "device_memory": device_memory, "host_memory": host_memory}
        Machine("a small machine", **figures).save(tmp_path / "machine.json")
        return str(tmp_path / "machine.json")

    return write


def test_explain_prints_the_report_of_a_folder_and_of_its_file(config, capsys):
    folder = config()
    for path in (folder, f"{folder}/config.json"):
        assert main(["explain", path, "--batch", "4", "--length", "16", "--micro-batches", "2", "--machine", "h200"]) == 0
        printed = capsys.readouterr().out
        assert "a batch of 4 x 16 tokens" in printed and "on NVIDIA H200 SXM:" in printed
        assert "x3" in printed and "model.layers.0 … model.layers.2" in printed
        assert printed.count("fits ") == 2


def test_parameters_of_16_bits_in_a_config_are_explained_as_fp32_on_the_host(config, capsys):
    assert main(["explain", config(), "--batch", "4", "--length", "16"]) == 0
    assert "(4.0), wire" in capsys.readouterr().out


def test_a_config_that_does_not_fit_says_by_how_much_and_what_to_change(config, small_machine, capsys):
    """Room on the device for two micro-batches, and on the host for an optimizer without state."""
    given = ["explain", config(), "--batch", "8", "--length", "64", "--micro-batches", "1", "--machine"]
    assert main([*given, small_machine(2e5, 5e5)]) == 1
    printed = capsys.readouterr().out
    assert "too large device memory: " in printed and "--micro-batches 2: " in printed and "still too much" in printed
    assert "too large host memory: " in printed and "--update in_backward" in printed and "--optimizer sgd" in printed
    assert main([*given, small_machine(1e9, 1e9)]) == 0
    assert "too much" not in capsys.readouterr().out


def test_a_remedy_that_is_said_is_one(config, small_machine, capsys):
    folder, machine = config(), small_machine(7e5, 1e9)
    given = ["explain", folder, "--batch", "8", "--length", "64", "--machine", machine, "--micro-batches"]
    assert main([*given, "1"]) == 1
    *_, enough = [line for line in capsys.readouterr().out.splitlines() if "--micro-batches" in line]
    assert "still too much" not in enough
    count = enough.split(":")[0].split()[-1]
    assert main([*given, count]) == 0


def test_simulate_prints_seconds_and_tokens(config, capsys):
    assert main(["simulate", config(), "--batch", "4", "--length", "16", "--machine", "h200"]) == 0
    printed = capsys.readouterr().out
    assert "s a step, " in printed and "tokens/s" in printed and "optimizer state" in printed and "compute" in printed


def workload(batch):
    """What a user's function may return."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.empty(batch, 8)


def test_a_function_gives_a_model_and_its_batch(capsys):
    assert main(["explain", f"{__name__}:workload", "--batch", "6", "--micro-batches", "3", "--outputs", "all"]) == 0
    printed = capsys.readouterr().out
    assert "144 parameters, a batch of 6 rows" in printed and "3 micro-batches" in printed


def workload_of_five():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.empty(5, 8),)


def test_a_function_without_arguments_makes_the_batch(capsys):
    assert main(["explain", f"{__name__}:workload_of_five", "--outputs", "all"]) == 0
    printed = capsys.readouterr().out
    assert "a batch of 5 rows" in printed and "5 micro-batches" in printed


def test_coverage_compares_with_eager(capsys):
    assert main(["coverage", "LlamaForCausalLM", "NoSuchModel"]) == 1
    one, other = capsys.readouterr().out.strip().splitlines()
    assert one.startswith("LlamaForCausalLM: ") and "equal in all of" in one
    assert "no model class 'NoSuchModel'" in other


def test_what_cannot_be_asked_is_one_line(config, capsys):
    for given, words in (
        (["explain", "nothing"], "no folder, no config.json, and no package.module:function"),
        (["explain", "no_such_module:f"], "No module named 'no_such_module'"),
        (["explain", f"{__name__}:workload_of_five", "--batch", "3"], "takes no argument 'batch'"),
        (["explain", config(), "--batch", "0"], "--batch must be at least 1, got 0"),
        (["explain", config(), "--length", "512"], "the model has 64 positions"),
        (["simulate", config(), "--machine", "abacus"], "no machine 'abacus'"),
    ):
        assert main(given) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_python_runs_the_package(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["l2l", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("l2l_compile", run_name="__main__")
    assert "explain" in capsys.readouterr().out
