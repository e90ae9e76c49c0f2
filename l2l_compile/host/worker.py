"""The host lane: a thread that updates layers while the device computes other layers."""

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

from l2l_compile import reentry
from l2l_compile.lanes import Lane
from l2l_compile.memory.finalizers import items
from l2l_compile.races import UNWATCHED, Unwatched, VectorClock
from l2l_compile.torch_internals.threads import compiles_here
from l2l_compile.uncaught import uncaught


class Ticket:
    """A piece of work of the host lane. `wait` returns when it is done; `order` is the order of accesses then."""

    def __init__(self, worker: Worker, order: VectorClock) -> None:
        self._is_done = False
        # Held until the work is done. An Event would not do: a signal handler that runs within its `wait` finds its lock taken.
        self._undone = threading.Lock()
        self._undone.acquire()
        self._worker, self._accesses, self._order = worker, worker.accesses, order

    def wait(self) -> None:
        while not self._is_done:
            if self._undone.acquire(timeout=_LOOK):
                self._undone.release()
            else:
                self._worker.finish_what_is_left()
        self._accesses.follow(self._order)

    def finish(self) -> None:
        self._is_done = True
        self._undone.release()

    def look(self) -> bool:
        """Whether the work is done. If the thread has ended, does all queued work first."""
        self._worker.finish_what_is_left()
        return self._is_done


class Worker:
    """Does work in order on a thread of its own. After a failure, queued work is dropped until `raise_failure`.

    threads  bounds the intra-op threads of the work: if the host is the device, both compute at the same time
    name     of the lane
    running  makes the context in which the thread works
    """

    running: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    def __init__(self, threads: int, accesses: Unwatched = UNWATCHED, name: str = Lane.HOST):
        self.accesses, self.name = accesses, name
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._dropping = False
        self.finished = 0  # pieces of work that were done or dropped
        ready = threading.Event()
        thread = threading.Thread(target=self._loop, args=(threads, self._queue, ready), name=f"l2l-{name}", daemon=True)
        _threads[thread] = self
        self._thread = weakref.ref(thread)
        thread.start()
        ready.wait()  # in a forked process, PyTorch makes its threads anew, and fails if two threads ask for them at once

    @property
    def is_here(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread()

    def submit(self, work: Callable[[], None]) -> Ticket:
        """Queue work; it runs without recording gradients."""
        given, order = self.accesses.give(self.name, work)
        ticket = Ticket(self, order)
        self._queue.put((given, ticket))
        return ticket

    def drain(self, failed: Callable[[], None] | None = None) -> None:
        """Wait until all work is done. Raises the error of work that failed, once; before that, calls `failed`.

        What interrupts the wait leaves the work under way, and is no failure.
        """
        self.submit(lambda: None).wait()
        if self._failure is not None and failed is not None:
            failed()
        self.raise_failure()

    def settle(self) -> None:
        """Wait until all work is done, and drop its error. What interrupts the wait is raised when the wait is over."""
        interrupt: BaseException | None = None
        ticket = self.submit(lambda: None)
        while not ticket.look():
            try:
                ticket.wait()
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
        ticket.wait()
        self._failure = None
        if interrupt is not None:
            raise interrupt

    def raise_failure(self) -> None:
        """Raise the error of work that failed since the last call."""
        failure = self._failure
        if failure is not None:
            self._failure = None
            raise failure

    def close(self) -> None:
        """End the thread when all queued work is done. Does not wait: the garbage collector may call it anywhere."""
        self._queue.put(None)

    def end(self, drop: bool) -> None:
        """End the thread when all queued work is done, or dropped. Does not wait."""
        self._dropping = drop
        self.close()

    def finish_what_is_left(self) -> None:
        """Do work that was queued after `close`, if the thread has ended: a caller waits for it."""
        thread = self._thread()
        if thread is None or not thread.is_alive():
            with contextlib.suppress(queue.Empty):
                while True:
                    self._do(*self._queue.get_nowait())

    def _loop(self, threads: int, work_queue: queue.SimpleQueue, ready: threading.Event) -> None:
        try:
            torch.set_num_threads(threads)
        finally:
            ready.set()
        while (item := work_queue.get()) is not None:
            self._do(*item)
            del item

    def _do(self, work: Callable[[], None], ticket: Ticket) -> None:
        try:
            if self._failure is None and not self._dropping:
                with torch.no_grad(), self.running():
                    work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller by drain or raise_failure
            self._failure = error
        ticket.finish()
        self.finished += 1


_LOOK = 0.2  # seconds
_threads: weakref.WeakKeyDictionary[threading.Thread, Worker] = weakref.WeakKeyDictionary()
_PATIENCE = 60.0  # seconds without any work being finished
_PATIENCE_AFTER_FAILURE = 3.0
_PATIENCE_WITHIN_A_STEP = 1.0  # a signal handler has forked


@reentry.whole("a fork")
def _before_fork() -> None:
    """Wait for all updates before a fork.

    The forked process has no threads: an update under way would stay half done there, and its thread's locks would stay locked.
    Does not wait on the thread of a worker, or while this thread compiles: the updates may wait for this thread.
    """
    if threading.current_thread() in _threads or compiles_here():
        return
    workers = [worker for thread, worker in items(_threads) if thread.is_alive()]
    tickets = [worker.submit(lambda: None) for worker in workers]
    patience = _PATIENCE if reentry.running() is None else _PATIENCE_WITHIN_A_STEP  # of a thread that may wait for this one
    _wait(lambda: all(ticket.look() for ticket in tickets), workers, patience, "a process is forked")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def _wait(done: Callable[[], bool], workers: Iterable[Worker], patience: float, what: str) -> None:
    """Wait until `done()`. Gives up, with a message, if no work is finished for `patience` seconds."""
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
@reentry.whole("the end of the process")
def _finish() -> None:
    """Wait for the last updates when Python ends: else they would be lost. The wait is bounded, since Python must end.

    After an uncaught exception, queued work is dropped, and the wait for work under way is short.
    """
    failed = uncaught() is not None
    patience = _PATIENCE_AFTER_FAILURE if failed else _PATIENCE
    workers = dict(items(_threads))
    for worker in workers.values():
        worker.end(drop=failed)
    _wait(lambda: not any(thread.is_alive() for thread in workers), workers.values(), patience, "the program ends")
