"""Worker processes that do one job after the other. A worker that dies or hangs is replaced; the other workers go on."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

Work = Callable[[Any], dict]


def run(jobs: Iterable, work: Work, workers: int = 2, seconds: float = 180, lifetime: int = 50) -> Iterator[tuple[Any, dict]]:
    """Do jobs in processes. Yields each job with its result as it comes, which includes the `seconds` that it took.

    The result is `{"status": "hang"}` if there is none within `seconds`, and `{"status": "death"}` if the process ended, both
    with a `reason`. A worker is replaced after `lifetime` jobs, so that memory which the jobs do not free does not add up.
    """
    todo = list(jobs)[::-1]
    pool = [Worker(work) for _ in range(min(workers, len(todo)))]
    try:
        while pool:
            wait([w.connection for w in pool], timeout=0.5)
            for worker in list(pool):
                result = worker.answer(seconds)
                if worker.job is not None and result is not None:
                    yield worker.job, {**result, "seconds": round(worker.age, 1)}
                    worker.job = None
                if worker.alive and worker.job is None and todo and worker.served < lifetime:
                    worker.give(todo.pop())
                elif worker.job is None:
                    worker.stop()
                    pool.remove(worker)
                    pool += [Worker(work)] if todo else []
    finally:
        for worker in pool:
            worker.stop()


class Worker:
    """A process and its current job."""

    def __init__(self, work: Work):
        context = multiprocessing.get_context("spawn")
        self.connection, end = context.Pipe()
        self.process = context.Process(target=_serve, args=(work, end), daemon=True)
        self.process.start()
        end.close()
        self.job, self.served, self.alive, self.started = None, 0, True, 0.0

    @property
    def age(self) -> float:
        """Seconds since the job was given."""
        return time.monotonic() - self.started

    def give(self, job: Any) -> None:
        self.job, self.started = job, time.monotonic()
        self.served += 1
        self.connection.send(job)

    def answer(self, seconds: float) -> dict | None:
        """The result of the job; a failure if the process died or the time is over; None while it may still come."""
        if self.connection.poll():
            try:
                return self.connection.recv()
            except (EOFError, ConnectionError):
                self.process.join()
                self.alive = False
                return {"status": "death", "reason": f"exit code {self.process.exitcode}"}
        if self.job is not None and self.age > seconds:
            self.alive = False
            return {"status": "hang", "reason": f"no result after {seconds:g} s"}
        return None

    def stop(self) -> None:
        """End the process. An idle process ends by itself when its pipe closes; a busy process is killed."""
        self.connection.close()
        self.process.join(timeout=10 if self.alive and self.job is None else 0)
        self.process.kill()
        self.process.join()


def _serve(work: Work, connection: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            connection.send(work(connection.recv()))
