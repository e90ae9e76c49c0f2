"""The plan of the options `disk` and `host_memory`: how much of the budget is for what, and so what is on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from l2l_compile.devices.host import knows_own_memory, own_memory
from l2l_compile.disk.disk_file import PAGE
from l2l_compile.errors import L2LError
from l2l_compile.host.disk_placement import SMALL, DiskPlacement, TensorSizes, place_on_disk
from l2l_compile.host.step.sharded_state import ranks_among
from l2l_compile.host.step.torch_step import state_bytes_of_trial
from l2l_compile.memory.address import memory_of
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.sharded import local
from l2l_compile.units import format_bytes

BUFFERS = 8  # of the ring: some are read, one is updated, some are written
_LARGEST_BUFFER, _SMALLEST_BUFFER = 64 << 20, 1 << 20  # bytes
_RING_PART = 8  # the ring takes up to this part of the budget
_OF_AVAILABLE = 0.8  # of the memory that is available, where the option host_memory says nothing
_HOSTS = ("cpu", "meta")  # a model on meta is one that will be on the host


@dataclass(frozen=True)
class DiskPlan:
    """Bytes of everything that `host_memory` bounds.

    parameters   those that are trained, in the order of `placement`; `sizes` has their bytes
    budget       the bound
    beside       copies that cross the link, gradients, and the tensors of a segment whose step takes them whole
    buffer       one of the `BUFFERS` buffers of the ring
    masters, states   of both, on disk
    """

    parameters: tuple[torch.nn.Parameter, ...]
    sizes: tuple[TensorSizes, ...]
    placement: DiskPlacement
    budget: int
    beside: int
    buffer: int
    masters: int
    states: int

    @property
    def ring(self) -> int:
        return BUFFERS * self.buffer

    @property
    def host(self) -> int:
        """Bytes in memory."""
        return self.placement.in_memory + self.beside + self.ring

    def check(self) -> None:
        """Raise `L2LError` if the budget is too small."""
        if self.host > self.budget:
            raise L2LError(
                f"host_memory={format_bytes(self.budget)} is too small even with all large parameters on disk: {format_bytes(self.beside)} "
                f"are for copies that cross the link, gradients and the update of a segment, {format_bytes(self.ring)} for the buffers of the "
                f"disk, and {format_bytes(self.placement.in_memory)} for what stays in memory: raise host_memory to {format_bytes(self.host)}"
            )


def disk_plan(options: Options, largest: int) -> DiskPlan:
    """The plan for the parameters of the option `optimizer`; `largest` are the trained entries of the largest segment.

    Of parameters that are sharded over ranks, each rank plans for its own shards. Raises `L2LError` for several ranks if nothing says how much
    of the host's memory is for each.
    """
    optimizer = options.optimizer
    assert optimizer is not None, "`Options.build` requires it"
    own = [p for p in parameters_of(optimizer) if p.requires_grad]
    shards = [local(p) for p in own]
    each = state_bytes_of_trial(optimizer) or 0
    owners = Counter(map(memory_of, shards))
    alone = [can_move(s) and owners[memory_of(s)] == 1 for s in shards]
    sizes = [TensorSizes(s.nbytes, s.numel() * each, is_alone) for s, is_alone in zip(shards, alone, strict=True)]
    budget = options.host_memory
    if budget is None:
        _check_part_is_known(own)
        budget = int(_OF_AVAILABLE * (own_memory() + sum(one.master for one in sizes)))
    buffer = min(_LARGEST_BUFFER, max(_SMALLEST_BUFFER, budget // _RING_PART // BUFFERS // PAGE * PAGE))
    beside = bytes_beside(sum(s.numel() for s in shards), largest, each, options)
    placed = place_on_disk(sizes, budget - beside - BUFFERS * buffer)
    masters = sum(one.master for one, away in zip(sizes, placed.masters, strict=True) if away)
    return DiskPlan(tuple(own), tuple(sizes), placed, budget, beside, buffer, masters, placed.on_disk - masters)


def _check_part_is_known(parameters: Sequence[torch.nn.Parameter]) -> None:
    if ranks_among(parameters) is not None and not knows_own_memory():
        raise L2LError(
            "the option 'disk' leaves a part of the host's memory to each rank, and the number of ranks on this host is not known: LOCAL_WORLD_SIZE, "
            "which torchrun sets, is not set. Give each rank its part with the option host_memory"
        )


def bytes_beside(entries: int, largest: int, state: int, options: Options) -> int:
    """Host memory for copies that cross the link, for gradients, and for the update of a segment. It does not depend on the batch.

    entries   of all trained parameters; `largest` of those of one segment
    state     bytes of optimizer state for an entry
    """
    at_once = copies_on_link(entries, options) + gradients_at_once(entries, largest, options)
    return at_once + largest * (4 + state)  # a step without a formula, and the first one, take a segment whole


def copies_on_link(entries: int, options: Options) -> int:
    """Bytes of the copies of trained parameters that cross the link in another dtype than theirs, or at older weights."""
    of_entry = 2 if options.precision != "fp32" else 4 if options.delay else 0
    return entries * of_entry * (2 if options.delay else 1)


def gradients_at_once(entries: int, largest: int, options: Options) -> int:
    """Bytes of the gradients that are in host memory together, of so many trained entries; `largest` are those of one segment."""
    on_link = 2 if options.gradients_on_link in ("bf16", "fp16") else 4
    if options.accumulate != 1:
        return entries * 4
    if options.mode.keeps_gradients:
        return entries * on_link * (2 if options.delay else 1)
    return min(entries, largest * (options.prefetch + 2)) * on_link


def can_move(tensor: torch.Tensor) -> bool:
    """Whether a tensor, this rank's shard of one, may be on disk: large, dense, alone in its storage, and shared with no process."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in _HOSTS
        and tensor.nbytes >= SMALL
        and tensor.is_contiguous()
        and not tensor.is_shared()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )
