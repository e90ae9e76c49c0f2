"""Finds the dimension of the inputs that is the batch: the first one, unless the model mixes the rows along it.

A model whose inputs are [time, batch, features] attends along dimension 0, and cannot be split there. It is traced once more
with the second dimension as the batch. Of the two traces, the one with more of the model in the inner loop runs.

States of recurrent layers are [layers, batch, hidden], and the inputs beside them may be [batch, time]. Dynamo then fixes the
size of the batch, because that size is a plain number in a state. The layers tell which dimension is the batch, so the frame is
traced again with that dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from l2l_compile.frontend.dynamo import adapter, batch_marks
from l2l_compile.ir.captured import Captured, Input
from l2l_compile.ir.graph import hint_of
from l2l_compile.ir.recurrent_operator import layer
from l2l_compile.ir.segments import Segment

_ENOUGH = 0.95  # part of the parameters' bytes; a BatchNorm has few parameters


@dataclass(frozen=True)
class Choice:
    """The batch dimensions that a frame is traced with.

    dimensions  the dimension by name of an input (None: it has no rows); None for dimension 0 of every input
    part        the part of the parameters in the inner loop with dimension 0
    """

    dimensions: dict[str, int | None] | None
    part: float

    @property
    def settled(self) -> bool:
        """Whether other dimensions were tried, and were no better than dimension 0."""
        return self.dimensions is None

    def lacks(self, captured: Captured) -> bool:
        """Whether the choice was made for a call that did not have some of the current inputs."""
        return self.dimensions is not None and any(adapter.source_name(i.node) not in self.dimensions for i in _values(captured))


def try_other_batch_dimension(captured: Captured, segments: Sequence[Segment]) -> None:
    """Make Dynamo trace the frame again with another batch dimension, if more of it may then run in the inner loop."""
    before = batch_marks.batch_choice()
    if before is not None and before.settled:
        return
    part = _part_in_inner_loop(segments) if captured.batch is not None else 0.0
    if before is None or before.lacks(captured):
        dimensions = _other_dimensions(captured) if part < _ENOUGH else None
        known = before.dimensions if before is not None else {}
        if dimensions:
            batch_marks.trace_again(Choice({**known, **dimensions}, part), "the rows along dimension 0 are mixed")
    elif part <= before.part:
        batch_marks.trace_again(Choice(None, before.part), "the rows along dimension 1 are mixed as well")


def _part_in_inner_loop(segments: Sequence[Segment]) -> float:
    """The part of the parameter bytes in the inner loop, among segments that read rows; 1 if these have no parameters."""
    rows = [s for s in segments if any(v.batch or v.mixed for v in s.block.values)]
    total = sum(s.parameter_bytes for s in rows)
    return sum(s.parameter_bytes for s in rows if s.block.inner_looped) / total if total else 1.0


def _other_dimensions(captured: Captured) -> dict[str, int | None]:
    """The batch dimension of each input, if it is not the first one of all inputs; {} if that cannot be told from the sizes.

    The size of the batch is taken from a recurrent layer, or else from dimension 1 of the input with the most dimensions.
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
        found[adapter.source_name(node)] = places[0] if places else None
    return found if batch > 1 and any(found.values()) else {}


def _read_by(nodes: list[fx.Node]) -> set[fx.Node]:
    """The inputs that lead to these nodes without a recurrent layer in between."""
    found, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and node.target is not layer:
            found.add(node)
            waiting += node.all_input_nodes
    return {node for node in found if node.op == "placeholder"}


def _values(captured: Captured) -> list[Input]:
    """Inputs that are not in a module. Inputs that count as weights because they have no batch dimension are included."""
    tensors = [i for i in captured.inputs if isinstance(i.node.meta["example_value"], torch.Tensor)]
    return [
        i
        for i in tensors
        if not isinstance(i.node.meta["example_value"], torch.nn.Parameter) and not adapter.is_module_attribute(i.node)
    ]
