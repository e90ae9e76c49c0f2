"""The host lane: a thread that updates layers while the device computes others."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable

import torch

from ..frontend.dynamo import compiles_here
from ..memory.accesses import UNWATCHED, Order, Unwatched
from ..timeline import HOST


class Ticket:
    """A piece of work of the host lane; `wait` returns when it is done, and all that is in `order`."""

    def __init__(self, worker: Worker, order: Order) -> None:
        self._done = threading.Event()
        self._worker, self._accesses, self._order = worker, worker.accesses, order

    def wait(self) -> None:
        while not self._done.wait(_LOOK):
            self._worker.finish_what_is_left()
        self._accesses.follow(self._order)

    def finish(self) -> None:
        self._done.set()

    def look(self) -> bool:
        """Whether it is done. Does it, and what is before it, if the thread has ended."""
        self._worker.finish_what_is_left()
        return self._done.is_set()


class Worker:
    """Does work in order on a thread of its own. After a failure, what is queued is dropped until `raise_failure`.

    threads  bounds the intra-op threads of the work: on a device that is the host itself, both compute at once
    name     of the lane
    """

    def __init__(self, threads: int, accesses: Unwatched = UNWATCHED, name: str = HOST):
        self.accesses, self.name = accesses, name
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._dropping = False
        self.finished = 0  # pieces of work that were done or dropped
        thread = threading.Thread(target=self._loop, args=(threads, self._queue), name=f"l2l-{name}", daemon=True)
        _threads[thread] = self
        self._thread = weakref.ref(thread)
        thread.start()

    def submit(self, work: Callable[[], None]) -> Ticket:
        """Queue work; it runs without recording gradients."""
        given, order = self.accesses.give(self.name, work)
        ticket = Ticket(self, order)
        self._queue.put((given, ticket))
        return ticket

    def drain(self) -> None:
        """Wait until all work is done. Raises what work has raised, once."""
        self.submit(lambda: None).wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what work has raised since the last call."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread when what is queued is done. Does not wait: the garbage collector may call it anywhere."""
        self._queue.put(None)

    def end(self, drop: bool) -> None:
        """End the thread when what is queued is done, or dropped. Does not wait."""
        self._dropping = drop
        self.close()

    def finish_what_is_left(self) -> None:
        """Do what was given after `close`, if the thread has ended: somebody waits for it."""
        thread = self._thread()
        if thread is None or not thread.is_alive():
            with contextlib.suppress(queue.Empty):
                while True:
                    self._do(*self._queue.get_nowait())

    def _loop(self, threads: int, work_queue: queue.SimpleQueue) -> None:
        torch.set_num_threads(threads)
        while (item := work_queue.get()) is not None:
            self._do(*item)
            del item

    def _do(self, work: Callable[[], None], ticket: Ticket) -> None:
        try:
            if self._failure is None and not self._dropping:
                with torch.no_grad():
                    work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller by drain or raise_failure
            self._failure = error
        ticket.finish()
        self.finished += 1


_LOOK = 0.2  # seconds
_threads: weakref.WeakKeyDictionary[threading.Thread, Worker] = weakref.WeakKeyDictionary()
_PATIENCE = 60.0  # seconds without any work being finished
_PATIENCE_AFTER_FAILURE = 3.0


def _before_fork() -> None:
    """A forked process has no threads: an update under way would stay half done there, with what its thread has locked.

    Not where the updates wait for this thread, which is one of a worker, or compiles.
    """
    if threading.current_thread() in _threads or compiles_here():
        return
    workers = [worker for thread, worker in dict(_threads).items() if thread.is_alive()]
    tickets = [worker.submit(lambda: None) for worker in workers]
    _wait(lambda: all(ticket.look() for ticket in tickets), workers, _PATIENCE, "a process is forked")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def _wait(done: Callable[[], bool], workers: Iterable[Worker], patience: float, what: str) -> None:
    """Wait, as long as something is done within the patience."""
    finished, since = -1, time.monotonic()
    while not done():
        time.sleep(0.002)
        now = sum(worker.finished for worker in workers)
        if now != finished:
            finished, since = now, time.monotonic()
        elif time.monotonic() - since > patience:
            print(f"l2l: {what} without an update that has taken more than {patience:.0f} s", file=sys.stderr, flush=True)
            return


@atexit.register
def _finish() -> None:
    """Python should not end while a thread is at work: its last updates would be lost. But it must end.

    After an exception that nobody has caught, what is queued is dropped, and what is under way is waited for, but not for long.
    """
    failed = getattr(sys, "last_value", None) is not None
    patience = _PATIENCE_AFTER_FAILURE if failed else _PATIENCE
    workers = dict(_threads)
    for worker in workers.values():
        worker.end(drop=failed)
    _wait(lambda: not any(thread.is_alive() for thread in workers), workers.values(), patience, "the program ends")
