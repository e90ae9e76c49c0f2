"""The figures of docs/recipes.md are those of the command `l2l` for Llama-3-8B.

`UPDATE_DOCUMENTS=1 pytest -m slow tests/test_recipes.py` writes the table anew.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from pathlib import Path

import pytest

from l2l_compile import Machine
from l2l_compile.command.asked import Asked, Settings
from l2l_compile.command.speed import Plain
from l2l_compile.planner.fit import Fit
from l2l_compile.units import format_bytes

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "docs" / "recipes.md"
UPDATE = bool(os.environ.get("UPDATE_DOCUMENTS"))
MACHINE = dataclasses.replace(Machine.load("rtx4090"), host_memory=128 * 10**9)
HEAD = "| training | device memory | host memory | on this machine | without l2l, all on the device |\n|---|---|---|---|---|\n"
WAYS = {  # of training, as a row of the table begins
    'full, `update="in_backward"`': Settings(batch=8, length=2048, update="in_backward"),
    'full, `update="in_backward"`, `accumulate=2`': Settings(batch=8, length=2048, update="in_backward", accumulate=2),
    'full, `update="in_forward"`': Settings(batch=8, length=2048),
    'LoRA of rank 16, base in bf16, `update="in_forward"`': Settings(batch=8, length=2048, lora=16),
    'LoRA of rank 16, base in NF4, `update="in_forward"`': Settings(batch=8, length=2048, lora=16, base="nf4"),
}


@functools.cache
def asked_of(lora: int | None, base: str) -> Asked:
    """Ways of training that differ in other settings alone are traced once."""
    return Asked(str(ROOT / "examples" / "llama-3-8b.json"), Settings(batch=8, length=2048, lora=lora, base=base), MACHINE)


def row_of(way: str, settings: Settings) -> str:
    asked = asked_of(settings.lora, settings.base)
    report = asked.report_of(settings)
    fit, plain = Fit.of(report, MACHINE), Plain.of(report, asked.workload_of(settings))
    verdict = "does not fit"
    if fit.fits:
        step = asked.simulated(MACHINE, settings)
        verdict = f"{step.seconds:.3g} s a step, {step.tokens_per_second:,.0f} tokens/s"
    needs = " | ".join(f"{format_bytes(need.bytes)} of {format_bytes(need.room)}" for need in fit.needs)
    alone = "fits" if plain.bytes <= MACHINE.device_room else "does not fit"
    return f"| {way} | {needs} | {verdict} | {alone}: about {format_bytes(plain.bytes)} |"


def rows_shown() -> list[str]:
    return re.findall(r"^\| (?:full|LoRA).*\|$", RECIPES.read_text(), re.MULTILINE)


def test_the_table_of_recipes_has_a_row_for_each_way():
    shown = rows_shown()
    assert [row.split(" | ")[0].removeprefix("| ") for row in shown] == list(WAYS)
    cells = [row.strip("| ").split(" | ")[-2:] for row in shown]
    assert [fits != "does not fit" for fits, _ in cells] == [True, False, False, True, True], "as the text below the table says"
    assert [alone.startswith("fits") for _, alone in cells] == [False, False, False, True, True], (
        "as the text below the table says"
    )
    for row in shown:
        assert f"of {format_bytes(MACHINE.device_room)}" in row and f"of {format_bytes(MACHINE.host_room)}" in row


def test_recipes_give_the_host_memory_of_the_table():
    """As the command reads it: GB is 10^9 bytes."""
    text = RECIPES.read_text()
    assert set(re.findall(r"--machine rtx4090 --host-memory (\S+)", text)) == {"128GB"} and "host_memory=128 * 10**9" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_figures_of_recipes_are_those_of_today():
    made = [row_of(way, settings) for way, settings in WAYS.items()]
    if UPDATE:
        before, head, after = RECIPES.read_text().partition(HEAD)
        assert head, "the table has other columns"
        after = re.sub(r"\A(?:\| .*\n)*", "", after)
        RECIPES.write_text(before + head + "".join(f"{row}\n" for row in made) + after)
    assert rows_shown() == made
