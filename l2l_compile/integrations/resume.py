"""Resume a training run whose parameters and optimizer state are on disk, commit steps of it, and keep some of them as versions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from l2l_compile.disk.found_run import parts_of_ranks
from l2l_compile.disk.manifest import NAMES, PREPARED, UNFINISHED, names_of_versions, read_manifest
from l2l_compile.errors import DiskError, L2LError, OptionError
from l2l_compile.frontend.dynamo import adapter
from l2l_compile.host.resumable_run import ResumableRun, Resumed, run_of
from l2l_compile.host.step.sharded_state import ranks_among
from l2l_compile.host.updates.overlapped import OverlappedUpdates
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.reentry import check, whole
from l2l_compile.session import session_of


@whole("resume()")
def resume(compiled: Any, version: str | None = None) -> Resumed:
    """Continue the run in the folder, or the folders, of the option `disk` from its last complete step; begin one if there is none.

    With `version`, continue from a step that `commit` has kept under this name. The last complete step stays until the first commit of
    this process, which takes its place; versions stay.

    Call it once, behind `torch.compile(model, backend="l2l", options={..., "resumable": True})` and before the first forward, with the
    model and the optimizer built as they were in the killed process. Afterwards parameters, buffers, the optimizer's state and its
    param_groups are those of that step. Nothing on disk is read.

    Ranks that share a model all call it, with the same `version`, and so `commit` and `drop_version`. Each has a part of the run, in a folder
    `rank-0`, `rank-1`, ... of its own within that of the option `disk`. All continue from the same step, the newest one that all have.
    If one raises an error, all do.

    Returns the number of complete steps, and what `commit` got behind the last one. Raises `OptionError` without the option, `L2LError`
    for another model or optimizer than that of the run, and `DiskError` for a folder that another process trains in, whose files are
    damaged or missing, or are of another rank, or that has no such version; nothing is changed then.
    """
    check()
    session = session_of(compiled)  # raises for what is not compiled
    options = Options.build(adapter.options_of(compiled))
    options.check_folders()
    if not options.resumable:
        raise OptionError("resume() is for a model that is compiled with the options 'disk' and resumable=True")
    assert options.optimizer is not None and options.disk is not None, "`Options.build` requires it"
    if options.delay and options.goes_by_turns:
        raise L2LError(
            "the option 'resumable' does not go with a schedule of turns and delay=1: a step is over there while its last turns are in flight. Leave "
            "out 'delay' or 'schedule', or leave out 'resumable' and save checkpoints with torch.distributed.checkpoint"
        )
    if session is not None:
        raise L2LError("resume() comes before the first forward of a compiled model: it replaces parameters and optimizer state")
    if run_of(options.optimizer) is not None:
        raise L2LError("resume() was called with this optimizer before: call it once, behind torch.compile")
    ranks = ranks_among(parameters_of(options.optimizer))
    return ResumableRun(options.disk, options.optimizer, adapter.uncompiled_module(compiled), version, ranks).resumed


@whole("commit()")
def commit(compiled: Any, extra: Any = None, wait: bool = False, keep: str | None = None) -> None:
    """Commit the step that `optimizer.step()` has ended, with `extra`, which `resume` returns.

    Without it, the next forward that trains commits the step, with None. Call it behind all that belongs to the step, such as
    `scheduler.step()`. `extra` are numbers, texts, tensors, and lists, tuples and dictionaries of them: the state of a random
    generator, of a learning rate scheduler, or of a data loader. Does not block; with `wait`, returns when the step is durable.

    With `keep`, a name, the step stays as a version until `drop_version`, or until another step is kept under this name, and `commit`
    returns when it is durable. No weight is copied: later steps write other places of the file.

    Each rank hands in its own `extra`. With `wait` or `keep`, a rank waits for the others.

    Raises `L2LError` if no step is over, for other values, and with `wait` or `keep` the error of the updates or of the disk. If the disk
    has too little room for a version, nothing is committed, and training can go on.
    """
    check()
    session = session_of(compiled)
    updates = session.server.updates if session is not None else None
    if keep is not None:
        _check_name(keep)
    if not isinstance(updates, OverlappedUpdates) or not (updates.commit(extra) if keep is None else updates.keep(extra, keep)):
        raise L2LError(
            "commit() commits a step of a model with the option resumable=True: call it behind optimizer.step(), once, before the next forward"
        )
    if wait:
        updates.await_commit()


@whole("drop_version()")
def drop_version(compiled: Any, version: str) -> None:
    """Remove a version that `commit` has kept. The next version, or step, uses its space again.

    Call it with a model whose run `resume` has continued. Where no process trains, the file `l2l-store.version.NAME` may be removed as
    well. Raises `DiskError` if there is no such version.
    """
    check()
    session_of(compiled)  # raises for what is not compiled
    optimizer = Options.build(adapter.options_of(compiled)).optimizer
    run = run_of(optimizer) if optimizer is not None else None
    if run is None:
        raise L2LError("drop_version() is for a run that l2l_compile.resume(model) has begun or continued: call it before")
    run.store.drop(version)


@dataclass(frozen=True)
class KeptVersion:
    """A step that `commit` has kept.

    steps  complete steps, as `resume` returns them; so `extra`
    """

    steps: int
    extra: Any


def versions(folder: str | os.PathLike) -> dict[str, KeptVersion]:
    """The versions that are kept in a folder, by name, the one with the fewest steps first. A run may train there meanwhile.

    Of several ranks, each has a folder of its own, such as "/nvme/run7/rank-0" in "/nvme/run7".

    Raises `DiskError` for a folder that cannot be read, and for a version that is damaged.
    """
    if parts := parts_of_ranks(str(folder)):
        raise DiskError(f"{folder} has a run of several ranks: give versions() the folder of one, such as {parts[0]}")
    found = {name: read_manifest(str(folder), name) for name in names_of_versions(str(folder))}
    contents = {name: manifest["contents"] for name, manifest in found.items() if manifest is not None}
    kept = {name: KeptVersion(each["steps"], each["extra"]) for name, each in contents.items()}
    return dict(sorted(kept.items(), key=lambda item: item[1].steps))


def _check_name(version: str) -> None:
    if not isinstance(version, str) or not NAMES.fullmatch(version) or version.endswith((UNFINISHED, PREPARED)):
        raise L2LError(
            f"keep={version!r} is no name of a version: it is a part of a file's name, of up to 100 letters, digits and the characters . _ = + -, "
            f"begins with a letter, a digit or _, and does not end with {UNFINISHED} or {PREPARED}"
        )
