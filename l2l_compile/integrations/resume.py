"""Resume a training run whose parameters and optimizer state are on disk from its last complete step, and commit steps of it."""

from __future__ import annotations

from typing import Any

from l2l_compile.errors import L2LError, OptionError
from l2l_compile.frontend.dynamo import adapter
from l2l_compile.host.resumable_run import ResumableRun, Resumed, run_of
from l2l_compile.host.step.sharded_state import ranks_among
from l2l_compile.host.updates.overlapped import OverlappedUpdates
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.reentry import check, whole
from l2l_compile.session import session_of


@whole("resume()")
def resume(compiled: Any) -> Resumed:
    """Continue the run in the folder, or the folders, of the option `disk` from its last complete step; begin one if there is none.

    Call it once, behind `torch.compile(model, backend="l2l", options={..., "resumable": True})` and before the first forward, with the
    model and the optimizer built as they were in the killed process. Afterwards parameters, buffers, the optimizer's state and its
    param_groups are those of that step. Nothing on disk is read.

    Returns the number of complete steps, and what `commit` got behind the last one. Raises `OptionError` without the option, `L2LError`
    for another model or optimizer than that of the run, and `DiskError` for a folder that another process trains in, or whose files
    are damaged; nothing is changed then.
    """
    check()
    session = session_of(compiled)  # raises for what is not compiled
    options = Options.build(adapter.options_of(compiled))
    options.check_folders()
    if not options.resumable:
        raise OptionError("resume() is for a model that is compiled with the options 'disk' and resumable=True")
    assert options.optimizer is not None and options.disk is not None, "`Options.build` requires it"
    if ranks_among(parameters_of(options.optimizer)) is not None:
        raise L2LError(
            "the option 'resumable' is for one rank: ranks would not commit the same step. Leave it out, and save checkpoints with "
            "torch.distributed.checkpoint"
        )
    if session is not None:
        raise L2LError("resume() comes before the first forward of a compiled model: it replaces parameters and optimizer state")
    if run_of(options.optimizer) is not None:
        raise L2LError("resume() was called with this optimizer before: call it once, behind torch.compile")
    return ResumableRun(options.disk, options.optimizer, adapter.uncompiled_module(compiled)).resumed


@whole("commit()")
def commit(compiled: Any, extra: Any = None, wait: bool = False) -> None:
    """Commit the step that `optimizer.step()` has ended, with `extra`, which `resume` returns.

    Without it, the next forward that trains commits the step, with None. Call it behind all that belongs to the step, such as
    `scheduler.step()`. `extra` are numbers, texts, tensors, and lists, tuples and dictionaries of them: the state of a random
    generator, of a learning rate scheduler, or of a data loader. Does not block; with `wait`, returns when the step is durable.

    Raises `L2LError` if no step is over, for other values, and with `wait` the error of the updates or of the disk.
    """
    check()
    session = session_of(compiled)
    updates = session.server.updates if session is not None else None
    if not isinstance(updates, OverlappedUpdates) or not updates.commit(extra):
        raise L2LError(
            "commit() commits a step of a model with the option resumable=True: call it behind optimizer.step(), once, before the next forward"
        )
    if wait:
        updates.await_commit()
