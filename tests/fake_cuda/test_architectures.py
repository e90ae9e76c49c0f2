"""Blocks are compiled by Inductor and Triton for GPUs of four architectures; ptxas says what their kernels take.

`UPDATE_DOCUMENTS=1 make cuda-kernels` writes the table in docs/cuda.md anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import real_sizes
import zoo
from compiled_kernels import Candidate, compute_capability_of

PAGE = Path(__file__).parents[2] / "docs" / "cuda.md"
BLOCK = r"(?s)(?<=<!-- kernels -->\n).*?(?=<!-- end -->)"
CAPABILITIES = (80, 89, 90, 100)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_blocks_compile_for_each_architecture(runtime, capability):
    found = _compiled(capability)
    kernels = {
        (name, precision): [Candidate(**candidate) for candidate in candidates]
        for name, precisions in found["kernels"].items()
        for precision, candidates in precisions.items()
    }
    assert set(kernels) == {(name, precision) for name in (*zoo.MODELS, *real_sizes.MODELS) for precision in ("fp32", "bf16")}
    assert all(kernels.values())
    of_driver = found["spilling"].pop("of the driver")
    known = Candidate(**found["spilling"])
    assert known.spilled > 0
    assert of_driver == [known.registers, known.stack]
    everything = [candidate for candidates in kernels.values() for candidate in candidates]
    assert {candidate.compute_capability for candidate in (known, *everything)} == {capability}
    assert spilling(everything) == []
    _document(capability, found["versions"], kernels)


def spilling(candidates: list[Candidate]) -> list[Candidate]:
    """Candidates of kernels that spill, whichever Inductor takes, and of pointwise kernels that spill."""
    without = {candidate.source for candidate in candidates if not candidate.spilled}
    spilled = (candidate for candidate in candidates if candidate.spilled)
    return [candidate for candidate in spilled if candidate.is_pointwise or candidate.source not in without]


def test_kernels_that_spill_in_each_candidate_are_found():
    rows = [("triton_red_a", "a.py", 0), ("triton_red_a", "a.py", 8), ("triton_red_b", "b.py", 8), ("triton_poi_c", "c.py", 0)]
    rows += [("triton_poi_c", "c.py", 8)]
    candidates = [Candidate(name, source, 90, 32, spilled, spilled, 0) for name, source, spilled in rows]
    assert [candidate.source for candidate in spilling(candidates)] == ["b.py", "c.py"]


@pytest.mark.parametrize(("version", "flags", "expected"), [(7, 0x500550, 80), (7, 0x5A0D5A, 90), (8, 0x9006402, 100)])
def test_the_architecture_is_read_from_machine_code(version, flags, expected):
    header = bytearray(64)
    header[:4], header[8], header[48:52] = b"\x7fELF", version, flags.to_bytes(4, "little")
    assert compute_capability_of(bytes(header)) == expected


def _compiled(capability: int) -> dict:
    """What compile_zoo.py prints, in a process that has such a GPU."""
    script = Path(__file__).parent / "compile_zoo.py"
    variables = {
        "FAKE_CUDA_CAPABILITY": str(capability),
        "FAKE_CUDA_GIB": "64",
    }  # memory that no copy reaches takes none of the host
    variables["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no process records for another
    done = subprocess.run([sys.executable, str(script)], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return json.loads(done.stdout)


def _document(capability: int, versions: str, kernels: dict[tuple[str, str], list[Candidate]]) -> None:
    """Compare one column of the table, or write it. Figures of other versions of the compilers are left alone."""
    text = PAGE.read_text()
    block = re.search(BLOCK, text)[0]
    written = _with_column(block, f"sm_{capability}", versions, {name: _cell(name, kernels) for name, _ in kernels})
    if os.environ.get("UPDATE_DOCUMENTS"):
        PAGE.write_text(re.sub(BLOCK, lambda _: written, text))
    elif block.startswith(versions):
        assert block == written


def _cell(name: str, kernels: dict[tuple[str, str], list[Candidate]]) -> str:
    candidates = kernels[name, "fp32"] + kernels[name, "bf16"]
    sources = {candidate.source for candidate in candidates}
    registers = max(candidate.registers for candidate in candidates)
    shared = max(candidate.shared for candidate in candidates) / 1024
    spills = sum(candidate.spilled > 0 for candidate in candidates)
    return f"{len(sources)} / {registers} / {shared:.1f} / {spills}"


def _with_column(block: str, heading: str, versions: str, cells: dict[str, str]) -> str:
    headings = [f"sm_{capability}" for capability in CAPABILITIES]
    rows = {
        name: others for name, *others in (line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("|"))
    }
    lines = [["model", *headings], ["---"] * (1 + len(headings))]
    for name, cell in cells.items():
        others = dict(zip(headings, rows.get(name, ["?"] * len(headings)), strict=True))
        lines.append([name, *(others | {heading: cell}).values()])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{versions}:\n\n{table}\n"
