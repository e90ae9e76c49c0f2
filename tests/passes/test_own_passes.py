"""Passes of the user's own, and what can be seen of every pass: files of `explain(dump=...)`, artifacts of TORCH_TRACE."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import l2l_compile
from l2l_compile import OptionError, VerifyError
from l2l_compile.ir import nodes
from l2l_compile.passes.compilation import Fact, Pass
from l2l_compile.passes.pipeline import PIPELINE
from models import Stack, assert_parity, compiled, rows


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    yield importlib.import_module("own_pass")
    sys.path.pop(0)


def distances(graph) -> list[int]:
    """How many segments before its reader the weights of each segment are fetched."""
    order = list(graph.nodes)
    runs = [n for n in order if nodes.runs_segment(n)]
    fetches = [order.index(nodes.operands(run).weights) for run in runs]
    return [sum(fetch < order.index(earlier) for earlier in runs[:index]) for index, fetch in enumerate(fetches)]


def test_an_own_pass_changes_both_schedules_and_no_number(example):
    torch.manual_seed(0)
    model = Stack(6).double()
    (program,) = l2l_compile.programs(assert_parity(model, rows(6), prefetch=2, passes=[example.FetchLater()]))
    for module in (program.forward, program.backward):
        found = distances(module.graph)
        assert found[2:4] == [2, 2] and set(found[4:]) == {1}


def test_a_pass_for_gradients_that_were_not_expected_runs_again():
    seen = []

    @dataclass(frozen=True)
    class Look(Pass):
        name: ClassVar = "look"
        requires: ClassVar = frozenset({Fact.UPDATES_PLACED})

        def apply(self, compilation):
            seen.append(compilation.gradient_mask)

    class Two(Stack):
        def forward(self, x):
            y = super().forward(x)
            return y, y * 2

    step = compiled(Two(2).double(), passes=(Look(),))
    step(rows(6))[1].sum().backward()
    assert len(seen) == 2 and seen[0] != seen[1]


def test_an_own_pass_that_breaks_a_rule_is_refused_with_the_rule(example):
    with pytest.raises(VerifyError, match="slabs.*needs slab 4 of 3; before pass '.*' the program was legal"):
        l2l_compile.explain(Stack(6), {"device": "cpu", "prefetch": 2, "passes": [example.FetchEarlier()]})(rows(6).float())


def test_an_own_pass_with_a_requirement_nobody_meets_is_refused():
    class Asks(Pass):
        name = "asks"
        requires = frozenset({"magic"})

    with pytest.raises(l2l_compile.L2LError, match="pass 'asks' requires magic"):
        l2l_compile.explain(Stack(2), {"device": "cpu", "passes": [Asks()]})(rows(6).float())


@pytest.mark.parametrize("passes", [None, "prefetch", 3, [None], [Pass], ["prefetch"]])
def test_what_is_no_sequence_of_passes_is_an_option_error(passes):
    with pytest.raises(OptionError, match="option 'passes' must be a sequence of passes"):
        l2l_compile.Options.build({"passes": passes})


def test_the_example_runs(example, capsys):
    example.main()
    said = capsys.readouterr().out
    assert "fetch_weights('7')" in said and "FetchEarlier is refused: " in said


def test_a_dump_has_a_file_for_every_pass_of_every_program(tmp_path):
    class Broken(Stack):
        def forward(self, x):
            y = super().forward(x)
            torch._dynamo.graph_break()
            return y.exp()

    (tmp_path / "program0").mkdir()
    (tmp_path / "program0" / "31_of_an_earlier_dump.txt").write_text("# of_an_earlier_dump: 0.001 s\n\ntext\n")
    report = l2l_compile.explain(Broken(3), {"device": "cpu"}, dump=tmp_path)(rows(6).float())
    assert len(report.programs) == 2
    for number, program in enumerate(report.programs):
        files = sorted((tmp_path / f"program{number}").iterdir())
        assert [f.name for f in files] == [f"{i:02d}_{step.name}.txt" for i, step in enumerate(PIPELINE)]
        assert files[-1].read_text().split("\n\n", 1)[1] == f"{program}\n"
        first = files[0].read_text().split("\n")[0]
        assert first.startswith("# drop_outputs: ") and first.endswith(" s")
    assert "layers.2: block_" in (tmp_path / "program0" / "05_cut_segments.txt").read_text()


def dumped(folder, **options):
    return l2l_compile.explain(Stack(2), {"device": "cpu", **options}, dump=folder)(rows(6).float())


def test_a_dump_deletes_no_file_of_the_user(tmp_path):
    kept = {
        "weights.pt": "weights",
        "00_notes.txt": "notes",
        "results/00_run.txt": "# run: 0.100 s\n",
        "04.txt": "# find_blocks: 0.1 s",
    }
    for name, text in kept.items():
        path = tmp_path / "program0" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "program0" / "40_linked.txt").symlink_to(tmp_path / "program0" / "results" / "00_run.txt")
    for _ in range(2):
        dumped(tmp_path)
    assert {name: (tmp_path / "program0" / name).read_text() for name in kept} == kept
    assert (tmp_path / "program0" / "40_linked.txt").is_symlink()
    assert len(list((tmp_path / "program0").glob("*.txt"))) == len(PIPELINE) + 3


def test_a_dump_does_not_write_over_a_file_of_the_user(tmp_path):
    path = tmp_path / "program0" / f"01_{PIPELINE[1].name}.txt"
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.raises(l2l_compile.L2LError, match=f"{path.name} exists, and .* Remedy: dump into another folder"):
        dumped(tmp_path)
    assert path.read_text() == "mine"


def test_a_dump_into_a_file_is_an_error_with_its_remedy(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(l2l_compile.L2LError, match="cannot be written .* Remedy: dump into a folder of your own"):
            dumped(folder)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_name_of_a_pass_leads_to_no_other_folder(tmp_path):
    @dataclass(frozen=True)
    class Outside(Pass):
        name: ClassVar = "../../outside"

        def apply(self, compilation):
            pass

    dumped(tmp_path / "dump", passes=[Outside()])
    assert [path.name for path in tmp_path.iterdir()] == ["dump"]
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["program0"]


def test_a_pass_that_fails_is_named():
    @dataclass(frozen=True)
    class Divides(Pass):
        name: ClassVar = "divides"

        def apply(self, compilation):
            return 1 / 0

    with pytest.raises(l2l_compile.L2LError, match="pass 'divides' failed: ZeroDivisionError: division by zero"):
        compiled(Stack(2).double(), passes=[Divides()])(rows(6))


def test_torch_trace_has_an_artifact_for_every_pass():
    found = []

    class Keep(logging.Handler):
        def emit(self, record):
            artifact = getattr(record, "metadata", {}).get("artifact", {})
            if artifact.get("name", "").startswith("l2l_"):
                found.append((artifact["name"], record.payload))

    log, keep = logging.getLogger("torch.__trace"), Keep()
    log.addHandler(keep)
    try:
        step = compiled(Stack(2).double())
        step(rows(6))
    finally:
        log.removeHandler(keep)
    assert [name for name, _ in found] == [f"l2l_{step.name}" for step in PIPELINE]
    (program,) = l2l_compile.programs(step)
    assert found[-1][1].endswith(str(program)) and json.dumps(found[-1][1])
