"""What an error of device memory that ran out is told: the node or the slabs that had no room, and the options that leave more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx, nn

from l2l_compile.ir import nodes
from l2l_compile.ir.segments import Segment
from l2l_compile.ir.values import Bindings
from l2l_compile.runtime.kept_activations import Room
from l2l_compile.runtime.slab import slab_bytes
from l2l_compile.runtime.step import Step
from l2l_compile.units import format_bytes


def name_node(error: torch.OutOfMemoryError, node: fx.Node, segments: Sequence[Segment]) -> None:
    """Say which node of the program had no room, and its segment."""
    index = nodes.segment_of(node)
    of_segment = "" if index is None else f", {nodes.called(node).name} of segment '{segments[index].name}'"
    error.add_note(f"the device had no memory left for node '{node.name}'{of_segment}")


def name_slabs(error: torch.OutOfMemoryError, count: int, segments: Sequence[Segment], bindings: Bindings) -> None:
    """Say that the slabs had no room, and which segment makes them as large as they are."""
    largest = max(segments, key=lambda segment: slab_bytes([segment], bindings))
    size = format_bytes(slab_bytes([largest], bindings))
    error.add_note(f"the device had no memory left for {count} slabs of {size}, the weights of segment '{largest.name}'")


def name_remedies(error: torch.OutOfMemoryError, step: Step, kept: Room) -> None:
    """Say what leaves more memory to a step that keeps `kept` inside of its layers: only options that are not used so far."""
    rows = step.rows
    size = f"{rows.count} rows in {len(rows.sizes)} micro-batches" if rows.batch is not None else "a batch that cannot be split"
    error.add_note(
        f"backend 'l2l': a step of {size} ran out of device memory. These take less, in this order: {', '.join(_remedies(step, kept))} "
        "(docs/recipes.md, out of memory)"
    )


def _remedies(step: Step, kept: Room) -> Iterator[str]:
    options, rows = step.engine.options, step.rows
    if kept.both:
        yield (
            f"smaller options keep and keep_on_host (the step keeps {format_bytes(kept.device)} inside of layers on the device for "
            f"backward, and copies {format_bytes(kept.host)} to the host)"
        )
    if rows.batch is not None and len(rows.sizes) < rows.count:
        yield f"up to micro_batches={rows.count}"
    if step.to_train and options.outputs == "all":
        yield "outputs='loss'"
    if options.precision == "fp32" and any(isinstance(x, nn.Parameter) and x.dtype is torch.float32 for x in step.given):
        yield "precision='bf16'"
    if options.resident:
        yield "resident=0"
    if options.prefetch:
        yield "prefetch=0"
    if step.to_train and options.stash == "device":
        yield "stash='host'"
    yield "fewer rows, or shorter ones"
