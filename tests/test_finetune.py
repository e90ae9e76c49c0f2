"""examples/finetune.py: a run that is killed and resumed, its checkpoints, its default task."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parent.parent / "examples"

# Imports and compiles once, then forks a run for every line of arguments: what a run prints goes to the test, then how it ended.
LAUNCHER = """
import json, os, sys
import networkx, sympy, torch._dynamo, torch._functorch.aot_autograd, transformers.models.bert.modeling_bert
import l2l_compile.backend, finetune, lean
lean.settle()
lean.warm()
for line in sys.stdin:
    ranks, port, *arguments = json.loads(line)
    others = []
    child = os.fork()
    for rank in range(1, ranks if child else 0):
        others.append(os.fork())
        if not others[-1]:
            child = 0
            break
    else:
        rank = 0
    if not child:
        if ranks:  # as torchrun does
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sys.argv = ["finetune.py", *arguments]
        print("pid", os.getpid(), flush=True)
        try:
            finetune.main()
        except SystemExit as error:
            print(error, flush=True)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    statuses = [os.waitpid(process, 0)[1] for process in (child, *others)]
    print("ended", max(statuses), flush=True)
"""


@pytest.fixture(scope="module")
def finetune():
    spec = importlib.util.spec_from_file_location("finetune", EXAMPLES / "finetune.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Launcher:
    """Runs of the example as processes of their own."""

    def __init__(self, folder: Path):
        paths = [p for p in (str(EXAMPLES), str(Path(__file__).parent), os.environ.get("PYTHONPATH")) if p]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.errors = folder / "errors.txt"
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
            env=environment,
        )

    def run(self, *arguments, kill_in_step: int | None = None, delay: float = 0.0, ranks: int = 0) -> tuple[int, list[str]]:
        """Run to the end, or kill the process some time after it says that a step begins. The status and what it printed.

        `ranks` processes run as under torchrun; without it, one does.
        """
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.process.stdin.write(json.dumps([ranks, port, *(str(a) for a in arguments)]) + "\n")
        self.process.stdin.flush()
        child, printed = None, []
        for line in self.process.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == "ended":
                return int(rest), printed
            printed.append(line.strip())
            if word == "pid":
                child = int(rest)
            if line.strip() == f"step {kill_in_step} begins":
                time.sleep(delay)
                os.kill(child, signal.SIGKILL)  # not yet waited for, so the number is still its own
        raise AssertionError(f"the launcher ended: {self.errors.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    launcher = Launcher(tmp_path_factory.mktemp("launcher"))
    yield launcher
    launcher.process.stdin.close()
    launcher.process.wait(timeout=30)


def write_rows(path: Path, count: int = 50) -> Path:
    """A table of texts that say which of two labels they have."""
    chance = random.Random(0)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("text", "label"))
        for number in range(count):
            words = chance.choices(("red", "blue", "small", "round", "old"), k=6)
            table.writerow((f"{' '.join(words)} {number}", "warm" if words.count("red") > 1 else "cold"))
    return path


def equal(one, other) -> bool:
    """Whether two nested structures have the same bits."""
    if isinstance(one, torch.Tensor):
        equal_rows = one.dtype == other.dtype and one.shape == other.shape
        return equal_rows and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.slow
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(launcher, finetune, tmp_path):
    table = write_rows(tmp_path / "rows.csv")
    common = (
        "--data",
        table,
        "--layers",
        1,
        "--hidden",
        32,
        "--length",
        16,
        "--padding",
        "max",
        "--batch-size",
        8,
        "--epochs",
        2,
        "--save-every",
        2,
        "--block-compiler",
        "eager",
        "--device",
        "cpu",
        "--log-steps",
        "--resume",
    )  # 5 batches an epoch
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    status, printed = launcher.run(*common, "--output", whole)
    assert status == 0, launcher.errors.read_text()[-3000:]
    assert f"no checkpoint in {whole}: it starts anew" in printed and "step 10 begins" in printed

    chance = random.Random(0)
    for kill in (chance.randint(1, 4), chance.randint(6, 8)):
        status, printed = launcher.run(
            *common, "--output", broken, kill_in_step=kill, delay=chance.uniform(0, 0.03)
        )  # within the step
        assert status == signal.SIGKILL, (printed, launcher.errors.read_text()[-3000:])
        (broken / "step-000000099.pt.partial").write_bytes(b"PK")  # as if it had been writing
    status, printed = launcher.run(*common, "--output", broken)
    assert status == 0 and any(line.startswith("continuing after step ") for line in printed)
    assert "step 1 begins" not in printed

    names = [sorted(p.name for p in folder.iterdir()) for folder in (whole, broken)]
    assert names[0] == names[1] == ["final", "step-000000008.pt", "step-000000010.pt"]
    states = [torch.load(folder / names[0][-1], weights_only=True) for folder in (whole, broken)]
    assert states[0]["optimizer"]["state"] and equal(*states)
    weights = [(folder / "final" / "model.safetensors").read_bytes() for folder in (whole, broken)]
    assert weights[0] == weights[1]

    status, printed = launcher.run(*common, "--output", broken, "--seed", 1)
    assert status == 0 and any("cannot be continued with other arguments: seed was '0' and is '1'" in line for line in printed)


@pytest.mark.slow
def test_a_run_of_two_processes_is_continued_by_one(launcher, tmp_path):
    """The weights are those of a run without torchrun, dropout included."""
    table = write_rows(tmp_path / "rows.csv")
    common = [
        "--data",
        table,
        "--layers",
        1,
        "--hidden",
        32,
        "--length",
        16,
        "--batch-size",
        8,
        "--micro-batches",
        4,
        "--precision",
        "fp32",
    ]
    common += ["--save-every", 2, "--block-compiler", "eager", "--device", "cpu", "--resume"]
    divided, alone = tmp_path / "divided", tmp_path / "alone"
    for ranks, steps, output in ((2, 2, divided), (1, 4, divided), (0, 4, alone)):
        status, printed = launcher.run(*common, "--max-steps", steps, "--output", output, ranks=ranks)
        assert status == 0, launcher.errors.read_text()[-3000:]
        assert ("continuing after step 2" in printed) == (ranks == 1)
    assert sorted(p.name for p in divided.iterdir()) == ["final", "step-000000002", "step-000000004"]
    ours, expected = (load_file(folder / "final" / "model.safetensors") for folder in (divided, alone))
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    status, printed = launcher.run(*common, "--output", divided)
    assert status == 0 and any("was written under torchrun" in line for line in printed)
    for ranks, output in (
        (2, tmp_path / "two"),
        (0, tmp_path / "one"),
    ):  # from weights in a folder, which each process reads in part
        status, printed = launcher.run(*common, "--max-steps", 1, "--model", alone / "final", "--output", output, ranks=ranks)
        assert status == 0, launcher.errors.read_text()[-3000:]
        assert ("new: nothing; left out: nothing" in printed) == (ranks == 2)
    ours, expected = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("two", "one"))
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5, msg=name)


def state_of(step: int) -> dict:
    return {"position": {"step": step}, "must_match": {"seed": "0"}, "model": {"weight": torch.full((4,), float(step))}}


def test_only_the_last_checkpoints_are_kept(finetune, tmp_path):
    for step in (2, 4, 10, 100):
        finetune.save_checkpoint(tmp_path, 2, state_of(step))
    assert [p.name for p in finetune.checkpoints(tmp_path)] == ["step-000000010.pt", "step-000000100.pt"]
    assert equal(finetune.load_checkpoint(tmp_path, {"seed": "0"}), state_of(100))


def test_a_run_with_other_arguments_is_not_continued(finetune, tmp_path):
    assert finetune.load_checkpoint(tmp_path, {"seed": "0"}) is None
    finetune.save_checkpoint(tmp_path, 1, state_of(2))
    with pytest.raises(SystemExit, match="seed was '0' and is '1'"):
        finetune.load_checkpoint(tmp_path, {"seed": "1"})
    with pytest.raises(SystemExit, match="holds checkpoints of a run"):
        finetune.open_output(finetune.parse_arguments(["--output", str(tmp_path)]), {"seed": "0"})


def test_what_a_killed_run_left_half_written_is_removed(finetune, tmp_path):
    finetune.save_checkpoint(tmp_path, 2, state_of(2))
    whole = (tmp_path / "step-000000002.pt").read_bytes()
    (tmp_path / "step-000000004.pt.partial").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "final.partial").mkdir()
    (tmp_path / "final.partial" / "config.json").write_text("{")
    args = finetune.parse_arguments(["--output", str(tmp_path), "--resume"])
    assert equal(finetune.open_output(args, {"seed": "0"}), state_of(2))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000002.pt"]


@pytest.mark.parametrize("where", ["save", "sync", "replace"])
def test_a_failure_while_writing_leaves_the_old_checkpoint(finetune, tmp_path, monkeypatch, where):
    finetune.save_checkpoint(tmp_path, 1, state_of(2))

    def fail(*arguments):
        if where == "save":
            Path(arguments[1]).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(*{"save": (torch, "save"), "sync": (os, "fsync"), "replace": (os, "replace")}[where], fail)
    with pytest.raises(OSError, match="no space left"):
        finetune.save_checkpoint(tmp_path, 1, state_of(4))
    monkeypatch.undo()
    assert equal(finetune.load_checkpoint(tmp_path, {"seed": "0"}), state_of(2))
    finetune.save_checkpoint(tmp_path, 1, state_of(4))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000004.pt"]


def test_a_folder_takes_the_place_of_an_older_one(finetune, tmp_path):
    for text in ("old", "new"):

        def write(path, text=text):
            path.mkdir()
            (path / text).write_text(text)

        finetune.write_atomically(tmp_path / "final", write)
    assert [p.relative_to(tmp_path).as_posix() for p in sorted(tmp_path.rglob("*"))] == ["final", "final/new"]


def test_the_default_task_is_deterministic_and_without_leakage(finetune):
    train, validation = finetune.documentation()
    assert finetune.documentation() == (train, validation)
    assert len(train) > 2 * len(validation) > 1000
    assert {label for _, label in train} == {label for _, label in validation} == {"prose", "code"}

    def runs(examples):
        return {tuple(text.split()[i : i + 8]) for text, _ in examples for i in range(finetune.WORDS - 7)}

    assert not {text for text, _ in train} & {text for text, _ in validation}
    assert not runs(train) & runs(validation)


@pytest.mark.parametrize(
    "paragraph, kind",
    [
        ("   >>> 3 + 4\n   7", "code"),
        ('   pass_stmt ::= "pass"', "code"),
        ("   for x in y:\n       print(x)", "code"),
        ("object.__len__(self) -> int", None),
        ("The value is *None*.", "prose"),
        ("   Called to implement it.", "prose"),
        ("Assignment\n**********", None),
        ("is equivalent to", None),
        ("a = b", "code"),
        ("pass", None),
        ("", None),
    ],
)
def test_kinds_of_paragraphs(finetune, paragraph, kind):
    assert finetune.kind_of(paragraph) == kind


@pytest.mark.slow
def test_the_default_task_is_learnt_in_16_bits(finetune, tmp_path, monkeypatch, capsys):
    """With its defaults but fewer steps, of one length: blocks compiled, bf16, updates behind the next forward."""
    monkeypatch.setattr(
        sys, "argv", ["finetune.py", "--output", str(tmp_path), "--max-steps", "50", "--padding", "max", "--device", "cpu"]
    )
    finetune.main()
    final, largest = (float(x) for x in re.findall(r"([\d.]+)%", capsys.readouterr().out.splitlines()[-1]))
    assert final > largest + 5


def test_the_vocabulary_and_the_order_of_rows_are_reproducible(finetune):
    texts = [text for text, _ in finetune.documentation()[0][:200]]
    one, other = (finetune.build_tokenizer(t) for t in (texts, texts[::-1]))
    assert one.get_vocab() == other.get_vocab()
    assert [token == one.unk_token_id for token in one("the qwz")["input_ids"]] == [False, False, True, False]

    args = finetune.parse_arguments(["--batch-size", "4"])
    torch.manual_seed(1)
    first = finetune.rows_of_epoch(11, args, 0)
    torch.manual_seed(2)
    assert torch.equal(first, finetune.rows_of_epoch(11, args, 0)) and first.shape == (2, 4)
    assert len(set(first.flatten().tolist())) == 8 and not torch.equal(first, finetune.rows_of_epoch(11, args, 1))


def test_rows_that_fill_the_last_batch_do_not_count(finetune):
    tokens = torch.tensor([[0, 9], [1, 0], [1, 0], [0, 0], [1, 0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 0], [1, 0]])
    data = {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([0, 1, 1, 0, 0])}
    sizes = []

    def model(input_ids, attention_mask):
        assert input_ids.shape == attention_mask.shape and input_ids.is_contiguous()
        sizes.append(tuple(input_ids.shape))
        return SimpleNamespace(logits=torch.nn.functional.one_hot(input_ids[:, 0], 2))

    before = torch.get_rng_state()
    for padding, last in (("longest", 1), ("max", 2)):
        assert finetune.accuracy(torch.nn.Identity(), model, data, 4, padding) == 0.8
        assert sizes[-2:] == [(4, 2), (4, last)]
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_tables_are_read_and_a_text_never_stands_on_both_sides(finetune, tmp_path, suffix):
    rows = [{"text": f"text, {i % 20}", "label": "even" if i % 2 == 0 else "odd"} for i in range(40)]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, ("text", "label"), delimiter="\t" if suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    train, validation = finetune.load_examples(finetune.parse_arguments(["--data", str(path)]))
    assert sorted(train + validation) == sorted({(row["text"], row["label"]) for row in rows})
    assert len(validation) == 2 and finetune.load_examples(finetune.parse_arguments(["--data", str(path)])) == (train, validation)

    with pytest.raises(SystemExit, match="has no column 'label'"):
        finetune.examples_of([{"text": "a"}], "rows.csv")


def test_a_dataset_without_the_library_is_explained(finetune, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit, match="needs the library datasets: pip install datasets"):
        finetune.load_examples(finetune.parse_arguments(["--dataset", "imdb"]))


@pytest.mark.parametrize("held_out", ["validation", "test", None])
def test_a_dataset_s_own_split_is_for_validation(finetune, monkeypatch, held_out):
    class Rows(list):
        features = {"label": SimpleNamespace(names=["bad", "good"])}

    loaded = {"train": Rows({"text": f"text {i}", "label": i % 2} for i in range(20))}
    if held_out:
        loaded[held_out] = Rows([{"text": "another", "label": 1}])
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda name: loaded))
    train, validation = finetune.load_examples(finetune.parse_arguments(["--dataset", "reviews"]))
    assert ("text 3", "good") in train + validation
    assert (len(train), validation) == (20, [("another", "good")]) if held_out else (len(train), len(validation)) == (18, 2)
