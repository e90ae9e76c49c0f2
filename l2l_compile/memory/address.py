"""Which memory a tensor is in, also for tensors without any (fake tensors), where the storage itself has to stand for it."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor


def memory_of(tensor: torch.Tensor) -> int:
    """A number that two tensors have in common where their memory begins at the same address."""
    return memory_of_storage(tensor.untyped_storage())


def memory_of_storage(storage: torch.UntypedStorage) -> int:
    """`memory_of`, for the storage of a tensor: that of a fake tensor is on `meta`."""
    return storage._cdata if storage.device.type == "meta" else storage.data_ptr()


def address(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the first entry of a tensor is: equal for two tensors that begin there."""
    if isinstance(tensor, FakeTensor):
        return memory_of(tensor), int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr(), 0
