"""Parameters and optimizer state on disk (options `disk`, `host_memory`): which, and when they are read and written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from l2l_compile.disk.chunk_ring import ChunkRing
from l2l_compile.disk.disk_file import PAGE, whole_pages
from l2l_compile.disk.disk_store import DiskStore, place_of, whole_spans
from l2l_compile.disk.stored_entries import moved_to_disk, read_entries, write_entries
from l2l_compile.disk.stored_range import StoredSpan
from l2l_compile.errors import DiskError
from l2l_compile.host.disk_plan import BUFFERS, DiskPlan, can_move, disk_plan, is_in, is_stored_state
from l2l_compile.host.hooks import WeakHook
from l2l_compile.host.resumable_run import run_for
from l2l_compile.host.step.in_pieces import first_step_in_pieces
from l2l_compile.host.step.sharded_state import ranks_among
from l2l_compile.host.step.torch_step import Hyperparameters, step_on
from l2l_compile.host.watched_parameters import unwatched
from l2l_compile.memory.heap import apart_from_the_heap, trim_the_heap
from l2l_compile.memory.pages import huge_pages
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.ranks.sharded import local, set_local, sharded_as
from l2l_compile.update_modes import UpdatePlace

_TENSORS = 5  # of a parameter, its state and its copy: each takes whole pages

Scale = Callable[[Mapping[torch.nn.Parameter, torch.Tensor]], Mapping[torch.nn.Parameter, torch.Tensor]]
_IN_MEMORY = False, False, False

Parameter = torch.nn.Parameter


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
    stash_buffers    the most bytes of memory that a forward needs for stashes on their way to the disk, and back
    run              with the option `resumable`
    """

    def __init__(self, options: Options, optimizer: torch.optim.Optimizer):
        assert options.disk is not None
        self._options, self._optimizer = options, optimizer
        self.run = run_for(optimizer) if options.resumable else None
        if self.run is not None and not options.delay:
            self.run.end_before()
        self.store = self.run.store if self.run is not None else DiskStore(*options.disk, failed=WeakHook(self._tell))
        self.largest_segment = self.stash_buffers = 0
        self.plan: DiskPlan | None = None
        self._before, self._last = DiskFigures(), DiskFigures()  # when the updates of this step began; of the step before
        self._planned: dict[Parameter, tuple[bool, bool, bool]] = {}  # of master, state and copy: whether it is on disk
        self._ring: ChunkRing | None = None
        self._store_of_copies: DiskStore | None = None
        self._ranks: Ranks | None = None  # that share the parameters

    @property
    def ring(self) -> ChunkRing:
        assert self._ring is not None, "parameters are placed before the first update"
        return self._ring

    @property
    def late(self) -> frozenset[Parameter]:
        """The parameters that are updated in the next forward, though others are updated in backward (any thread)."""
        return self.plan.late if self.plan is not None else frozenset()

    # ---- called on the user's thread ---------------------------------------------------------------------------------

    def has_copy(self, parameter: torch.Tensor) -> bool:
        """Whether the copy of a parameter that crosses the link is on disk (any thread)."""
        return self._planned.get(parameter, _IN_MEMORY)[2]  # type: ignore[call-overload]  # a tensor that is none of the parameters

    def store_of_copies(self) -> DiskStore:
        """Where copies for the link are: with the option `resumable`, in files that end with the process, as the next one makes them anew."""
        if self._store_of_copies is None:
            self._store_of_copies = (
                DiskStore(*self.store.file.folders, failed=WeakHook(self._tell)) if self.run is not None else self.store
            )
        return self._store_of_copies

    def empty_copy(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor for a copy that crosses the link, on disk (h2d lane). Raises `DiskError`."""
        return self.store_of_copies().empty(shape, dtype)

    def misplaced(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """The parameters, among these, that `place` is to move: in the first forward, with the optimizer state that they have.

        Raises the `DiskError` of an earlier step, and `L2LError` if the budget is too small.
        """
        self.store.check()
        own = dict.fromkeys(parameters)
        if self.plan is not None and own.keys() <= self._planned.keys() and self.stash_buffers <= self.plan.stashes:
            return [p for p in own if self._master_to_move(p)]
        self._ranks = ranks_among(parameters_of(self._optimizer))
        self.plan = self._make_plan()  # the first one, or some were frozen, or have joined the optimizer, or batches are larger
        return [*(own | dict.fromkeys(self._planned))]

    def place(self, parameters: Iterable[Parameter]) -> None:
        """Move parameters, and their state, to the disk whose place it is. No update is under way. Raises `DiskError`.

        State that comes later, of a first step or of a checkpoint, is moved behind the next update.
        """
        start = self._moved()
        for parameter in parameters:
            if self._master_to_move(parameter):
                set_local(parameter, moved_to_disk(self.store, local(parameter)))
            self.place_state([parameter])
        if self.run is not None and self._options.delay:
            self.run.reserve_before()
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
        is_later = self._options.mode.place is UpdatePlace.BEFORE_FETCH or self.late
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
            return [p for p in parameters if (found := place_of(local(p))) is not None and found.writes]

    # ---- called on the host lane -------------------------------------------------------------------------------------

    def place_state(self, parameters: Iterable[Parameter]) -> None:
        """Move optimizer state to the disk that a step, or a checkpoint, has left in memory. Raises `DiskError`."""
        for parameter in parameters:
            for name in self._state_to_move(parameter):
                state = self._optimizer.state[parameter]
                state[name] = sharded_as(moved_to_disk(self.store, local(state[name])), state[name])

    def step(
        self,
        shared: Hyperparameters,
        gradients: Mapping[Parameter, torch.Tensor],
        copies: Mapping[Parameter, torch.Tensor],
        scale: Scale,
    ) -> Hyperparameters:
        """As `step_on`, one after another for parameters that are on disk, or their state: whole, or in pieces in a first step.

        For a step without a formula, and for the one that makes the state. Their `copies` that cross the link, as far as these are on disk,
        are written with them. `scale` brings gradients to the step, some at a time. Raises `DiskError`.
        """
        stored = {p for p in gradients if p in copies or self._is_stored(p)}
        in_memory = {p: g for p, g in gradients.items() if p not in stored}
        after = [step_on(self._optimizer, shared, scale(in_memory))] if in_memory else []
        for parameter in filter(stored.__contains__, gradients):
            given = shared, parameter, gradients[parameter], copies.get(parameter), scale
            after.append(self._in_pieces(*given) if self._has_to_make_state(parameter) else self._on_whole(*given))
        return functools.reduce(Hyperparameters.joined, after)

    def _on_whole(
        self, shared: Hyperparameters, parameter: Parameter, gradient: torch.Tensor, copy: torch.Tensor | None, scale: Scale
    ) -> Hyperparameters:
        stored = [t for t in _tensors_of([parameter], self._optimizer) if place_of(t) is not None]
        written = [*stored, *([copy] if copy is not None else [])]
        spans, size = whole_spans(written)
        buffer = huge_pages(size, "parameters and optimizer state whose step takes them whole")
        if stored:
            self.store.read(spans[: len(stored)], buffer).wait()
        brought = {t: _within(buffer, span, t) for t, span in zip(stored, spans, strict=False)}
        after = step_on(self._optimizer, shared, scale({parameter: gradient}), brought)
        if copy is not None:
            _within(buffer, spans[-1], copy).copy_(brought.get(parameter, parameter.detach()))
        if written:
            self.store.write(spans, buffer).wait()
        torch.autograd.graph.increment_version(stored)
        self.place_state([parameter])
        return after

    def _in_pieces(
        self, shared: Hyperparameters, parameter: Parameter, gradient: torch.Tensor, copy: torch.Tensor | None, scale: Scale
    ) -> Hyperparameters:
        made: dict[Any, torch.Tensor] = {}
        flat = parameter.detach().view(-1)

        def written(part: slice, piece: torch.Tensor, state: Mapping[Any, torch.Tensor]) -> None:
            for name, value in state.items():
                if name not in made:
                    made[name] = self._room_for_state(parameter, value.dtype)
                write_entries(made[name].view(-1), part.start, value)
            write_entries(flat, part.start, piece)
            if copy is not None:
                write_entries(copy.view(-1), part.start, piece)

        def read(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
            return read_entries(flat, part).clone(), scale({parameter: gradient.reshape(-1)[part]})[parameter]

        after = first_step_in_pieces(self._optimizer, shared, parameter, read, written)
        self._optimizer.state[parameter] |= made
        torch.autograd.graph.increment_version([parameter])
        return after

    def _is_stored(self, parameter: Parameter) -> bool:
        return self._planned.get(parameter, _IN_MEMORY)[1] or any(
            place_of(t) is not None for t in _tensors_of([parameter], self._optimizer)
        )

    def _has_to_make_state(self, parameter: Parameter) -> bool:
        """Whether a step will make the state of a parameter, and may make it in pieces."""
        return self.plan is not None and parameter in self.plan.in_pieces and not self._optimizer.state.get(parameter)

    def _room_for_state(self, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """Memory for state with an entry for each one of a parameter, where the plan puts it. Raises `DiskError`."""
        if self._planned.get(parameter, _IN_MEMORY)[1]:
            return self.store.empty(parameter.shape, dtype)
        with apart_from_the_heap():
            return torch.empty(parameter.shape, dtype=dtype)

    # ---- called on a disk thread -------------------------------------------------------------------------------------

    def _tell(self, error: DiskError) -> None:
        """Tell the other ranks: they wait for this one, which may be anywhere in its step, or in code of the user."""
        if self._ranks is not None:
            self._ranks.failed(error)

    # ---- the plan ----------------------------------------------------------------------------------------------------

    def _make_plan(self) -> DiskPlan:
        """Decide where parameters and state are, and allocate the file. Raises `L2LError` if the budget is too small."""
        plan = disk_plan(self._options, self.largest_segment, self.stash_buffers)
        plan.check()
        placed = plan.placement
        self._planned = dict(zip(plan.parameters, zip(placed.masters, placed.states, placed.copies, strict=True), strict=True))
        if self._ring is None:
            self._ring = ChunkRing(self.store, BUFFERS, plan.buffer)
        needed = {self.store: plan.to_come}
        if plan.copies:
            needed[self.store_of_copies()] = needed.get(self.store_of_copies(), 0) + plan.copies
        for store, size in needed.items():
            store.reserve(
                whole_pages(size) + len(plan.parameters) * _TENSORS * plan.places_of_masters * PAGE, ", or raise host_memory"
            )
        return plan

    def _master_to_move(self, parameter: Parameter) -> bool:
        shard = local(parameter)
        return self._planned.get(parameter, _IN_MEMORY)[0] and self._is_elsewhere(shard) and can_move(shard)

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in memory; with the option `resumable`, or in another file than that of the run."""
        return place_of(tensor) is None or self.run is not None and not is_in(tensor, self.store)

    def _state_to_move(self, parameter: Parameter) -> list[str]:
        """Names of optimizer state that is to be on disk, and is in memory."""
        if not self._planned.get(parameter, _IN_MEMORY)[1]:
            return []
        state = self._optimizer.state.get(parameter, {})
        return [name for name, value in state.items() if is_stored_state(value) and self._is_elsewhere(local(value))]

    def _moved(self) -> DiskFigures:
        """Bytes and seconds so far."""
        waited = self._ring.waited if self._ring is not None else 0.0
        return DiskFigures(self.store.read_bytes, self.store.written_bytes, waited)


def _tensors_of(parameters: Iterable[Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, and the tensors of their optimizer state; of those that are sharded, this rank's shards."""
    found: list[torch.Tensor] = []
    for parameter in parameters:
        found += [parameter, *(v for v in optimizer.state.get(parameter, {}).values() if isinstance(v, torch.Tensor))]
    return [local(tensor) for tensor in found]


def _within(buffer: torch.Tensor, span: StoredSpan, tensor: torch.Tensor) -> torch.Tensor:
    """A stored tensor in a buffer."""
    return buffer[span.at : span.at + span.size].view(tensor.dtype).view(tensor.shape)
