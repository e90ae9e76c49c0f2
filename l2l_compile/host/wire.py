"""The wire: the parameters of a segment as they cross the link, in one contiguous buffer on the host.

A parameter that has the dtype of the link already is not copied to a wire. It crosses from its own memory, unless it is small.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from l2l_compile.disk.disk_store import await_writes, range_of
from l2l_compile.disk.stored_entries import samples
from l2l_compile.disk.stored_range import some_are_stored
from l2l_compile.host.gradients import GradientMemory
from l2l_compile.ir.captured import Input
from l2l_compile.ir.segments import Segment
from l2l_compile.ir.values import Bindings, TensorSpec
from l2l_compile.memory.address import address
from l2l_compile.memory.layout import aligned
from l2l_compile.memory.pages import PinnedMemory
from l2l_compile.options import Options
from l2l_compile.ranks.sharded import local

CHUNK = 32 << 20  # bytes of a wire that are sent while the next ones are copied: they take longer than a transfer's start
_SMALL = 1 << 16  # bytes; to copy fewer on the host takes hardly longer than to start another copy over the link
STRIDE = 251  # prime: entries that far apart fall into every column of a matrix, and into every run of 251 entries


Ready: TypeAlias = "Callable[[Wire, int, int], None]"  # a wire, and the bytes of it that are up to date now: from, to


def on_wire(segment: Segment, bindings: Bindings, options: Options) -> list[int]:
    """Positions of the weights of a segment that cross the link as copies on a wire. The others cross from their own memory."""
    if options.precision == "fp32" and not options.delay:
        return []
    weights = enumerate(zip(segment.weights, segment.block.weights, strict=True))
    return [
        i
        for i, (weight, spec) in weights
        if weight.kind == "parameter" and weight.inner is None and _is_copied(weight, spec, bindings, options)
    ]


def _is_copied(weight: Input, spec: TensorSpec, bindings: Bindings, options: Options) -> bool:
    is_cast = spec.compute_dtype is not None
    has_versions = bool(options.delay) and spec.differentiable
    return is_cast or has_versions or math.prod(shape_on_host(weight, spec, bindings)) * spec.dtype.itemsize < _SMALL


def is_locked(spec: TensorSpec, options: Options, to_train: bool) -> bool:
    """Whether a parameter that crosses the link from its own memory is page-locked there, within the option `pinned_memory`.

    In full precision, trained parameters go through the ring: they are all of the model, and would take the whole budget.
    A model without an optimizer that is called without gradients is taken for one that is not trained.
    """
    is_trained = spec.differentiable and (to_train or options.optimizer is not None)
    return options.precision != "fp32" or not is_trained


def shape_on_host(weight: Input, spec: TensorSpec, bindings: Bindings) -> tuple[int, ...]:
    """The shape of a parameter on this host; for a sharded parameter, the shape of the largest shard."""
    return spec.sizes(bindings) if weight.shard_spec is None else weight.shard_spec.shape_of(0)


def no_waiter(wire: Wire, start: int, end: int) -> None:
    """Does nothing: for wires that nobody waits for."""


class Wire:
    """Copies of some parameters, in the dtypes that cross the link, laid out as in a weight slab.

    buffer   uint8
    pinned   whether the device can copy from it directly
    views    the copies, one per parameter, in the order given; for a sharded parameter, the copy of this rank's shard

    spare   the source of memory if none can be page-locked; the wire gives this memory back when it is freed
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
        memory: PinnedMemory,
        spare: GradientMemory | None = None,
    ):
        self.parameters = tuple(parameters)
        shards = [local(p) for p in parameters]
        sizes = [p.numel() * dtype.itemsize for p, dtype in zip(shards, dtypes, strict=True)]
        self.shapes = [p.shape for p in shards]
        self.spans, end = [], 0
        for size in sizes:
            self.spans.append((end, end + size))
            end += aligned(size)
        if spare is not None and end and not memory.has_room(end):
            self.buffer, self.pinned = spare.wire(shards, end), False
        else:
            self.buffer, self.pinned = memory.take(end, "the weights that cross the link")
        self.dtypes = tuple(dtypes)
        self.views = self.in_slab(self.buffer)
        self.copies = [Copy(p, view) for p, view in zip(parameters, self.views, strict=True)]

    def in_slab(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """The parameters as views of a buffer with this layout."""
        return [
            slab[start:end].view(dtype).view(shape)
            for shape, dtype, (start, end) in zip(self.shapes, self.dtypes, self.spans, strict=True)
        ]

    def refresh(self, generation: int, ready: Ready = no_waiter) -> None:
        """Copy the parameters again, except parameters that only an update wrote since, together with their copy.

        Calls `ready` for one chunk after another, as soon as it is up to date: for all bytes in the end.
        """
        sent = 0
        same = self._same_on_disk(generation)
        for copy, (start, _) in zip(self.copies, self.spans, strict=True):
            for entries in copy.refresh(generation, same.get(copy)):
                now = start + entries * copy.view.element_size()
                if now - sent >= CHUNK:
                    ready(self, sent, now)
                    sent = now
        ready(self, sent, self.buffer.numel())

    def _same_on_disk(self, generation: int) -> Mapping[Copy, bool]:
        """What `same_sample` says of each copy that may be kept and is read from a disk."""
        if not some_are_stored():
            return {}
        kept = [copy for copy in self.copies if copy.may_be_kept() and is_read_from_disk(copy.view, copy.parameter)]
        return dict(zip(kept, same_samples([(c.view, c.parameter) for c in kept], generation), strict=True))


class Copy:
    """The copy of one parameter on a wire; both may be written together, by an update.

    generation  of the forward that used it last
    is_stored   whether it is on disk
    """

    is_stored = False

    def __init__(self, parameter: torch.Tensor, view: torch.Tensor):
        self.parameter, self.view, self.generation = parameter, view, 0
        self._of: tuple[int, ...] | None = None
        self._written = False

    def unchanged(self) -> bool:
        """Whether PyTorch knows of no write into the parameter since the copy was made."""
        return self._of == identity(self.parameter)

    def written(self) -> None:
        """The copy has been written together with the parameter."""
        self._of, self._written = identity(self.parameter), True

    def follow(self, other: Copy) -> bool:
        """Take the values that another copy of the parameter got from its update. Returns whether they are there now."""
        if other.is_stored:  # its parameter is on its way to the disk: the next forward copies it, if one reads this copy again
            self._of = None
            return False
        self.view.copy_(other.view if other.view.dtype is self.view.dtype else written_values(self.parameter))
        return True

    def may_be_kept(self) -> bool:
        """Whether the copy was written with the parameter, and PyTorch knows of no write since."""
        return self._written and self.unchanged()

    def refresh(self, generation: int, is_same: bool | None = None) -> Iterator[int]:
        """Copy the parameter, unless the copy was written with it and nothing was written since. Yields how many entries are up to date.

        `is_same` says what `same_sample` of both is, if that is known.

        A write that PyTorch does not record (`p.data.mul_()`) is found by comparing every 251st entry, with another offset in
        every generation: no write to a run of 251 entries, a row or a column is missed. The next update finds smaller ones
        (see `kernel`).
        """
        self.generation = generation
        if is_same is None:
            is_same = self.may_be_kept() and same_sample(self.view, self.parameter, generation)
        if is_same:
            yield self.view.numel()
            return
        source = written_values(self.parameter)
        for rows in _chunks(self.view):
            self.view[rows].copy_(source[rows])
            yield self.view[: rows.stop].numel() if isinstance(rows, slice) else self.view.numel()
        self._of, self._written = identity(self.parameter), False


def _chunks(tensor: torch.Tensor) -> list[Any]:
    """Indices of chunks of a tensor, rows of about `CHUNK` bytes each; a tensor without dimensions has one chunk."""
    if tensor.dim() == 0 or not len(tensor):
        return [...]
    rows = max(1, CHUNK * len(tensor) // max(1, tensor.nbytes))
    return [slice(start, min(start + rows, len(tensor))) for start in range(0, len(tensor), rows)]


class Wires:
    """The wires of all segments, by their parameters.

    With `spare`, a wire that is not page-locked is in memory that later holds the gradients of its parameters.
    """

    def __init__(self, memory: PinnedMemory, spare: GradientMemory | None = None):
        self._memory, self._spare = memory, spare
        self._wires: dict[tuple, Wire] = {}
        self._stale: set[Wire] = set()
        self._turn = 0
        self._copies: defaultdict[torch.Tensor, list[Copy]] = defaultdict(list)

    def begin_forward(self) -> None:
        """Check all wires again: since the last forward, any code may have written into the parameters."""
        self._stale = set(self._wires.values())
        self._turn += 1

    def load(
        self,
        parameters: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
        owners: Sequence[torch.Tensor] = (),
        *,
        keep: bool = True,
        newest: bool = True,
        ready: Ready = no_waiter,
    ) -> Wire:
        """The wire of these parameters, or of slices of their `owners`, with their values at the beginning of this forward.

        With `newest`, the wire has the newest values even if training reads older ones (`delay=1`). With `keep=False`, an
        unpinned wire is not cached: the caller owns its memory. `ready` is called as by `Wire.refresh`.
        """
        key = tuple(zip(map(id, parameters), dtypes, strict=True))
        wire = self._wires.get(key)
        if wire is None:
            wire = self._wires[key] = Wire(parameters, dtypes, self._memory, self._spare)
            self._stale.add(wire)
            for copy in wire.copies:
                self.add(copy)
        if wire in self._stale:
            self._stale.discard(wire)
            wire.refresh(self._turn, ready)
        else:
            ready(wire, 0, wire.buffer.numel())
        if not (keep or wire.pinned):
            del self._wires[key]
            for copy in wire.copies:
                self._copies[copy.parameter].remove(copy)
        return wire

    @property
    def generation(self) -> int:
        """The number of the forward that began last."""
        return self._turn

    def add(self, copy: Copy) -> None:
        """From now on, whoever writes a parameter writes this copy as well."""
        self._copies[copy.parameter].append(copy)

    def drop(self) -> None:
        """Drop the wires, whose copies may belong on disk now. Those that a forward needs are made again. Nothing is under way."""
        self._wires.clear()
        self._stale.clear()
        for parameter, copies in list(self._copies.items()):
            self._copies[parameter] = [copy for copy in copies if copy.is_stored]

    def latest(self, parameter: torch.Tensor) -> Copy | None:
        """The copy of a parameter that a forward used last."""
        return max(self._copies.get(parameter, ()), key=lambda copy: copy.generation, default=None)

    def written(self, parameter: torch.Tensor) -> None:
        """A parameter has been written, together with its latest copy."""
        latest = self.latest(parameter)
        if latest is None:  # no forward has used it
            return
        for copy in self._copies[parameter]:
            if copy is latest or copy.follow(latest):
                copy.written()


def written_values(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's values of a parameter, when no update is on its way to the disk. Every reader of a master calls this."""
    return await_writes(local(parameter)).detach()


def same_sample(copy: torch.Tensor, parameter: torch.Tensor, generation: int) -> bool:
    """Whether a sample of a copy still equals its parameter: other entries in every generation (see `Copy.refresh`).

    Of a parameter or a copy on disk, a few whole pages: every 251st entry would be on every page of the file.
    """
    if is_read_from_disk(copy, parameter):
        return same_samples([(copy, parameter)], generation)[0]
    return _is_same(copy, local(parameter), generation)


def same_samples(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], generation: int) -> list[bool]:
    """`same_sample` of copies and parameters. Those on disk are read at a time."""
    given = [(copy, local(parameter)) for copy, parameter in pairs]
    on_disk = [is_read_from_disk(copy, master) for copy, master in given]
    found = iter(samples((pair for pair, is_there in zip(given, on_disk, strict=True) if is_there), generation))
    same = []
    for (copy, master), is_there in zip(given, on_disk, strict=True):
        if is_there:
            _, (copied, entries) = next(found)
            same.append(torch.equal(copied, entries.to(copied.dtype)))
        else:
            same.append(_is_same(copy, master, generation))
    return same


def _is_same(copy: torch.Tensor, master: torch.Tensor, generation: int) -> bool:
    return torch.equal(_some_entries(copy, generation), _some_entries(master, generation).to(copy.dtype))


def is_read_from_disk(copy: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a sample of a copy and its parameter is read from a disk."""
    return range_of(local(parameter)) is not None or range_of(copy) is not None


def _some_entries(tensor: torch.Tensor, generation: int) -> torch.Tensor:
    """Every 251st entry of a tensor, as a contiguous copy: PyTorch converts and compares strided entries slowly."""
    entries = local(tensor).detach().view(-1)
    stride = STRIDE if entries.numel() > 16 * STRIDE else 1
    return entries[generation % stride :: stride].contiguous()


def identity(parameter: torch.Tensor) -> tuple[int, ...]:
    """A key that changes when a parameter moves, or when PyTorch records a write into it."""
    shard = local(parameter)
    if shard.is_inference():  # made under inference mode, for which PyTorch records no writes; no update writes it either
        return address(shard)
    return parameter._version, shard._version, *address(shard)
