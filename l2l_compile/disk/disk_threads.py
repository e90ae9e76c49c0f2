"""Threads that move blocks between memory and files. The calls into the system hold no lock of Python (GIL).

A forked process has none of them, and the files of its parent: there, whoever asks for urgent blocks moves them, and others are refused.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from l2l_compile.errors import DiskError
from l2l_compile.memory.finalizers import members

_LOOK = 0.2  # seconds
_PATIENCE = 10.0  # seconds that a fork waits for transfers, of which each end may begin others
IN_A_FORK = (
    "a forked process has the disk files of its parent, and does not train on them: train in the process that compiled the model, or start the other "
    "one with multiprocessing's method 'spawn'"
)
_groups: weakref.WeakSet[DiskThreads] = weakref.WeakSet()


class DiskBlock(NamedTuple):
    """A call of a disk thread, and the number of the queue that it waits in: of a folder, so that no disk waits for another."""

    work: Callable[[], None]
    queue: int = 0


class Transfer:
    """Blocks on their way. `wait` returns when all are done.

    error  of the first block that failed, None if none has
    """

    def __init__(self, blocks: int, then: Callable[[Transfer], None]):
        self.error: BaseException | None = None
        self._left, self._then = blocks, then
        self._guard = threading.Lock()
        # Held until all blocks are done. An Event would not do: a signal handler that runs within its `wait` finds its lock taken.
        self._undone = threading.Lock()
        self._undone.acquire()
        self.is_done = False

    def wait(self) -> None:
        """Raises the error of the first block that failed."""
        self.settle()
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """As `wait`, without an error."""
        while not self.is_done:
            if self._undone.acquire(timeout=_LOOK):
                self._undone.release()

    def abandon(self, error: BaseException) -> None:
        """Nobody will do the blocks that are left: whoever waits gets an error."""
        self.error, self._then = self.error or error, _nothing
        if not self.is_done:
            self.is_done = True
            self._undone.release()

    def block_done(self, error: BaseException | None) -> None:
        """A block is done. `then` is called behind the last one, before `wait` returns (a disk thread)."""
        with self._guard:
            self.error = self.error or error
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            then, self._then = self._then, _nothing  # it may hold who holds this transfer
            try:
                then(self)
            finally:
                self.is_done = True
                self._undone.release()


def _nothing(_: Transfer) -> None:
    """For a transfer that is done."""


class _Queue:
    """Blocks in the order in which they were given, urgent ones first."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True for each block; its `put` may be called by a finalizer
        self._blocks: tuple[deque, deque] = (deque(), deque())

    def put(self, block: tuple[Callable[[], None], Transfer], is_urgent: bool) -> None:
        self._blocks[not is_urgent].append(block)
        self._given.put(True)

    def get(self) -> tuple[Callable[[], None], Transfer] | None:
        """The next block; None at the end."""
        if not self._given.get():
            return None
        while True:  # there is one: a look may miss it while other threads take theirs
            for blocks in self._blocks:
                with suppress(IndexError):
                    return blocks.popleft()

    def end(self, threads: int) -> None:
        for _ in range(threads):
            self._given.put(False)


class DiskThreads:
    """Queues with a few threads each, which take blocks in the order in which these were given, and urgent ones before others.

    is_in_a_fork  whether the threads are those of the parent
    """

    is_in_a_fork = False

    def __init__(self, count: int, name: str, queues: int = 1):
        self._queues = [_Queue() for _ in range(queues)]
        self._under_way: set[Transfer] = set()
        for number in range(count * queues):
            of_thread = self._queues[number % queues]
            threading.Thread(target=_loop, args=(of_thread,), name=f"l2l-{name}-{number}", daemon=True).start()
        for each in self._queues:
            weakref.finalize(self, each.end, count)
        _groups.add(self)

    def submit(
        self,
        blocks: Sequence[DiskBlock],
        begin: Callable[[Transfer], None] = lambda _: None,
        then: Callable[[Transfer], None] = lambda _: None,
        *,
        is_urgent: bool = False,
    ) -> Transfer:
        """Queue blocks, at least one. `begin` is called before the first one, and `then` behind the last one, on a disk thread.

        Raises `DiskError` in a forked process, if they are not urgent.
        """
        if self.is_in_a_fork and not is_urgent:
            raise DiskError(IN_A_FORK)
        under_way = self._under_way

        def leave(transfer: Transfer) -> None:
            try:
                then(transfer)
            finally:
                under_way.discard(transfer)

        transfer = Transfer(len(blocks), leave)
        under_way.add(transfer)
        begin(transfer)
        for block in blocks:
            if self.is_in_a_fork:
                _move(block.work, transfer)
                continue
            self._queues[block.queue % len(self._queues)].put((block.work, transfer), is_urgent)
        return transfer

    @property
    def under_way(self) -> set[Transfer]:
        """The transfers that are not done."""
        return self._under_way.copy()  # a copy is one step, and other threads give transfers

    def settle(self) -> None:
        """Wait until all that was given is done. Raises no error."""
        for transfer in self.under_way:
            transfer.settle()

    def leave_to_the_parent(self) -> None:
        """This is a forked process: what is under way is done in the parent."""
        self.is_in_a_fork = True
        for transfer in self.under_way:
            transfer.abandon(DiskError(IN_A_FORK))
        self._under_way.clear()


def _loop(blocks: _Queue) -> None:
    while (item := blocks.get()) is not None:
        _move(*item)
        del item


def _move(work: Callable[[], None], transfer: Transfer) -> None:
    error = None
    try:
        work()
    except BaseException as failure:  # noqa: BLE001 - handed to whoever waits
        error = failure
    transfer.block_done(error)


def _before_fork() -> None:
    """Wait for all transfers, also those that begin behind others."""
    end = time.monotonic() + _PATIENCE
    while any(group.under_way for group in members(_groups)) and time.monotonic() < end:
        for group in members(_groups):
            group.settle()


def _after_fork() -> None:
    for group in members(_groups):
        group.leave_to_the_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
