"""Processes of several ranks that train a run on disk, and die at a given point of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import l2l_compile
from forked import Launcher
from l2l_compile.disk import found_run, versions
from l2l_compile.disk.manifest import read_manifest
from l2l_compile.disk.versioned_range import VersionedRange
from l2l_compile.ranks import watch
from l2l_compile.ranks.agreement import Agreement
from slow_disk import Faults, slow_disk
from stored_training import Training, training

HERE = Path(__file__).parent
KINDS = {
    "in_backward": {"update": "in_backward"},
    "in_forward": {"update": "in_forward"},
    "delayed": {"update": "in_forward", "delay": 1},
}
SCRIPT = """
import os, sys
sys.path[:0] = {folders}
import runs_of_ranks
runs_of_ranks.start(runs_of_ranks.Run(**{run!r}))
os._exit(0)
"""


@dataclass(frozen=True)
class Run:
    """What all ranks of a run do.

    out     a folder for what each says
    disk    the folder of the run, None for the same training in memory
    model   "shards", or "stages" of a pipeline
    kind    of `KINDS`
    upto    complete steps at the end
    point   of `POINTS` or `OTHER_POINTS`, where a rank dies in the commit of step `at`, or behind it
    rate    bytes a second of the disk
    keep    the name under which each step is kept, and `version` that from which the run continues
    dies    seconds behind two steps, after which a rank is killed; which one; and seconds until the others are
    """

    out: str
    disk: str | None
    model: str
    kind: str
    upto: int
    point: str | None = None
    at: int = 0
    world: int = 2
    precision: str = "bf16"
    rate: float | None = None
    keep: str | None = None
    version: str | None = None
    dies: tuple[float, int, float] | None = None


def said_by(launcher: Launcher, run: Run) -> list[list[dict[str, Any]]]:
    """What each rank says, in order. Raises `AssertionError` if one has ended with an error."""
    Path(run.out).mkdir(exist_ok=True)
    folders = [str(HERE), str(HERE.parent), str(HERE.parent / "host")]
    done = launcher.run(SCRIPT.format(folders=folders, run=asdict(run)), seconds=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return [[json.loads(line) for line in Path(run.out, f"said_{r}").read_text().splitlines()] for r in range(run.world)]


def start(run: Run) -> None:
    """Start the ranks. When one dies, so do the others."""
    ranks = {}
    for rank in range(run.world):
        child = os.fork()
        if not child:
            signal.alarm(100)
            train(run, rank)
            os._exit(0)
        ranks[child] = rank
    if run.dies is not None:
        kill(run, [*ranks])
    while ranks:
        child, status = os.wait()
        del ranks[child]
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)


def kill(run: Run, processes: list[int]) -> None:
    """When each rank has made two steps, kill one, and then the others."""
    seconds, first, gap = run.dies
    files = [Path(run.out, f"said_{rank}") for rank in range(run.world)]
    until(lambda: all(file.exists() and file.read_text().count("\n") >= 3 for file in files))
    time.sleep(seconds)
    os.kill(processes.pop(first), signal.SIGKILL)
    time.sleep(gap)
    for other in processes:
        os.kill(other, signal.SIGKILL)


def train(run: Run, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    watch.PATIENCE = 2.0
    torch.set_num_threads(1)
    store = dist.FileStore(f"{run.out}/store", run.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=run.world)
    if run.point is not None:
        {**POINTS, **OTHER_POINTS}[run.point](run, rank)
    with slow_disk(Faults(rate=run.rate)), open(f"{run.out}/said_{rank}", "w") as file:
        go_on(run, rank, lambda **said: print(json.dumps(said), file=file, flush=True))
    dist.barrier()
    dist.destroy_process_group()


def begun(run: Run) -> Training:
    options = {**KINDS[run.kind], "precision": run.precision}
    if run.disk is not None:
        options |= {"disk": run.disk, "resumable": True}
    if run.model == "shards":
        return training("adamw", mesh=dist.init_device_mesh("cpu", (run.world,)), **options)
    from test_stored_stages import staged

    return staged(
        "adamw", run.world, options.pop("disk", None), run.kind, **{k: v for k, v in options.items() if k not in KINDS[run.kind]}
    )


def go_on(run: Run, rank: int, say: Callable[..., None]) -> None:
    """Train, with commits behind every second step; the next forward commits the others."""
    from test_killed_and_resumed import digest

    made = begun(run)
    if run.disk is not None:
        resumed = l2l_compile.resume(made.call, run.version)
        made.number = resumed.steps
        say(steps=resumed.steps, extra=resumed.extra, digest=digest(made.tensors()) if resumed.steps else None)
    while made.number < run.upto:
        made.step()
        if run.disk is None:
            say(steps=made.number, digest=digest(made.tensors()))
            continue
        if run.keep is not None:
            l2l_compile.commit(made.call, [rank, made.number], keep=run.keep)
        elif made.number % 2:
            l2l_compile.commit(made.call, [rank, made.number])
        say(steps=made.number)
    if run.disk is not None and made.number > resumed.steps:
        if run.keep is None and not made.number % 2:
            l2l_compile.commit(made.call, [rank, made.number])
        l2l_compile.synchronize(made.call)
        made.stored.store.await_commit()
        say(steps=made.number, digest=digest(made.tensors()))


# ---- where ranks die -------------------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pause() -> None:
    """Until the other rank has died, and this one is killed as well."""
    time.sleep(90)


def until(is_there: Callable[[], bool]) -> None:
    while not is_there():
        time.sleep(0.002)


def commits_of(run: Run, rank: int, is_prepared: bool = False) -> int:
    found = read_manifest(f"{run.disk}/rank-{rank}", is_prepared=is_prepared)
    return 0 if found is None else found["commits"]


def before(owner: Any, name: str, number: int, then: Callable[[], None]) -> None:
    """Have `then` called before call `number` of a function, counted from 1."""
    function, calls = getattr(owner, name), []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            then()
        return function(*args, **options)

    setattr(owner, name, counted)


def one_has_prepared(run: Run, rank: int) -> None:
    """Rank 1 dies before it has prepared the step, when rank 0 has."""
    if rank == 1:
        before(versions, "write_manifest", run.at, lambda: (until(lambda: commits_of(run, 0, True) == run.at), die()))


def the_other_has_prepared(run: Run, rank: int) -> None:
    """Rank 1 dies when it has prepared the step, and rank 0 has not."""
    if rank == 1:
        before(Agreement, "all_have", run.at, die)
    else:
        before(versions, "write_manifest", run.at, pause)


def both_have_prepared(run: Run, rank: int) -> None:
    before(versions, "confirm_manifest", run.at, die if rank == 1 else pause)


def one_writes_the_next_step(run: Run, rank: int) -> None:
    """Rank 1 dies when all have prepared the step, and rank 0 has written a part of the next one."""
    sign = Path(run.out, "writes")
    if rank == 1:
        before(versions, "confirm_manifest", run.at, lambda: (until(sign.exists), die()))
        return
    written, write = [], VersionedRange.write

    def noted(self: VersionedRange, buffer: memoryview, start: int) -> None:
        write(self, buffer, start)
        if commits_of(run, 0) == run.at:
            written.append(None)
            if len(written) == 2:
                sign.touch()
                pause()

    VersionedRange.write = noted


def both_write_the_next_step(run: Run, rank: int) -> None:
    written, write = [], VersionedRange.write

    def noted(self: VersionedRange, buffer: memoryview, start: int) -> None:
        write(self, buffer, start)
        if commits_of(run, rank) == run.at:
            written.append(None)
            if len(written) == 3:
                die()

    VersionedRange.write = noted


def one_has_prepared_a_version(run: Run, rank: int) -> None:
    """As `one_has_prepared`, of the version of a step: the manifest of the step itself is in place on both."""
    prepared = lambda: read_manifest(f"{run.disk}/rank-0", run.keep, is_prepared=True)  # noqa: E731 - a short one
    is_there = lambda: (found := prepared()) is not None and found["commits"] == run.at  # noqa: E731 - a short one
    if rank == 1:
        before(versions, "write_manifest", 2 * run.at, lambda: (until(is_there), die()))


def one_has_a_version(run: Run, rank: int) -> None:
    """Rank 1 dies when both have prepared the version of a step, and rank 0 has it in place."""
    is_there = lambda: read_manifest(f"{run.disk}/rank-0", run.keep)["commits"] == run.at  # noqa: E731 - a short one
    if rank == 1:
        before(versions, "confirm_manifest", 2 * run.at, lambda: (until(is_there), die()))


def both_settle(run: Run, rank: int) -> None:
    """In `resume`, before a manifest that was prepared is put in place, or removed."""
    for name in ("confirm_manifest", "remove_manifest"):
        before(found_run, name, 1, die)


POINTS = {
    "one has prepared": one_has_prepared,
    "the other has prepared": the_other_has_prepared,
    "both have prepared": both_have_prepared,
    "one writes the next step": one_writes_the_next_step,
    "both write the next step": both_write_the_next_step,
}
OTHER_POINTS = {
    "one has prepared a version": one_has_prepared_a_version,
    "one has a version": one_has_a_version,
    "both settle": both_settle,
}
