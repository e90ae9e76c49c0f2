"""examples/benchmarks/gpu.py: whatever a stage does, the others run, the JSON is whole, and the end comes in time."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "examples" / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def path_of_the_stages():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def module(name: str):
    return importlib.import_module(f"gpu_stages.{name}")


# what the command of a stage may use; `--journal FILE --go FILE --shard i/n` are its arguments
PROTOCOL = """
import json, os, signal, subprocess, sys, time
journal = open(sys.argv[sys.argv.index("--journal") + 1], "a", buffering=1)
begun = [json.loads(l)["begin"]["case"] for l in open(journal.name) if l.startswith('{"begin')]
def write(kind, content): journal.write(json.dumps({kind: content}) + chr(10))
def begin(case, seconds=None): write("begin", {"case": case, "at": time.time(), "seconds": seconds})
def row(case, value=1.0): write("row", {"stage": "s", "case": case, "figure": "f", "value": value})
def end(case): write("end", {"case": case, "at": time.time()})
"""
GOOD = "write('plan', ['a']); begin('a'); row('a'); end('a')"
CRASH = "write('plan', ['a', 'b']); begin('a'); row('a'); end('a'); begin('b'); print('last words', flush=True); os.abort()"
HANG = "write('plan', ['a', 'b']); begin('a'); row('a'); end('a'); begin('b'); time.sleep(1000)"
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; print('child', flush=True); time.sleep(1000)"])
begin('a')
time.sleep(1000)
"""
FLOOD = "begin('a')\nwhile True: print('x' * 10000)"


def stage(name: str, code: str, seconds: float = 1.0, workers: int = 1):
    return module("processes").Stage(name, seconds, (sys.executable, "-c", PROTOCOL + textwrap.dedent(code)), workers)


@pytest.fixture(autouse=True)
def quick_starts(monkeypatch):
    """The processes of these stages import nothing large."""
    monkeypatch.setattr(module("record"), "START", 1.0)


def run(tmp_path, *stages, seconds: float = 20.0):
    """The JSON after all stages; it was whole whenever it was looked at."""
    record = module("record")
    path = tmp_path / "gpu.json"
    ended = []

    def look(name, found):
        ended.append(name)
        assert set(json.loads(path.read_text())["stages"]) == {s.name for s in stages}

    start = time.time()
    record.run_stages(stages, seconds, record.Record(path, seconds / 60), ended=look)
    assert time.time() - start < seconds
    assert ended == [s.name for s in stages]
    return json.loads(path.read_text())["stages"]


def verdicts(found: dict) -> dict[str, str]:
    return {row["case"]: row["verdict"] for row in found["rows"]}


def test_a_crash_leaves_the_others_and_what_was_measured_before(tmp_path):
    found = run(tmp_path, stage("first", GOOD), stage("crashes", CRASH), stage("last", GOOD))
    assert [s["status"] for s in found.values()] == ["done", "crash", "done"]
    assert verdicts(found["crashes"]) == {"a": "measured", "b": "crash"}
    assert "SIGABRT" in found["crashes"]["rows"][1]["note"] and "last words" in found["crashes"]["rows"][1]["note"]


@pytest.mark.parametrize("code", [HANG, STUBBORN, FLOOD], ids=["sleeps", "ignores signals, has a child", "floods its output"])
@pytest.mark.slow(but="ignores signals, has a child")
def test_a_hang_leaves_the_others_and_ends_in_time(tmp_path, code):
    found = run(tmp_path, stage("first", GOOD), stage("hangs", code, 0.5), stage("last", GOOD, 8.0), seconds=22.0)
    assert [s["status"] for s in found.values()] == ["done", "hang", "done"]
    assert "hang" in verdicts(found["hangs"]).values()
    assert len(found["hangs"]["output"]) <= 4000


def test_children_of_a_stage_end_with_it(tmp_path):
    mark = tmp_path / "pid"
    code = f"""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    open({str(mark)!r}, "w").write(str(child.pid))
    """
    run(tmp_path, stage("leaves a child", code), seconds=10.0)
    deadline = time.time() + 5
    while time.time() < deadline and is_alive(int(mark.read_text())):
        time.sleep(0.05)
    assert not is_alive(int(mark.read_text()))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_cases_behind_a_crash_run_in_a_new_process(tmp_path):
    code = """
    write('plan', ['a', 'b', 'c'])
    for case in 'abc':
        if case not in begun:
            begin(case)
            if case == 'b': os.abort()
            row(case); end(case)
    """
    found = run(tmp_path, stage("s", code), seconds=40.0)["s"]
    assert verdicts(found) == {"a": "measured", "b": "crash", "c": "measured"} and found["starts"] == 2


def test_a_case_beyond_its_time_is_a_hang_and_the_next_one_runs(tmp_path):
    code = """
    write('plan', ['a', 'b'])
    for case in 'ab':
        if case not in begun:
            begin(case, 0.5)
            if case == 'a': time.sleep(1000)
            row(case); end(case)
    """
    found = run(tmp_path, stage("s", code), seconds=40.0)["s"]
    assert verdicts(found) == {"a": "hang", "b": "measured"}


def test_a_process_without_progress_gets_no_new_one(tmp_path):
    found = run(tmp_path, stage("s", "write('plan', ['a']); sys.exit(75)"), seconds=30.0)["s"]
    assert found["starts"] == 1 and found["status"] == "crash" and "not reached" in verdicts(found).values()


def test_cases_that_were_not_reached_are_named(tmp_path):
    code = "write('plan', ['a', 'b', 'c']); begin('a'); row('a'); end('a'); time.sleep(1000)"
    found = run(tmp_path, stage("s", code), seconds=6.5)["s"]
    (missed,) = (row for row in found["rows"] if row["verdict"] == "not reached")
    assert missed["value"] == 2 and missed["note"] == "2 of 3 cases: b, c"


def test_workers_share_a_stage(tmp_path):
    code = "write('plan', ['x']); case = sys.argv[sys.argv.index('--shard') + 1]; begin(case); row(case); end(case)"
    found = run(tmp_path, stage("s", code, workers=3), seconds=20.0)["s"]
    assert {row["case"] for row in found["rows"] if row["verdict"] == "measured"} == {"0/3", "1/3", "2/3"}


def test_json_is_written_in_a_stage_and_when_the_script_stops(tmp_path):
    record, path = module("record"), tmp_path / "gpu.json"
    seen = []

    def heard(row):
        seen.append(row.case)
        if len(seen) == 2:
            raise SystemExit("stopped")

    code = "for case in 'ab':\n begin(case); row(case); end(case); time.sleep(2.5)\ntime.sleep(1000)"
    with pytest.raises(SystemExit):
        record.run_stages([stage("s", code)], 30.0, record.Record(path, 0.5), heard)
    rows = json.loads(path.read_text())["stages"]["s"]["rows"]
    assert [row["case"] for row in rows] == ["a", "b"]


def test_shares_add_up_and_unused_time_goes_on():
    record = module("record")
    stages = [stage(str(i), "", seconds) for i, seconds in enumerate((10, 100, 60))]
    given, left = [], 270.0
    for i, each in enumerate(stages):
        given.append(record.share(each, stages[i + 1 :], left))
        left -= given[-1]
    assert left == pytest.approx(0)
    assert (given[1] - record.START) / (given[0] - record.START) == pytest.approx(10)
    assert record.share(stages[1], stages[2:], 260.0) > given[1]
    assert record.share(stages[0], stages[1:], 3.0) == pytest.approx(1.0)


# ---- settings, rows, table -------------------------------------------------------------------------------------------


def test_every_pair_of_values_comes_early():
    settings = module("settings")
    models = ("a", "b", "c", "d", "e")
    found = settings.settings(models)
    factors = {"model": models, **settings.FACTORS}
    allowed = [dict(zip(factors, v, strict=True)) for v in itertools.product(*factors.values())]
    allowed = [c for c in allowed if settings.is_allowed(c)]
    assert len(found) == len(set(found)) == len(allowed)
    wanted = set().union(*map(settings.pairs_of, allowed))
    early = set().union(*(settings.pairs_of({name: getattr(s, name) for name in factors}) for s in found[:30]))
    assert wanted == early
    assert not any(s.precision == "fp16" and s.update == "in_backward" for s in found)


def test_limits_and_numbers_that_are_none():
    row = module("rows").Row.limited
    assert row("s", "c", "f", 1.0, most=2.0).verdict == "ok"
    assert row("s", "c", "f", 3.0, most=2.0).verdict == "off"
    assert row("s", "c", "f", 0.0, most=0).verdict == "ok"
    assert row("s", "c", "f", 1.0, most=0).verdict == "off"
    assert row("s", "c", "f", float("nan"), most=2.0).verdict == "off"
    assert row("s", "c", "f", float("inf"), most=2.0).verdict == "off"
    assert row("s", "c", "f", 0.0, least=0.5).verdict == "off"
    assert row("s", "c", "f", 0.7, least=0.5).verdict == "ok"
    assert row("s", "c", "f", 0.7).verdict == "measured"


def test_the_table_is_worst_first():
    rows, table = module("rows"), module("table")
    made = [
        rows.Row.limited("s", "fine", "f", 1.0, most=2.0), rows.Row.limited("s", "off", "f", 4.0, most=2.0),
        rows.Row.limited("s", "worse", "f", 40.0, most=2.0), rows.Row("s", "measured", "f", 3.0),
        rows.Row("s", "crashed", "", None, verdict="crash", note="signal"), rows.Row("s", "gpu", "", None, verdict="needs a GPU"),
    ]  # fmt: skip
    lines = table.table(made).splitlines()
    order = [
        next(i for i, line in enumerate(lines) if f" {name} " in line)
        for name in ("crashed", "worse", "off", "gpu", "measured", "fine")
    ]
    assert order == sorted(order)
    assert "at most 2" in lines[order[1]] and "signal" in lines[order[0] + 1]


def test_a_journal_that_was_cut_off_keeps_its_whole_lines(tmp_path):
    rows = module("rows")
    journal = rows.Journal(tmp_path / "j")
    journal.row(rows.Row("s", "c", "f", float("inf")))
    with (tmp_path / "j").open("a") as file:
        file.write('{"row": {"stage": "s"')
    ((kind, row),) = rows.read_journal(tmp_path / "j")
    assert kind == "row" and row.value == "inf"


def test_rows_from_a_journal_sort_as_before_it(tmp_path):
    """Also those that are infinitely bad: JSON has no such number."""
    rows = module("rows")
    journal = rows.Journal(tmp_path / "j")
    made = [rows.Row.limited("s", "c", "f", value, least=1.0) for value in (0.5, 0.0)]
    for row in made:
        journal.row(row)
    read = [row for _, row in rows.read_journal(tmp_path / "j")]
    assert [row.order() for row in read] == [row.order() for row in made]
    assert sorted(read, key=rows.Row.order)[0].value == 0.0


def test_a_gpu_without_an_index_is_the_first():
    device_named = module("__main__").device_named
    assert str(device_named("cuda")) == "cuda:0"
    assert str(device_named("cuda:1")) == "cuda:1"


# ---- cases in a process ----------------------------------------------------------------------------------------------


def test_a_case_that_fails_is_a_row_and_the_next_one_runs(tmp_path):
    import torch

    cases, rows = module("cases"), module("rows")
    path = tmp_path / "j"

    def fail(report):
        report("before", 1.0, most=2.0)
        raise ValueError("what is wrong")

    def unfit(report):
        raise cases.Unfit("too small")

    context = cases.Context("s", torch.device("cpu"), time.time() + 60, rows.Journal(path))
    listed = [cases.Case("fails", fail), cases.Case("unfit", unfit), cases.Case("gpu", fail, gpu=True),
              cases.Case("alone", lambda report: report("f", 1.0), alone=True)]  # fmt: skip
    assert cases.run_cases(context, listed, path) == rows.RESTART
    assert cases.run_cases(context, listed, path) == rows.RESTART  # the one that is alone
    assert cases.run_cases(context, listed, path) == 0
    found = [content for kind, content in rows.read_journal(path) if kind == "row"]
    assert [(r.case, r.verdict) for r in found] == [
        ("fails", "ok"),
        ("fails", "error"),
        ("unfit", "skipped"),
        ("gpu", "needs a GPU"),
        ("alone", "measured"),
    ]
    assert "what is wrong" in found[1].note and "test_gpu_script.py" in found[1].note


def test_the_package_is_found_in_the_checkout(tmp_path):
    """A Python that does not have it installed: the folder of the checkout is enough."""
    import subprocess

    code = f"""
import sys
sys.path[:] = [p for p in sys.path if p != {str(BENCHMARKS.parent.parent)!r}] + [{str(BENCHMARKS)!r}]
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "") + getattr(f, "__name__", "")]
from gpu_stages.checkout import find_package
find_package()
import l2l_compile.passes.pipeline
print(l2l_compile.__file__, l2l_compile.passes.__file__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.stderr
    assert str(BENCHMARKS.parent.parent) in done.stdout


@pytest.mark.parametrize("stage", ["faults", "memory", "races", "speed"])
def test_quick_sizes_on_a_gpu_are_those_of_a_cpu(stage):
    import torch

    size = getattr(module(stage), "load" if stage == "speed" else "size_of")
    kinds = [("cpu", False), ("cuda", True), ("cuda", False)]
    on_cpu, quick, large = (size(module("cases").Context(stage, torch.device(kind), 0.0, None, fast)) for kind, fast in kinds)
    assert on_cpu == quick != large


# ---- what could pass without a check ---------------------------------------------------------------------------------


def figures(tmp_path, work, stage: str = "faults", seconds: float = 60.0) -> list:
    """The rows that a case writes on the host."""
    import torch

    cases, rows = module("cases"), module("rows")
    context = cases.Context(stage, torch.device("cpu"), time.time() + seconds, rows.Journal(tmp_path / "j"))
    work(context, cases.Report(context, "case"))
    return [content for kind, content in rows.read_journal(tmp_path / "j") if kind == "row"]


def test_gradients_that_are_not_a_number_are_the_worst():
    import torch

    good, bad = torch.ones(2), torch.tensor([1.0, float("nan")])
    worst = module("faults").worst
    assert math.isnan(worst([good, bad, good], [good, good, good]))
    assert worst([good, 2 * good], [good, good]) == 1.0


def test_a_process_killed_before_its_limit_says_nothing_of_it(tmp_path, monkeypatch):
    faults = module("faults")

    def late(command, timeout, **_):
        raise faults.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(faults.subprocess, "run", late)
    (early,) = figures(tmp_path, faults.out_of_range, seconds=6.0)
    assert early.verdict == "out of time"
    (_, full) = figures(tmp_path, faults.out_of_range, seconds=100.0)
    assert full.verdict == "hang"


@pytest.mark.slow
def test_a_token_that_the_host_finds_is_refused(tmp_path, monkeypatch):
    """On the host, PyTorch's own error refuses it."""
    monkeypatch.chdir(BENCHMARKS)
    found = {row.figure: row for row in figures(tmp_path, module("faults").out_of_range)}
    assert "IndexError" in found["a step with a token that the host finds"].value
    assert found["the step is not refused"].value == 0
    assert found["loss of the next step, less that before"].value < 1e-6
    assert found["exit status"].value == 1
    assert found["nothing says what is wrong"].value == 0


def test_a_step_that_was_not_refused_is_one_of_the_worst(tmp_path):
    faults = module("faults")
    rows = figures(tmp_path, lambda context, report: faults.refused_step("no error", report))
    assert [row.verdict for row in rows[1:]] == ["off", "off"]


def test_one_peak_is_not_compared_with_itself(tmp_path):
    memory = module("memory")
    of = lambda depth: lambda context, report: memory.peak(context, depth, report)  # noqa: E731
    assert not any("over the smallest" in row.figure for row in figures(tmp_path, of(1), "memory"))
    (ratio,) = (row for row in figures(tmp_path, of(2), "memory") if "over the smallest" in row.figure)
    assert ratio.note == "depths [1, 2]"


def test_memory_that_is_given_counts_less_what_is_in_use(monkeypatch):
    cases = module("cases")
    monkeypatch.delenv(cases.HOST_GB, raising=False)
    free = cases.available_bytes()
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(lines["MemTotal"].split()[0]) * 1024
    monkeypatch.setenv(cases.HOST_GB, str(total / 1e9))
    assert cases.available_bytes() == pytest.approx(free, rel=0.2)
    monkeypatch.setenv(cases.HOST_GB, "0.001")
    assert cases.available_bytes() == 0


@pytest.mark.slow
def test_no_case_of_the_script_fails_on_the_host(tmp_path):
    """Cases use objects of the package that users do not: they have to follow it."""
    import subprocess

    path = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--minutes", "3", "--json", str(path)]
    subprocess.run(
        [*command, "--only", "races", "speed", "faults", "memory", "paper"], capture_output=True, cwd=tmp_path, timeout=240
    )
    stages = json.loads(path.read_text())["stages"]
    assert all(stage["status"] == "done" for stage in stages.values())
    assert not [row for stage in stages.values() for row in stage["rows"] if row["verdict"] in ("error", "crash", "hang", "off")]
