"""Parameters and optimizer state on disk (options `disk`, `host_memory`): which, and when they are read and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from l2l_compile.devices.host import own_memory
from l2l_compile.disk.chunk_ring import ChunkRing
from l2l_compile.disk.disk_file import PAGE, whole_pages
from l2l_compile.disk.disk_store import DiskStore, moved_to_disk, range_of, whole_spans
from l2l_compile.errors import L2LError
from l2l_compile.host.disk_placement import SMALL, DiskPlacement, TensorSizes, place_on_disk
from l2l_compile.host.step.sharded_state import ranks_among
from l2l_compile.host.step.torch_step import state_bytes_of_trial
from l2l_compile.host.watched_parameters import unwatched
from l2l_compile.memory.heap import trim_the_heap
from l2l_compile.memory.pages import pages
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.sharded import is_sharded
from l2l_compile.units import format_bytes

_BUFFERS = 8  # of the ring: some are read, one is updated, some are written
_LARGEST_BUFFER, _SMALLEST_BUFFER = 64 << 20, 1 << 20  # bytes
_RING_PART = 8  # the ring takes up to this part of the budget
_OF_AVAILABLE = 0.8  # of the memory that is available, where the option host_memory says nothing

Parameter = torch.nn.Parameter
Brought = Mapping[torch.Tensor, torch.Tensor]  # stored tensors, each with its copy in memory
_Result = TypeVar("_Result")


class StoredParameters:
    """The parameters of one optimizer that are trained by one compiled model, as far as they are on disk."""

    def __init__(self, options: Options, optimizer: torch.optim.Optimizer):
        assert options.disk is not None
        self._options, self._optimizer = options, optimizer
        self.store = DiskStore(options.disk)
        self.placement: DiskPlacement | None = None
        self._planned: dict[Parameter, tuple[bool, bool]] = {}  # master on disk, state on disk
        self._ring: ChunkRing | None = None

    @property
    def ring(self) -> ChunkRing:
        assert self._ring is not None, "parameters are placed before the first update"
        return self._ring

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    def place(self, parameters: Iterable[Parameter]) -> None:
        """Move parameters to the disk whose place it is, in the first forward with the optimizer state that they have.

        State that comes later, of a first step or of a checkpoint, is moved behind the next update. Raises `DiskError`, also of an
        earlier step, and `L2LError` if the budget is too small.
        """
        self.store.check()
        is_first = self.placement is None
        if is_first:
            self._plan()
        misplaced = [p for p in parameters if is_first or self._master_to_move(p)]
        for parameter in misplaced:
            if self._master_to_move(parameter):
                parameter.data = moved_to_disk(self.store, parameter)
            self.place_state([parameter])
        if misplaced:
            trim_the_heap()

    def begin_updates(self) -> None:
        """The gradients of a step are on their way: from now on, no code but its updates writes parameters or state."""
        if self._ring is not None:
            self._ring.begin()

    def finish_writes(self) -> None:
        """Wait until mappings of all tensors hold what updates have written. Raises `DiskError`."""
        if self._ring is not None:
            self._ring.reset()
        self.store.settle()

    def forget(self) -> None:
        """The updates of a step have failed, or will not be made: nothing is read ahead any more."""
        if self._ring is not None:
            self._ring.reset()

    def being_written(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """The parameters, among these, whose updates are still on their way to the disk."""
        with unwatched():
            return [p for p in parameters if (found := range_of(p)) is not None and found.writes]

    # ---- called on the host lane -------------------------------------------------------------------------------------

    def place_state(self, parameters: Iterable[Parameter]) -> None:
        """Move optimizer state to the disk that a step, or a checkpoint, has left in memory. Raises `DiskError`."""
        for parameter in parameters:
            for name in self._state_to_move(parameter):
                state = self._optimizer.state[parameter]
                state[name] = moved_to_disk(self.store, state[name])

    def on_whole(self, parameters: Iterable[Parameter], step: Callable[[Brought], _Result]) -> _Result:
        """The result of a step on whole parameters, in memory: `step` gets the stored tensors of these, each with its copy there.

        For a step without a formula, and for the one that makes the state. Raises `DiskError`.
        """
        own = list(parameters)
        stored = [t for t in _tensors_of(own, self._optimizer) if range_of(t) is not None]
        if not stored:
            result = step({})
        else:
            spans, size = whole_spans(stored)
            buffer = pages(size, "parameters and optimizer state whose step takes them whole")
            self.store.read(spans, buffer).wait()
            flat = [buffer[span.at : span.at + span.size] for span in spans]
            result = step({t: f.view(t.dtype).view(t.shape) for t, f in zip(stored, flat, strict=True)})
            self.store.write(spans, buffer).wait()
            torch.autograd.graph.increment_version(stored)
        self.place_state(own)
        return result

    # ---- the plan ----------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Decide where parameters and state are, and allocate the file. Raises `L2LError` if the budget is too small."""
        own = [p for p in parameters_of(self._optimizer) if p.requires_grad]
        if ranks_among(own) is not None:
            raise L2LError(
                "the option 'disk' is for one rank, and the parameters of this optimizer are divided among several: leave out 'disk'"
            )
        each = state_bytes_of_trial(self._optimizer) or 0
        owners = Counter(p.data_ptr() for p in own)
        alone = [_can_move(p) and owners[p.data_ptr()] == 1 for p in own]
        sizes = [TensorSizes(p.nbytes, p.numel() * each, is_alone) for p, is_alone in zip(own, alone, strict=True)]
        budget = self._budget(sizes)
        buffer = min(_LARGEST_BUFFER, max(_SMALLEST_BUFFER, budget // _RING_PART // _BUFFERS // PAGE * PAGE))
        beside = bytes_beside(own, self._options) + _BUFFERS * buffer
        self.placement = found = place_on_disk(sizes, budget - beside)
        if found.in_memory + beside > budget:
            raise L2LError(
                f"host_memory={format_bytes(budget)} is too small even with all large parameters on disk: "
                f"{format_bytes(beside)} are for copies that cross the link, gradients and the ring of the disk, and {format_bytes(found.in_memory)} "
                f"for parameters that stay in memory: raise host_memory to {format_bytes(found.in_memory + beside)}"
            )
        self._planned = dict(zip(own, zip(found.masters, found.states, strict=True), strict=True))
        self._ring = ChunkRing(self.store, _BUFFERS, buffer)
        pages_of_state = len(own) * 4 * PAGE  # a tensor of the state takes whole pages
        self.store.reserve(whole_pages(found.on_disk) + pages_of_state)

    def _master_to_move(self, parameter: Parameter) -> bool:
        return self._planned.get(parameter, (False, False))[0] and range_of(parameter) is None and _can_move(parameter)

    def _state_to_move(self, parameter: Parameter) -> list[str]:
        """Names of optimizer state that is to be on disk, and is in memory."""
        if not self._planned.get(parameter, (False, False))[1]:
            return []
        state = self._optimizer.state.get(parameter, {})
        return [name for name, value in state.items() if _is_stored_state(value) and range_of(value) is None]

    def _budget(self, sizes: Sequence[TensorSizes]) -> int:
        if self._options.host_memory is not None:
            return self._options.host_memory
        return int(_OF_AVAILABLE * (own_memory() + sum(each.master for each in sizes)))


def bytes_beside(parameters: Sequence[Parameter], options: Options) -> int:
    """Host memory for copies that cross the link and for gradients. It does not depend on the batch."""
    versions = 2 if options.delay else 1
    entries = sum(p.numel() for p in parameters)
    narrow = 2 if options.gradients_on_link in ("bf16", "fp16") else 4
    width = 2 if options.precision != "fp32" else 4
    wires = entries * width * versions if options.precision != "fp32" or options.delay else 0
    waiting = options.mode.keeps_gradients or options.accumulate != 1
    largest = max((p.numel() for p in parameters), default=0)
    gradients = entries * narrow * versions if waiting else largest * narrow * (options.prefetch + 2)
    return wires + gradients


def _can_move(parameter: torch.Tensor) -> bool:
    """Whether a parameter may be on disk: large, dense, and the only tensor in its storage."""
    return (
        not is_sharded(parameter)
        and parameter.layout is torch.strided
        and parameter.device.type == "cpu"
        and parameter.nbytes >= SMALL
        and parameter.is_contiguous()
        and parameter.untyped_storage().nbytes() == parameter.nbytes
    )


def _is_stored_state(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and _can_move(value)


def _tensors_of(parameters: Iterable[Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, and the tensors of their optimizer state."""
    found: list[torch.Tensor] = []
    for parameter in parameters:
        found += [parameter, *(v for v in optimizer.state.get(parameter, {}).values() if isinstance(v, torch.Tensor))]
    return found
