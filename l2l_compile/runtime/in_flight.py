"""The step of one compiled model whose last turns go back in its next call (`paused_step.py`), if there is one."""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from l2l_compile import reentry
from l2l_compile.errors import L2LError
from l2l_compile.memory.finalizers import members
from l2l_compile.ranks.announcements import ActionKind
from l2l_compile.runtime.late_loss import ReadAtOnce
from l2l_compile.uncaught import uncaught

_all: weakref.WeakSet[InFlight] = weakref.WeakSet()


class InFlight:
    """`drain` runs what is in flight at once, where nothing may be: before an evaluation, a checkpoint, or a batch of another size."""

    def __init__(self) -> None:
        self.paused: Any = None  # a `PausedStep`, whose module imports this one
        self.read_at_once = ReadAtOnce()
        self.lock = threading.RLock()  # of the lanes: a thread of the user may read a loss while another one runs a step
        self.settle: Callable[[], None] = self.drain  # drains, and waits for all updates
        _all.add(self)

    def put(self, paused: Any) -> None:
        """A call has ended, and turns of its step are in flight."""
        _drain_before_the_end()
        self.paused = paused

    def take(self) -> Any:
        """The step, which is in flight no longer; None if there is none."""
        paused, self.paused = self.paused, None
        return paused

    def drain(self, kind: ActionKind = ActionKind.DRAIN) -> None:
        """Run the turns that are in flight, together with the other ranks, which are told the `kind`. Returns when all lanes are done."""
        if (paused := self.paused) is not None:
            paused.finish(paused, kind)  # takes it

    def drop(self, error: BaseException) -> list[Any]:
        """After a failure: nothing is in flight any more. Returns the steps that were."""
        if (paused := self.take()) is None:
            return []
        paused.drop(error)
        return [paused.step]


_PATIENCE = 10.0  # seconds, for ranks that do something else before their processes end


def _drain_at_the_end() -> None:
    for each in members(_all):
        if each.paused is not None:
            each.paused.step.ranks.watch.ends_within(_PATIENCE)
    _drain_all()


def _drain_all() -> None:
    """Run what is in flight of all models, where nothing can be in flight any more; not behind an error, which other ranks may not have."""
    if sys.exc_info()[0] is not None or uncaught() is not None:
        return
    for each in members(_all):
        if each.paused is not None:
            try:
                each.drain(ActionKind.DRAIN_TO_END)
            except (L2LError, RuntimeError) as error:
                warnings.warn(
                    f"backend 'l2l': the last update was not made, since turns of it were in flight: {error}. Call l2l_compile.synchronize(model) "
                    "behind the last step",
                    RuntimeWarning,
                    stacklevel=2,
                )


@functools.cache
def _drain_before_the_end() -> None:
    """From now on, the end of the process and `torch.distributed.destroy_process_group` run what is in flight first, with the other ranks."""
    atexit.register(reentry.whole("the end of the process")(_drain_at_the_end))  # behind that of the threads, so it runs before
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def drained(*arguments: Any, **named: Any) -> None:
        _drain_all()
        destroy(*arguments, **named)

    dist.destroy_process_group = drained
