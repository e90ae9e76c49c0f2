"""`profile`: the measured timeline of real steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from l2l_compile.devices.observed import observe
from l2l_compile.errors import L2LError
from l2l_compile.host.worker import Ticket, Worker
from l2l_compile.inspection.timed import Timing
from l2l_compile.session import Session, each_session_of, session_of
from l2l_compile.timeline import Timeline


def profile(compiled: Any, path: str | Path | None = None) -> Profile:
    """Measure when the lanes of a compiled model are at work: `with l2l_compile.profile(model, "step.json"): step()`.

    path   the file for the Chrome trace, written at the end of the block; https://ui.perfetto.dev opens it. None writes no file

    `with ... as measured` gives a `Profile`, whose `timeline` has the form of a simulated one. The model computes the same numbers.
    If the model has not run before, the compilation is in the profile. Lanes of a GPU are measured by events on their streams.
    If the host is the device, all work but updates is work of the caller. Raises `TypeError` if
    `compiled` is no compiled model of this backend, and `L2LError` at the end of the block if the model did not run in it.
    """
    session_of(compiled)  # or a TypeError
    return Profile(compiled, path)


class Profile:
    """A measurement of steps, which lasts as long as its `with` block."""

    def __init__(self, compiled: Any, path: str | Path | None):
        self._compiled, self._path = compiled, path
        self._timings: dict[Session, Timing] = {}
        self._timeline: Timeline | None = None
        self._open = ExitStack()

    @property
    def timeline(self) -> Timeline:
        """The measured timeline. Raises `L2LError` before the end of the block."""
        if self._timeline is None:
            raise L2LError("the timeline of a profile exists after its 'with' block")
        return self._timeline

    def __enter__(self) -> Profile:
        with self._open:
            self._open.enter_context(each_session_of(self._compiled, self._measure))
            self._open = self._open.pop_all()
        return self

    def _measure(self, session: Session) -> None:
        """Measure a session from now on."""
        if session in self._timings:
            return
        device = session.device
        if device.profiled:
            raise L2LError("this model is profiled already: a profile cannot begin inside of another one")
        device.synchronize()
        self._timings[session] = timing = Timing(device)
        self._open.enter_context(_as_profiled(device))
        self._open.enter_context(observe(device, timing))
        for worker in _workers(session):
            self._open.enter_context(_timed(worker, timing))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        try:
            if kind is None:
                for session in self._timings:
                    session.device.synchronize()
        finally:
            self._open.close()
        for session, timing in self._timings.items():
            for worker in _workers(session):
                worker.submit(_nothing).wait()
            found = timing.timeline()
            if found.spans or self._timeline is None:
                self._timeline = session.timeline = found
        if kind is None:
            self._save()

    def _save(self) -> None:
        if self._timeline is None or not self._timeline.spans:
            raise L2LError("the model did not run within the profile")
        if self._path is not None:
            self._timeline.save(self._path, "measured")


def _workers(session: Session) -> list[Any]:
    """The threads of the host that a session has given work to."""
    return [*session.server.workers, *(session.stashes_on_disk.workers if session.stashes_on_disk is not None else ())]


@contextmanager
def _as_profiled(device: Any) -> Iterator[None]:
    device.profiled = True
    try:
        yield
    finally:
        device.profiled = False


@contextmanager
def _timed(worker: Worker, timing: Timing) -> Iterator[None]:
    """A context in which the work of a worker, and the waits for it, are timed."""
    submit = worker.submit

    @functools.wraps(submit)
    def timed(work: Callable[[], None]) -> Ticket:
        ticket = submit(timing.on_host_lane(worker.name, work))
        ticket.wait = timing.wait_of(ticket.wait)  # type: ignore[method-assign]
        return ticket

    worker.submit = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        del worker.submit


def _nothing() -> None:
    """Work that does nothing: when it is done, all work submitted before it is done."""
