"""The inner loop: every micro-batch of the batch through one segment, forward or backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..devices.device import Device
from ..ir import nodes
from ..ir.precision import gradient_dtype
from ..ir.program import Program
from ..ir.segments import Block, Segment
from ..ir.values import TensorSpec
from ..lowering.lower import Lowered, Request, wanted_of
from ..lowering.randomness import derived_seed
from .step import RuntimeValue, Step


def lowerings(step: Step, program: Program, to_train: bool) -> Iterator[Request]:
    """What a step through a program is going to lower, forward first, in the order in which it runs."""
    seen = set()
    for block in dict.fromkeys(segment.block for segment in program.segments):
        for micro_batch, bindings in enumerate(step.bindings_of(block)):
            if (told := (block, micro_batch > 0, bindings.get(step.batch))) not in seen:
                seen.add(told)
                yield block, bindings, "forward", wanted_of(block, again=micro_batch > 0)
    if not to_train or program.backward is None:
        return
    for node in program.backward.graph.find_nodes(op="call_function", target=nodes.backward):
        block = program.segments[nodes.operands(node).segment].block
        given = tuple(gradient is not None for gradient in nodes.arriving_gradients(node))
        for bindings in step.bindings_of(block):
            if (told := (block, given, bindings.get(step.batch))) not in seen:
                seen.add(told)
                yield block, bindings, "backward", given


def run_forward(
    step: Step,
    device: Device,
    segment: Segment,
    weights: RuntimeValue,
    operands: Sequence[RuntimeValue],
    results: Sequence[RuntimeValue],
) -> list[Callable[[], None]]:
    """Work for the compute lane, one for each micro-batch, that runs a segment forward and adds to `results`.

    Lowers now, on the caller's thread.
    """
    block = segment.block
    lowered = [
        _lower(segment, "forward", step.lowering.forward, block, b, micro_batch > 0)
        for micro_batch, b in enumerate(step.bindings_of(block))
    ]
    seeds = _seeds(step, segment, lowered)
    compare = step.check and step.check.forward(step, segment, weights, operands)
    for result in results:
        result.tensors = []

    def work(micro_batch: int) -> None:
        if compare and micro_batch == 0:
            compare()
        arguments = [*weights.tensors, *(micro_batch_of(o.tensors, micro_batch) for o in operands)]
        made = iter(_call(segment, "forward", micro_batch, lowered[micro_batch], arguments, seeds, device))
        there = [
            (result, spec)
            for result, spec, present in zip(results, block.outputs, lowered[micro_batch].present, strict=True)
            if present
        ]
        for (result, spec), tensor in zip(there, made, strict=True):
            if micro_batch == 0 or not spec.computed_once:
                parts = step.replicate(tensor, spec) if spec.equal_rows else [tensor]
                result.tensors += parts
                device.hold(parts)

    return [functools.partial(work, micro_batch) for micro_batch in range(len(lowered))]


def run_backward(
    step: Step,
    device: Device,
    segment: Segment,
    weights: RuntimeValue,
    operands: Sequence[RuntimeValue],
    gradients: Sequence[RuntimeValue],
    results: Sequence[RuntimeValue],
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

    def work(micro_batch: int) -> None:
        if compare and micro_batch == 0:
            compare()
        arguments = [*weights.tensors, *(micro_batch_of(o.tensors, micro_batch) for o in operands)]
        arguments += [gradient_of(step, block, g.tensors, micro_batch, spec) for g, spec in arriving]
        made = iter(_call(segment, "backward", micro_batch, lowered[micro_batch], arguments, seeds, device))
        before = len(gathered)
        for index, spec in enumerate(block.operands):
            if present[index]:
                split, total = _split(block, spec), totals[index]
                totals[index] = _collect(total, next(made), split, len(lowered) > 1)
                if split or total is None:
                    gathered.append(totals[index][-1] if split else totals[index])
        device.hold(gathered[before:])
        if micro_batch == len(lowered) - 1:
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
                device.hold(result.tensors)
        if not results[-1].absent:
            bundle = [_for_the_link(step, spec, t) for spec, t in zip(block.weights, totals, strict=False)]
            results[-1].tensors = bundle
            device.hold([t for t in bundle if t is not None])
        device.free(gathered)

    return [functools.partial(work, micro_batch) for micro_batch in range(len(lowered))]


def _split(block: Block, spec: TensorSpec) -> bool:
    return block.inner_looped and spec.splits


def micro_batch_of(tensors: Sequence[torch.Tensor], micro_batch: int) -> torch.Tensor:
    """A value for one micro-batch: its own part of it, or the one tensor that all share."""
    return tensors[micro_batch] if len(tensors) > 1 else tensors[0]


def joined(tensors: Sequence[torch.Tensor], spec: TensorSpec) -> torch.Tensor:
    """A value for all micro-batches at once."""
    return torch.cat(list(tensors), spec.batch.dim) if len(tensors) > 1 else tensors[0]


def gradient_of(step: Step, block: Block, tensors: Sequence[torch.Tensor], micro_batch: int, spec: TensorSpec) -> torch.Tensor:
    """A gradient for one micro-batch. That of a value which all micro-batches share counts once, that of a sum in each."""
    if block.inner_looped and spec.partial is not None:
        return tensors[0] * step.partial_weight(micro_batch, spec.partial)
    if _split(block, spec) or micro_batch == 0:
        return tensors[micro_batch]
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
    return [derived_seed(base, segment.index, micro_batch) for micro_batch in range(len(lowered))]


def _call(
    segment: Segment, which: str, micro_batch: int, run: Lowered, arguments: list, seeds: Sequence[int], device: Device
) -> Sequence[torch.Tensor]:
    device.use_workspace(run.workspace_bytes)
    try:
        if not run.random:
            return run.run(*arguments)
        arguments += [d.make(_generator(device.torch_device, derived_seed(seeds[micro_batch], d.number))) for d in run.draws]
        if not run.seeded:
            return run.run(*arguments)
        with _seeded(device.torch_device, seeds[micro_batch]):
            return run.run(*arguments)
    except Exception as error:
        error.add_note(f"in segment '{segment.name}', {which} of micro-batch {micro_batch + 1}")
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
