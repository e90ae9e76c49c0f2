"""Steps on parameters and optimizer state that are on disk: a ring of chunks is read, updated and written.

    for each chunk of the parameters of a segment:    buffer = take(chunk);  update the entries in the buffer;  give(chunk, buffer)

The compiled step takes addresses and a count, so it runs on a range of entries: the ring holds chunks and not segments. A step
without a formula takes its parameters whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from l2l_compile.disk.chunk_ring import Chunk
from l2l_compile.disk.disk_file import PAGE, whole_pages
from l2l_compile.disk.disk_store import place_of
from l2l_compile.disk.stored_range import StoredRange, StoredSpan
from l2l_compile.host.compiled_step.compiled_step import CompiledStep
from l2l_compile.host.compiled_step.kernel import Launch, run_all
from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.step.torch_step import Hyperparameters, TorchStep, scaled
from l2l_compile.host.stored_copies import StoredCopy
from l2l_compile.host.stored_parameters import Scale, StoredParameters
from l2l_compile.host.wire import Wires

Parameter = torch.nn.Parameter
_TOO_SMALL = 16  # part of a buffer that is left empty rather than filled with the beginning of the next parameter


class StoredStep(CompiledStep):
    """As `CompiledStep`, with parameters and state that may be on disk."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        wires: Wires,
        threads: int,
        memory: GradientMemory,
        stored: StoredParameters,
    ):
        super().__init__(optimizer, wires, threads, memory)
        self._stored = stored
        self._by_own_step: list[Parameter] = []

    def on(self, shared: Hyperparameters, gradients: Mapping[Parameter, torch.Tensor], factor: float) -> Hyperparameters:
        after = super().on(shared, gradients, factor)
        while self._by_own_step:
            self.wires.written(self._by_own_step.pop())
        self._stored.place_state(gradients)  # that of a checkpoint
        return after

    def _run(self, launches: Mapping[Parameter, Launch]) -> None:
        places = {p: [place_of(t) for t in launch.tensors] for p, launch in launches.items()}
        super()._run({p: launch for p, launch in launches.items() if not any(places[p])})
        ring = self._stored.ring
        for part in _parts([(launch, places[p]) for p, launch in launches.items() if any(places[p])], ring.size):
            chunk = Chunk(tuple(span for piece in part for span in piece.spans if span is not None))
            buffer = ring.take(chunk)
            try:
                within = [piece.within(buffer) for piece in part]
                run_all(within, self.threads)
            except BaseException:
                ring.drop(buffer)
                raise
            ring.give(chunk, buffer, [t for piece in part for t in piece.launch.tensors])
            for piece, launch in zip(part, within, strict=True):
                piece.launch.stale |= launch.stale

    def _own_step(self, shared: Hyperparameters, gradients: Mapping[Parameter, torch.Tensor], factor: float) -> Hyperparameters:
        scale = functools.partial(scaled, factor=factor, memory=self._memory)
        after, self._by_own_step = _own_step_on(self._stored, self.wires, shared, gradients, scale)
        return after


class StoredTorchStep(TorchStep):
    """As `TorchStep`, with parameters and state that may be on disk. Takes them whole."""

    def __init__(self, optimizer: torch.optim.Optimizer, wires: Wires, memory: GradientMemory, stored: StoredParameters):
        super().__init__(optimizer, memory)
        self._wires, self._stored = wires, stored

    def on(self, shared: Hyperparameters, gradients: Mapping[Parameter, torch.Tensor], factor: float) -> Hyperparameters:
        scale = functools.partial(scaled, factor=factor, memory=self._memory)
        after, written = _own_step_on(self._stored, self._wires, shared, gradients, scale)
        for parameter in written:
            self._wires.written(parameter)
        return after


def _own_step_on(
    stored: StoredParameters,
    wires: Wires,
    shared: Hyperparameters,
    gradients: Mapping[Parameter, torch.Tensor],
    scale: Scale,
) -> tuple[Hyperparameters, list[Parameter]]:
    """As `step_on`, with parameters and state that may be on disk. Also returns the parameters whose copies there were written with them."""
    latest = {p: wires.latest(p) for p in gradients}
    copies = {p: copy.view for p, copy in latest.items() if isinstance(copy, StoredCopy)}
    return stored.step(shared, gradients, copies, scale), list(copies)


@dataclass(frozen=True)
class _Piece:
    """Entries `start` to `end` of one launch; for each of its tensors, the span in the buffer, None for a tensor in memory."""

    launch: Launch
    start: int
    end: int
    spans: Sequence[StoredSpan | None]

    def within(self, buffer: torch.Tensor) -> Launch:
        """The launch on these entries."""
        tensors = [
            tensor.detach().view(-1)[self.start : self.end]
            if span is None
            else buffer[span.at : span.at + span.size].view(tensor.dtype)
            for tensor, span in zip(self.launch.tensors, self.spans, strict=True)
        ]
        return Launch(self.launch.address, self.launch.scalars, tensors, checked=self.launch.checked)


def _parts(launches: Iterable[tuple[Launch, Sequence[StoredRange | None]]], size: int) -> Iterator[list[_Piece]]:
    """The pieces of launches, in lists of at most `size` bytes on disk. Each span begins on a page."""
    part: list[_Piece] = []
    used = 0
    for launch, places in launches:
        widths = [t.element_size() for t, place in zip(launch.tensors, places, strict=True) if place is not None]
        run = PAGE // min(widths)  # entries that take whole pages of every tensor
        start = 0
        while start < launch.count:
            entries = (size - used) // (run * sum(widths)) * run
            if part and entries < min(launch.count - start, size // sum(widths) // _TOO_SMALL):
                yield part
                part, used = [], 0
                continue
            end = min(launch.count, start + entries)
            spans: list[StoredSpan | None] = []
            for tensor, place in zip(launch.tensors, places, strict=True):
                spans.append(_span(place, tensor.element_size(), start, end, used) if place is not None else None)
                used += whole_pages(spans[-1].size) if spans[-1] is not None else 0
            part.append(_Piece(launch, start, end, spans))
            start = end
    if part:
        yield part


def _span(place: StoredRange, width: int, start: int, end: int, at: int) -> StoredSpan:
    return StoredSpan(place, start * width, (end - start) * width, at)
