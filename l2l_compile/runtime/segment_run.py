"""The inner loop: every micro-batch of the batch through one segment, forward or backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import sympy
import torch

from ..ir import nodes
from ..ir.program import Block, Program, Segment
from ..ir.values import Bindings, TensorSpec, evaluate
from ..lower import Lowered, Lowering, Request, wanted_of
from ..precision import gradient_dtype
from ..randomness import mixed
from .device import Device

if TYPE_CHECKING:
    from ..check import Check
    from ..host.server import ParameterServer
    from ..host.updates import Use
    from .executor import Box


@dataclass
class Stats:
    """Figures of the last step of a compiled model; bytes and seconds.

    `gradient_squares` is the sum of the squares of all gradients of parameters, where the option `optimizer` is given, and
    `skipped_steps` counts the steps since the start that did nothing because a gradient was not finite; `loss_scale` is the
    factor on the loss in fp16, 1.0 in other precisions.
    """

    peak_device_bytes: int = 0
    fetched_bytes: int = 0
    pushed_bytes: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    gradient_squares: float = 0.0
    skipped_steps: int = 0
    loss_scale: float = 1.0

    def __add__(self, other: Stats) -> Stats:
        """Two programs of one step: amounts add up, the larger peak counts."""
        total = Stats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Stats)))
        total.peak_device_bytes = max(self.peak_device_bytes, other.peak_device_bytes)
        total.loss_scale = other.loss_scale
        return total

    @property
    def gradient_norm(self) -> float:
        """The global norm of the gradients, before clipping; 0.0 without the option `optimizer`."""
        return self.gradient_squares**0.5

    @property
    def seconds(self) -> float:
        """Seconds in forward and backward programs, transfers of outputs and gradients included."""
        return self.forward_seconds + self.backward_seconds

    def __str__(self) -> str:
        """A figure a line, by the names that users read."""
        parts = {"forward_seconds", "backward_seconds", "gradient_squares"}
        names = [f.name for f in fields(self) if f.name not in parts] + ["seconds", "gradient_norm"]
        return "\n".join(f"{name:18} {getattr(self, name):,.10g}" for name in names)


def micro_batch_sizes(rows: int, micro_batches: int) -> list[int]:
    """Rows of each micro-batch: as equal as can be, none empty, the larger ones first."""
    count = min(micro_batches, rows)
    return [rows // count + (i < rows % count) for i in range(count)]


def block_bindings(block: Block, bindings: Bindings, batch: sympy.Symbol | None, micro_batches: int) -> list[Bindings]:
    """The sizes of each run of a block in a step with these bindings."""
    if not block.inner_looped:
        return [bindings]
    return [{**bindings, batch: size} for size in micro_batch_sizes(bindings[batch], micro_batches)]


@dataclass(eq=False)
class Step:
    """What one forward and its backward share: arguments, sizes, seeds, and what comes back to the host.

    scale      the factor on the gradients of the outputs in backward
    returned   gradients for `p.grad` by index of the argument, filled by the host lane
    last_fetches   how often parameters (by their indices) are still fetched, where their wire is of no use afterwards
    """

    arguments: Sequence
    constants: dict[str, torch.Tensor]
    bindings: Bindings
    batch: sympy.Symbol | None
    micro_batches: int
    lowering: Lowering
    stats: Stats
    server: ParameterServer
    check: Check | None = None
    gradient_wire: str | None = None
    use: Use | None = None
    writes: dict[int, torch.Tensor] = field(default_factory=dict)
    seed: int | None = None
    scale: float = 1.0
    returned: dict[int, torch.Tensor] = field(default_factory=dict)
    last_fetches: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = micro_batch_sizes(self.bindings[self.batch], self.micro_batches) if self.batch is not None else [1]

    def split(self, tensor: torch.Tensor, spec: TensorSpec) -> list[torch.Tensor]:
        """Slices of a whole value, contiguous; views where the batch is the first dimension."""
        return [self.part(tensor, spec, turn).contiguous() for turn in range(len(self.sizes))]

    def part(self, tensor: torch.Tensor, spec: TensorSpec, turn: int) -> torch.Tensor:
        """A micro-batch's slice of a whole value, a view."""
        dim, multiple = spec.batch.dim, evaluate(spec.batch.multiple, self.bindings)
        return tensor.narrow(dim, sum(self.sizes[:turn]) * multiple, self.sizes[turn] * multiple)

    def for_all(self, tensor: torch.Tensor, spec: TensorSpec) -> list[torch.Tensor]:
        """The first micro-batch's part of a value whose rows are alike, as the parts of all: one memory, as far as that goes."""
        dim, multiple = spec.batch.dim, evaluate(spec.batch.multiple, self.bindings)
        return [tensor.narrow(dim, 0, size * multiple).contiguous() for size in self.sizes]

    def share(self, turn: int, partial: str | None) -> float:
        """What a micro-batch's part of a sum counts for; `partial` is that of `TensorSpec`."""
        return self.sizes[turn] / sum(self.sizes) if partial == "mean" else 1

    def bindings_of(self, block: Block) -> list[Bindings]:
        """The sizes of each run of a block: one per micro-batch, or the whole batch once."""
        return block_bindings(block, self.bindings, self.batch, self.micro_batches)

    def base_seed(self) -> int:
        """One number from the default generator a step, drawn only if something in the step is random."""
        if self.seed is None:
            self.seed = int(torch.randint(2**62, ()))
        return self.seed


def lowerings(step: Step, program: Program, to_train: bool) -> Iterator[Request]:
    """What a step through a program is going to lower, forward first, in the order in which it runs."""
    seen = set()
    for block in dict.fromkeys(segment.block for segment in program.segments):
        for turn, bindings in enumerate(step.bindings_of(block)):
            if (told := (block, turn > 0, bindings.get(step.batch))) not in seen:
                seen.add(told)
                yield block, bindings, "forward", wanted_of(block, again=turn > 0)
    if not to_train or program.backward is None:
        return
    for node in program.backward.graph.find_nodes(op="call_function", target=nodes.backward):
        block, given = program.segments[node.args[0]].block, tuple(gradient is not None for gradient in node.args[3])
        for bindings in step.bindings_of(block):
            if (told := (block, given, bindings.get(step.batch))) not in seen:
                seen.add(told)
                yield block, bindings, "backward", given


def run_forward(
    step: Step, device: Device, segment: Segment, weights: Box, operands: Sequence[Box], results: Sequence[Box]
) -> list[Callable[[], None]]:
    """Work for the compute lane, one for each micro-batch, that runs a segment forward and adds to `results`.

    Lowers now, on the caller's thread.
    """
    block = segment.block
    lowered = [
        _lower(segment, "forward", step.lowering.forward, block, b, turn > 0) for turn, b in enumerate(step.bindings_of(block))
    ]
    seeds = _seeds(step, segment, lowered)
    compare = step.check and step.check.forward(step, segment, weights, operands)
    for result in results:
        result.tensors = []

    def work(turn: int) -> None:
        if compare and turn == 0:
            compare()
        arguments = [*weights.tensors, *(turn_of(o.tensors, turn) for o in operands)]
        made = iter(_call(segment, "forward", turn, lowered[turn], arguments, seeds, device))
        there = [
            (result, spec) for result, spec, present in zip(results, block.outputs, lowered[turn].present, strict=True) if present
        ]
        for (result, spec), tensor in zip(there, made, strict=True):
            if turn == 0 or not spec.made_once:
                parts = step.for_all(tensor, spec) if spec.alike else [tensor]
                result.tensors += parts
                device.adopt(parts)

    return [functools.partial(work, turn) for turn in range(len(lowered))]


def run_backward(
    step: Step,
    device: Device,
    segment: Segment,
    weights: Box,
    operands: Sequence[Box],
    gradients: Sequence[Box],
    results: Sequence[Box],
) -> list[Callable[[], None]]:
    """Work, one for each micro-batch, that recomputes and differentiates a segment.

    Marks at once which results exist; the last micro-batch fills them. That of the first two may be read by the first.
    """
    block = segment.block
    given = tuple(not g.absent for g in gradients)
    lowered = [_lower(segment, "backward", step.lowering.backward, block, b, given) for b in step.bindings_of(block)]
    seeds = _seeds(step, segment, lowered)
    present, count = lowered[0].present, len(block.weights)
    for result, exists in zip(results, present[count:], strict=False):
        result.absent = not exists
    results[-1].absent = not any(present[:count])
    arriving = [(g, spec) for g, spec in zip(gradients, block.outputs, strict=True) if not g.absent]
    whole = None
    if block.summed_whole and len(lowered) > 1 and not lowered[0].random:
        whole = _lower(segment, "backward", step.lowering.backward, block, step.bindings, given)

    compare = step.check and step.check.backward(step, segment, weights, operands, gradients)
    totals: list = [None] * len(block.operands)
    gathered: list[torch.Tensor] = []  # what of them is on the device until the results are

    def work(turn: int) -> None:
        if compare and turn == 0:
            compare()
        arguments = [*weights.tensors, *(turn_of(o.tensors, turn) for o in operands)]
        arguments += [gradient_of(step, block, g.tensors, turn, spec) for g, spec in arriving]
        made = iter(_call(segment, "backward", turn, lowered[turn], arguments, seeds, device))
        before = len(gathered)
        for index, spec in enumerate(block.operands):
            if present[index]:
                split, total = _split(block, spec), totals[index]
                totals[index] = _collect(total, next(made), split, len(lowered) > 1)
                if split or total is None:
                    gathered.append(totals[index][-1] if split else totals[index])
        device.adopt(gathered[before:])
        if turn == len(lowered) - 1:
            finish()

    def finish() -> None:
        if whole is not None:
            read = [(b, s) for b, s in zip(operands, block.values, strict=True)] + arriving
            arguments = [*weights.tensors, *(joined(b.tensors, s) for b, s in read)]
            made = iter(_call(segment, "backward", 0, whole, arguments, seeds, device))
            for index, gradient in ((i, next(made)) for i, exists in enumerate(present) if exists):
                if index in block.summed_whole:
                    totals[index] = gradient
        for result, total, spec in zip(results, totals[count:], block.values, strict=False):
            if not result.absent:
                total = total.to(spec.gradient_dtype) if isinstance(total, torch.Tensor) else total
                result.tensors = total if isinstance(total, list) else [total]
                device.adopt(result.tensors)
        if not results[-1].absent:
            bundle = [_for_the_link(step, spec, t) for spec, t in zip(block.weights, totals, strict=False)]
            results[-1].tensors = bundle
            device.adopt([t for t in bundle if t is not None])
        device.free(gathered)

    return [functools.partial(work, turn) for turn in range(len(lowered))]


def _split(block: Block, spec: TensorSpec) -> bool:
    return block.inner_looped and spec.splits


def turn_of(tensors: Sequence[torch.Tensor], turn: int) -> torch.Tensor:
    """A value for one micro-batch: its own part of it, or the one tensor that all share."""
    return tensors[turn] if len(tensors) > 1 else tensors[0]


def joined(tensors: Sequence[torch.Tensor], spec: TensorSpec) -> torch.Tensor:
    """A value for all micro-batches at once."""
    return torch.cat(list(tensors), spec.batch.dim) if len(tensors) > 1 else tensors[0]


def gradient_of(step: Step, block: Block, tensors: Sequence[torch.Tensor], turn: int, spec: TensorSpec) -> torch.Tensor:
    """A gradient for one micro-batch. That of a value which all micro-batches share counts once, that of a sum in each."""
    if block.inner_looped and spec.partial is not None:
        return tensors[0] * step.share(turn, spec.partial)
    if _split(block, spec) or turn == 0:
        return tensors[turn]
    return torch.zeros_like(tensors[0])


def _collect(total, gradient: torch.Tensor, split: bool, several: bool):
    if split:
        return [*(total or ()), gradient]
    if total is None:  # gradients of 16 bits are summed in 32
        return gradient.float() if several and gradient.dtype in (torch.bfloat16, torch.float16) else gradient
    return total.add_(gradient)


def _for_the_link(step: Step, spec: TensorSpec, gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient if gradient is None else gradient.to(gradient_dtype(spec, step.gradient_wire))


def _lower(segment: Segment, which: str, lower, *arguments) -> Lowered:
    try:
        return lower(*arguments)
    except Exception as error:
        error.add_note(f"while lowering {which} of segment '{segment.name}'")
        raise


def _seeds(step: Step, segment: Segment, lowered: Sequence[Lowered]) -> list[int]:
    if not any(run.random for run in lowered):
        return []
    base = step.base_seed()
    return [mixed(base, segment.index, turn) for turn in range(len(lowered))]


def _call(
    segment: Segment, which: str, turn: int, run: Lowered, arguments: list, seeds: Sequence[int], device: Device
) -> Sequence[torch.Tensor]:
    device.computes(run.inside)
    try:
        if not run.random:
            return run.run(*arguments)
        arguments += [d.make(_generator(device.torch_device, mixed(seeds[turn], d.number))) for d in run.draws]
        if not run.seeded:
            return run.run(*arguments)
        with _seeded(device.torch_device, seeds[turn]):
            return run.run(*arguments)
    except Exception as error:
        error.add_note(f"in segment '{segment.name}', {which} of micro-batch {turn + 1}")
        raise


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """The default generator of a device begins at a seed, and is as it was before at the end; those of others are left alone."""
    if device.type == "cuda":
        with torch.random.fork_rng([device]), torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
            yield
    else:
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            yield


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
