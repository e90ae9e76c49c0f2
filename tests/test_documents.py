"""The documents are true: their code runs, what they print is printed today, and the files and names that they tell of exist.

Every fenced block of a document belongs to a check (`checks`), or `test_every_code_block_is_checked` fails. After a change of
printed text, `UPDATE_DOCUMENTS=1 pytest tests/test_documents.py` writes printed blocks anew.
"""

from __future__ import annotations

import ast
import gc
import importlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import l2l_compile
from l2l_compile import session
from l2l_compile.command.main import main as command
from l2l_compile.command.main import parser
from l2l_compile.ir import nodes, text
from l2l_compile.ir.schedule import without_flush
from l2l_compile.options import Options
from l2l_compile.passes.pipeline import PIPELINE
from l2l_compile.planner.search import DECIDED
from l2l_compile.simulation.machine import Machine, names
from l2l_compile.timeline import save_together

pytestmark = pytest.mark.few_micro_batches

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import page_picture  # noqa: E402
import quickstart  # noqa: E402

UPDATE = bool(os.environ.get("UPDATE_DOCUMENTS"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FILES = [
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*"),
        *(p for name in ("l2l_compile", "passes", "tests", "examples", "docs") for p in (ROOT / name).rglob("*")),
    )
    if path.is_file()
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COVERAGE = (ROOT / "tests" / "coverage" / "table.md").read_text()


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


# ---- code blocks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fenced:
    """A code block of a document, under a heading."""

    document: str
    heading: str
    language: str
    text: str


def fenced(path: Path) -> Iterator[Fenced]:
    heading, language, lines = "", None, []
    for line in path.read_text().split("\n"):
        if line.startswith("```"):
            if language is None:
                language, lines = line[3:], []
            else:
                yield Fenced(path.relative_to(ROOT).as_posix(), heading, language, "\n".join(lines))
                language = None
        elif language is not None:
            lines.append(line)
        elif line.startswith("#"):
            heading = line.lstrip("# ")


BLOCKS = [block for path in DOCUMENTS for block in fenced(path)]
CHECKED: set[Fenced] = set()


def checks(*places: str):
    """Gives the code blocks under a heading ("document: heading") to a test, as `shown`; they count as checked."""
    found = [[block for block in BLOCKS if f"{block.document}: {block.heading}" == place] for place in places]
    CHECKED.update(block for blocks in found for block in blocks)
    return pytest.mark.parametrize("shown", found, ids=places)


CHECKED.update(block for block in BLOCKS if block.document == "docs/package.md")  # tests/test_package.py compares it with README


TESTING = [block for block in BLOCKS if block.document == "docs/testing.md"]
CHECKED.update(TESTING)


def without_figures(text: str) -> list[str]:
    """Lines whatever their order, which rounding decides; figures of rounding do not count."""
    return sorted(re.sub(r"\d\.\de[+-]\d\d", "#", line) for line in text.strip().splitlines())


def test_the_code_on_testing_runs_and_prints_the_table(capsys):
    torch.manual_seed(0)
    scope: dict = {}
    (table,) = [block.text for block in TESTING if block.language == "text"]
    assert all(block.language in ("python", "text") for block in TESTING)
    for block in TESTING:
        if block.language == "python":
            exec(
                block.text.replace('"micro_batches": 3', '"micro_batches": 3, "block_compiler": "eager", "device": "cpu"'), scope
            )
            printed = capsys.readouterr().out
            if "print(compare" in block.text:
                assert without_figures(printed) == without_figures(table)
    scope["test_random_models"]()
    scope["test_my_model"]()


def test_every_code_block_is_checked():
    assert not [(b.document, b.heading, b.text) for b in BLOCKS if b not in CHECKED]


def run(code: str, scope: dict) -> None:
    """Run a block as a reader would, with blocks as traced: Inductor takes half a minute."""
    as_traced = code.replace('"micro_batches":', '"block_compiler": "eager", "micro_batches":')
    exec(as_traced.replace("micro_batches=", 'block_compiler="eager", micro_batches='), scope)


def tiny_llama() -> tuple[LlamaForCausalLM, list[dict]]:
    """A model, and a loader of two batches."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    tokens = torch.randint(32, (8, 4))
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)), [{"input_ids": tokens, "labels": tokens}] * 2


@checks("README.md: Use it")
def test_the_lines_of_the_readme_train_and_explain(shown, capsys):
    adopted, explained, asked = shown
    assert parser().parse_args(asked.text.split()[1:]).run and asked.text in text_of("docs/command.md")
    lines = adopted.text.split("\n")
    assert (adopted.language, explained.language) == ("diff", "python")
    assert len(lines) == 6 and [line[0] for line in lines].count("+") == 1
    model, loader = tiny_llama()
    before = model.lm_head.weight.detach().clone()
    scope = {"torch": torch, "model": model, "loader": loader}
    run("\n".join(line[1:] for line in lines), scope)
    (program,) = l2l_compile.programs(scope["model"])
    assert [s.micro_batches for s in program.segments if s.block.inner_looped] == [8] * 4
    assert not torch.equal(model.lm_head.weight, before)
    run(explained.text, scope)
    assert "x2" in capsys.readouterr().out


@checks("docs/updates.md: Overlapped updates")
def test_the_lines_on_updates_run(shown):
    (block,) = shown
    torch.manual_seed(0)
    model, loader = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    before = model.lm_head.weight.detach().clone()
    scope = {"torch": torch, "model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    run(block.text, scope)
    l2l_compile.synchronize(scope["model"])
    assert not torch.equal(model.lm_head.weight, before)


@checks("docs/programs.md: Reading a program")
def test_the_lines_on_programs_print(shown, capsys):
    (block,) = shown
    plain, loader = tiny_llama()
    model = torch.compile(plain, backend="l2l", options={"micro_batches": 2, "block_compiler": "eager"})
    run(block.text, {"l2l_compile": l2l_compile, "model": model, "batch": loader[0]})
    printed = capsys.readouterr().out
    assert "fetch_weights('model.layers.0')" in printed and "peak_device_bytes" in printed


@checks(
    "docs/programs.md: The page",
    "docs/simulation.md: Simulated and measured steps",
    "docs/simulation.md: Machines",
    "docs/simulation.md: A measured timeline",
)
@pytest.mark.slow(only="*Machines")
def test_the_lines_on_simulation_run(shown, tmp_path, capsys):
    (block,) = shown
    plain, loader = tiny_llama()
    compiled = torch.compile(plain, backend="l2l", options={"micro_batches": 2, "block_compiler": "eager", "device": "cpu"})
    found = l2l_compile.simulate(plain, "h200", {"micro_batches": 2})(**loader[0])
    scope = {"l2l_compile": l2l_compile, "model": plain, "compiled": compiled, "batch": loader[0], "folder": tmp_path}
    scope |= {"save_together": save_together, "found": found}
    run(block.text, scope)
    assert [*tmp_path.glob("*.json"), *tmp_path.glob("*.html")] and scope["found"].seconds > 0
    if "print" in block.text:
        assert capsys.readouterr().out.startswith("simulated on NVIDIA H200 SXM: ")


def lightning_module(lightning, model):
    """A LightningModule around a model of transformers."""

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    return Module()


@pytest.mark.filterwarnings("ignore")  # those of Lightning
@checks("docs/loops.md: Trainer and SFTTrainer", "docs/loops.md: Accelerate", "docs/loops.md: Lightning")
def test_the_lines_on_loops_run(shown, tmp_path, monkeypatch):
    """`model`, `optimizer`, data and arguments are the user's."""
    (block,) = shown
    monkeypatch.chdir(tmp_path)  # where Lightning writes its checkpoints
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    model, loader = tiny_llama()
    rows = [{name: values[row] for name, values in loader[0].items()} for row in range(4)]
    scope = {"transformers": transformers, "accelerate": accelerate, "model": model, "train": rows, "test": rows}
    scope["arguments"] = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=1, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    scope["loader"] = torch.utils.data.DataLoader(rows, batch_size=2)
    scope["optimizer"] = torch.optim.SGD(model.parameters(), lr=1.0)
    scope |= {"lightning": lightning, "module": lightning_module(lightning, model)}
    before = model.lm_head.weight.detach().clone()
    run(block.text, scope)
    model.state_dict()  # waits
    assert not torch.equal(model.lm_head.weight, before) and l2l_compile.programs(model)


@pytest.mark.filterwarnings("ignore")  # of PEFT
@checks("docs/recipes.md: Llama-3-8B on 24 GB and 128 GB", "docs/recipes.md: Full fine-tuning", "docs/recipes.md: LoRA")
def test_the_lines_of_the_recipes_run(shown, tmp_path, capsys):
    """On a folder with a tiny Llama in bf16. Full fine-tuning keeps fp32 parameters, and LoRA trains adapters alone."""
    *commands, block = shown
    for line in (line for block in commands for line in block.text.splitlines()):
        program, *words = line.split()
        assert program in PROJECT["project"]["scripts"] and parser().parse_args(words).run
    plain, loader = tiny_llama()
    plain.to(torch.bfloat16).save_pretrained(tmp_path)
    code = block.text.replace("meta-llama/Meta-Llama-3-8B", str(tmp_path)).replace("8, 2048", "8, 4")
    scope = {"torch": torch, "transformers": transformers, "l2l_compile": l2l_compile, "loader": loader}
    run(code, scope)
    if "explain" in code:
        printed = capsys.readouterr().out
        assert printed.startswith("device memory at its peak") and "simulated on NVIDIA GeForce RTX 4090" in printed
        return
    l2l_compile.synchronize(scope["model"])
    trained = {name for name, p in scope["model"].named_parameters() if p.requires_grad}
    assert all(p.dtype == torch.float32 for p in scope["model"].parameters() if p.requires_grad)
    assert all("lora" in name for name in trained) == ("peft" in code)
    assert len(scope["optimizer"].state) == len(trained)


@pytest.mark.filterwarnings("ignore")  # of PEFT and bitsandbytes
@checks("docs/quantized.md: Quantized weights")
def test_the_lines_on_quantized_weights_run(shown, tmp_path):
    """On a folder with a tiny Llama. The base is in 4 bits, and adapters alone are trained."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    block, asked = shown
    program, *words = asked.text.split()
    assert program in PROJECT["project"]["scripts"] and parser().parse_args(words).run
    plain, loader = tiny_llama()
    plain.save_pretrained(tmp_path)
    code = block.text.replace("meta-llama/Meta-Llama-3-8B", str(tmp_path))
    scope = {"torch": torch, "transformers": transformers, "l2l_compile": l2l_compile, "loader": loader}
    run(code, scope)
    l2l_compile.synchronize(scope["model"])
    stored = {p.dtype for name, p in scope["model"].named_parameters() if name.endswith("base_layer.weight")}
    assert stored == {torch.uint8} and len(scope["optimizer"].state) == sum(p.requires_grad for p in scope["model"].parameters())


@checks("docs/generation.md: Generation")
def test_the_lines_on_generation_run(shown, tmp_path):
    """On a folder with a tiny Llama."""
    (block,) = shown
    plain, loader = tiny_llama()
    plain.save_pretrained(tmp_path)
    scope = {"torch": torch, "transformers": transformers, "prompts": {"input_ids": loader[0]["input_ids"]}}
    run(block.text.replace("meta-llama/Meta-Llama-3-8B", str(tmp_path)).replace("=64", "=3"), scope)
    assert len(scope["tokens"][0]) == len(loader[0]["input_ids"][0]) + 3 and l2l_compile.programs(scope["model"])


@checks("docs/keeping.md: Keeping activations")
def test_the_line_on_keeping_runs(shown):
    (block,) = shown
    plain, (batch, _) = tiny_llama()
    scope = {"torch": torch, "plain": plain}
    run(block.text, scope)
    scope["model"](**batch).loss.backward()
    assert session.session_of(scope["model"]).options.keep == 20 * 10**9


@checks("docs/keeping.md: On the host")
def test_the_line_on_keeping_on_the_host_is_taken(shown):
    (block,) = shown
    scope: dict = {}
    run(block.text, scope)
    assert Options.build(scope["options"]).keep_on_host == "auto"


@checks("docs/keeping.md: Weights")
def test_the_line_on_weights_that_stay_runs(shown):
    (block,) = shown
    plain, (batch, _) = tiny_llama()
    scope = {"torch": torch, "plain": plain}
    run(block.text, scope)
    scope["model"](**batch).loss.backward()
    assert l2l_compile.programs(scope["model"])[0].resident


@checks("docs/disk.md: Models larger than host memory")
def test_the_lines_on_a_disk_train(shown, tmp_path):
    (block,) = shown
    model, (batch, _) = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    scope = {"torch": torch, "model": model, "optimizer": optimizer}
    run(block.text.replace("/nvme", str(tmp_path)), scope)
    scope["model"](**batch).loss.backward()
    optimizer.step()
    assert session.session_of(scope["model"]).options.host_memory == 24 * 10**9


@checks("docs/disk.md: Stashes")
def test_the_lines_on_stashes_train(shown, tmp_path):
    (block,) = shown
    model, (batch, _) = tiny_llama()
    scope = {"torch": torch, "model": model}
    run(block.text.replace("/nvme", str(tmp_path)), scope)
    scope["model"](**batch).loss.backward()
    (program,) = l2l_compile.programs(scope["model"])
    assert "store(" in str(program) and session.session_of(scope["model"]).stashes_on_disk is not None


@checks("docs/disk.md: A model that is larger than memory from the start")
def test_the_lines_on_a_large_model_train_what_they_load(shown, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    (block,) = shown
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    saved = LlamaForCausalLM(LlamaConfig(vocab_size=3000, hidden_size=128, **sizes))
    saved.save_pretrained(tmp_path)
    scope = {"torch": torch, "l2l_compile": l2l_compile, "folder": tmp_path}
    scope |= {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}
    run(block.text.replace("/nvme", str(tmp_path)), scope)
    assert all(map(torch.equal, scope["model"].parameters(), saved.parameters()))
    batch = torch.arange(12).view(2, 6)
    scope["model"](input_ids=batch, labels=batch).loss.backward()
    scope["optimizer"].step()
    placed = session.session_of(scope["model"]).server.updates._stored.plan
    assert placed.masters == 2 * 3000 * 128 * 4, "the embedding and the head"


@checks("docs/disk.md: Frozen weights where they are")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_the_lines_on_weights_in_place_train_adapters(shown, tmp_path):
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    (block,) = shown
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    saved = LlamaForCausalLM(LlamaConfig(vocab_size=3000, hidden_size=256, **sizes)).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    scope = {"torch": torch, "l2l_compile": l2l_compile, "folder": tmp_path, "peft": peft}
    scope |= {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}
    run(block.text, scope)
    batch = torch.arange(12).view(2, 6)
    report = l2l_compile.explain(scope["model"])(input_ids=batch, labels=batch)
    assert report.host_memory.in_place == 2 * 3000 * 256 * 2, "the embedding and the head"
    scope["model"](input_ids=batch, labels=batch).loss.backward()
    scope["optimizer"].step()
    assert torch.equal(scope["model"].get_input_embeddings().weight, saved.model.embed_tokens.weight)


@checks("docs/disk.md: After a kill")
def test_the_lines_on_a_kill_continue(shown, tmp_path):
    """Twice: the first time for some steps, and then for the others, in a copy of the folder."""
    (block,) = shown
    folder = tmp_path / "0"
    folder.mkdir()
    for steps, begins in (3, 0), (5, 3):
        model, batches = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        scope = {"torch": torch, "l2l_compile": l2l_compile, "model": model, "optimizer": optimizer, "scheduler": scheduler}
        scope["batches"] = batches * 3
        run(block.text.replace("/nvme/run7", str(folder)).replace("1000", str(steps)), scope)
        session.session_of(scope["model"]).server.updates.await_commit()
        folder = shutil.copytree(folder, tmp_path / str(steps))
        assert scope["run"].steps == begins and scheduler.last_epoch == steps


@checks("docs/disk.md: Checkpoints without a copy")
def test_the_lines_on_versions_keep_the_last_three(shown, tmp_path):
    """And a new process goes on from one of them."""
    (block,) = shown
    text = block.text.replace("/nvme/run7", str(tmp_path)).replace("1000", "5").replace("% 100", "% 1")

    def begun(version=None):
        gc.collect()  # a run that is over leaves the folder
        model, batches = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters())
        options = {"optimizer": optimizer, "update": "in_forward", "disk": tmp_path, "resumable": True}
        compiled = torch.compile(model, backend="l2l", options=options)
        scope = {"l2l_compile": l2l_compile, "model": compiled, "optimizer": optimizer, "batches": batches * 3}
        return {**scope, "run": l2l_compile.resume(compiled, version)}

    run(text, begun())
    assert [each.extra["step"] for each in l2l_compile.versions(tmp_path).values()] == [2, 3, 4]
    assert begun("step-4")["run"].steps == 4


@checks("docs/disk.md: Several disks")
@pytest.mark.filterwarnings("ignore:.*are on one device")
def test_the_lines_on_several_disks_train(shown, tmp_path):
    (block,) = shown
    model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.Linear(512, 512), torch.nn.Linear(512, 1))
    scope = {"torch": torch, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    run(block.text.replace("/nvme", f"{tmp_path}/").replace("24GB", "13.2MiB"), scope)
    scope["model"](torch.ones(4, 8)).sum().backward()
    scope["optimizer"].step()
    stored = session.session_of(scope["model"]).server.updates._stored
    assert stored.store.file.folders == (f"{tmp_path}/0", f"{tmp_path}/1") and stored.plan.states == 2 * 512 * 512 * 4


@checks("docs/disk.md: Several ranks")
def test_the_lines_on_disks_of_ranks_keep_a_half_each(shown, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    (block,) = shown
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        scope = {"torch": torch, "init_device_mesh": init_device_mesh, "l2l_compile": l2l_compile, "model": model}
        run(block.text.replace("/nvme", str(tmp_path)), scope)
        plan = l2l_compile.explain(scope["model"])(torch.randn(4, 8)).host_memory.disk
    finally:
        torch.distributed.destroy_process_group()
    assert plan.budget == 24 * 10**9 and sum(size.master for size in plan.sizes) == 3 * (8 * 8 + 8) * 4 // 2


INSTALLING = [block for block in BLOCKS if block.document == "docs/installing.md"]
CHECKED.update(INSTALLING)


def test_the_lines_on_installing_name_extras_that_there_are():
    (block,) = INSTALLING
    named = re.findall(r"\[(\w+)\]", block.text)
    assert named and set(named) <= set(PROJECT["project"]["optional-dependencies"])
    assert all(line.startswith("pip install ") for line in block.text.splitlines())


@checks("docs/command.md: The command `l2l`")
def test_commands_of_the_package_are_parsed(shown):
    (block,) = shown
    for line in block.text.splitlines():
        program, *words = line.split()
        assert program in PROJECT["project"]["scripts"] and parser().parse_args(words).run


@pytest.mark.slow
@checks(
    "docs/command.md: Llama-3-8B on a 24 GB card",
    "docs/generation.md: How long a text takes",
    "docs/keeping.md: What is kept",
    "docs/planning.md: A model from its config",
    "docs/planning.md: Several devices",
)
def test_answers_about_a_card_are_those_of_the_command(shown, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for asked, answer in zip(shown[::2], shown[1::2], strict=True):
        program, *words = asked.text.split()
        assert program in PROJECT["project"]["scripts"]
        status = command(words)
        printed = capsys.readouterr().out
        assert status == int("too large" in printed)  # another step than the one that is asked for, or none
        if not same_but_for_rounded_seconds(answer.text, printed.strip()):
            compare(answer, printed.strip())


@pytest.mark.parametrize(
    ("printed", "same"), [("10.6 s, 2.1%", True), ("10.61 s, 2.1%", True), ("10.9 s, 2.1%", False), ("10.6 s, 2.2%", False)]
)
def test_seconds_are_compared_but_for_their_last_digits(printed, same):
    assert same_but_for_rounded_seconds("10.6 s,   2.1%", printed) == same


@checks("docs/planning.md: In code")
def test_the_lines_on_plans_run(shown, capsys):
    (block,) = shown
    model, loader = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scope = {"l2l_compile": l2l_compile, "model": model, "batch": loader[0], "optimizer": optimizer}
    exec(block.text, scope)
    assert "on NVIDIA GeForce RTX 4090: " in capsys.readouterr().out
    assert l2l_compile.Options.build({**scope["options"], "device": "cpu"}).precision == "bf16"


@checks("docs/planning.md: In the first step")
def test_the_lines_on_a_plan_in_the_first_step_train(shown):
    (block,) = shown
    model, loader = tiny_llama()
    scope = {"torch": torch, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    exec(block.text, scope)
    with pytest.warns(UserWarning, match="has planned for"):
        scope["model"](**loader[0]).loss.backward()
    assert l2l_compile.programs(scope["model"])


def test_options_that_are_decided_have_a_row():
    rows = rows_below("docs/planning.md", "What is decided")
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[0])} == set(DECIDED)


@checks("docs/simulation.md: Several devices")
def test_the_lines_on_several_devices_run(shown, capsys):
    (block,) = shown
    model, loader = tiny_llama()
    scope = {"l2l_compile": l2l_compile, "model": model, "batch": loader[0]}
    run(block.text, scope)
    assert capsys.readouterr().out.startswith("simulated on one of 16 ranks on NVIDIA H200 SXM: ")
    assert scope["found"].busy("comm") > 0 < scope["found"].tokens_per_second


@checks("docs/pipelines.md: How long a step takes")
def test_the_lines_on_a_pipeline_in_time_run(shown, tmp_path, capsys):
    (block,) = shown
    model, loader = tiny_llama()
    scope = {"l2l_compile": l2l_compile, "model": model, "batch": loader[0], "folder": tmp_path}
    run(block.text, scope)
    assert capsys.readouterr().out.startswith("simulated on a pipeline of 4 ranks on NVIDIA H200 SXM: ")
    assert len(scope["found"].stages) == 4 and (tmp_path / "step.json").exists()


def test_machines_of_the_package_are_named():
    (named,) = re.findall(r"come with the package: (.*?)\. Case", " ".join(text_of("docs/simulation.md").split()))
    assert sorted(re.findall(r"`([\w-]+)`", named)) == names()
    (connected,) = re.findall(r"Only (`.*?) have figures of a network", " ".join(text_of("docs/simulation.md").split()))
    assert sorted(re.findall(r"`([\w-]+)`", connected)) == sorted(n for n in names() if Machine.load(n).network)


def test_every_figure_of_a_machine_has_a_row():
    rows = rows_below("docs/simulation.md", "A machine file")
    named = {name: row[1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert set(named) == {f.name for f in fields(Machine)}
    defaults = {f.name: f.default for f in fields(Machine) if f.name in named}
    for name, unit in named.items():
        shown = re.findall(r"default (\d)", unit)
        assert not shown or float(shown[0]) == defaults[name], name
        assert ("null" in unit) == (defaults[name] is None), name


@checks("docs/saving.md: Saving and resuming")
def test_runs_saved_as_documented_go_on_with_the_same_bits(shown, tmp_path):
    save, load = shown

    def build_model():
        return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)))

    torch.manual_seed(0)
    batches = [torch.randn(4, 8) for _ in range(4)]
    scope = {"torch": torch, "build_model": build_model, "loader": batches, "path": tmp_path / "checkpoint.pt"}
    run(save.text, scope)
    l2l_compile.synchronize(scope["model"])
    trained = scope["plain"].state_dict()
    run(load.text, scope)
    options = {"micro_batches": 2, "optimizer": scope["optimizer"], "update": "in_backward", "block_compiler": "eager"}
    model = torch.compile(scope["plain"], backend="l2l", options=options)
    for batch in batches[2:]:
        model(batch).pow(2).mean().backward()
        scope["optimizer"].step()
        scope["optimizer"].zero_grad()
    for name, value in scope["plain"].state_dict().items():
        assert torch.equal(value, trained[name]), name


@checks("docs/saving.md: A run that is told to stop")
def test_a_run_that_is_told_to_stop_saves_behind_its_step(shown, tmp_path):
    """The signal comes in the middle of the second forward."""
    (block,) = shown
    plain = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    options = {"micro_batches": 2, "optimizer": optimizer, "update": "in_forward", "block_compiler": "eager"}
    scope = {"torch": torch, "plain": plain, "optimizer": optimizer, "path": tmp_path / "checkpoint.pt"}
    scope["model"], scope["loader"] = torch.compile(plain, backend="l2l", options=options), [torch.randn(4, 8)] * 4
    forwards = itertools.count()
    begin = session.Session.begin_forward

    def interrupted(own):
        if next(forwards) == 1:
            signal.raise_signal(signal.SIGTERM)
        return begin(own)

    before = signal.getsignal(signal.SIGTERM)
    with mock.patch.object(session.Session, "begin_forward", interrupted):
        try:
            run(block.text, scope)
        finally:
            signal.signal(signal.SIGTERM, before)
    saved = torch.load(scope["path"])
    assert next(forwards) == 2 and saved["optimizer"]["state"][0]["step"] == 2
    assert all(torch.equal(value, saved["model"][name]) for name, value in plain.state_dict().items())


@checks("docs/ranks.md: Many devices", "docs/ranks.md: Saving")
def test_the_lines_on_ranks_run_in_two_processes(shown, launcher, tmp_path):
    check = 'assert plain._modules["layers"][0]._parameters["weight"].to_local().shape == (4, 8)'
    run_in_processes(lines_from("docs/ranks.md: Many devices", shown), check, launcher, tmp_path)


@checks("docs/pipelines.md: Pipelines", "docs/pipelines.md: Saving")
def test_the_lines_on_pipelines_run_in_two_processes(shown, launcher, tmp_path):
    check = "assert len(list(plain.parameters())) == 4"
    run_in_processes(lines_from("docs/pipelines.md: Pipelines", shown), check, launcher, tmp_path)


@checks("docs/pipelines.md: A folder for transformers")
def test_the_lines_on_a_folder_of_a_pipeline_run(shown, launcher, tmp_path):
    begins, _ = lines_from("docs/pipelines.md: Pipelines", []).split("l2l_compile.pipeline(")
    makes = """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
plain = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, use_cache=False, **sizes))
tokens = torch.randint(0, 8, (4, 5))
l2l_compile.pipeline(plain, mesh["pp"], {"input_ids": tokens, "labels": tokens})
"""
    check = """
found = LlamaForCausalLM.from_pretrained(folder)
assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in plain.state_dict().items())
assert 0 < len(plain.state_dict()) < len(found.state_dict())
"""
    run_in_processes(f"{begins}{makes}{shown[0].text}", check, launcher, tmp_path)


@checks("docs/pipelines.md: One forward, one back")
def test_the_lines_on_one_forward_one_back_run(shown, launcher, tmp_path):
    first = lines_from("docs/pipelines.md: Pipelines", []).split("\n")
    division, *compiles = (
        shown[0].text.replace('"micro_batches":', '"device": "cpu", "block_compiler": "eager", "micro_batches":').split("\n")
    )
    lines = []
    for line in first:
        lines += [division] if line.startswith("l2l_compile.pipeline(") else compiles if line.startswith("model =") else [line]
    check = "assert l2l_compile.programs(model)[0].step is not None and len(list(plain.parameters())) == 4"
    run_in_processes("\n".join(lines), check, launcher, tmp_path)


@checks("docs/pipelines.md: Without a flush")
def test_the_lines_without_a_flush_run(shown, launcher, tmp_path):
    begins, _ = lines_from("docs/pipelines.md: Pipelines", []).split("l2l_compile.pipeline(")
    loop = shown[0].text.replace('"micro_batches": 8', '"micro_batches": 2, "device": "cpu", "block_compiler": "eager"')
    check = "assert len(losses) == 2 and l2l_compile.programs(model)[0].schedule is not None"
    run_in_processes(f"{begins}{loop}", check, launcher, tmp_path)


@checks("docs/pipelines.md: A schedule of one's own")
def test_the_schedules_shown_are_read(shown):
    lines, without_a_flush = shown
    scope = {"l2l_compile": l2l_compile}
    run(lines.text, scope)
    assert Options.build(scope["options"]).schedule.in_flight(0) == 2
    assert without_a_flush.text.strip() == str(without_flush(2, 3))


@checks("docs/pipelines.md: Width and depth")
def test_the_lines_on_width_and_depth_run_in_four(shown, launcher, tmp_path):
    """With two stages in place of four."""
    begins, trains = lines_from("docs/pipelines.md: Pipelines", []).split("mesh = ")
    division = shown[0].text.replace("(2, 4)", "(2, 2)")
    code = f"{begins}{division}\n{trains[trains.index('optimizer =') :]}"
    check = "assert [tuple(p.to_local().shape) for p in plain.parameters()] == [(4, 8), (4,)] * 2"
    run_in_processes(code, check, launcher, tmp_path, size=4)


def lines_from(start: str, shown: list) -> str:
    """The first lines of a document, which train, and behind them the lines shown, if these are others."""
    (first,) = [block for block in BLOCKS if f"{block.document}: {block.heading}" == start]
    code = first.text.replace('"micro_batches":', '"device": "cpu", "block_compiler": "eager", "micro_batches":')
    return "\n".join([code, *(block.text for block in shown if block != first)])


def run_in_processes(code: str, check: str, launcher, folder, size: int = 2) -> None:
    """Run lines in processes of `torch.distributed`, and then a check in each."""
    script = f"""
import collections, os
children = []
while len(children) < {size - 1} and 0 not in children:
    children.append(os.fork())
rank = 0 if 0 not in children else len(children)
os.environ.update(RANK=str(rank), WORLD_SIZE="{size}", MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
import torch, torch.distributed, torch.distributed.checkpoint as dcp, l2l_compile
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
torch.set_num_threads(1)
torch.manual_seed(0)
folder = {str(folder / "checkpoint")!r}
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return Loss(x.pow(2).mean())
Loss = collections.namedtuple("Loss", "loss")
plain, loader = Model(), [{{"x": torch.randn(4, 8)}} for _ in range(2)]
batch = loader[0]
init = torch.distributed.init_process_group
torch.distributed.init_process_group = lambda kind: init(
    kind, store=torch.distributed.FileStore({str(folder / "store")!r}, {size}), rank=rank, world_size={size})
exec({code!r})
{check}
torch.distributed.barrier()
if rank == 0:
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * {size - 1}
"""
    done = launcher.run(script, seconds=100)
    assert done.returncode == 0, done.stderr[-2000:]


@checks("docs/ranks.md: A pretrained model", "docs/ranks.md: A folder for transformers")
def test_the_lines_on_a_pretrained_model_fill_it_and_save_it(shown, tmp_path):
    """Those that save run behind those that fill it."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    saved, dist = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, **sizes)), torch.distributed
    saved.save_pretrained(tmp_path / "model")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        scope = {"folder": tmp_path / "model", "mesh": init_device_mesh("cpu", (1,)), "torch": torch, "l2l_compile": l2l_compile}
        scope |= {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}
        (fill,) = [block for block in BLOCKS if (block.document, block.heading) == ("docs/ranks.md", "A pretrained model")]
        run(fill.text, scope)
        found = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in scope["plain"].state_dict().items()}
        if shown != [fill]:
            run(shown[0].text, scope | {"dist": dist, "folder": tmp_path / "written"})
            found = LlamaForCausalLM.from_pretrained(tmp_path / "written").state_dict()
        for name, value in saved.state_dict().items():
            assert torch.equal(found[name], value), name
    finally:
        dist.destroy_process_group()


@checks("docs/ranks.md: Several hosts")
def test_the_lines_on_several_hosts_divide_a_model_within_each(shown):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    (block,) = shown
    dist, plain = torch.distributed, torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=6)
    try:
        scope = {"dist": dist, "init_device_mesh": init_device_mesh, "l2l_compile": l2l_compile, "plain": plain}
        run(block.text, scope)
        (program,) = l2l_compile.explain(plain, {"device": "cpu", "micro_batches": 2})(torch.randn(4, 8)).programs
    finally:
        dist.destroy_process_group()
    assert scope["hosts"] == 3 and program.captured.shards == 2 and plain[0]._parameters["weight"].to_local().shape == (4, 8)


@checks("docs/ranks.md: Tensor parallel layers")
def test_the_lines_on_tensor_parallel_layers_give_a_program(shown):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    dist = torch.distributed
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        scope = {"plain": torch.nn.Module(), "dist": dist, "l2l_compile": l2l_compile, **vars(dist.device_mesh)}
        scope["plain"].layers = torch.nn.Sequential(Layer(), Layer())
        exec(shown[0].text, scope)
        (program,) = l2l_compile.explain(scope["plain"].layers, {"micro_batches": 2, "device": "cpu"})(torch.randn(4, 8)).programs
    finally:
        dist.destroy_process_group()
    fetched = {line.split()[-2] for line in str(program).splitlines() if "fetch_weights(" in line}
    assert program.captured.shards == 2 and fetched == {str(4 * (4 * 8 + 4 + 4 * 8 + 4))}  # of 8 x 16 + 16 + 16 x 8 + 8 entries


@checks(
    "README.md: Install",
    "CONTRIBUTING.md: Contributing",
    "docs/benchmarks.md: Benchmarks",
    "docs/coverage.md: Coverage",
    "docs/saving.md: A run that may be killed",
)
def test_commands_name_what_there_is(shown):
    """Targets of make, extras of the package, scripts and their options."""
    (block,) = shown
    for line in block.text.split("\n"):
        words = line.split("#")[0].split()
        if words[0] == "make":
            assert subprocess.run(["make", "-n", words[1]], cwd=ROOT, capture_output=True).returncode == 0, line
        elif words[0] == "pip":
            (extra,) = re.findall(r"\[(\w+)\]", line)
            assert extra in PROJECT["project"]["optional-dependencies"], line
        else:
            assert words[0] == "python", line
            script = (ROOT / words[1]).read_text()
            assert all(f'"{word}"' in script for word in words[2:] if word.startswith("--")), line


def test_recipes_name_files_and_identifiers_that_exist():
    """Each row of a recipe: a file or a folder of the repository, and identifiers that occur in it or in a file that the row names."""
    rows = re.findall(
        r"^\| ((?:a new|the file|a pass)?[^|]*`[^|]*) \| ([^|]*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 15
    for files, change in rows:
        named = re.findall(r"`([\w/.]+/[\w/.]*)`", f"{files} {change}") + re.findall(r"\(([\w/]+\.md)\)", files)
        assert named and all((ROOT / path).exists() for path in named), files
        sources = [path for name in named for path in (ROOT / name, *(ROOT / name).glob("*.py")) if path.is_file()]
        text = "".join(path.read_text() for path in sources)
        for identifier in re.findall(r"`@?(\w+)[^`/]*`", change):
            assert re.search(rf"\b{identifier}\b", text), f"{identifier}: not in {files}"


@checks("ARCHITECTURE.md: Pipeline overview")
def test_the_overview_names_the_folders(shown):
    """Those that a model goes through, and the folders of passes in the order of the pipeline."""
    (block,) = shown
    named = [
        word
        for word in re.findall(r"\w+", block.text)
        if (ROOT / "l2l_compile" / word).is_dir() or (ROOT / "passes" / word).is_dir()
    ]
    stages = list(dict.fromkeys(step.__module__.split(".")[2] for step in map(type, PIPELINE)))
    assert [name for name in named if name in stages] == stages
    assert set(named) >= {"frontend", "lowering", "runtime", "devices", "host"}


# ---- what is printed -------------------------------------------------------------------------------------------------


def normal(line: str) -> str:
    """A line without the widths of its columns; the names of Dynamo's symbols do not count."""
    return re.sub(r"\bs\d+\b", "s", " ".join(line.split()))


def same_but_for_rounded_seconds(shown: str, printed: str) -> bool:
    """Whether two texts are the same but for layout and the last digits of seconds, which differ from run to run."""
    seconds = re.compile(r"(\d+(?:\.\d+)?) s\b")
    texts = [[normal(line) for line in text.split("\n")] for text in (shown, printed)]
    without = [[seconds.sub("seconds", line) for line in text] for text in texts]
    figures = [[float(figure) for line in text for figure in seconds.findall(line)] for text in texts]
    return without[0] == without[1] and figures[0] == pytest.approx(figures[1], rel=0.01)


def compare(shown: Fenced, printed: str) -> None:
    """Compare a block with what is printed today, or write it anew."""
    if UPDATE:
        path = ROOT / shown.document
        path.write_text(
            path.read_text().replace(f"```{shown.language}\n{shown.text}\n```", f"```{shown.language}\n{printed}\n```")
        )
    else:
        assert [normal(line) for line in shown.text.split("\n")] == [normal(line) for line in printed.split("\n")]


@checks("docs/programs.md: A report")
def test_the_report_of_the_quickstart(shown, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--device", "cpu"])
    arguments = quickstart.parse_arguments()
    tokens = torch.zeros(arguments.batch, arguments.context, dtype=torch.int64)
    options = {"micro_batches": arguments.micro_batches, "device": "cpu"}
    report = l2l_compile.explain(quickstart.build_model(arguments), options)(input_ids=tokens, labels=tokens)
    compare(*shown, str(report))


@checks("docs/programs.md: A program")
def test_the_program_of_a_transformer(shown):
    compare(*shown, str(page_picture.program_of_a_small_step()))
    assert UPDATE or str(l2l_compile.Program.parse(shown[0].text)) == shown[0].text


@checks("docs/ranks.md: What a rank does")
def test_the_program_of_two_ranks(shown):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.pow(2).mean()

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = l2l_compile.shard(Model(), init_device_mesh("cpu", (2,)))
        (program,) = l2l_compile.explain(model, {"micro_batches": 2, "device": "cpu"})(torch.randn(8, 64)).programs
    finally:
        torch.distributed.destroy_process_group()
    compare(*shown, str(program))
    assert UPDATE or str(l2l_compile.Program.parse(shown[0].text)) == shown[0].text


@checks("docs/pipelines.md: Who gets what", "docs/pipelines.md: What a rank does")
def test_the_stages_of_two_ranks(shown):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.pow(2).mean()

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with torch.device("meta"):
            plain = Model()
        x = torch.randn(8, 64)
        model = l2l_compile.pipeline(plain, init_device_mesh("cpu", (2,)), x)
        report = l2l_compile.explain(model, {"micro_batches": 2, "device": "cpu"})(x)
    finally:
        torch.distributed.destroy_process_group()
    text = str(report)
    for block in shown:
        if block.heading == "Who gets what":
            compare(block, text[text.index("pipeline of") :])
        else:
            compare(block, str(report.programs[0]))
            assert UPDATE or str(l2l_compile.Program.parse(block.text)) == block.text


def test_the_picture_is_small_and_as_wide_as_the_script_takes_it():
    """tests/page/test_page.py takes it anew where there is a browser."""
    picture = (ROOT / "docs" / "page.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and int.from_bytes(picture[16:20], "big") == page_picture.PIXELS
    assert len(picture) < 200_000


# ---- names and numbers -----------------------------------------------------------------------------------------------


def test_the_readme_is_short():
    assert len(text_of("README.md").encode()) <= 8192


def anchors(path: Path) -> set[str]:
    """The anchors that a page gives its headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", document.read_text()):
        name, _, anchor = link.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_folders_that_are_named_exist(document):
    written = document.read_text()
    for name in re.findall(r"`([\w./-]+\.(?:py|md|svg|toml))`", written):
        assert any(path == name or path.endswith(f"/{name}") for path in FILES), name
    for name in re.findall(r"`([\w./-]+)/`", written):
        assert any((folder / name).is_dir() for folder in (ROOT, ROOT / "l2l_compile")), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_names_of_the_package_exist(document):
    for name in re.findall(r"\bl2l_compile\.(\w+)", document.read_text()):
        assert hasattr(l2l_compile, name) or importlib.import_module(f"l2l_compile.{name}"), name


def test_the_users_glossary_is_part_of_the_architectures():
    """Row for row, so that there are no two meanings of a word."""
    rows, source = rows_below("docs/glossary.md", "Glossary"), rows_below("ARCHITECTURE.md", "Glossary")
    assert len(rows) > 15 and all(row in source for row in rows)
    assert "docs/glossary.md" in text_of("README.md") and "(glossary.md)" in text_of("docs/programs.md")


def rows_below(document: str, heading: str) -> list[list[str]]:
    """The cells of the tables under a heading, without the first row of each."""
    _, _, below = text_of(document).partition(f" {heading}\n")
    below = re.split(r"^#", below, maxsplit=1, flags=re.MULTILINE)[0]
    lines = below.split("\n")
    rules = {i for i, line in enumerate(lines) if line.startswith("|--")}
    return [
        [c.strip() for c in line.strip("|").split("|")]
        for i, line in enumerate(lines)
        if line.startswith("|") and not {i, i + 1} & rules
    ]


def described(path: Path) -> str:
    """The first line of a module's docstring, without its period: "`options`: ..."."""
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
    assert first.endswith("."), path
    return first[:-1].replace("|", "\\|")


def file_tables() -> str:
    """A table for each folder of the package, in the order of its floors: from the command down to errors."""
    floors = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    order = [name for floor in floors for name in floor.split(" | ")]
    package, texts = ROOT / "l2l_compile", []

    def key(path: Path) -> tuple:
        return (order.index(path.stem) if path.stem in order else -1, path.stem)

    def write(folder: Path) -> None:
        entries = [
            path for path in folder.iterdir() if path.name != "__init__.py" and not path.name.startswith((".", "__pycache__"))
        ]
        entries.sort(key=key if folder == package else lambda path: (path.stem,))
        rows = [f"| `{path.name}` | {described(path)} |" for path in entries if path.suffix == ".py"]
        shown = folder.resolve().relative_to(ROOT).as_posix()
        texts.append(
            "\n".join([f"### `{shown}/`\n\n{described(folder / '__init__.py')}.\n\n| file | contents |\n|---|---|", *rows, ""])
        )
        for path in entries:
            if (path / "__init__.py").is_file():
                write(path)

    write(package)
    return "\n".join(texts)


def test_file_tables_are_made_from_docstrings():
    text = text_of("ARCHITECTURE.md")
    start, end = text.index("### `l2l_compile/`"), text.index("### `tests/` and `examples/`")
    written = text[:start] + file_tables() + "\n" + text[end:]
    if UPDATE:
        (ROOT / "ARCHITECTURE.md").write_text(written)
    else:
        assert text == written, "UPDATE_DOCUMENTS=1 pytest tests/test_documents.py writes the tables anew"


def test_every_option_has_a_row():
    rows = {row[0].strip("`"): row[2] for row in rows_below("docs/options.md", "Options")}
    assert list(rows) and set(rows) == {field.name for field in fields(Options)}
    defaults = {field.name: field.default for field in fields(Options)}
    shown = {name: default for name, default in rows.items() if default.startswith("`")}
    assert {name: default.strip("`").replace('"', "'") for name, default in shown.items()} == {
        n: repr(defaults[n]) for n in shown
    }
    assert {name for name in rows.keys() - shown.keys() if defaults[name]} == {"device"}  # the accelerator, if there is one


def test_every_node_has_a_row():
    rows = rows_below("docs/programs.md", "A program")
    named = set(re.findall(r"(\w+)\(", " ".join(row[0] for row in rows)))
    assert named == {function.__name__ for function in nodes.VOCABULARY} - {"getitem"}


def test_every_flag_of_a_value_has_a_row():
    rows = rows_below("docs/programs.md", "A program")
    named = {name for row in rows for name in re.findall(r"`([\w ]+)`", row[0])}
    for flag in (text.SPLIT, text.EQUAL_ROWS, text.GRADIENT, text.STREAMED, text.COMPUTES_IN, text.PARTIAL):
        assert any(name.startswith(flag) for name in named), flag


def test_figures_of_the_last_step_are_named():
    (row,) = (row for row in rows_below("docs/programs.md", "Reading a program") if "stats" in row[0])
    named = set(re.findall(r"`(\w+)`", row[1])) - {"optimizer", "at_step", "max_grad_norm", "None"}
    of_options = ("kept_bytes", "kept_on_host_bytes", "sent_bytes", "received_bytes")
    of_disk = (
        *("disk_fetched_bytes", "disk_read_bytes", "disk_written_bytes", "disk_wait_seconds"),
        *("disk_stash_bytes", "disk_stash_wait_seconds"),
    )
    stats = l2l_compile.Stats(**dict.fromkeys((*of_options, *of_disk), 1))
    stats.add_squares(1.0)
    assert named == {line.split()[0] for line in str(stats).split("\n")}


def test_the_readmes_measured_figure_is_among_the_benchmarks():
    (figure,) = re.findall(r"[\d,]{8,} bytes", text_of("README.md"))
    assert figure in text_of("docs/benchmarks.md")


def total(row: str) -> list[int]:
    """The numbers in the column `all` of a row of the table of coverage."""
    (line,) = (line for line in COVERAGE.split("\n") if line.startswith(f"| {row} |"))
    return [int(number) for number in re.findall(r"(\d+)(?! ?%)(?![\d.])", line.rstrip("|").rsplit("|", 1)[1].split("(")[0])]


def test_figures_of_coverage_are_those_of_its_table():
    (attempted,), (captured,) = total("attempted"), total('of these, trained by `torch.compile(backend="eager")`')
    equal, of = total("**of these, parity with l2l**")
    streamed, lists = total("**stacks streamed layer by layer**")
    assert of == captured and total("silently wrong") == [0]
    readme, coverage = " ".join(text_of("README.md").split()), [row[1] for row in rows_below("docs/coverage.md", "Coverage")]
    for sentence in (f"{attempted:,} classes", f"Of the {captured} that", f"{equal} reach eager's", "none is silently wrong"):
        assert sentence in readme
    assert coverage[1:] == [f"{attempted:,}", f"{captured}", f"{equal}", "0", f"{streamed:,} of {lists:,}"]


def test_the_version_is_written_once():
    """In `l2l_compile/__init__.py`; the changelog and the citation agree."""
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "l2l_compile.__version__"}
    assert re.findall(r"^version: (.*)$", text_of("CITATION.cff"), re.MULTILINE) == [l2l_compile.__version__]
    assert re.findall(r"^## ([\d.]+)", text_of("CHANGELOG.md"), re.MULTILINE)[0] == l2l_compile.__version__


def test_every_folder_is_installed():
    """Setuptools finds the folders with an `__init__.py`, also behind the link to `passes/`, and files of data by their patterns."""
    assert PROJECT["tool"]["setuptools"]["packages"] == {"find": {"include": ["l2l_compile*"], "namespaces": False}}
    assert (ROOT / "l2l_compile" / "passes").resolve() == ROOT / "passes"
    folders = {path.rsplit("/", 1)[0] for path in FILES if path.startswith(("l2l_compile/", "passes/")) and path.endswith(".py")}
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)
    data = PROJECT["tool"]["setuptools"]["package-data"]["l2l_compile"]
    assert data == ["py.typed", "simulation/machines/*.json", "report/page/*.html"] and all(
        list((ROOT / "l2l_compile").glob(pattern)) for pattern in data
    )
