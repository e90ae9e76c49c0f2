"""Which dimension of the inputs is the batch: the first one, unless the model proves to mix its rows.

A model that is given time first, [time, batch, features], attends along dimension 0. Nothing of it could be split there,
so it is traced once more with the second dimension in its place; the trace that leaves more of the model in the inner loop
is the one that runs.

States of recurrent layers are [layers, batch, hidden], beside inputs that may be [batch, time]. Dynamo then fixes the size of
the batch, since it meets a number in a state. The layers say where the batch is, so the frame is traced again with it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..ir.captured import Captured, Input
from ..ir.segments import Segment
from . import dynamo
from .recurrent import layer
from .simplify import hint_of

_ENOUGH = 0.95  # parts of the parameters; a BatchNorm's are few


@dataclass(frozen=True)
class Choice:
    """Dimensions by the name of an input (None: it has no rows), None for the first of each; the part in the inner loop with the first ones."""

    dimensions: dict[str, int | None] | None
    part: float

    @property
    def settled(self) -> bool:
        """Whether other dimensions were tried, and were no better than the first ones."""
        return self.dimensions is None

    def lacks(self, captured: Captured) -> bool:
        """Whether the choice was made for a call without some of the inputs that there are now."""
        return self.dimensions is not None and any(dynamo.source_name(i.node) not in self.dimensions for i in _values(captured))


def try_other_batch_dimension(captured: Captured, segments: Sequence[Segment]) -> None:
    """Have Dynamo trace the frame again with the batch in another dimension, if that may leave more of it row-wise."""
    before = dynamo.batch_choice()
    if before is not None and before.settled:
        return
    part = _part_in_inner_loop(segments) if captured.batch is not None else 0.0
    if before is None or before.lacks(captured):
        dimensions = _other_dimensions(captured) if part < _ENOUGH else None
        known = before.dimensions if before is not None else {}
        if dimensions:
            dynamo.trace_again(Choice({**known, **dimensions}, part), "the rows along dimension 0 are mixed")
    elif part <= before.part:
        dynamo.trace_again(Choice(None, before.part), "the rows along dimension 1 are mixed as well")


def _part_in_inner_loop(segments: Sequence[Segment]) -> float:
    """Of the parameters that work on rows, in bytes; 1 if there are none."""
    rows = [s for s in segments if any(v.batch or v.mixed for v in s.block.values)]
    total = sum(s.parameter_bytes for s in rows)
    return sum(s.parameter_bytes for s in rows if s.block.inner_looped) / total if total else 1.0


def _other_dimensions(captured: Captured) -> dict[str, int | None]:
    """Where inputs have the size of the batch, if it is not the first one of all; {} if they do not tell.

    The batch is where a recurrent layer has it, or else the second dimension of the largest input.
    """
    nodes = [i.node for i in _values(captured)]
    shapes = {node: tuple(map(hint_of, node.meta["example_value"].shape)) for node in nodes}
    layers = captured.graph.find_nodes(op="call_function", target=layer)
    states: set[fx.Node] = set()
    if layers:
        _, sequence, *_, batch_first = layers[0].args
        batch, order = hint_of(sequence.meta["example_value"].shape[0 if batch_first else 1]), (0, 1) if batch_first else (1, 0)
        states = _read_by([state for node in layers for state in node.args[2]])
    elif captured.batch is not None:
        long = [s for s in shapes.values() if len(s) > 1]
        batch, order = max(long, key=len)[1] if long else 1, (1, 0)
    else:
        return {}
    found = {}
    for node, shape in shapes.items():
        places = [dim for dim in ((1, 0) if node in states else order) if len(shape) > dim and shape[dim] == batch]
        found[dynamo.source_name(node)] = places[0] if places else None
    return found if batch > 1 and any(found.values()) else {}


def _read_by(nodes: list[fx.Node]) -> set[fx.Node]:
    """The inputs from which these nodes are made without a recurrent layer in between."""
    found, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and node.target is not layer:
            found.add(node)
            waiting += node.all_input_nodes
    return {node for node in found if node.op == "placeholder"}


def _values(captured: Captured) -> list[Input]:
    """Inputs that are no part of a module, those included that count as weights for want of a batch dimension."""
    tensors = [i for i in captured.inputs if isinstance(i.node.meta["example_value"], torch.Tensor)]
    return [
        i
        for i in tensors
        if not isinstance(i.node.meta["example_value"], torch.nn.Parameter) and not dynamo.is_module_attribute(i.node)
    ]
