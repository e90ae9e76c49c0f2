"""The host lane: a thread that updates layers while the device computes others."""
from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable

import torch


class Ticket:
    """A piece of work of the host lane; `wait` returns when it is done."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def wait(self) -> None:
        self._done.wait()

    def finish(self) -> None:
        self._done.set()


class Worker:
    """Does work in order on a thread of its own. After a failure, what is queued is dropped until `raise_failure`.

    `threads` bounds the intra-op threads of the work: on a device that is the host itself, both compute at once.
    """

    def __init__(self, threads: int):
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._failure: BaseException | None = None
        thread = threading.Thread(target=self._loop, args=(threads, self._queue), name="l2l-host", daemon=True)
        _threads[thread] = self._queue
        thread.start()

    def submit(self, work: Callable[[], None]) -> Ticket:
        """Queue work; it runs without recording gradients."""
        ticket = Ticket()
        self._queue.put((work, ticket))
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

    def _loop(self, threads: int, work_queue: queue.SimpleQueue) -> None:
        torch.set_num_threads(threads)
        while (item := work_queue.get()) is not None:
            work, ticket = item
            try:
                if self._failure is None:
                    with torch.no_grad():
                        work()
            except BaseException as error:  # noqa: BLE001 - handed to the caller by drain or raise_failure
                self._failure = error
            ticket.finish()
            del item, work, ticket


_threads: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue] = weakref.WeakKeyDictionary()


@atexit.register
def _finish() -> None:
    """Python must not end while a thread is at work."""
    for thread, work_queue in list(_threads.items()):
        work_queue.put(None)
        thread.join()
