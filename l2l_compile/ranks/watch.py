"""Watches the other ranks. If a rank fails, ends or does not answer, the ranks that wait for it raise `RankError`.

Ranks communicate through the store of `torch.distributed`. Twice a second, a thread of each rank writes a counter there. The
thread also reads the counters of the other ranks, and the note that a rank leaves when it fails.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from l2l_compile.errors import DiskError, RankError
from l2l_compile.uncaught import look_at_target, uncaught

BEAT = 0.5  # seconds between two writes of the counter
PATIENCE = 6.0  # seconds without a new counter after which a rank counts as gone
LATE = 30.0  # seconds after which a rank warns that it waits for another rank, which is alive
GRACE = 2.0  # seconds in which data that a rank has sent before it ended may still arrive


@dataclass(frozen=True)
class Failure:
    """Why a rank dropped out, and the time (`time.monotonic`) from which a collective that waits for it raises.

    own  the error of this rank's disk, if it is this rank that dropped out
    """

    text: str
    gives_up: float
    has_ended: bool = False  # its process, without an error
    own: DiskError | None = None

    @property
    def error(self) -> RankError | DiskError:
        return self.own or RankError(self.text)


class Watch:
    """A rank's view of the other ranks, and its reports to them."""

    def __init__(self, store: Any, rank: int, size: int):
        self.rank, self.size, self._store = rank, size, store
        self.failure: Failure | None = None
        self.abandoned = False  # whether this rank left a collective that other ranks may never finish
        self._until: float | None = None  # when this rank, at the end of its process, waits no longer
        self._closed = self._gone = False
        self._disk: DiskError | None = None  # of this rank
        self._wake: queue.SimpleQueue = queue.SimpleQueue()  # a finalizer may put into it, whatever its thread is doing
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._beats = self._begun = 0
        self._beat()
        _all.add(self)
        look_at_target(os.getpid(), _tell_all)
        threading.Thread(target=self._loop, name="l2l-watch", daemon=True).start()

    def check(self) -> None:
        """Raises `RankError` if a rank has dropped out, and the `DiskError` of this rank if its own disk has failed."""
        failure = self.failure
        if failure is not None and time.monotonic() >= failure.gives_up:
            self.abandoned = True
            raise failure.error
        if self._until is not None and time.monotonic() > self._until:
            self.abandoned = True
            raise RankError("other ranks have not come to the end of their processes")

    def ends_within(self, seconds: float) -> None:
        """The process ends: from then on, this rank waits for no other."""
        self._until = time.monotonic() + seconds

    @property
    def is_closed(self) -> bool:
        """Whether this rank has dropped out, and looks at the others no more."""
        return self._closed

    @property
    def ends_well(self) -> bool:
        """Whether no rank has failed, as far as this one knows."""
        return self._until is not None and (self.failure is None or self.failure.has_ended)

    def waiting(self, begins: str) -> Callable[[], None]:
        """Count a joint action that begins. Returns a `check` to call while this rank waits; it also warns of late ranks."""
        self._begun += 1
        since, warned = time.monotonic(), False

        def check() -> None:
            nonlocal warned
            self.check()
            if not warned and time.monotonic() - since > LATE:
                warned = True
                late = [rank for rank, (beat, _) in sorted(self._seen.copy().items()) if int(beat.split()[1]) < self._begun]
                if late:
                    _warn_of(late, self.rank, begins)

        return check

    def explain(self, error: Exception) -> RankError | DiskError:
        """The error for a collective that failed, most likely because a rank is gone. Waits until it is known which rank."""
        until = time.monotonic() + PATIENCE + 2 * BEAT
        while self.failure is None and time.monotonic() < until:
            time.sleep(BEAT / 10)
        self.abandoned = True
        return self.failure.error if self.failure is not None else RankError(f"a collective failed: {error}")

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks that this rank has failed within a step: they cannot finish the step without it."""
        if isinstance(error, RankError) or self._closed:
            return
        text = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
        if isinstance(error, DiskError):
            self._disk = error
        self._note(f"rank {self.rank} failed: {text}")

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.put(None)

    def groups_are_gone(self) -> None:
        """A finalizer of the process groups: the thread tells the other ranks that this rank has dropped out."""
        self._gone = True
        self._wake.put(None)

    def ended(self) -> None:
        """Tell the other ranks that this rank has dropped out: its process or its process groups end."""
        if self._closed:
            return
        error = uncaught()
        if error is not None:
            self._note(f"rank {self.rank} ended: {''.join(traceback.format_exception_only(error)).strip()}")
            if self.rank == 0:
                time.sleep(2 * BEAT)  # with its process ends the store, in most cases: the other ranks look into it first
        else:
            self._set(f"ended/{self.rank}", "1")
        self.close()

    def _note(self, text: str) -> None:
        try:
            self._store.compare_set("failed", "", text)
        except Exception:  # noqa: BLE001 - the store is gone, which the other ranks notice themselves
            pass

    def _set(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except Exception:  # noqa: BLE001 - as above
            pass

    def _loop(self) -> None:
        while not self._is_to_end():
            try:
                self._beat()
                self._look()
            except Exception as error:  # noqa: BLE001 - every kind of store raises its own kind of error
                if self.failure is None and not self._closed:
                    text = (
                        "the store of torch.distributed is gone: the process that holds it, most often that of rank 0, has ended. Its own "
                        f"output says why ({error})"
                    )
                    self.failure = Failure(text, time.monotonic() + GRACE)
                return

    def _is_to_end(self) -> bool:
        """Wait until the next beat, or until the thread is to end. Returns whether it is."""
        with suppress(queue.Empty):
            self._wake.get(timeout=BEAT)
        if self._gone:
            self.ended()
        return self._closed

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self.rank}", f"{self._beats} {self._begun}")

    def _look(self) -> None:
        """Record the first failure of another rank."""
        now = time.monotonic()
        if self.failure is not None:
            return
        if self._store.check(["failed"]) and (text := self._store.get("failed").decode()):
            is_own = text.startswith(f"rank {self.rank} failed: ")
            self.failure = Failure(text, now, own=self._disk if is_own else None)
            return
        for rank in range(self.size):
            if rank != self.rank and self._store.check([f"beat/{rank}"]):
                beat = self._store.get(f"beat/{rank}")
                last, since = self._seen.get(rank, (b"", now))
                self._seen[rank] = (beat, since if beat == last else now)
                if now - self._seen[rank][1] > PATIENCE:
                    self._silent(rank, now)
                    return

    def _silent(self, rank: int, now: float) -> None:
        has_ended = self._store.check([f"ended/{rank}"])
        if has_ended:
            text = f"rank {rank} has ended, and this rank waits for it: all ranks have to take the same steps"
        else:
            text = f"rank {rank} does not answer since {PATIENCE:.0f} s: it was killed, or hangs"
        self.failure = Failure(text, now, has_ended)


def _warn_of(late: list[int], rank: int, begins: str) -> None:
    others = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
    warnings.warn(
        f"rank {rank} {begins}, and has waited {LATE:.0f} s for {others}, alive but not as far. All ranks have to take the same steps: one "
        "with fewer batches, or in a collective of its own (all_reduce, barrier, full_tensor), is waited for until the timeout of the "
        "process group",
        RuntimeWarning,
        stacklevel=2,
    )


_all: weakref.WeakSet[Watch] = weakref.WeakSet()


def _tell_all() -> None:
    """The process ends: tell the other ranks."""
    for watch in list(_all):
        watch.ended()


@atexit.register
def _end() -> None:
    """Tell the other ranks. If a collective was abandoned, end the process here: exit would wait for its thread."""
    watches = list(_all)
    _tell_all()
    if any(watch.abandoned for watch in watches):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if all(watch.ends_well for watch in watches if watch.abandoned) else 1)
