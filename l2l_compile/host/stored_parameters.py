"""Parameters and optimizer state on disk (options `disk`, `host_memory`): which, and when they are read and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from l2l_compile.disk.chunk_ring import ChunkRing
from l2l_compile.disk.disk_file import PAGE, whole_pages
from l2l_compile.disk.disk_store import DiskStore, moved_to_disk, range_of, whole_spans
from l2l_compile.errors import DiskError
from l2l_compile.host.disk_plan import BUFFERS, DiskPlan, can_move, disk_plan
from l2l_compile.host.hooks import WeakHook
from l2l_compile.host.step.sharded_state import ranks_among
from l2l_compile.host.watched_parameters import unwatched
from l2l_compile.memory.heap import trim_the_heap
from l2l_compile.memory.pages import pages
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.ranks.sharded import local, set_local, sharded_as
from l2l_compile.update_modes import UpdatePlace

_TENSORS = 4  # of a parameter and its state: each takes whole pages

Parameter = torch.nn.Parameter
Brought = Mapping[torch.Tensor, torch.Tensor]  # stored tensors, each with its copy in memory
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class DiskFigures:
    """Bytes that were read and written, and seconds for which updates have waited for a chunk."""

    read: int = 0
    written: int = 0
    waited: float = 0.0

    def since(self, before: DiskFigures) -> DiskFigures:
        return DiskFigures(self.read - before.read, self.written - before.written, self.waited - before.waited)


class StoredParameters:
    """The parameters of one optimizer that are trained by one compiled model, as far as they are on disk.

    largest_segment  the most trained entries that a segment of a program has
    """

    def __init__(self, options: Options, optimizer: torch.optim.Optimizer):
        assert options.disk is not None
        self._options, self._optimizer = options, optimizer
        self.store = DiskStore(options.disk, WeakHook(self._tell))
        self.largest_segment = 0
        self.plan: DiskPlan | None = None
        self._before, self._last = DiskFigures(), DiskFigures()  # when the updates of this step began; of the step before
        self._planned: dict[Parameter, tuple[bool, bool]] = {}  # master on disk, state on disk
        self._ring: ChunkRing | None = None
        self._ranks: Ranks | None = None  # that share the parameters

    @property
    def ring(self) -> ChunkRing:
        assert self._ring is not None, "parameters are placed before the first update"
        return self._ring

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    def misplaced(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """The parameters, among these, that `place` is to move: in the first forward, with the optimizer state that they have.

        Raises the `DiskError` of an earlier step, and `L2LError` if the budget is too small.
        """
        self.store.check()
        is_first = self.plan is None
        if is_first:
            self._ranks = ranks_among(parameters_of(self._optimizer))
            self.plan = self._make_plan()
        return [p for p in parameters if is_first or self._master_to_move(p)]

    def place(self, parameters: Iterable[Parameter]) -> None:
        """Move parameters, and their state, to the disk whose place it is. No update is under way. Raises `DiskError`.

        State that comes later, of a first step or of a checkpoint, is moved behind the next update.
        """
        start = self._moved()
        for parameter in parameters:
            if self._master_to_move(parameter):
                set_local(parameter, moved_to_disk(self.store, local(parameter)))
            self.place_state([parameter])
        trim_the_heap()
        self._before = self._moved().since(start.since(self._before))  # what was moved now is no part of a step

    def begin_updates(self) -> None:
        """The gradients of a step are on their way: from now on, no code but its updates writes parameters or state."""
        now = self._moved()
        self._before, self._last = now, now.since(self._before)
        if self._ring is not None:
            self._ring.begin()

    def figures(self) -> DiskFigures:
        """Of the updates that were made last: those of the step before, where updates run during the next forward."""
        is_later = self._options.mode.place is UpdatePlace.BEFORE_FETCH
        return self._last if is_later else self._moved().since(self._before)

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
            return [p for p in parameters if (found := range_of(local(p))) is not None and found.writes]

    # ---- called on the host lane -------------------------------------------------------------------------------------

    def place_state(self, parameters: Iterable[Parameter]) -> None:
        """Move optimizer state to the disk that a step, or a checkpoint, has left in memory. Raises `DiskError`."""
        for parameter in parameters:
            for name in self._state_to_move(parameter):
                state = self._optimizer.state[parameter]
                state[name] = sharded_as(moved_to_disk(self.store, local(state[name])), state[name])

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

    # ---- called on a disk thread -------------------------------------------------------------------------------------

    def _tell(self, error: DiskError) -> None:
        """Tell the other ranks: they wait for this one, which may be anywhere in its step, or in code of the user."""
        if self._ranks is not None:
            self._ranks.failed(error)

    # ---- the plan ----------------------------------------------------------------------------------------------------

    def _make_plan(self) -> DiskPlan:
        """Decide where parameters and state are, and allocate the file. Raises `L2LError` if the budget is too small."""
        plan = disk_plan(self._options, self.largest_segment)
        plan.check()
        placed = plan.placement
        self._planned = dict(zip(plan.parameters, zip(placed.masters, placed.states, strict=True), strict=True))
        self._ring = ChunkRing(self.store, BUFFERS, plan.buffer)
        there = (range_of(t) for t in _tensors_of(plan.parameters, self._optimizer))  # in the store of a model compiled before
        left = placed.on_disk - sum(found.size for found in there if found is not None)
        self.store.reserve(whole_pages(max(0, left)) + len(plan.parameters) * _TENSORS * PAGE)
        return plan

    def _master_to_move(self, parameter: Parameter) -> bool:
        shard = local(parameter)
        return self._planned.get(parameter, (False, False))[0] and range_of(shard) is None and can_move(shard)

    def _state_to_move(self, parameter: Parameter) -> list[str]:
        """Names of optimizer state that is to be on disk, and is in memory."""
        if not self._planned.get(parameter, (False, False))[1]:
            return []
        state = self._optimizer.state.get(parameter, {})
        return [name for name, value in state.items() if _is_stored_state(value) and range_of(local(value)) is None]

    def _moved(self) -> DiskFigures:
        """Bytes and seconds so far."""
        waited = self._ring.waited if self._ring is not None else 0.0
        return DiskFigures(self.store.read_bytes, self.store.written_bytes, waited)


def _is_stored_state(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and can_move(local(value))


def _tensors_of(parameters: Iterable[Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, and the tensors of their optimizer state; of those that are sharded, this rank's shards."""
    found: list[torch.Tensor] = []
    for parameter in parameters:
        found += [parameter, *(v for v in optimizer.state.get(parameter, {}).values() if isinstance(v, torch.Tensor))]
    return [local(tensor) for tensor in found]
