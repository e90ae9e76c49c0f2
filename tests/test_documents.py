"""What the README shows of a report and of a program is what they print."""
from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import l2l_compile

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import quickstart  # noqa: E402

README = (ROOT / "README.md").read_text()


def block_after(text: str) -> list[str]:
    """The lines of the first code block behind a piece of text."""
    _, _, behind = README.partition(text)
    assert behind, f"README does not say {text!r} any more"
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
            pytest.fail(f"README shows a line that the program has not, or has elsewhere: {line}")
        position += printed[position:].index(line) + 1
