"""The plan of the options `disk` and `host_memory`: how much of the budget is for what, and so what is on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from l2l_compile.devices.host import knows_own_memory, own_memory
from l2l_compile.disk.disk_file import PAGE
from l2l_compile.disk.disk_store import DiskStore, has_place, is_in_place, place_of
from l2l_compile.errors import L2LError
from l2l_compile.host.compiled_step.compiled_step import why_not_compiled
from l2l_compile.host.disk_placement import SMALL, DiskPlacement, TensorSizes, late, place_on_disk, room_for_late
from l2l_compile.host.resumable_run import run_of
from l2l_compile.host.step.in_pieces import PIECE, taken_in_pieces
from l2l_compile.host.step.sharded_state import ranks_among
from l2l_compile.host.step.torch_step import state_bytes_of_trial
from l2l_compile.host.step.trial import nothing_else_changes
from l2l_compile.memory.address import memory_of
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.sharded import is_sharded, local
from l2l_compile.units import format_bytes
from l2l_compile.update_modes import UpdatePlace

BUFFERS = 8  # of the ring: some are read, one is updated, some are written
_LARGEST_BUFFER, _SMALLEST_BUFFER = 64 << 20, 1 << 20  # bytes
_RING_PART = 8  # the ring takes up to this part of the budget
_OF_AVAILABLE = 0.8  # of the memory that is available, where the option host_memory says nothing
_WHAT_IS_BESIDE = "gradients, copies that cross the link and stay in memory, stashes on their way, and the update of a parameter"
_HOSTS = ("cpu", "meta")  # a model on meta is one that will be on the host


@dataclass(frozen=True)
class DiskPlan:
    """Bytes of everything that `host_memory` bounds.

    parameters   those that are trained, in the order of `placement`; `sizes` has their bytes
    budget       the bound
    beside       copies that cross the link of shards, or in two versions, gradients, and a parameter whose step takes it whole
    buffer       one of the `BUFFERS` buffers of the ring
    masters, states, copies   of each, on disk
    places       that states have in the file, and `places_of_masters` masters
    stashes      the part of `beside` that is for stashes on their way to the disk, and back
    in_pieces    the parameters whose first step is taken in pieces
    late         those that are updated in the next forward, though others are updated in backward: the disk would be idle there
    late_gradients  bytes of their gradients, which wait in memory
    disks        folders over which all is striped
    """

    parameters: tuple[torch.nn.Parameter, ...]
    sizes: tuple[TensorSizes, ...]
    placement: DiskPlacement
    budget: int
    beside: int
    buffer: int
    masters: int
    states: int
    copies: int = 0
    places: int = 1
    places_of_masters: int = 1
    in_pieces: frozenset[torch.nn.Parameter] = frozenset()
    late: frozenset[torch.nn.Parameter] = frozenset()
    late_gradients: int = 0
    stashes: int = 0
    disks: int = 1

    @property
    def ring(self) -> int:
        return BUFFERS * self.buffer

    @property
    def host(self) -> int:
        """Bytes in memory."""
        return self.placement.in_memory + self.beside + self.late_gradients + self.ring

    @property
    def to_come(self) -> int:
        """Bytes of the places of masters and state that belong on disk and are not there yet."""
        placed = zip(self.sizes, self.placement.masters, self.placement.states, strict=True)
        return sum(
            size.master * self.places_of_masters * (master and not size.master_is_there)
            + size.state * self.places * (state and not size.state_is_there)
            for size, master, state in placed
        )

    @property
    def on_file(self) -> int:
        """Bytes of all places of masters and state."""
        return self.masters * self.places_of_masters + self.states * self.places

    def check(self) -> None:
        """Raise `L2LError` if the budget is too small."""
        if self.host > self.budget:
            raise L2LError(
                f"host_memory={format_bytes(self.budget)} is too small even with all large parameters on disk: {format_bytes(self.beside)} "
                f"are for {_WHAT_IS_BESIDE}, {format_bytes(self.ring)} for the buffers of the "
                f"disk, and {format_bytes(self.placement.in_memory)} for what stays in memory: raise host_memory to {format_bytes(self.host)}"
            )


def disk_plan(options: Options, largest: int, stashes: int = 0) -> DiskPlan:
    """The plan for the parameters of the option `optimizer`; `largest` are the trained entries of the largest segment, `stashes` the bytes
    of memory through which stashes go to the disk.

    Of parameters that are sharded over ranks, each rank plans for its own shards. Raises `L2LError` for several ranks if nothing says how much
    of the host's memory is for each.
    """
    optimizer = options.optimizer
    assert optimizer is not None, "`Options.build` requires it"
    own = [p for p in parameters_of(optimizer) if p.requires_grad]
    shards = [local(p) for p in own]
    each = state_bytes_of_trial(optimizer) or 0
    owners = Counter(map(memory_of, shards))
    on_link = 0 if options.delay else bytes_on_link(options)
    copies = [s.numel() * on_link if s.itemsize > on_link else 0 for s in shards]  # in the dtype of the link, it crosses as it is
    of_shards = sum(copy for p, copy in zip(own, copies, strict=True) if is_sharded(p))
    is_there = _there(options)
    sizes = [
        TensorSizes(
            s.nbytes,
            s.numel() * each,
            can_move(s) and owners[memory_of(s)] == 1,
            0 if is_sharded(p) else copy,
            is_there(s),
            _has_state(p, optimizer, is_there),
        )
        for p, s, copy in zip(own, shards, copies, strict=True)
    ]
    budget = options.host_memory
    if budget is None:
        _check_part_is_known(own)
        freed = sum(s.nbytes for s, one in zip(shards, sizes, strict=True) if not (one.master_is_there or is_in_place(s)))
        budget = int(_OF_AVAILABLE * (own_memory() + freed))
    buffer = min(_LARGEST_BUFFER, max(_SMALLEST_BUFFER, budget // _RING_PART // BUFFERS // PAGE * PAGE))
    in_pieces = _in_pieces(options)
    at_once = at_once_in_update(own, in_pieces, each)
    beside = bytes_beside(sum(s.numel() for s in shards), largest, options) + at_once + of_shards + stashes
    room = budget - beside - BUFFERS * buffer
    placed = place_on_disk(sizes, room, only_copies=options.resumable)
    are_late: list[int] = []
    gradients = [s.numel() * gradient_that_waits(options) for s in shards]
    if options.mode.place is UpdatePlace.AFTER_PUSH:
        for_late = room_for_late(placed, sizes, gradients, room)
        placed = place_on_disk(sizes, room - for_late, only_copies=options.resumable)
        are_late = late(placed, sizes, gradients, for_late)
    masters = sum(one.master for one, away in zip(sizes, placed.masters, strict=True) if away)
    stored = sum(one.copy for one, away in zip(sizes, placed.copies, strict=True) if away)
    places = 2 if options.resumable else 1
    return DiskPlan(
        tuple(own),
        tuple(sizes),
        placed,
        budget,
        beside,
        buffer,
        masters,
        placed.on_disk - masters - stored,
        stored,
        places=places,
        places_of_masters=places + bool(options.resumable and options.delay),  # weights of a step before as well
        in_pieces=in_pieces,
        late=frozenset(own[i] for i in are_late),
        late_gradients=sum(gradients[i] for i in are_late),
        stashes=stashes,
        disks=options.disks,
    )


def _check_part_is_known(parameters: Sequence[torch.nn.Parameter]) -> None:
    if ranks_among(parameters) is not None and not knows_own_memory():
        raise L2LError(
            "the option 'disk' leaves a part of the host's memory to each rank, and the number of ranks on this host is not known: LOCAL_WORLD_SIZE, "
            "which torchrun sets, is not set. Give each rank its part with the option host_memory"
        )


def bytes_beside(entries: int, largest: int, options: Options) -> int:
    """Host memory for gradients, and for copies that cross the link in two versions: those stay in memory. It does not depend on the batch.

    entries   of all trained parameters; `largest` of those of one segment
    """
    return (copies_on_link(entries, options) if options.delay else 0) + gradients_at_once(entries, largest, options)


def at_once_in_update(parameters: Sequence[torch.nn.Parameter], in_pieces: frozenset[torch.nn.Parameter], state: int) -> int:
    """Host memory for an update beside the ring: of a parameter that is taken whole, or of a piece in the step that makes its state.

    state   bytes of optimizer state for an entry
    """
    entries = (min(local(p).numel(), PIECE) if p in in_pieces else local(p).numel() for p in parameters)
    return max(entries, default=0) * (8 + state)  # its gradient may be widened


def _in_pieces(options: Options) -> frozenset[torch.nn.Parameter]:
    """The parameters whose first step is taken in pieces: later steps have machine code for any range."""
    optimizer = options.optimizer
    assert optimizer is not None
    with nothing_else_changes(optimizer):
        is_compiled = options.compile_update and why_not_compiled(optimizer) is None
    return taken_in_pieces(optimizer) if is_compiled else frozenset()


def copies_on_link(entries: int, options: Options) -> int:
    """Bytes of the copies of trained parameters that cross the link in another dtype than theirs, or at older weights."""
    return entries * bytes_on_link(options) * (2 if options.delay else 1)


def bytes_on_link(options: Options) -> int:
    """Bytes of an entry of a copy that crosses the link; 0 if parameters cross from their own memory."""
    return 2 if options.precision != "fp32" else 4 if options.delay else 0


def gradients_at_once(entries: int, largest: int, options: Options) -> int:
    """Bytes of the gradients that are in host memory together, of so many trained entries; `largest` are those of one segment."""
    on_link = _gradient_on_link(options)
    if options.accumulate != 1:
        return entries * 4
    if options.mode.keeps_gradients:
        return entries * on_link * (2 if options.delay else 1)
    return min(entries, largest * (options.prefetch + 2)) * on_link


def gradient_that_waits(options: Options) -> int:
    """Bytes of an entry of a gradient that waits for the next forward: none if all gradients of the step are kept anyway."""
    return _gradient_on_link(options) if options.accumulate == 1 else 0


def _gradient_on_link(options: Options) -> int:
    return 2 if options.gradients_on_link in ("bf16", "fp16") else 4


def _there(options: Options) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor is on disk and stays where it is: with the option `resumable`, in the file of the run."""
    if not options.resumable:
        return has_place
    run = run_of(options.optimizer) if options.optimizer is not None else None
    return lambda tensor: run is not None and has_place(tensor) and is_in(tensor, run.store)


def is_in(tensor: torch.Tensor, store: DiskStore) -> bool:
    """Whether a tensor is in the file of a store."""
    found = place_of(tensor)
    return found is not None and found.store is store


def _has_state(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, is_there: Callable[[torch.Tensor], bool]) -> bool:
    state = [value for value in optimizer.state.get(parameter, {}).values() if is_stored_state(value)]
    return bool(state) and all(is_there(local(each)) for each in state)


def is_stored_state(value: object) -> bool:
    """Whether a value of an optimizer's state is one that may be on disk."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and can_move(local(value))


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
