"""The command `l2l`, on configs of tiny models and of one that no machine holds."""

from __future__ import annotations

import json
import re
import runpy
import sys
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile import Machine
from l2l_compile.command.asked import Asked, Settings
from l2l_compile.command.main import main
from l2l_compile.options import Options
from l2l_compile.simulation.machine import names
from l2l_compile.units import parse_bytes

pytestmark = pytest.mark.few_micro_batches

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


def test_parameters_of_16_bits_are_explained_as_fp32_on_the_host(config, capsys):
    assert main(["explain", config(), "--batch", "4", "--length", "16"]) == 0
    assert "(4.0), wire" in capsys.readouterr().out


def stack(batch):
    """Six layers, the last of which is the largest."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*layers, nn.Linear(64, 1024)), torch.empty(batch, 64)


STACK = ["explain", f"{__name__}:stack", "--batch", "8", "--outputs", "all", "--machine"]


def printed_by(arguments, capsys, status=0):
    assert main(arguments) == status
    return capsys.readouterr().out


def peaks(printed):
    """Bytes of the device and of the host in the verdict."""
    return [parse_bytes(re.search(rf"{memory} memory: (.*?) of", printed)[1]) for memory in ("device", "host")]


def test_a_step_that_does_not_fit_has_a_remedy_and_bytes(small_machine, capsys):
    """Every change that is printed is one with which the command says that the step fits, in the bytes that were printed."""
    asked = [*STACK, "h200", "--micro-batches", "1", "--prefetch", "2"]
    device, _ = peaks(printed_by(asked, capsys))
    asked[asked.index("h200")] = small_machine(0.6 * device, 1e9)
    printed = printed_by(asked, capsys, 1)
    assert "too large device memory: " in printed and " too much" in printed
    changes = re.findall(r"^    (--.*?): device (.*?), host (.*?)(?: \(.*)?$", printed, re.MULTILINE)
    assert changes
    for change, on_device, on_host in changes:
        again = printed_by([*asked, *change.split()], capsys)
        assert f"fits      device memory: {on_device} of" in again and f"fits      host memory: {on_host} of" in again


def test_prefetch_is_tried_before_another_model_is_advised(small_machine, capsys):
    """Room for one weight slab in place of two, and for nothing more."""
    (two, _), (one, _) = (peaks(printed_by([*STACK, "h200", "--prefetch", str(ahead)], capsys)) for ahead in (1, 0))
    assert one < two
    assert "it fits with:\n    --prefetch 0: device" in printed_by([*STACK, small_machine((one + two) / 2, 1e9)], capsys, 1)


def test_host_that_is_too_small_gets_updates_in_backward(small_machine, capsys):
    (_, asked), (_, least) = (
        peaks(printed_by([*STACK, "h200", "--update", update], capsys)) for update in ("in_forward", "in_backward")
    )
    assert least < asked
    assert "it fits with:\n    --update in_backward: device" in printed_by(
        [*STACK, small_machine(1e9, (asked + least) / 2)], capsys, 1
    )


def test_one_backward_is_tried_where_several_do_not_fit(small_machine, capsys):
    """With several, `in_backward` keeps the sums of gradients."""
    several = [*STACK, "h200", "--accumulate", "4", "--update", "in_backward"]
    (_, kept), (_, least) = (peaks(printed_by([*several, "--accumulate", count], capsys)) for count in ("4", "1"))
    assert least < kept
    several[several.index("h200")] = small_machine(1e9, (kept + least) / 2)
    printed = printed_by(several, capsys, 1)
    assert re.search(r"    --accumulate 1: device .*, host .* \(a step for each backward call\)\n", printed)


def test_one_backward_is_tried_with_updates_in_backward(small_machine, capsys):
    (_, least), (_, kept) = (peaks(printed_by([*STACK, "h200", "--update", u], capsys)) for u in ("in_backward", "in_forward"))
    printed = printed_by([*STACK, small_machine(1e9, (kept + least) / 2), "--accumulate", "2"], capsys, 1)
    assert "    --update in_backward --accumulate 1: device" in printed


def test_simulate_shows_the_step_that_fits(small_machine, capsys):
    host = [peaks(printed_by([*STACK, "h200", "--update", update], capsys))[1] for update in ("in_forward", "in_backward")]
    printed = printed_by(["simulate", *STACK[1:], small_machine(1e9, sum(host) / 2)], capsys, 1)
    assert (
        "speed with --update in_backward: " in printed
        and "updates each layer while the device computes the layers before it" in printed
    )
    assert "samples/s" in printed


@pytest.mark.slow
def test_changes_of_training_are_tried_when_options_do_not_help(config, small_machine, capsys):
    """The host has no room for the state of the optimizer: adapters of a frozen model, or an optimizer without state."""
    given = ["explain", config(num_hidden_layers=2), "--batch", "2", "--length", "16", "--machine"]
    _, host = peaks(printed_by([*given, "h200", "--update", "in_backward"], capsys))
    printed = printed_by([*given, small_machine(1e9, 0.6 * host)], capsys, 1)
    assert "--optimizer sgd" in printed and "sgd has no state" in printed
    assert "it fits with" in printed


@pytest.mark.slow
def test_adapters_are_advised_where_the_model_is_large(config, small_machine, capsys):
    given = ["explain", config(num_hidden_layers=1, hidden_size=128), "--batch", "2", "--length", "16", "--machine"]
    _, full = peaks(printed_by([*given, "h200", "--update", "in_backward"], capsys))
    _, adapters = peaks(printed_by([*given, "h200", "--lora", "16", "--update", "in_backward"], capsys))
    printed = printed_by([*given, small_machine(1e9, (full + 2 * adapters) / 3)], capsys, 1)
    assert "--lora 16" in printed and "adapters of a frozen model are trained" in printed


def test_a_base_in_four_bits_is_counted(config, capsys):
    """NF4 with double quantization has 4.13 bits a weight, and the headline counts the weights that bytes stand for."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 1024}
    given = ["explain", config(**sizes), "--batch", "2", "--length", "16", "--lora", "2", "--base"]
    printed = {base: printed_by([*given, base], capsys) for base in ("bf16", "int8", "nf4")}
    counts = {re.search(r"([\d.]+ \w+) parameters", text)[1] for text in printed.values()}
    assert len(counts) == 1
    layers = {base: parse_bytes(re.search(r"block_2 +x1 +([\d.]+ \w+)", text)[1]) for base, text in printed.items()}
    assert 0.45 < layers["int8"] / layers["bf16"] < 0.6 and 0.25 < layers["nf4"] / layers["bf16"] < 0.36


def test_nearest_change_is_told_where_nothing_fits(small_machine, capsys):
    printed = printed_by([*STACK, small_machine(1e5, 1e5)], capsys, 1)
    assert "no change of options that was tried makes it fit; the nearest:\n    --" in printed


@pytest.mark.slow(but="*lora*")
@pytest.mark.parametrize("given", [[], ["--update", "at_step"], ["--lora", "4"]], ids=["full", "at_step", "lora"])
def test_verdict_report_and_page_have_the_same_bytes(given, config, tmp_path, capsys):
    """Device and host, in `explain`, in `simulate` and on the page."""
    page, shown = tmp_path / "page.html", ["--batch", "4", "--length", "16", "--machine", "rtx4090", *given]
    assert main(["explain", config(num_hidden_layers=1), *shown]) == 0
    explained = figures(capsys.readouterr().out)
    assert main(["simulate", config(num_hidden_layers=1), *shown, "--html", str(page)]) == 0
    simulated = figures(capsys.readouterr().out)
    (data,) = re.findall(r"^const data = (.*);$", page.read_text(), re.MULTILINE)
    of_the_page = dict(json.loads(data)["figures"])
    assert explained == simulated
    for memory in ("device memory", "host memory"):
        assert explained[memory] == explained[f"{memory}, in the report"] == of_the_page[f"{memory} at its peak"]


def figures(printed):
    """The memory of the verdict and of the report, as printed."""
    text = " ".join(printed.split())
    found = {name: re.search(rf"fits {name}: (\S+ \S+) of", text)[1] for name in ("device memory", "host memory")}
    found["device memory, in the report"] = re.search(r"device memory at its peak: (\S+ \S+) \(", text)[1]
    found["host memory, in the report"] = re.search(r"host memory \(bytes a parameter\): .*?in all (\S+ [KMGT]?i?B)", text)[1]
    return found


def test_memory_of_the_command_line_replaces_the_machines(capsys):
    assert main([*STACK, "rtx4090", "--host-memory", "128GiB", "--device-memory", "12GiB"]) == 0
    printed = capsys.readouterr().out
    assert "of 11.0 GiB (12.0 GiB less 1.0 GiB for driver, context and libraries)" in printed
    assert "of 124.0 GiB (128.0 GiB less 4.0 GiB for the operating system, Python and PyTorch)" in printed


def test_adapters_are_trained_and_the_model_is_frozen(config, capsys):
    assert main(["explain", config(num_hidden_layers=1), "--batch", "4", "--length", "16", "--lora", "2"]) == 0
    printed = capsys.readouterr()
    assert "of them trained, a batch of 4 x 16 tokens" in printed.out and "Warning" not in printed.err


def test_machines_are_listed(capsys):
    assert main(["machines"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == names() and "NVIDIA GeForce RTX 4090" in "".join(lines)


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"l2l-compile {l2l_compile.__version__}\n"


def test_help_says_which_defaults_are_not_the_librarys(capsys):
    for command in ("explain", "simulate"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        printed = " ".join(capsys.readouterr().out.split())
        library, own = Options(), Settings()
        for name in {f.name for f in fields(Options)} & {f.name for f in fields(Settings)} - {"optimizer"}:
            assert f"--{name.replace('_', '-')}" in printed or f"--no-{name.replace('_', '-')}" in printed
            if getattr(library, name) != getattr(own, name):
                assert f"(default: {getattr(own, name)}; the library's: {getattr(library, name)})" in printed


def test_options_that_change_time_or_memory_are_all_there():
    # of the machine, of a look for errors, of several devices, of calls without gradients alone; a plan is a command
    # a run that can be resumed takes as long
    neither = {"device", "check", "block_compiler", "batch_scope", "passes", "device_cache", "host_memory", "plan", "resumable"}
    assert {f.name for f in fields(Options)} - neither <= {f.name for f in fields(Settings)}


def test_work_that_takes_long_is_told_on_stderr(monkeypatch, capsys):
    monkeypatch.setattr("l2l_compile.command.progress._PATIENCE", 0.0)
    assert main([*STACK, "h200"]) == 0
    assert "l2l: tracing " in capsys.readouterr().err


def test_simulate_prints_seconds_and_tokens(config, capsys):
    assert main(["simulate", config(), "--batch", "4", "--length", "16", "--machine", "h200"]) == 0
    printed = capsys.readouterr().out
    assert "s a step, " in printed and "tokens/s; bound by " in printed and "optimizer state" in printed
    assert "without l2l, all on the device: fits" in printed and "plain PyTorch, on such a device" in printed
    assert re.search(r"compute .* s .*%  layers, on the device", printed)
    assert re.search(r"host .* s .*%  a thread of the host: takes gradients from the link, and updates the layers after", printed)


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


def test_generate_simulates_a_prompt_and_a_token(config, capsys):
    asked = ["simulate", config(), "--rows", "4", "--length", "16", "--generate", "8", "--machine", "h200"]
    assert main(asked) == 0
    printed = capsys.readouterr().out
    assert "4 rows, prompts of 16 tokens, 8 new tokens each, static cache" in printed
    prompt, token, text = (float(s) for s in re.findall(r"(?:prompt|of all rows|whole text): ([\d.e-]+) s", printed))
    assert text == pytest.approx(prompt + 7 * token, rel=0.02)
    assert "0 B cross the link for a token" in printed and "a token" in printed.splitlines()[-1]


def test_generate_counts_what_does_not_stay(config, capsys):
    asked = ["simulate", config(), "--rows", "4", "--length", "16", "--generate", "8", "--machine", "h200"]
    assert main([*asked, "--resident", "0", "--device-cache", "0", "--cache", "dynamic"]) == 0
    printed = capsys.readouterr().out
    assert "; 0 B stay on the device" in printed
    cached = 3 * 2 * 4 * 2 * 20 * 16 * 2  # layers, keys and values, rows, heads, entries, width, bytes
    up = re.search(rf"cache: {cached / 1024:.1f} KiB after half of the tokens, of which ([\d.]+) KiB go up", printed)
    assert up is not None and cached < 1024 * float(up[1]) < 1.2 * cached


def test_generate_says_when_memory_is_too_small(config, small_machine, capsys):
    asked = ["simulate", config(vocab_size=1 << 20), "--rows", "4", "--length", "16", "--generate", "8"]
    assert main([*asked, "--machine", small_machine(1e8, 1e8)]) == 1
    assert "too large host memory: " in capsys.readouterr().out


@pytest.mark.parametrize("base", ["fp32", "int8"])
def test_generate_takes_other_formats_of_weights(config, base, capsys):
    asked = ["simulate", config(), "--rows", "2", "--length", "8", "--generate", "4", "--machine", "h200"]
    assert main([*asked, "--base", base]) == 0
    assert "whole text" in capsys.readouterr().out


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_generate_simulates_other_models(tmp_path, cache, capsys):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256}
    kind = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(kind))
    asked = [
        "simulate",
        str(tmp_path),
        "--rows",
        "2",
        "--length",
        "8",
        "--generate",
        "4",
        "--machine",
        "rtx4090",
        "--cache",
        cache,
    ]
    assert main(asked) == 0
    assert "whole text" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--generate", "0"], "--generate must be between 1"),
        (["--generate", "60"], "--length and --generate 76: the model has 64 positions"),
        (["--generate", "4", "--lora", "8"], "--lora is for training steps"),
        (["--generate", "4", "--update", "in_backward"], "--update is for training steps"),
        (["--generate", "4", "--no-compile-update"], "--no-compile-update is for training steps"),
        (["--generate", "4", "--html", "page.html"], "--html shows a training step"),
        (["--generate", "4", "--resident", "much"], "'resident' must be bytes"),
    ],
)
def test_generate_refuses_what_does_not_go_with_it(config, more, said, capsys):
    assert main(["simulate", config(), "--length", "16", "--machine", "h200", *more]) == 2
    assert said in capsys.readouterr().err


def test_generate_refuses_models_that_continue_no_text(tmp_path, capsys):
    of_bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    of_t5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    for kind in (of_bert, of_t5):
        (tmp_path / "config.json").write_text(json.dumps(kind))
        assert main(["simulate", str(tmp_path), "--generate", "4", "--machine", "h200"]) == 2
        assert re.search("takes no cache of keys|simulates models that continue a text", capsys.readouterr().err)
    assert main(["simulate", "test_command:function", "--generate", "4", "--machine", "h200"]) == 2
    assert "--generate needs a folder or a config.json" in capsys.readouterr().err


def test_the_order_of_questions_does_not_change_the_answers(config):
    late, early = (Asked(config(), Settings(batch=4, length=16)) for _ in range(2))
    other = Settings(batch=4, length=16, update="in_backward")
    early.report_of(other)
    assert early.report.host_memory == late.report.host_memory != late.report_of(other).host_memory


def plan_of(config, capsys, *flags, rows="8"):
    status = main(["plan", config(), "--length", "16", *(["--rows", rows] if rows else []), *flags])
    return status, capsys.readouterr().out


def test_plan_prints_plans_and_the_lines_to_paste(config, capsys):
    status, printed = plan_of(config, capsys, "--machine", "h200", "--prefetch", "2", "--max-grad-norm", "1.0")
    assert status == 0 and printed.startswith("LlamaForCausalLM, 8 x 16 tokens, on NVIDIA H200 SXM: ")
    assert '"prefetch": 2,' in printed and '"max_grad_norm": 1.0,' in printed and '"update": "in_forward",' in printed
    assert "the first one by `simulate`: " in printed and printed.rstrip().endswith("options=options)")


def test_plan_says_what_fits_if_nothing_does(config, small_machine, capsys):
    status, printed = plan_of(config, capsys, "--machine", small_machine(1e9, 200_000))
    assert status == 1 and "nothing fits. The nearest, " in printed and "too large host memory" in printed
    assert "--optimizer sgd" in printed or "--rows" in printed or "--batch" in printed


# A plan tries fewer sets with these.
FEW_OPTIONS = ["--update", "in_backward", "--prefetch", "1", "--keep", "0", "--keep-on-host", "0", "--resident", "0"]


@pytest.fixture
def with_disk(small_machine):
    """The path of a machine that has a disk as well."""

    def write(device_memory, host_memory):
        path = small_machine(device_memory, host_memory)
        replace(Machine.load(path), disk_read=4e9, disk_write=2e9).save(path)
        return path

    return write


def test_plan_with_a_disk_fits_where_memory_is_too_small(config, with_disk, capsys):
    wide = config(hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    asked = ["plan", wide, "--machine", with_disk(4e9, 330e6), "--rows", "4", "--length", "16", *FEW_OPTIONS]
    assert main(asked) == 1
    assert re.search(r"--disk /disk: .*\(parameters and optimizer state in a folder of the machine\)", capsys.readouterr().out)
    assert main([*asked, "--disk", "/elsewhere"]) == 0
    printed = capsys.readouterr().out
    assert '"disk": "/elsewhere",' in printed and '"host_memory": 264000000,' in printed
    assert "the first one by `simulate`: " in printed


@pytest.fixture
def many_rows(config, with_disk):
    """What asks for a plan of rows whose stashes fit into no memory, and everything else does."""
    long = config(hidden_size=512, intermediate_size=1024, num_hidden_layers=16, max_position_embeddings=128)
    return [
        "plan",
        long,
        "--machine",
        with_disk(450e6, 300e6),
        "--length",
        "128",
        "--rows",
        "256",
        *FEW_OPTIONS,
        "--micro-batches",
        "8",
    ]


def test_plan_puts_stashes_on_a_disk_if_the_host_lacks_room(many_rows, capsys):
    assert main([*many_rows, "--disk", "/elsewhere"]) == 0
    assert '"stash": "disk"' in capsys.readouterr().out


@pytest.mark.slow
def test_stashes_on_a_disk_are_proposed_where_they_help(many_rows, capsys):
    assert main(many_rows) == 1
    assert "--stash disk --disk /disk: " in capsys.readouterr().out


def test_explain_and_simulate_count_the_disk(config, with_disk, capsys):
    wide = config(hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    asked = [
        wide,
        "--machine",
        with_disk(4e9, 260e6),
        "--batch",
        "4",
        "--length",
        "16",
        "--update",
        "in_backward",
        "--disk",
        "/d",
    ]
    assert main(["explain", *asked]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"disk: master .*, optimizer state .*, in all .*, read and\s+written once in a step", printed)
    assert main(["simulate", *asked]) == 0
    assert "reads of parameters, optimizer state and stashes from the disk" in " ".join(capsys.readouterr().out.split())


def test_a_disk_that_is_given_twice_is_two_disks(config, with_disk, capsys):
    """Their rates add up, and both are in the options."""
    wide = config(hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    asked = [
        wide,
        "--machine",
        with_disk(4e9, 260e6),
        "--batch",
        "4",
        "--length",
        "16",
        "--update",
        "in_backward",
        "--disk",
        "/d",
    ]
    seconds = []
    for more in ([], ["--disk", "/e"]):
        assert main(["simulate", *asked, *more]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        seconds.append(float(re.search(r"disk_write +([\d.]+) s", printed)[1]))
    assert seconds[1] == pytest.approx(seconds[0] / 2, rel=0.02)
    assert main(["explain", *asked, "--disk", "/e"]) == 0
    assert "striped over 2 folders" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", *asked[:3], "--rows", "4", "--length", "16", "--disk", "/d", "--disk", "/e"]) == 0
    assert '"disk": ["/d", "/e"],' in capsys.readouterr().out
    assert main(["explain", *asked, "--disk", "/d"]) == 2
    assert "option 'disk' has '/d' twice" in capsys.readouterr().err


def test_plan_without_rows_says_how_many_fit(config, small_machine, capsys):
    machine = small_machine(1e6, 1e9)
    status, printed = plan_of(config, capsys, "--machine", machine, rows=None)
    most = int(re.search(r"at most ([\d,]+) rows of 16 tokens fit", printed)[1].replace(",", ""))
    assert status == 0 and "too large device memory" in printed and most >= 2
    for rows, fits in ((most, 0), (most + 1, 1)):
        slices = str(min(rows, 256))
        given = ["--batch", str(rows), "--length", "16", "--micro-batches", slices, "--prefetch", "0", "--update", "in_backward"]
        assert main(["explain", config(), "--machine", machine, *given]) == fits


def test_plan_finds_rows_for_16_bits_of_any_kind(config, capsys):
    found = [plan_of(config, capsys, "--machine", "h200", "--precision", p, rows=None) for p in ("bf16", "fp16")]
    assert all(status == 0 and ", in 256 micro-batches." in printed for status, printed in found)


def test_plan_finds_rows_in_whichever_memory_has_room(config, small_machine, capsys):
    def most(*flags):
        printed = plan_of(config, capsys, "--machine", small_machine(1e8, 2e6), *flags, rows=None)[1]
        return int(re.search(r"at most ([\d,]+) rows", printed)[1].replace(",", ""))

    assert most() == most("--stash", "device") > most("--stash", "host")


def test_plan_refuses_what_does_not_go_together(config, capsys):
    assert main(["plan", config(), "--machine", "h200", "--rows", "4", "--update", "at_step", "--max-grad-norm", "1.0"]) == 2
    assert "'max_grad_norm' is for update='in_forward'" in capsys.readouterr().err
