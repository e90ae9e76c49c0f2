"""Which memory a tensor is in. Fake tensors have no memory: the storage object stands for it."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor


def memory_of(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor: equal for two tensors whose memory begins at the same address."""
    return memory_of_storage(tensor.untyped_storage())


def memory_of_storage(storage: torch.UntypedStorage) -> int:
    """`memory_of`, for a storage. The storage of a fake tensor is on `meta`."""
    return storage._cdata if storage.device.type == "meta" else storage.data_ptr()


def address(tensor: torch.Tensor) -> tuple[int, int]:
    """The position of a tensor's first entry: equal for two tensors that begin at the same position."""
    if isinstance(tensor, FakeTensor):
        return memory_of(tensor), int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr(), 0
