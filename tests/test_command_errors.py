"""Odd calls of the command `l2l`: each is one sentence on stderr and exit status 2, never a traceback."""

from __future__ import annotations

import contextlib
import json
import re
import sys

import pytest
import torch
from torch import nn

from l2l_compile import Machine
from l2l_compile.command import failures
from l2l_compile.command import main as command
from l2l_compile.command.main import main
from l2l_compile.report.explain import Report
from test_command import TINY

with contextlib.suppress(ImportError):
    import bitsandbytes  # noqa: F401 - says once on stderr which of its kernels are missing: not within a test

HUGE = 10**13


def refused(arguments, capsys) -> str:
    """The sentence of a call that is refused."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    error = without_progress(printed.err)
    assert not printed.out and error.startswith("l2l: ") and error.count("\n") == 1 and len(error) < 900
    assert "Traceback" not in error
    return error


def without_progress(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.endswith(" ...\n"))


@pytest.fixture
def written(tmp_path):
    """Writes a file, of text or bytes, and returns its path."""

    def write(content, name="config.json"):
        path = tmp_path / name
        path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content)
        return str(path)

    return write


ARGUMENTS = {
    "nothing": ([], "required"),
    "no such command": (["train"], "invalid choice"),
    "no config": (["explain"], "required"),
    "two configs": (["explain", "a", "b"], "unrecognized"),
    "no machine": (["simulate", "a"], "--machine"),
    "an unknown flag": (["explain", "a", "--fast"], "--fast"),
    "a flag without a value": (["explain", "a", "--batch"], "expected one argument"),
    "a batch of 1e13": (["explain", "a", "--batch", "1e13"], "invalid int"),
    "a batch in words": (["explain", "a", "--batch", "many"], "invalid int"),
    "a batch of 5,000 digits": (["explain", "a", "--batch", "9" * 5000], "--batch"),
    "a batch of ten million million": (["explain", "a", "--batch", str(HUGE)], "--batch must be at most"),
    "no row": (["explain", "a", "--batch", "0"], "--batch must be at least 1"),
    "no token": (["explain", "a", "--length", "0"], "--length must be at least 1"),
    "a length of ten million million": (["explain", "a", "--length", str(HUGE)], "--length must be at most"),
    "a rank of zero": (["explain", "a", "--lora", "0"], "--lora must be at least 1"),
    "a rank in words": (["explain", "a", "--lora", "low"], "invalid int"),
    "quantized weights without adapters": (["explain", "a", "--base", "nf4"], "--base nf4: quantized weights are not trained"),
    "an unknown base": (["explain", "a", "--base", "int4"], "base"),
    "a half row": (["explain", "a", "--batch", "0.5"], "invalid int"),
    "no micro-batch": (["explain", "a", "--micro-batches", "0"], "micro_batches"),
    "a negative micro-batch": (["explain", "a", "--micro-batches", "-1"], "micro_batches"),
    "a negative prefetch": (["explain", "a", "--prefetch", "-1"], "prefetch"),
    "an unknown precision": (["explain", "a", "--precision", "int8"], "precision"),
    "an unknown update": (["explain", "a", "--update", "never"], "update"),
    "an unknown optimizer": (["explain", "a", "--optimizer", "lion"], "optimizer"),
    "an unknown stash": (["explain", "a", "--stash", "disk"], "stash"),
    "unknown outputs": (["explain", "a", "--outputs", "none"], "outputs"),
    "a delay of two": (["explain", "a", "--delay", "2"], "delay"),
    "a delay in backward": (["explain", "a", "--delay", "1", "--update", "in_backward"], "delay"),
    "no backward": (["explain", "a", "--accumulate", "0"], "accumulate"),
    "accumulation at the step": (["explain", "a", "--accumulate", "2", "--update", "at_step"], "accumulate"),
    "a norm of zero": (["explain", "a", "--max-grad-norm", "0"], "max_grad_norm"),
    "a norm that is no number": (["explain", "a", "--max-grad-norm", "nan"], "max_grad_norm"),
    "a norm in backward": (["explain", "a", "--max-grad-norm", "1", "--update", "in_backward"], "max_grad_norm"),
    "fp16 in backward": (["explain", "a", "--precision", "fp16", "--update", "in_backward"], "fp16"),
    "pinned memory without a unit": (["explain", "a", "--pinned-memory", "8"], "pinned_memory"),
    "pinned memory in words": (["explain", "a", "--pinned-memory", "all"], "pinned_memory"),
    "device memory without a unit": (["explain", "a", "--machine", "h200", "--device-memory", "24"], "no size"),
    "negative device memory": (["explain", "a", "--machine", "h200", "--device-memory=-24GB"], "no size"),
    "no device memory": (["explain", "a", "--machine", "h200", "--device-memory", "0GB"], "no size"),
    "host memory in words": (["explain", "a", "--machine", "h200", "--host-memory", "much"], "no size"),
    "host memory that is no number": (["explain", "a", "--machine", "h200", "--host-memory", "nanGB"], "no size"),
    "less memory than the reserve": (["explain", "a", "--machine", "h200", "--device-memory", "1MB"], "device_memory"),
    "memory of no machine": (["explain", "a", "--device-memory", "24GB"], "give --machine"),
    "an unknown machine": (["explain", "a", "--machine", "abacus"], "no machine 'abacus'"),
    "an empty machine": (["explain", "a", "--machine", ""], "no machine ''"),
    "a machine without bf16": (["explain", "a", "--machine", "v100"], "bfloat16"),
    "a page in no folder": (["explain", "a", "--html", "/no/such/folder/a.html"], "cannot be written"),
    "a page that is a folder": (["explain", "a", "--html", "/"], "cannot be written"),
    "a page without a name": (["explain", "a", "--html", ""], "cannot be written"),
    "a page with a null character": (["explain", "a", "--html", "a\0b"], "cannot be written"),
    "an empty config": (["explain", ""], "no folder"),
    "a config that is not there": (["explain", "nothing"], "no folder, no config.json, and no package.module:function"),
    "a name of the hub": (
        ["explain", "meta-llama/Llama-3-8B"],
        "hf download meta-llama/Llama-3-8B config.json --local-dir Llama-3-8B",
    ),
    "a name of a million characters": (["explain", "a" * 10**6], "no folder"),
    "a null character": (["explain", "a\0b"], "no folder"),
    "a device of the system": (["explain", "/dev/zero"], "is no file"),
    "coverage of nothing": (["coverage"], "required"),
    "machines with a name": (["machines", "h200"], "unrecognized"),
}


@pytest.mark.parametrize("arguments, words", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_are_invalid_are_refused_in_a_sentence(arguments, words, capsys):
    assert words in refused(arguments, capsys)


def changed(**changes):
    return json.dumps({**TINY, **changes})


FILES = {
    "empty": ("", "is not JSON"),
    "broken": ('{"model_type": "llama"', "is not JSON"),
    "a list": ("[1, 2]", "got a list"),
    "a number": ("7", "got a int"),
    "null": ("null", "got a NoneType"),
    "binary": (b"\x80\x00\xff\xfe" * 9, "is no text"),
    "NaN": ('{"model_type": "llama", "rms_norm_eps": NaN}', "NaN is not a number"),
    "Infinity": ('{"model_type": "llama", "hidden_size": Infinity}', "Infinity is not a number"),
    "nested": ("[" * 10**5, "nested too deeply"),
    "a number of 5,000 digits": ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "is not a config"),
    "11 MB": (" " * 11_000_000, "a config has at most"),
    "without a model_type": (json.dumps({"hidden_size": 8}), "has no model_type"),
    "of diffusers": (json.dumps({"_class_name": "UNet2DConditionModel"}), "a config of diffusers"),
    "of timm": (json.dumps({"architecture": "vit", "num_features": 8}), "a config of timm"),
    "of a model_type that is null": (changed(model_type=None), "must be the name"),
    "of a model_type that is a list": (changed(model_type=["llama"]), "must be the name"),
    "of an unknown model_type": (changed(model_type="lama"), "did you mean 'llama'"),
    "with code of its own": (changed(model_type="mine", auto_map={"AutoModel": "m.M"}), "`auto_map` names code of the folder"),
    "of an unknown class": (changed(architectures=["MyOwnForCausalLM"]), "no model class 'MyOwnForCausalLM'"),
    "of a function": (changed(architectures=["pipeline"]), "no model class 'pipeline'"),
    "of a class that is no model": (changed(architectures=["Trainer"]), "no model class 'Trainer'"),
    "of a tokenizer": (changed(architectures=["LlamaTokenizer"]), "no model class"),
    "of the base class": (changed(architectures=["PreTrainedModel"]), "no model class"),
    "of a module": (changed(architectures=["models"]), "no model class"),
    "of a special name": (changed(architectures=["__class__"]), "no model class"),
    "of a class of another config": (changed(architectures=["BertForMaskedLM"]), "takes BertConfig"),
    "of a class in no list": (changed(architectures="LlamaForCausalLM"), "must be a list"),
    "of a class that is a number": (changed(architectures=[3]), "must be a list"),
    "of a class that is a mapping": (changed(architectures={"a": 1}), "must be a list"),
    "of a class without batch sizes": (json.dumps({"model_type": "whisper", "architectures": ["WhisperModel"]}), "does not say"),
    "of no causal model": (json.dumps({"model_type": "vit"}), "has no causal language model"),
}
SIZES = {
    "hidden_size": (0, -1, HUGE, "4096", 1.5, True, None, [], {"a": 1}),
    "num_hidden_layers": (0, -1, HUGE, "32", 2.5, None, False),
    "num_attention_heads": (0, -2, HUGE, "2", None, 3),
    "num_key_value_heads": (-1, HUGE, "2", 0),
    "vocab_size": (0, -5, HUGE, "256", None),
    "intermediate_size": (-1, HUGE, "48"),
    "max_position_embeddings": (-1, HUGE, "64", 8),
    "head_dim": (-16, "16"),
    "hidden_act": ("no_such_activation", 7),
    "rope_parameters": ("linear", [1]),
    "rms_norm_eps": ("small",),
    "layer_types": ("all", 5),
    "pad_token_id": (10**6, "a"),
    "attention_dropout": ("none",),
}


@pytest.mark.parametrize("content, words", FILES.values(), ids=FILES)
def test_configs_that_are_none_are_refused_in_a_sentence(content, words, written, capsys):
    path = written(content)
    assert words in refused(["explain", path, "--length", "16"], capsys)


@pytest.mark.parametrize("name, value", [(n, v) for n, values in SIZES.items() for v in values], ids=lambda v: str(v)[:20])
def test_configs_with_odd_values_are_refused_or_explained(name, value, written, capsys):
    """A value that transformers takes all the same is explained."""
    status = main(["explain", written(changed(**{name: value})), "--length", "16"])
    printed = capsys.readouterr()
    assert status in (0, 2) and "Traceback" not in printed.err
    if status == 2:
        assert without_progress(printed.err).startswith("l2l: ") and not printed.out
        assert without_progress(printed.err).count("\n") == 1
    assert status == 2 or name not in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@pytest.mark.parametrize(
    "name", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "max_position_embeddings"]
)
@pytest.mark.parametrize("value", [-1, HUGE, "8", True])
def test_sizes_are_refused_before_transformers_is_imported(name, value, written, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert name in refused(["explain", written(changed(**{name: value}))], capsys)


def test_folders_without_a_config_are_refused_in_a_sentence(tmp_path, capsys):
    assert "has no config.json" in refused(["explain", str(tmp_path)], capsys)
    (tmp_path / "model_index.json").write_text("{}")
    assert "a folder of diffusers" in refused(["explain", str(tmp_path)], capsys)
    (tmp_path / "config.json").mkdir()
    assert "is no file" in refused(["explain", str(tmp_path)], capsys)


def test_code_of_a_folder_is_not_run(written, tmp_path, capsys):
    (tmp_path / "m.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass M: pass\nC = M\n")
    own = {"auto_map": {"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"}}
    refused(["explain", written(changed(model_type="mine", architectures=["M"], **own))], capsys)
    refused(["explain", written(changed(architectures=["M"], **own))], capsys)
    assert main(["explain", written(changed(num_hidden_layers=1, **own)), "--length", "16"]) == 0
    assert not (tmp_path / "ran").exists()


def test_transformers_that_is_missing_is_told(written, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in refused(["explain", written(changed())], capsys)


def test_peft_that_is_missing_is_told(written, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "pip install peft" in refused(["explain", written(changed()), "--lora", "4"], capsys)


# ---- functions -------------------------------------------------------------------------------------------------------

_model = nn.Linear(8, 8)
SECRET = "a value that nobody may print"
environ = {"KEY": SECRET}


def gives_nothing():
    return None


def gives_a_model():
    return _model


def gives_three():
    return _model, torch.empty(2, 8), SECRET


def gives_a_secret():
    return SECRET


def gives_a_batch_of_text():
    return _model, SECRET


def gives_a_batch_by_number():
    return _model, {1: torch.empty(2, 8)}


def fails():
    raise ValueError("the user's own error")


def exits():
    sys.exit(7)


def needs_more(batch, depth):
    return _model, torch.empty(batch, 8)


def frozen():
    return nn.Linear(8, 8).requires_grad_(False), torch.empty(2, 8)


def of_wrong_sizes():
    return nn.Linear(8, 8), torch.empty(2, 9)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        raise RuntimeError("forward of the user")


def broken():
    return Broken(), torch.empty(2, 8)


HERE = __name__
FUNCTIONS = {
    "os:environ": "no function of Python",
    "os:getcwd": "no function of Python",
    "os:abort": "no function of Python",
    "sys:exit": "no function of Python",
    "builtins:print": "no function of Python",
    "builtins:dict": "no function of Python",
    "math:pi": "no function of Python",
    "os:path": "no function of Python",
    "shutil:rmtree": "needs the argument 'path'",
    "no_such_module:f": "No module named 'no_such_module'",
    "os:no_such_name": "has no 'no_such_name'",
    ":f": "is no package.module:function",
    "os:": "is no package.module:function",
    ".os:getcwd": "is no package.module:function",
    "a:b:c": "is no package.module:function",
    "model.py:build": "as in model:build",
    "http://example.org/a": "is no package.module:function",
    f"{HERE}:gives_a_model --lora": "--lora is for configs",
    f"{HERE}:environ": "no function of Python",
    f"{HERE}:Broken": "no function of Python",
    f"{HERE}:gives_nothing": "got a NoneType",
    f"{HERE}:gives_a_model": "got a Linear",
    f"{HERE}:gives_three": "got a tuple of Linear, Tensor, str",
    f"{HERE}:gives_a_secret": "got a str",
    f"{HERE}:gives_a_batch_of_text": "got a str",
    f"{HERE}:gives_a_batch_by_number": "got a dict",
    f"{HERE}:fails": "ValueError: the user's own error (test_command_errors.py, line",
    f"{HERE}:exits": "SystemExit: 7",
    f"{HERE}:needs_more": "needs the argument 'depth'",
    f"{HERE}:frozen": "no parameter that takes a gradient",
    f"{HERE}:of_wrong_sizes": "the model cannot compute with its inputs: linear: ",
    f"{HERE}:broken": "forward of the user",
}


@pytest.mark.parametrize("given", FUNCTIONS)
def test_functions_that_give_no_model_are_refused_in_a_sentence(given, capsys):
    name, *flags = given.split()
    said = refused(["explain", name, "--outputs", "all", *(f"{flag}=4" for flag in flags)], capsys)
    assert FUNCTIONS[given] in said and SECRET not in said


def test_values_of_the_environment_are_not_printed(capsys, monkeypatch):
    monkeypatch.setenv("A_KEY", SECRET)
    assert SECRET not in refused(["explain", "os:environ"], capsys)


# ---- machines, pages -------------------------------------------------------------------------------------------------

FIGURES = {**json.loads((command.Path(command.__file__).parents[1] / "simulation" / "machines" / "h200.json").read_text())}
MACHINES = {
    "empty": "",
    "a list": "[]",
    "nothing": "{}",
    "with memory as text": json.dumps({**FIGURES, "device_memory": "80GB"}),
    "with NaN": json.dumps({**FIGURES, "h2d": float("nan")}),
    "with a negative bandwidth": json.dumps({**FIGURES, "d2h": -1}),
    "with no bandwidth": json.dumps({**FIGURES, "memory_bandwidth": 0}),
    "with FLOP/s as a number": json.dumps({**FIGURES, "flops": 1e12}),
    "with an unknown figure": json.dumps({**FIGURES, "colour": 1}),
    "with overlaps as text": json.dumps({**FIGURES, "overlaps": "yes"}),
}


@pytest.mark.parametrize("content", MACHINES.values(), ids=MACHINES)
def test_machine_files_that_are_none_are_refused_in_a_sentence(content, written, capsys):
    for name in ("explain", "simulate"):
        assert "machine.json" in refused([name, "a", "--machine", written(content, "machine.json")], capsys)


def test_page_that_cannot_be_written_is_told_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command.Asked, "report", property(lambda self: pytest.fail("worked before it looked at the page")))
    refused(["explain", "a", "--html", str(tmp_path / "none" / "a.html")], capsys)


def test_page_that_can_be_written_is_not_made_by_a_refused_call(capsys, tmp_path):
    refused(["explain", "nothing", "--html", str(tmp_path / "a.html")], capsys)
    assert not (tmp_path / "a.html").exists()


def test_disk_that_is_full_is_told(written, capsys, monkeypatch):
    monkeypatch.setattr(Report, "page", lambda self, machine: "a page")
    assert main(["explain", written(changed()), "--length", "16", "--html", "/dev/full"]) == 2
    error = without_progress(capsys.readouterr().err)
    assert "No space left" in error and error.count("\n") == 1


def test_errors_of_other_code_are_told_in_one_line():
    with (
        pytest.raises(Exception, match=r"^what: ValueError: two lines \(test_command_errors.py, line \d+\)$"),
        failures.failing_as("what"),
    ):
        raise ValueError("two\n  lines")


def test_calls_are_as_many_as_were_tried():
    assert len(ARGUMENTS) + len(FILES) + sum(map(len, SIZES.values())) + len(FUNCTIONS) + 2 * len(MACHINES) >= 126


def test_machine_is_not_shown_by_a_refused_call(capsys):
    assert re.fullmatch(r"l2l: .*\n", refused(["explain", "nothing", "--machine", "h200"], capsys))
    assert Machine.load("h200")
