"""Race detection: if two accesses to one place include a write, the waits of lanes and threads must order them.

A *place* is a unit of memory: a value of the program, a weight slab, a buffer of the host, or a parameter. The *actors* are the
lanes of the device, the thread of the host, and the user, whose threads count as one actor. Each piece of work has a vector
clock: for every actor, how much of its work is certainly done when this work begins. Work given to a lane comes after all work
that its giver knows of. Waiting for an event adds the clock of the event. An access is a race if its clock does not cover an
earlier access to the same place, even if the two did not collide in this run.

The check for one access is that of FastTrack (Flanagan and Freund, PLDI 2009).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from l2l_compile.errors import RaceError

Work = Callable[[], Any]
Clock = dict[str, int]
USER = "the caller's thread"


@dataclass(frozen=True, slots=True)
class _Access:
    """An access to a place: the actor, the time on the actor's clock, and the node of the program."""

    actor: str
    time: int
    during: str


class Place:
    """A unit of memory, with its last write and the reads since then."""

    __slots__ = ("name", "read", "written")

    def __init__(self, name: str = "a value"):
        self.name = name
        self.written: _Access | None = None
        self.read: dict[str, _Access] = {}


@dataclass(slots=True)
class VectorClock:
    """A vector clock: the work that is certainly done at some point."""

    clock: Clock = field(default_factory=dict)


@dataclass(slots=True)
class _Running:
    """A piece of work of an actor, and its vector clock."""

    actor: str
    clock: Clock
    during: str


class HasPlace(Protocol):
    """A value of a program, with its place."""

    place: Place


class Unwatched:
    """The interface. Records nothing."""

    watches = False

    def begins(self, what: str) -> None:
        """The caller gives work for this node of a program from now on."""

    def give(self, actor: str, work: Work) -> tuple[Work, VectorClock]:
        """Wrap work that is queued for an actor, which works in order. Also returns the order when it is done."""
        return work, _NOTHING

    def reached(self, actor: str) -> VectorClock:
        """The order when an actor has done all work that it received so far."""
        return _NOTHING

    def hold(self, actor: str, order: VectorClock) -> None:
        """Work that the actor receives from now on comes after `order`."""

    def follow(self, order: VectorClock) -> None:
        """Work of the caller from now on comes after `order`: the caller has waited for it."""

    def here(self) -> VectorClock:
        """The order of all work that the caller has done, or knows to be done."""
        return _NOTHING

    def read(self, place: Place) -> None:
        """The caller reads a place. Raises `RaceError`."""

    def write(self, place: Place, knowing: Iterable[VectorClock] = ()) -> None:
        """The caller writes into a place, or frees it. It also comes after the orders `knowing`. Raises `RaceError`."""

    def read_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """`read`, for parameters and their copies on the wire."""

    def write_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """`write`, for parameters and their copies on the wire."""

    def around(self, reads: Iterable[HasPlace], writes: Iterable[HasPlace], work: Work) -> Work:
        """Wrap work that reads and writes the places of these values."""
        return work


_NOTHING = VectorClock()
UNWATCHED = Unwatched()


class Accesses(Unwatched):
    """All accesses of one device and its host side. May be called by any thread, and by the garbage collector."""

    watches = True

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._clocks: dict[str, Clock] = {}  # of the work that an actor receives next
        self._learnt: dict[str, Clock] = {}  # orders that an actor waited for during its work
        self._user = _Running(USER, {USER: 1}, "")
        self._thread = threading.local()
        self._parameters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._during = ""

    def begins(self, what: str) -> None:
        self._during = what

    def give(self, actor: str, work: Work) -> tuple[Work, VectorClock]:
        with self._lock:
            clock = self._clock_of(actor)
            _join(clock, self.here().clock)
            clock[actor] = clock.get(actor, 0) + 1
            running = _Running(actor, dict(clock), self._during)

        def do() -> Any:
            with self._lock:
                _join(running.clock, self._learnt.get(actor, {}))
            before = self._running()
            self._thread.running = running
            try:
                return work()
            finally:
                self._thread.running = None if before is self._user else before

        return do, VectorClock(running.clock)  # the clock grows while the work runs; after a failure, work may be dropped

    def reached(self, actor: str) -> VectorClock:
        with self._lock:
            return VectorClock(dict(self._clock_of(actor)))

    def hold(self, actor: str, order: VectorClock) -> None:
        with self._lock:
            _join(self._clock_of(actor), order.clock)

    def follow(self, order: VectorClock) -> None:
        with self._lock:
            running = self._running()
            _join(running.clock, order.clock)
            if running is not self._user:
                _join(self._clock_of(running.actor), order.clock)
                _join(self._learnt.setdefault(running.actor, {}), order.clock)

    def here(self) -> VectorClock:
        """Takes no lock, since a finalizer may call it: a copy of a dictionary of words and numbers is one step."""
        running = self._running()
        order = VectorClock(dict(running.clock))
        if running is self._user:
            running.clock[USER] += 1  # later work of the user is not part of this order
        return order

    def read(self, place: Place) -> None:
        with self._lock:
            running = self._running()
            _check(running, running.clock, "reads", place, place.written, "writes")
            place.read[running.actor] = self._access(running)

    def write(self, place: Place, knowing: Iterable[VectorClock] = ()) -> None:
        with self._lock:
            running = self._running()
            known = dict(running.clock)
            for order in knowing:
                _join(known, order.clock)
            _check(running, known, "writes", place, place.written, "writes")
            for access in place.read.values():
                _check(running, known, "writes", place, access, "reads")
            place.written, place.read = self._access(running), {}

    def read_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            self.read(self._place_of(parameter))

    def write_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            self.write(self._place_of(parameter))

    def around(self, reads: Iterable[HasPlace], writes: Iterable[HasPlace], work: Work) -> Work:
        read, written = [value.place for value in reads], [value.place for value in writes]

        def do() -> Any:
            for place in read:
                self.read(place)
            for place in written:
                self.write(place)
            return work()

        return do

    def _place_of(self, parameter: torch.Tensor) -> Place:
        with self._lock:
            place = self._parameters.get(parameter)
            if place is None:
                place = self._parameters[parameter] = Place(f"a parameter of shape {tuple(parameter.shape)}")
            return place

    def _clock_of(self, actor: str) -> Clock:
        return self._clocks.setdefault(actor, {})

    def _running(self) -> _Running:
        return getattr(self._thread, "running", None) or self._user

    def _access(self, running: _Running) -> _Access:
        return _Access(running.actor, running.clock[running.actor], running.during or self._during)


def _join(clock: Clock, other: Clock) -> None:
    for actor, time in other.items():
        clock[actor] = max(time, clock.get(actor, 0))


def _check(running: _Running, known: Clock, does: str, place: Place, access: _Access | None, did: str) -> None:
    if access is not None and known.get(access.actor, 0) < access.time:
        raise RaceError(
            f"{running.actor} {does} {place.name} for '{running.during}', and {access.actor} {did} it for '{access.during}', but "
            "neither waits for the other. The numbers of this step may be wrong. Leave out the option passes if you use it; "
            "without it, this is a fault of the library: please report it with the printed program"
        )
