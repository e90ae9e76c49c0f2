"""What the ranks of a run agree on: values that they exchange, errors that all of them raise, and that all have come to a point.

The first two are for the thread of the training loop. A disk thread waits for the others through the store of `torch.distributed`, and not
in a process group: the group may end, or wait for its collectives to end, while a rank's disk still writes.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from l2l_compile.errors import DiskError, L2LError, RankError
from l2l_compile.ranks import collectives as exchange
from l2l_compile.ranks.collectives import finish, own_store
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.ranks.watch import PATIENCE

_SHORTEST, _LONGEST = 1e-3, 2e-2  # seconds between two looks into the store

Made = TypeVar("Made")


class Agreement:
    """Made by all ranks at the same place.

    rank, size  which rank this is, and how many there are
    name        32 hexadecimal digits, the same on all ranks, and new each time
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self.rank, self.size = ranks.world_rank, ranks.world_size
        self.name = str(self.gather(uuid.uuid4().hex)[0])
        self._store = own_store(f"l2l/run/{self.name}")
        self._counts = Counter[str]()

    # ---- called on the user's thread, by all ranks in the same order ---------------------------------------------------

    def gather(self, mine: Any) -> list[Any]:
        """A value of each rank: numbers, texts, and lists and dictionaries of them. Raises `RankError`."""
        text = torch.tensor(list(json.dumps(mine).encode()), dtype=torch.uint8)
        sizes = self._gathered(torch.tensor([len(text)])).view(-1).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(text)] = text
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(self._gathered(padded), sizes, strict=True)]

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        found, watch = mine.new_empty((self.size, *mine.shape)), self._ranks.watch
        waiting = watch.waiting("resumes or keeps a step of a run")
        exchange.all_gather(found, mine, self._ranks.control_group, lambda work: finish(work, waiting, watch.explain))
        return found

    def together(self, call: Callable[[], Made]) -> Made:
        """What a call returns, if it raises an error on no rank. Else its own error on a rank that has one, and that of the first on others."""
        made: Made | None = None
        error: L2LError | None = None
        try:
            made = call()
        except L2LError as caught:
            error = caught
        said = self.gather(None if error is None else {"of_disk": isinstance(error, DiskError), "text": str(error)})
        if error is not None:
            raise error
        for rank, of_rank in enumerate(said):
            if of_rank is not None:
                raise (DiskError if of_rank["of_disk"] else L2LError)(f"rank {rank}: {of_rank['text']}")
        return made  # type: ignore[return-value]  # no error

    # ---- called on any thread ------------------------------------------------------------------------------------------

    def all_have(self, what: str) -> None:
        """Return when all ranks have called this as often as this one, with the same `what`. Raises `RankError` if one has dropped out.

        For each `what`, one thread of a rank calls this.
        """
        self._counts[what] += 1
        wanted, pause, watch = self._counts[what] * self.size, _SHORTEST, self._ranks.watch
        gives_up: float | None = None  # when this rank has dropped out of torch.distributed itself, and hears of no failure
        try:
            reached = self._store.add(what, 1)
            while reached < wanted:
                watch.check()
                if watch.is_closed:
                    gives_up = gives_up or time.monotonic() + PATIENCE
                    if time.monotonic() > gives_up:
                        raise RankError(f"torch.distributed has ended on this rank before {what} was there on all ranks")
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)
                reached = int(self._store.get(what))
        except RankError:
            raise
        except Exception as error:  # every kind of store raises its own kind of error
            raise watch.explain(error) from error

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on: they need not wait for it (any thread)."""
        self._ranks.failed(error)
