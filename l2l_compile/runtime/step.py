"""The state of one step through a program: sizes, seeds, figures, and the tensors of its values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import sympy
import torch
from torch import fx

from l2l_compile.devices.device import HostWeights
from l2l_compile.ir.segments import Block, Segment
from l2l_compile.ir.values import Bindings, TensorSpec, evaluate
from l2l_compile.lowering.lower import Lowering
from l2l_compile.memory.address import address
from l2l_compile.races import Place
from l2l_compile.ranks.ranks import Ranks


class RuntimeValue:
    """The tensors of a value: one if it is whole, one per micro-batch if it is split.

    tensors      None before it is filled and after its release; a gradient that a weight does not get is None as well
    lane, event  the lane that fills it, and the event when it is filled; None means at once
    readers      the last event of each other lane that reads it
    absent       a gradient that does not exist
    results      for a node with several results, a value each
    slab         for weights: the number of their slab
    unfetched    positions of weights whose entries were left out of the fetch, since nothing reads them
    in_flight    for gradients on the host: the work there that reads them
    place        its memory, watched for races
    """

    __slots__ = ("absent", "event", "in_flight", "lane", "place", "readers", "results", "slab", "tensors", "unfetched")

    def __init__(self, tensors: list[torch.Tensor] | None = None, absent: bool = False, results: Sequence[RuntimeValue] = ()):
        self.tensors: Any = tensors  # None until its lane fills it, and after its release
        self.absent, self.results = absent, results
        self.lane: str | None = None
        self.event: Any = None
        self.readers: dict[str, Any] = {}
        self.slab: int | None = None
        self.unfetched: frozenset[int] = frozenset()
        self.in_flight: Any = None
        self.place = Place()

    def copy(self) -> RuntimeValue:
        """Another value with the same, complete, tensors."""
        copy = RuntimeValue(self.tensors, self.absent)
        copy.lane, copy.place = self.lane, self.place
        return copy


def copies(tensors: Sequence[torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Copies of tensors, and the bytes copied. A tensor that several micro-batches share is copied once."""
    made: dict[tuple, torch.Tensor] = {}
    keys = [(*address(t), t.shape) for t in tensors]
    for key, tensor in zip(keys, tensors, strict=True):
        if key not in made:
            made[key] = copy(tensor)
    return [made[key] for key in keys], bytes_of(list(made.values()))


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all entries."""
    return sum(t.numel() * t.element_size() for t in tensors)


@dataclass
class Stats:
    """Figures of the last step of a compiled model; bytes and seconds.

    `gradient_squares` is the sum of the squares of all gradients of parameters. It is None if it was not taken: it needs the
    option `optimizer`, and an `optimizer.step()` with overlapped updates. `skipped_steps` counts the steps since the
    start that did nothing because a gradient was not finite; `loss_scale` is the factor on the loss in fp16, 1.0 in other
    precisions.
    """

    peak_device_bytes: int = 0
    fetched_bytes: int = 0
    pushed_bytes: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    gradient_squares: float | None = None
    skipped_steps: int = 0
    loss_scale: float = 1.0

    def __add__(self, other: Stats) -> Stats:
        """The figures of two programs of one step: amounts add up, the larger peak counts."""
        amounts = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Stats) if f.name != "gradient_squares"}
        total = Stats(**amounts, gradient_squares=self.gradient_squares)
        total.add_squares(other.gradient_squares)
        total.peak_device_bytes = max(self.peak_device_bytes, other.peak_device_bytes)
        total.loss_scale = other.loss_scale
        return total

    def add_squares(self, squares: float | None) -> None:
        """Add the squares of further gradients; None if they were not taken."""
        if squares is not None:
            self.gradient_squares = (self.gradient_squares or 0.0) + squares

    @property
    def gradient_norm(self) -> float | None:
        """The global norm of the gradients, before clipping; None if it was not taken (see `gradient_squares`)."""
        return None if self.gradient_squares is None else self.gradient_squares**0.5

    @property
    def seconds(self) -> float:
        """Seconds in forward and backward programs, transfers of outputs and gradients included."""
        return self.forward_seconds + self.backward_seconds

    def __str__(self) -> str:
        """A figure a line, by the names that users read, without figures that were not taken."""
        parts = {"forward_seconds", "backward_seconds", "gradient_squares"}
        names = [f.name for f in fields(self) if f.name not in parts] + ["seconds", "gradient_norm"]
        values = {name: getattr(self, name) for name in names}
        return "\n".join(f"{name:18} {value:,.10g}" for name, value in values.items() if value is not None)


def micro_batch_sizes(rows: int, micro_batches: int) -> list[int]:
    """Rows of each micro-batch: as equal as can be, none empty, the larger ones first."""
    count = min(micro_batches, rows)
    return [rows // count + (i < rows % count) for i in range(count)]


def block_bindings(block: Block, bindings: Bindings, batch: sympy.Symbol | None, micro_batches: int) -> list[Bindings]:
    """The sizes of each run of a block in a step with these bindings."""
    if not block.inner_looped:
        return [bindings]
    return [{**bindings, batch: size} for size in micro_batch_sizes(bindings[batch], micro_batches)]


class Host(Protocol):
    """The host side, as a running program calls it (`host/server.py`)."""

    def begin_forward(self, step: Step, parameters: Sequence[torch.nn.Parameter], to_train: bool) -> None: ...

    def load(
        self, step: Step, segment: Segment, weights: Sequence[torch.Tensor], ready: Callable[[Any, int, int], None] = ..., /
    ) -> tuple[HostWeights | None, list[torch.Tensor]]: ...

    def on_wire(self, step: Step, segment: Segment, /) -> list[int]: ...

    def begin_backward(self, step: Step, graph: fx.Graph, segments: Sequence[Segment]) -> None: ...

    def collect(self, step: Step, segment: Segment, gradients: RuntimeValue, /) -> None: ...

    def update(self, step: Step, segment: Segment, pushed: RuntimeValue | None, /) -> None: ...

    def end_backward(self, step: Step) -> dict[int, torch.Tensor]: ...

    def recover(self, step: Step) -> None: ...


class BlockCheck(Protocol):
    """Returns work that compares a block on rows together and apart, or None if there is nothing to compare (`row_check.py`)."""

    def forward(
        self, step: Step, segment: Segment, weights: RuntimeValue, operands: Sequence[RuntimeValue]
    ) -> Callable[[], None] | None: ...

    def backward(
        self,
        step: Step,
        segment: Segment,
        weights: RuntimeValue,
        operands: Sequence[RuntimeValue],
        gradients: Sequence[RuntimeValue],
    ) -> Callable[[], None] | None: ...


@dataclass(eq=False)
class Step:
    """The state that one forward and its backward share: arguments, sizes, seeds, and results for the host.

    arguments  the values that the program reads: for a parameter that is sharded over ranks, this rank's piece
    given      the arguments as the caller passes them
    rows_of_ranks  the rows of each rank, if the batch is made of the rows of all ranks; else empty
    first_micro_batch  how many micro-batches the ranks before this one have: seeds are numbered over all ranks
    scale      the factor on the gradients of the outputs in backward
    pending    the host's own record of this forward, until its backward has run
    for_optimizer  whether gradients of the current backward go to the optimizer
    wants_norms  whether the host asks for the norm of each gradient of a weight; the device may compute it
    returned   gradients for `p.grad` by index of the argument, filled by the host lane
    places     of `writes` and `returned`, watched for races
    last_fetches   the fetches of parameters (by their indices) still to come, if their wire is not needed after the last one
    """

    arguments: Sequence
    given: Sequence
    constants: dict[str, torch.Tensor]
    bindings: Bindings
    batch: sympy.Symbol | None
    micro_batches: int
    lowering: Lowering
    stats: Stats
    server: Host
    check: BlockCheck | None = None
    world: Ranks | None = None
    rows_of_ranks: tuple[int, ...] = ()
    first_micro_batch: int = 0
    gradient_wire: str | None = None
    pending: Any = None
    for_optimizer: bool = True
    wants_norms: bool = False
    writes: dict[int, torch.Tensor] = field(default_factory=dict)
    seed: int | None = None
    scale: float = 1.0
    returned: dict[int, torch.Tensor] = field(default_factory=dict)
    last_fetches: dict[tuple[int, ...], int] = field(default_factory=dict)
    places: tuple[Place, Place] = field(
        default_factory=lambda: (Place("new contents of a buffer"), Place("gradients for p.grad"))
    )

    @property
    def ranks(self) -> Ranks:
        """The ranks among which the parameters are sharded."""
        assert self.world is not None, "one rank has no collectives"
        return self.world

    def __post_init__(self) -> None:
        self.sizes = micro_batch_sizes(self.bindings[self.batch], self.micro_batches) if self.batch is not None else [1]

    @property
    def rows(self) -> int:
        """Rows of a batch that can be split."""
        assert self.batch is not None
        return self.bindings[self.batch]

    def split(self, tensor: torch.Tensor, spec: TensorSpec) -> list[torch.Tensor]:
        """Slices of a whole value, contiguous; views where the batch is the first dimension."""
        return [self.part(tensor, spec, micro_batch).contiguous() for micro_batch in range(len(self.sizes))]

    def part(self, tensor: torch.Tensor, spec: TensorSpec, micro_batch: int) -> torch.Tensor:
        """A micro-batch's slice of a whole value, a view."""
        dim, multiple = spec.rows.dim, evaluate(spec.rows.multiple, self.bindings)
        return tensor.narrow(dim, sum(self.sizes[:micro_batch]) * multiple, self.sizes[micro_batch] * multiple)

    def replicate(self, tensor: torch.Tensor, spec: TensorSpec) -> list[torch.Tensor]:
        """The parts of a value whose rows are equal: slices of the first micro-batch's part, views if contiguous."""
        dim, multiple = spec.rows.dim, evaluate(spec.rows.multiple, self.bindings)
        return [tensor.narrow(dim, 0, size * multiple).contiguous() for size in self.sizes]

    def partial_weight(self, micro_batch: int, partial: str | None) -> float:
        """Weight of a micro-batch's partial sum; `partial` is the field of `TensorSpec`."""
        return self.sizes[micro_batch] / (sum(self.rows_of_ranks) or sum(self.sizes)) if partial == "mean" else 1

    def summed(self, parts: Sequence[torch.Tensor], partial: str | None) -> torch.Tensor:
        """The sum over rows, from the partial sum of each micro-batch."""
        weighted = [part * self.partial_weight(i, partial) for i, part in enumerate(parts)]
        return functools.reduce(torch.add, weighted[1:], weighted[0])

    def bindings_of(self, segment: Segment) -> list[Bindings]:
        """The sizes of each run of a segment: one per micro-batch, or the whole batch once."""
        bindings = segment.bindings(self.bindings)
        if self.is_global and not segment.block.inner_looped:
            assert self.batch is not None
            return [{**bindings, self.batch: sum(self.rows_of_ranks)}]
        return block_bindings(segment.block, bindings, self.batch, self.micro_batches)

    @property
    def is_global(self) -> bool:
        """Whether the batch is made of the rows of all ranks."""
        return bool(self.rows_of_ranks)

    def rows_in(self, spec: TensorSpec) -> tuple[int, list[int]]:
        """The dimension of a value's rows, and how many entries each rank has there."""
        multiple = evaluate(spec.rows.multiple, self.bindings)
        return spec.rows.dim, [rows * multiple for rows in self.rows_of_ranks]

    def base_seed(self) -> int:
        """One number per step from the default generator, drawn only if something in the step is random."""
        if self.seed is None:
            self.seed = int(torch.randint(2**62, ()))
        return self.seed
