"""Weights that stay on the device from call to call, in programs without backward. They cross the link once.

Which weights stay is found out by measurement. The first call of a program keeps none, and shows how much memory it takes beside
them. From the second call on, weights that fit into the rest stay. For a call with larger sizes than before, more is left.

A call reads all segments, each once, in the same order. So none makes room for another: the one that was used least lately is the
one that the next call needs first. Segments that are used more often do make room: after a prompt, an encoder gives its place to
the decoder. Those that stay are spread over the program, so that the link is at work while they are computed with.

A call with gradients frees all: training needs the memory for itself, and changes the weights.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from l2l_compile.devices.device import MemoryState
from l2l_compile.disk.disk_store import range_of
from l2l_compile.disk.stored_entries import some_entries
from l2l_compile.ir.segments import Segment

_SAMPLED = 256  # entries of a weight
_SPARE, _LEAST_SPARE = 1 / 5, 1 / 64  # of the device's memory, for other code: without the option and with it
_STEP = 1 / 16


class MeasuredNeed:
    """What the calls of one program need of the device's memory beside resident weights.

    sizes   the largest sizes of its calls
    bytes   more than at the begin of the call; None before the first call
    """

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] = ()
        self.bytes: int | None = None

    def of(self, sizes: Sequence[int]) -> int | None:
        """The most bytes that a call with these sizes takes; None if nothing is known.

        Memory grows at most with the square of a size, as attention does.
        """
        if self.bytes is None or len(sizes) != len(self.sizes):
            return None
        growth = math.prod(max(1.0, size / max(1, before)) for size, before in zip(sizes, self.sizes, strict=True))
        return int(self.bytes * growth**2)

    def measured(self, sizes: Sequence[int], size: int, alone: bool) -> None:
        """A call has taken `size` bytes; `alone` says whether no weights were added meanwhile.

        What a smaller call takes says nothing about larger ones.
        """
        largest = tuple(map(max, sizes, self.sizes)) if len(sizes) == len(self.sizes) else tuple(sizes)
        is_exact = self.bytes is None or (alone and largest == tuple(sizes))
        self.sizes, self.bytes = largest, size if is_exact else max(size, self.bytes or 0)


class _Weight:
    """What a weight was when it was copied to the device. PyTorch counts writes, but not those through `.data`."""

    def __init__(self, tensor: torch.Tensor):
        self._storage = weakref.ref(tensor.untyped_storage())
        self._place = _place(tensor)
        self._sample = _sample(tensor)

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has the same memory and, by all that is known without reading all of it, the same contents."""
        is_same = self._storage() is tensor.untyped_storage() and self._place == _place(tensor)
        return is_same and torch.equal(self._sample, _sample(tensor))

    @property
    def is_gone(self) -> bool:
        return self._storage() is None


def _place(tensor: torch.Tensor) -> tuple:
    version = None if tensor.is_inference() else tensor._version
    return version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Entries from all over a tensor, as bytes: NaN equals NaN. Of one on disk, a few pages."""
    if range_of(tensor) is not None:
        return some_entries(tensor, 0).view(torch.uint8)
    each = max(1, round(_SAMPLED ** (1 / max(1, tensor.dim()))))
    spread = tensor.detach()[tuple(slice(None, None, max(1, size // each)) for size in tensor.shape)]
    return spread.contiguous().view(-1).view(torch.uint8).clone()


@dataclass(eq=False)
class Resident:
    """The weights of a segment on the device, from one call to the next.

    call     the last call that has used them
    tensors  on the device
    """

    bytes: int
    call: int
    tensors: list[torch.Tensor] = field(default_factory=list)
    _weights: list[_Weight] = field(default_factory=list)

    def fill(self, tensors: list[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
        """The lane that copies has copied the host's weights: updates that were put off are made by now."""
        self.tensors, self._weights = tensors, [_Weight(weight) for weight in weights]

    def is_still(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether the host's weights are those that were copied."""
        return all(mine.is_still(weight) for mine, weight in zip(self._weights, weights, strict=True))

    @property
    def is_gone(self) -> bool:
        """Whether one of the host's weights has no memory any more."""
        return any(weight.is_gone for weight in self._weights)


class OfDevice(Protocol):
    """What is asked of a device here. Estimates give one that has sizes alone (`estimate/resident_on_sizes.py`)."""

    @property
    def is_host(self) -> bool: ...

    def memory(self) -> MemoryState | None: ...

    def start_peak(self) -> None: ...

    def peak_bytes(self) -> int: ...

    def free(self, tensors: Sequence[torch.Tensor], /) -> None: ...


class ResidentWeights:
    """The resident weights of one device. It is called while no lane works, but for `find` and `admit`.

    The weights of a segment have a key (`key_of`): where they are on the host, and in which form they are on the device.

    budget  the most bytes; None for what calls have left of the device
    is_used whether any may stay
    bytes   of all that stay
    changes how often something came to stay or made room, or a call was measured to leave more: two calls without a change are alike
    lost    bytes that were forgotten in the call that began last, since it failed
    """

    def __init__(self, device: OfDevice, budget: int | None):
        self._device, self._budget = device, 0 if device.is_host else budget
        self.is_used = self._budget != 0
        self._entries: dict[tuple, Resident] = {}
        self._uses: Counter[tuple] = Counter()
        self._call = self._room = self._added = self._held_at_begin = 0
        self._share = self._due = 0.0
        self._more_spare = 0.0
        self.bytes = self.lost = self.changes = 0

    def begin(self, need: MeasuredNeed, sizes: Sequence[int], total: int) -> None:
        """A call of a program with `total` bytes of weights begins. From now on it is known how many more bytes may stay."""
        self._call, self._added, self._room, self._due, self.lost = self._call + 1, 0, 0, 0.0, 0
        if not self.is_used:
            return
        for key in [key for key, entry in self._entries.items() if entry.is_gone]:
            self._evict(key)
        memory = self._device.memory()
        before = self.bytes
        needed = need.of(sizes)
        if memory is not None and needed is None:
            self.clear()
            self._room = 0
        else:
            self._room = self._room_beside(needed or 0, memory)
            for key in reversed(list(self._entries)):
                if self._room >= 0:
                    break
                self._evict(key)
        self._share = self._room / max(1, total - self.bytes)
        if memory is not None:
            self._held_at_begin = memory.held - (before - self.bytes)
        if self.bytes < before:
            self._device.start_peak()

    def _room_beside(self, needed: int, memory: MemoryState | None) -> int:
        of_budget = self._budget - self.bytes if self._budget is not None else None
        if memory is None:
            return of_budget or 0
        spare = int(memory.total * ((_SPARE if self._budget is None else _LEAST_SPARE) + self._more_spare))
        free = memory.free - needed - spare
        return free if of_budget is None else min(free, of_budget)

    def end(self, need: MeasuredNeed, sizes: Sequence[int]) -> None:
        """The call that began last has ended."""
        if self.is_used and self._device.memory() is not None:
            taken = self._device.peak_bytes() - self._held_at_begin - self._added
            before = need.bytes
            need.measured(sizes, max(0, taken), alone=not self._added)
            self.changes += before is None or (need.bytes or 0) < before

    def find(self, key: tuple, weights: Sequence[torch.Tensor]) -> Resident | None:
        """The resident weights of a segment, if there are some and the host's have not changed since."""
        self._uses[key] += 1
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.call != self._call and not entry.is_still(weights):
            self._evict(key)
            return None
        entry.call = self._call
        return entry

    def admit(self, key: tuple, size: int) -> Resident | None:
        """A place for the weights of a segment, which the caller fills; None if there is no room."""
        if not size:
            return None
        self._due += size * self._share
        if size > self._room:
            self._make_room(key, size)
        elif self._due < size:
            return None
        if size > self._room:
            return None
        self._due = max(0.0, self._due - size)
        self._room -= size
        self._added += size
        self.bytes += size
        self.changes += 1
        entry = self._entries[key] = Resident(size, self._call)
        return entry

    def _make_room(self, key: tuple, size: int) -> None:
        """Free segments that are used less often than this one, if that is enough."""
        rare = [k for k, e in self._entries.items() if self._uses[k] + 1 < self._uses[key] and e.call != self._call]
        if self._room + sum(self._entries[k].bytes for k in rare) < size:
            return
        for other in sorted(rare, key=self._uses.__getitem__):
            if self._room < size:
                self._evict(other)

    def _evict(self, key: tuple) -> None:
        entry = self._entries.pop(key)
        self._device.free(entry.tensors)
        entry.tensors = []
        self.bytes -= entry.bytes
        self._room += entry.bytes
        self.changes += 1

    def clear(self) -> None:
        """Free all, and count uses anew."""
        for key in list(self._entries):
            self._evict(key)
        self._uses.clear()

    @property
    def sizes(self) -> dict[tuple, int]:
        """The bytes of each segment's weights that stay, by key."""
        return {key: entry.bytes for key, entry in self._entries.items()}

    def leave_more(self) -> None:
        """Memory ran out although it was measured: leave more of it from now on."""
        self._more_spare += _STEP

    def forget(self) -> None:
        """After a failure of the device: its ledger is empty."""
        self._entries, self.bytes, self.lost = {}, 0, self.bytes


def key_of(segment: Segment, weights: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Where the weights of a segment are on the host, and in which form they are on the device."""
    specs = zip(weights, segment.block.weights, strict=True)
    return tuple((w.untyped_storage()._cdata, w.storage_offset(), w.shape, w.dtype, spec.dtype) for w, spec in specs)
