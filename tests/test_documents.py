"""What the documents show of a report and of a program is what they print; their code runs; their links lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import l2l_compile

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import quickstart  # noqa: E402

README = (ROOT / "README.md").read_text()
INSPECTING = (ROOT / "docs" / "inspecting.md").read_text()
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def block_after(text: str) -> list[str]:
    """The lines of the first code block behind a piece of text."""
    _, _, behind = INSPECTING.partition(text)
    assert behind, f"docs/inspecting.md does not say {text!r} any more"
    return behind.split("```", 2)[1].strip("\n").split("\n")


def test_the_report_of_the_quickstart(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--device", "cpu"])
    arguments = quickstart.parse_arguments()
    tokens = torch.zeros(arguments.batch, arguments.context, dtype=torch.int64)
    options = {"micro_batches": arguments.micro_batches, "device": "cpu"}
    report = l2l_compile.explain(quickstart.build_model(arguments), options)(input_ids=tokens, labels=tokens)
    assert str(report).split("\n") == block_after("The report of the quickstart:")


def normal(line: str) -> str:
    """A line without the widths of its columns; the names of Dynamo's symbols do not count."""
    return re.sub(r"\bs\d+\b", "s", " ".join(line.split()))


def test_the_program_of_a_llama():
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=256, use_cache=False
    ))  # fmt: skip
    tokens = torch.zeros(8, 32, dtype=torch.int64)
    options = {"micro_batches": 4, "stash": "host", "device": "cpu"}
    program = l2l_compile.explain(model, options)(input_ids=tokens, labels=tokens).programs[0]
    printed = [normal(line) for line in str(program).split("\n")]
    shown = re.sub(r"\n {40,}", " ", "\n".join(block_after("long lines are wrapped:"))).split("\n")
    position = 0
    for line in map(normal, shown):
        if line not in printed[position:]:
            pytest.fail(f"docs/inspecting.md shows a line that the program has not, or has elsewhere: {line}")
        position += printed[position:].index(line) + 1


def test_the_readme_is_short():
    assert len(README.encode()) <= 8192


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(document):
    links = re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text())
    assert not [link for link in links if not (document.parent / link).exists()]


def code_blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def test_the_lines_of_the_readme_train_and_explain(capsys):
    """The line that is added, the lines around it, and the report before that."""
    (adopted,), (explained,) = code_blocks("README.md", "diff"), code_blocks("README.md", "python")
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, use_cache=False
    )
    tokens = torch.randint(32, (8, 4))
    scope = {
        "torch": torch,
        "transformers": transformers,
        "config": config,
        "loader": [{"input_ids": tokens, "labels": tokens}] * 2,
    }
    lines = [
        line[1:] for line in adopted.replace('"micro_batches": 8', '"micro_batches": 8, "block_compiler": "eager"').split("\n")
    ]
    exec("\n".join(lines), scope)
    (program,) = l2l_compile.programs(scope["model"])
    assert [s.micro_batches for s in program.segments if s.block.inner_looped] == [8] * 4
    exec(explained, scope)
    assert "x2" in capsys.readouterr().out


def test_the_lines_on_updates_run():
    (block,) = code_blocks("docs/updates.md", "python")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, use_cache=False
    )
    model, tokens = LlamaForCausalLM(config), torch.randint(32, (8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = model.lm_head.weight.detach().clone()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    scope = {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": [{"input_ids": tokens, "labels": tokens}] * 2,
    }
    exec(block.replace('"micro_batches": 8', '"micro_batches": 8, "block_compiler": "eager"'), scope)
    l2l_compile.synchronize(scope["model"])
    assert not torch.equal(model.lm_head.weight, before)


def test_what_is_saved_as_the_documents_say_goes_on_with_the_same_bits(tmp_path):
    save, load = code_blocks("docs/saving.md", "python")

    def build_model():
        return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)))

    torch.manual_seed(0)
    batches = [torch.randn(4, 8) for _ in range(4)]
    save = save.replace('"micro_batches": 2', '"micro_batches": 2, "block_compiler": "eager"')
    scope = {"torch": torch, "build_model": build_model, "loader": batches, "path": tmp_path / "checkpoint.pt"}
    exec(save, scope)
    l2l_compile.synchronize(scope["model"])
    trained = scope["plain"].state_dict()
    exec(load, scope)
    options = {"micro_batches": 2, "optimizer": scope["optimizer"], "update": "in_backward", "block_compiler": "eager"}
    model = torch.compile(scope["plain"], backend="l2l", options=options)
    for batch in batches[2:]:
        model(batch).pow(2).mean().backward()
        scope["optimizer"].step()
        scope["optimizer"].zero_grad()
    for name, value in scope["plain"].state_dict().items():
        assert torch.equal(value, trained[name]), name
