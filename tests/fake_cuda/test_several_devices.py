"""Ranks with a GPU each, on NCCL without GPUs: their numbers, their devices, and the order of their collectives."""

from __future__ import annotations

import itertools
import json

import pytest

from processes import started

SHARDS = ["shards", "steps on shards", "rows of all ranks", "shards, stash on the host", "parallel layers"]
PIPELINES = ["pipeline", "pipeline, loops", "by turns", "without a flush"]
TOGETHER = ["parallel layers of shards", "replicas", "replicas, clipped"]
WRONG = ("copies by another device", "failed", "not ", "nccl aborts")


def run(folder, world: int, *names: str, lazy: bool = True, devices: int | None = None, strict: bool = True) -> list[dict]:
    """What each rank has found in each case, by name."""
    variables = {"FAKE_CUDA_DEVICES": str(devices or world), "FAKE_CUDA_LAZY": str(int(lazy))}
    ranks = [
        started("rank.py", rank, world, folder, *names, **variables, **({"FAKE_CUDA_STRICT": str(rank)} if strict else {}))
        for rank in range(world)
    ]
    try:
        printed = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found = []
    for rank, (out, err) in enumerate(printed):
        file, hangs = folder / f"found.{rank}", folder / f"hangs.{rank}"
        assert file.exists(), f"rank {rank}: {out[-2000:]}{err[-2000:]}{hangs.read_text() if hangs.exists() else ''}"
        found.append(json.loads(file.read_text()))
    return found


def check(found: list[dict], *names: str) -> None:
    """Each case has ended well on each rank, which has used its own GPU."""
    for name, (rank, of_rank) in itertools.product(names, enumerate(found)):
        if name in of_rank:  # else the case before has failed
            assert of_rank[name]["error"] == "", f"{name}, rank {rank}"
            assert of_rank[name]["violations"] == [], f"{name}, rank {rank}"
            assert [call for call in of_rank[name]["counts"] if call.startswith(WRONG)] == []
            assert of_rank[name]["devices"] == [rank] and of_rank[name]["calls"]
    assert all(set(names) == set(of_rank) for of_rank in found)


def shared_calls(of_rank: dict, other: dict) -> list[list[str]]:
    """The collectives of a rank on the communicators that it shares with another, in the order of their launches."""
    shared = {name for name, _ in other["calls"]}
    return [call for call in of_rank["calls"] if call[0] in shared]


def assert_same_order(found: list[dict], *names: str) -> None:
    """Collectives of several communicators that two ranks share: NCCL wants them in the same order."""
    for name, (one, other) in itertools.product(names, itertools.combinations(found, 2)):
        assert shared_calls(one[name], other[name]) == shared_calls(other[name], one[name]), name


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("lazy", [True, False], ids=["late", "at once"])
def test_collectives_have_the_bytes_of_all_ranks(runtime, tmp_path, world, lazy):
    check(run(tmp_path, world, "collectives", lazy=lazy), "collectives")


def test_a_collective_that_is_held_up_keeps_no_other_back(runtime, tmp_path):
    """Streams go on beside each other, as on GPUs: else four stages of shards would hang here."""
    check(run(tmp_path, 2, "one is held up"), "one is held up")


@pytest.mark.parametrize("lazy", [True, False], ids=["late", "at once"])
def test_two_ranks_have_the_numbers_of_one_process(runtime, tmp_path, lazy):
    found = run(tmp_path, 2, *SHARDS, lazy=lazy)
    check(found, *SHARDS)
    assert_same_order(found, *SHARDS)


@pytest.mark.parametrize("lazy", [True, False], ids=["late", "at once"])
def test_two_stages_have_the_bits_of_one_process(runtime, tmp_path, lazy):
    check(run(tmp_path, 2, *PIPELINES, lazy=lazy), *PIPELINES)


def test_four_ranks_have_the_numbers_of_one_process(runtime, tmp_path):
    found = run(tmp_path, 4, *TOGETHER)
    check(found, *TOGETHER)
    assert_same_order(found, *TOGETHER)


def test_four_stages_have_the_bits_of_one_process(runtime, tmp_path):
    check(run(tmp_path, 4, *PIPELINES, "pipeline of shards"), *PIPELINES, "pipeline of shards")


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_name_the_one_that_fails(runtime, tmp_path, world):
    """Streams of the other ranks wait in collectives that it does not join."""
    for of_rank in run(tmp_path, world, "one fails"):
        assert of_rank["one fails"]["error"] == ""
        assert of_rank["one fails"]["violations"] == []


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("other sizes", "rank 0 calls AllReduce of 3 float32, operation 0, rank 1 calls AllReduce of 4 float32, operation 0"),
        ("other collectives", "rank 0 calls AllGather of 4 float32, rank 1 calls AllReduce of 4 float32, operation 0"),
    ],
)
def test_ranks_with_other_collectives_are_told(runtime, tmp_path, case, sentence):
    (first, *_) = run(tmp_path, 2, case)
    assert any(sentence in text for text in first[case]["violations"])


def test_ranks_on_one_device_are_refused(runtime, tmp_path):
    for of_rank in run(tmp_path, 2, "the same device", devices=1, strict=False):
        assert "NCCL error" in of_rank["the same device"]["error"]
        assert "ranks 0 and 1 of a communicator have device 0" in of_rank["the same device"]["violations"]
