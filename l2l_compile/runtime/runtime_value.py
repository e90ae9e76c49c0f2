"""The tensors of a value while a program runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from l2l_compile.memory.address import address
from l2l_compile.races import Place


class RuntimeValue:
    """The tensors of a value: one if it is whole, one per micro-batch if it is split.

    tensors      None before it is filled and after its release; a gradient that a weight does not get is None as well. What is kept
                 on the host of the inside of a segment is a list for each micro-batch
    lane, event  the lane that fills it, and the event when it is filled; None means at once
    readers      the last event of each other lane that reads it
    absent       a gradient that does not exist
    results      for a node with several results, a value each
    slab         for weights: the number of their slab
    resident     for weights: the object that holds them from call to call; they are not freed
    set_apart    for weights: the buffer that they are in until their release
    unfetched    positions of weights whose entries were left out of the fetch, since nothing reads them
    in_flight    for gradients on the host: the work there that reads them
    arrival      the message from another rank, or the read from the disk, that it comes with
    on_disk      the place where it waits for backward (`StoredStash`); it has no tensors then
    is_loaded    whether it was read from the disk: the one node that reads it frees it
    outgoing     messages to other ranks that its memory is needed for; None before the first one and when all are awaited
    place        its memory, watched for races
    """

    __slots__ = (
        "absent",
        "arrival",
        "event",
        "in_flight",
        "is_loaded",
        "lane",
        "on_disk",
        "outgoing",
        "place",
        "readers",
        "resident",
        "results",
        "set_apart",
        "slab",
        "tensors",
        "unfetched",
    )

    def __init__(self, tensors: list[torch.Tensor] | None = None, absent: bool = False, results: Sequence[RuntimeValue] = ()):
        self.tensors: Any = tensors  # None until its lane fills it, and after its release
        self.absent, self.results = absent, results
        self.lane: str | None = None
        self.event: Any = None
        self.readers: dict[str, Any] = {}
        self.slab: int | None = None
        self.resident: Any = None
        self.set_apart: Any = None
        self.unfetched: frozenset[int] = frozenset()
        self.in_flight: Any = None
        self.arrival: Any = None
        self.on_disk: Any = None
        self.is_loaded = False
        self.outgoing: list | None = None
        self.place = Place()

    @property
    def held(self) -> list[torch.Tensor]:
        """All tensors that are there. The value must be filled."""
        lists = [entry if isinstance(entry, list) else [entry] for entry in self.tensors]
        return [tensor for tensors in lists for tensor in tensors if tensor is not None]

    def copy(self) -> RuntimeValue:
        """Another value with the same, complete, tensors."""
        copy = RuntimeValue(self.tensors, self.absent)
        copy.lane, copy.place, copy.on_disk = self.lane, self.place, self.on_disk
        return copy


def copies(tensors: Sequence[torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Copies of tensors, and the bytes copied. A tensor that several micro-batches share is copied once."""
    made: dict[tuple, torch.Tensor] = {}
    keys = [(*address(t), t.shape) for t in tensors]
    for key, tensor in zip(keys, tensors, strict=True):
        if key not in made:
            made[key] = copy(tensor)
    return [made[key] for key in keys], bytes_of(list(made.values()))


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all entries."""
    return sum(t.nbytes for t in tensors)
