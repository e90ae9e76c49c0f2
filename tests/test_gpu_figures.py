"""The tables of an H200 in docs/benchmarks.md are those of the runs. `UPDATE_DOCUMENTS=1` writes them anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marked_tables import assert_written

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
FIRST, SECOND = (
    json.loads((ROOT / "examples" / "benchmarks" / "runs" / f"gpu-2026-11-29-nvidia-h200-{number}.json").read_text())
    for number in (1, 2)
)
WAYS = (
    (SECOND, "resident, recompute, layers compiled", "all on the GPU, layers compiled, recomputed in backward"),
    (SECOND, "in_backward, stash=host", '`update="in_backward"`'),
    (FIRST, "at_step, stash=host", '`update="at_step"`, before the mends below'),
    (SECOND, "in_forward, stash=host", '`update="in_forward"`, before the last mend below'),
    (SECOND, 'in_backward, keep="auto", resident', '`update="in_backward", keep="auto", resident="30GB"`'),
    (SECOND, "FSDP2 with CPUOffloadPolicy", "FSDP2 with `CPUOffloadPolicy`, layers compiled, recomputed"),
    (SECOND, "resident, an eighth of the batch", "an eighth of the batch, all on the GPU"),
    (SECOND, "in_backward, stash=host, an eighth of the batch", 'an eighth of the batch, `update="in_backward"`'),
    (SECOND, "delay=1, an eighth of the batch", "an eighth of the batch, `delay=1`, before the last mend below"),
)


def figure(run, stage: str, case: str, name: str):
    (value,) = (row["value"] for row in run["stages"][stage]["rows"] if row["case"] == case and row["figure"] == name)
    return value


def speed() -> str:
    lines = ["| way | seconds a step | tokens/s | TFLOP/s of the model | device memory |", "|---|---:|---:|---:|---:|"]
    for run, case, words in WAYS:
        of = lambda name, run=run, case=case: figure(run, "speed", case, name)  # noqa: E731
        memory = f"{of('peak of device memory'):.1f} GB"
        rates = f"{of('tokens per second'):,.0f} | {of('TFLOP/s of the model'):.0f}"
        lines.append(f"| {words} | {of('step'):.2f} | {rates} | {memory} |")
    return "\n".join(lines)


def memory() -> str:
    lines = ["| layers | parameters | peak of device memory |", "|---:|---:|---:|"]
    for layers in (24, 96, 384):
        of = lambda name, case=f"{layers} layers": figure(SECOND, "memory", case, name)  # noqa: E731
        lines.append(f"| {layers} | {of('parameters'):,} | {of('peak of device memory'):,} bytes |")
    return "\n".join(lines)


def checks() -> str:
    lines = ["| stage | figures within their limits | beyond | cases not reached in the time |", "|---|---:|---:|---:|"]
    for stage in ("parity", "races", "faults"):
        found = [run["stages"][stage]["rows"] for run in (FIRST, SECOND) if stage in run["stages"]]
        within = {(row["case"], row["figure"]) for rows in found for row in rows if row["verdict"] == "ok"}
        beyond = {(row["case"], row["figure"]) for row in found[-1] if row["verdict"] in ("off", "error", "crash", "hang")}
        missed = sum(row["value"] for row in found[-1] if row["verdict"] == "not reached")
        lines.append(f"| {stage} | {len(within)} | {len(beyond)} | {missed} |")
    return "\n".join(lines)


@pytest.mark.parametrize(("name", "table"), [("speed", speed), ("memory", memory), ("checks", checks)])
def test_the_documented_figures_of_a_gpu_are_measured(name, table):
    assert_written(PAGE, f"gpu: {name}", table())
