"""Inputs of programs without backward that stay on the device from call to call, such as the attention cache of a generation.

The host has each of them too, as the tensor that the caller holds. What the device has is found by that tensor: by the object, and
by the version that PyTorch gives it at each write. A tensor that the caller changes, or lets go of, has nothing on the device.

There may be less memory than inputs. A call reads all of them, each once, in the same order. So the first that fit are kept, and
none makes room for another: the one that was used least lately is the one that the next call needs first.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from l2l_compile.devices.device import Device
from l2l_compile.memory.finalizers import taken


@dataclass(eq=False)
class _Entry:
    """What the device has of a tensor. `contents` becomes empty when the tensor is gone."""

    reference: weakref.ref[torch.Tensor]
    version: int
    contents: list[torch.Tensor]
    bytes: int

    def is_of(self, tensor: torch.Tensor) -> bool:
        return self.reference() is tensor and self.version == _version(tensor)


class KeptInputs:
    """The contents of inputs on one device, by the tensor of the caller. Nothing of it is called while a lane works on it.

    budget  the most bytes that are kept; None for what the device has free at the begin of a call
    """

    def __init__(self, device: Device, budget: int | None):
        self._device, self._budget = device, budget
        self._entries: dict[int, _Entry] = {}  # by the identity of the caller's tensor
        self._seen: dict[int, _Entry] = {}  # tensors that a call has read and left as they were
        self._held = 0
        self._limit: int | None = None
        self._gone: deque[tuple[dict[int, _Entry], int, weakref.ref]] = deque()

    @property
    def bytes(self) -> int:
        """Bytes of the device that kept inputs take."""
        for entries, key, reference in taken(self._gone):
            if key in entries and entries[key].reference is reference:
                self._held -= entries.pop(key).bytes
        return self._held

    def begin(self, resident: int) -> None:
        """A call without gradients begins, and has its slabs: from now on it is known how much it may keep.

        `resident` are the bytes of weights that stay: they make room. A fifth of the device is left to the calls themselves.
        """
        memory, self._limit = self._device.memory(), self._budget
        if self._budget is None and memory is not None:
            self._limit = self.bytes + memory.free + resident - memory.total // 5

    def release(self) -> None:
        """Free all: a call with gradients needs the memory for itself."""
        for key in list(self._entries):
            entry = self._entries.pop(key)
            self.refuse(entry.contents, entry.bytes)

    def take(self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor] | None:
        """The contents of the caller's tensor, in parts of these shapes; they leave this object.

        None if the device does not have them so.
        """
        entry = self._entries.pop(id(tensor), None)
        if entry is None:
            return None
        self._held -= entry.bytes
        found = [(tuple(part.shape), part.dtype) for part in entry.contents]
        if entry.is_of(tensor) and found == [(tuple(shape), tensor.dtype) for shape in shapes]:
            return entry.contents
        self._device.free(entry.contents)
        return None

    def admits(self, size: int) -> bool:
        """Whether `size` more bytes may be kept. They count from now on, until `refuse` or for `keep`."""
        if self._limit is not None and self.bytes + size > self._limit:
            return False
        self._held += size
        return True

    def refuse(self, contents: list[torch.Tensor], size: int) -> None:
        """Free what was admitted."""
        self._device.free(contents)
        self._held -= size

    def keep(self, tensor: torch.Tensor, contents: list[torch.Tensor], size: int) -> None:
        """Keep the contents of the caller's tensor; `size` bytes were admitted for them."""
        if _version(tensor) is None:  # a write would not be noticed
            self.refuse(contents, size)
            return
        if (before := self._entries.pop(id(tensor), None)) is not None:
            self.refuse(before.contents, before.bytes)
        self._note(self._entries, tensor, contents, size)

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether this was asked before for the same tensor, which nobody has changed since."""
        if _version(tensor) is None:
            return False
        before = self._seen.get(id(tensor))
        if before is not None and before.is_of(tensor):
            return True
        self._note(self._seen, tensor, [], 0)
        return False

    def clear(self) -> None:
        """Forget everything, after a failure of the device: its ledger is empty."""
        self._gone.clear()
        self._entries, self._seen, self._held = {}, {}, 0

    def _note(self, entries: dict[int, _Entry], tensor: torch.Tensor, contents: list[torch.Tensor], size: int) -> None:
        version = _version(tensor)
        assert version is not None
        gone = functools.partial(_is_gone, self._device, contents, self._gone, entries, id(tensor))
        entries[id(tensor)] = _Entry(weakref.ref(tensor, gone), version, contents, size)


@torch.compiler.disable  # a finalizer may run in the middle of the user's code, which Dynamo may compile
def _is_gone(device: Device, contents: list, notes: deque, entries: dict[int, _Entry], key: int, reference: weakref.ref) -> None:
    """Free the contents at once, and note the rest for the next call."""
    device.forget(contents[:])
    contents.clear()
    notes.append((entries, key, reference))


def _version(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written; None for a tensor that was made under inference mode, where this is not counted."""
    return None if tensor.is_inference() else tensor._version
