"""docs/testing.md: its code runs, and its table is the one that its code prints."""

from __future__ import annotations

import re
from pathlib import Path

import torch

DOCUMENT = Path(__file__).parents[2] / "docs" / "testing.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


def without_figures(text: str) -> list[str]:
    """Lines whatever their order, which rounding decides; figures of rounding do not count."""
    return sorted(re.sub(r"\d\.\de[+-]\d\d", "#", line) for line in text.strip().splitlines())


def test_the_code_runs_and_prints_the_table(capsys):
    torch.manual_seed(0)
    scope = {}
    for block in blocks("python"):
        exec(block.replace('"micro_batches": 3', '"micro_batches": 3, "block_compiler": "eager", "device": "cpu"'), scope)
        printed = capsys.readouterr().out
        if "print(compare" in block:
            (shown,) = blocks("text")
            assert without_figures(printed) == without_figures(shown)
    scope["test_random_models"]()
    scope["test_my_model"]()
