"""Each rank has its part of a run: parts that do not go together are an error on every rank, and nothing in them is changed."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from pool import meet
from runs_of_ranks import die
from test_stored_shards import MODES, mesh_of
from test_stored_stages import staged

import l2l_compile
from l2l_compile import DiskError, L2LError, RankError
from l2l_compile.disk import manifest, versions
from l2l_compile.ranks import agreement, watch
from l2l_compile.ranks.sharded import is_sharded
from l2l_compile.session import session_of
from slow_disk import Faults, slow_disk
from stored_training import same, training

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
PATIENCE = 2.0  # seconds: a third of what it is for users


def begun(folder, world, version=None, kind="shards", optimizer="adamw", mode="in_forward"):
    torch._dynamo.reset()
    gc.collect()  # a training that is gone leaves the folder
    made = training(optimizer, disk=folder, mesh=mesh_of(kind, world), resumable=True, **MODES[mode])
    made.resumed = l2l_compile.resume(made.call, version)
    made.number = made.resumed.steps
    return made


def trains(rank, world, folder, kind="shards"):
    made = begun(folder, world, kind=kind)
    made.step(2)
    l2l_compile.commit(made.call, ["of rank", rank], wait=True)


@pytest.fixture
def left(ranks, tmp_path):
    """A folder with a run of two steps of two ranks."""
    (folder := tmp_path / "run").mkdir()
    ranks.run(trains, str(folder))
    return folder


def files_in(folder):
    """All files but the locks, with their bytes."""
    return {str(p): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file() and p.suffix != ".lock"}


def is_refused(rank, world, folder, *options):
    with pytest.raises(L2LError) as caught:
        begun(folder, world, *options)
    return type(caught.value).__name__, str(caught.value)


def continues(rank, world, folder):
    made = begun(folder, world)
    assert made.resumed.steps == 2 and made.resumed.extra == ["of rank", rank]
    state = [value for p in made.model.parameters() for value in made.optimizer.state[p].values() if value.dim()]
    assert all(map(is_sharded, [*made.model.parameters(), *state]))
    made.step(2)
    found = made.tensors()
    plain = training("adamw", mesh=mesh_of("shards", world), update="in_forward")
    plain.step(4)
    assert same(plain.tensors(), found)


def test_each_rank_gets_its_own_extra_and_shards(ranks, left):
    ranks.run(continues, str(left))
    assert sorted(path.name for path in left.iterdir()) == ["rank-0", "rank-1"]


@pytest.mark.filterwarnings("ignore:.*are on one device")
def test_each_rank_stripes_its_part_over_all_folders(ranks, tmp_path):
    folders = [str(tmp_path / name) for name in ("a", "b")]
    for folder in folders:
        os.mkdir(folder)
    ranks.run(trains, folders)
    ranks.run(continues, folders)
    shutil.rmtree(tmp_path / "b" / "rank-1")
    for rank, (_, text) in enumerate(ranks.run(is_refused, folders)):
        assert text.startswith("rank 1: " * (rank == 0) + f"{folders[1]}/rank-1: l2l-store.bin is missing")


def swap(left):
    (left / "rank-0").rename(left / "other")
    (left / "rank-1").rename(left / "rank-0")
    (left / "other").rename(left / "rank-1")


def mix(left):
    shutil.copy(left / "rank-0" / "l2l-store.bin", left / "rank-1" / "l2l-store.bin")


def take_away(left):
    (left / "rank-1").rename(left.parent / "away")


def lose_manifest(left):
    (left / "rank-1" / "l2l-store.manifest").unlink()


def damage(left):
    (left / "rank-1" / "l2l-store.manifest").write_bytes(b"l2l-store manifest 2\nnothing")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap, "{0}/rank-0: the part there is rank 1 of 2 of a run, and it was given to rank 0: give each rank its own part"),
        (take_away, "{0}/rank-1: the part of rank 1 is missing, and {0}/rank-0 has that of rank 0: mount its disk, or put back"),
        (lose_manifest, r"{0}/rank-0: the ranks have no step in common (rank 0: [2]; rank 1: [] complete steps): put back"),
        (mix, "{0}/rank-1: l2l-store.bin is of rank 0 of 2, so {0}/rank-1/l2l-store.manifest is not of it"),
        (damage, "{0}/rank-1/l2l-store.manifest is damaged, as its checksum shows"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(ranks, left, change, said):
    change(left)
    before = files_in(left)
    for rank, (kind, text) in enumerate(ranks.run(is_refused, str(left))):
        text = text.removeprefix("rank 1: ") if rank == 0 else text
        assert kind == "DiskError" and text.startswith(said.format(left))
    assert files_in(left) == before


def test_parts_of_two_runs_are_refused(ranks, left, tmp_path):
    (other := tmp_path / "other").mkdir()
    ranks.run(trains, str(other))
    shutil.rmtree(left / "rank-1")
    shutil.copytree(other / "rank-1", left / "rank-1")
    before = files_in(left)
    said = f"{left}/rank-1: the part of rank 1 is of another run than that of rank 0 in {left}/rank-0"
    assert all(kind == "DiskError" and text.startswith(said) for kind, text in ranks.run(is_refused, str(left)))
    assert files_in(left) == before


def test_another_number_of_ranks_is_refused(ranks, left, tmp_path):
    before = files_in(left)
    said = f"{left}/rank-0: the part there is rank 0 of 2 of a run, and here are 3 ranks: start as many"
    assert all(kind == "DiskError" and text.startswith(said) for kind, text in ranks.run(is_refused, str(left), world=3))
    for folder, of in (left, "one of 2 ranks"), (left / "rank-1", "rank 1 of 2"):
        alone = training("adamw", disk=folder, update="in_forward", resumable=True)
        with pytest.raises(DiskError, match=f"{folder}: the run there is {of}, and here is one: start as many"):
            l2l_compile.resume(alone.call)
    assert files_in(left) == before


def test_a_run_of_one_rank_is_none_of_several(ranks, tmp_path):
    made = training("adamw", disk=tmp_path, update="in_forward", resumable=True)
    l2l_compile.resume(made.call)
    made.step()
    l2l_compile.commit(made.call, wait=True)
    said = f"{tmp_path}: the run there is a run of one rank, and here are 2 ranks, each with a folder of its own in this one"
    assert any(text.removeprefix("rank 0: ").startswith(said) for _, text in ranks.run(is_refused, str(tmp_path)))


def with_another_optimizer(rank, world, folder):
    return is_refused(rank, world, folder, None, "shards", "sgd" if rank else "adamw")


def test_a_rank_with_another_optimizer_is_named(ranks, left):
    before = files_in(left)
    (kind, told), (_, own) = ranks.run(with_another_optimizer, str(left))
    assert own.startswith(f"{left}/rank-1 holds a run whose optimizer is AdamW, and here it is SGD")
    assert (kind, told) == ("L2LError", f"rank 1: {own}") and files_in(left) == before


def test_shards_of_another_mesh_are_refused(ranks, tmp_path):
    ranks.run(trains, str(tmp_path), world=4)
    for _, text in ranks.run(is_refused, str(tmp_path), None, "replicas", world=4):
        assert "holds a run whose parameter 0 is" in text


def of_two_versions(rank, world, folder):
    return is_refused(rank, world, folder, "a" if rank else None)


def test_ranks_resume_the_same_version(ranks, left):
    for _, text in ranks.run(of_two_versions, str(left)):
        assert text.startswith("rank 0 resumes version None, and rank 1 version 'a'")


def is_locked(rank, world, folder):
    kept = begun(folder, world)
    return kept.number, is_refused(rank, world, folder)[1]


def test_two_runs_of_ranks_keep_each_other_out(ranks, left):
    for rank, (_, text) in enumerate(ranks.run(is_locked, str(left))):
        assert f"{left}/rank-{rank}: a model of this process trains in this folder" in text


def without_flush(rank, world, folder):
    made = staged("adamw", world, folder, "without flush", resumable=True)
    with pytest.raises(L2LError, match="'resumable' does not go with a schedule of turns and delay=1"):
        l2l_compile.resume(made.call)


def test_turns_in_flight_are_refused(ranks, tmp_path):
    ranks.run(without_flush, str(tmp_path))


def keeps(rank, world, folder, mode):
    plain, wanted = training("adamw", mesh=mesh_of("shards", world), **MODES[mode]), []
    for _ in range(5):
        plain.step()
        wanted.append(plain.tensors())
    made, own = begun(folder, world, mode=mode), f"{folder}/rank-{rank}"
    for number in range(1, 4):
        made.step()
        l2l_compile.commit(made.call, [rank, number], keep=f"step-{number}")
    assert {n: (v.steps, v.extra) for n, v in l2l_compile.versions(own).items()} == {
        f"step-{n}": (n, [rank, n]) for n in (1, 2, 3)
    }
    l2l_compile.drop_version(made.call, "step-1")
    del made
    made = begun(folder, world, "step-2", mode=mode)
    assert made.resumed.steps == 2 and made.resumed.extra == [rank, 2] and [*l2l_compile.versions(own)] == ["step-2", "step-3"]
    made.step(3)
    assert same(wanted[4], made.tensors())
    l2l_compile.commit(made.call, wait=True)
    del made
    made = begun(folder, world, mode=mode)
    assert made.resumed.steps == 5
    made.step()
    l2l_compile.synchronize(made.call)


@pytest.mark.parametrize("mode", MODES)
def test_versions_of_ranks_continue_with_equal_bits(ranks, mode, tmp_path):
    ranks.run(keeps, str(tmp_path), mode)
    with pytest.raises(DiskError, match=f"{tmp_path} has a run of several ranks: .* such as {tmp_path}/rank-0"):
        l2l_compile.versions(tmp_path)


def keeps_without_room(rank, world, folder):
    with slow_disk(Faults(room=23 << 20) if rank == 1 else Faults()):  # two places of 9 MiB
        made = begun(folder, world)
        for number in (1, 2):
            made.step()
            with pytest.raises(DiskError) as caught:
                l2l_compile.commit(made.call, keep="a")
            l2l_compile.commit(made.call, number, wait=True)
        assert l2l_compile.versions(f"{folder}/rank-{rank}") == {}
        return str(caught.value)


def test_a_version_without_room_on_one_rank_is_kept_on_none(ranks, tmp_path):
    told, own = ranks.run(keeps_without_room, str(tmp_path))
    assert own.startswith(f"{tmp_path}/rank-1: No space left") and told == f"rank 1: {own}"


def loses_a_version(rank, world, folder):
    made = begun(folder, world)
    made.step()
    for name in ("a", "b"):
        l2l_compile.commit(made.call, keep=name)
        made.step()
    del made
    torch.distributed.barrier()
    if rank == 1:
        os.unlink(f"{folder}/rank-1/l2l-store.version.a")
    torch.distributed.barrier()
    begun(folder, world)
    return [*l2l_compile.versions(f"{folder}/rank-{rank}")]


def test_a_version_that_a_rank_has_dropped_is_no_other_ones(ranks, tmp_path):
    """A kill may come when some ranks have dropped it."""
    assert ranks.run(loses_a_version, str(tmp_path)) == [["b"], ["b"]]


def fails_to_commit(rank, world, folder):
    made = begun(folder, world)
    made.step()
    l2l_compile.commit(made.call, wait=True)

    def fails(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(manifest.os, "write", fails)
        with pytest.raises(L2LError) as caught:
            made.step(4)
        steps = made.number
        return type(caught.value).__name__, str(caught.value), time.time(), steps


def test_a_commit_that_fails_on_one_rank_ends_all(ranks, tmp_path):
    told, own = ranks.run(fails_to_commit, str(tmp_path), seconds=60)
    said = f"{tmp_path}/rank-1/l2l-store.manifest.next: No space left on device while "
    assert own[0] == "DiskError" and own[1].startswith(said)
    assert told[0] == "RankError" and told[1].startswith(f"rank 1 failed: l2l_compile.errors.DiskError: {said}")
    assert told[2] - own[2] < 5.0 and max(own[3], told[3]) <= 4, "within two steps"


def ends_without_a_wait(rank, world, folder):
    """Rank 1 prepares its last step when both have left torch.distributed."""
    made, ended = begun(folder, world), threading.Event()
    made.step()
    l2l_compile.synchronize(made.call)
    write = versions.write_manifest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "write_manifest", lambda *given, **options: (ended.wait(20), write(*given, **options))[1])
        l2l_compile.commit(made.call)
        meet()
        torch.distributed.destroy_process_group()
        if rank == 1:
            time.sleep(1.0)
        ended.set()
        made.stored.store.await_commit()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # for the pool
    return manifest.read_manifest(f"{folder}/rank-{rank}")["contents"]["steps"]


def test_a_last_commit_ends_behind_the_process_groups(ranks, tmp_path):
    assert ranks.run(ends_without_a_wait, str(tmp_path), seconds=60) == [1, 1]


def is_left_alone(rank, world, folder):
    made = begun(folder, world)
    made.step()
    among = made.stored.store._among
    meet()
    torch.distributed.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "PATIENCE", 0.3)
        if rank == 0:
            with pytest.raises(
                RankError, match="torch.distributed has ended on this rank before a version was there on all ranks"
            ):
                among.all_have("a version")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # for the pool


def test_a_rank_without_process_groups_does_not_wait_long(ranks, tmp_path):
    ranks.run(is_left_alone, str(tmp_path), seconds=60)


def waits_for_one_that_is_killed(rank, world, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "PATIENCE", PATIENCE)
        made = begun(folder, world)
        made.step(2)
        l2l_compile.synchronize(made.call)
        if rank == 1:
            patch.setattr(versions, "write_manifest", lambda *_, **__: die())
        begin = time.monotonic()
        with pytest.raises(RankError, match="rank 1 does not answer since 2 s: it was killed, or hangs"):
            l2l_compile.commit(made.call, wait=True)
        with pytest.raises(RankError, match="rank 1"):
            session_of(made.call).server.updates._stored.store.check()
        return time.monotonic() - begin


def test_a_commit_ends_when_another_rank_was_killed(ranks, tmp_path):
    waited, _ = ranks.run(waits_for_one_that_is_killed, str(tmp_path), killed=1, seconds=60)
    assert waited < PATIENCE + 5.0


def continues_on_a_wide_mesh(rank, world, folder, kind):
    def made(disk=None):
        torch._dynamo.reset()
        gc.collect()
        options = {} if disk is None else {"resumable": True}
        if kind == "replicas":
            return training("adamw", disk=disk, mesh=mesh_of(kind, world), update="in_backward", **options)
        return staged("adamw", world, disk, "delayed", width="shards", precision="bf16", **options)

    plain = made()
    plain.step(5)
    wanted = plain.tensors()
    for steps in (2, 5):
        run = made(folder)
        run.number = l2l_compile.resume(run.call).steps
        run.step(steps - run.number)
        l2l_compile.commit(run.call, wait=True)
        found = run.tensors()
        del run  # it leaves the folder
    assert same(wanted, found)


@pytest.mark.parametrize("kind", ["replicas", "sharded stages"])
def test_ranks_of_a_wide_mesh_continue_with_equal_bits(ranks, kind, tmp_path):
    ranks.run(continues_on_a_wide_mesh, str(tmp_path), kind, world=4)
    assert sorted(os.listdir(tmp_path)) == [f"rank-{rank}" for rank in range(4)]
