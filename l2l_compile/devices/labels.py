"""Names of pieces of work in a timeline, measured or simulated."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.ir.segments import Segment


def label_of(node: fx.Node, segments: Sequence[Segment]) -> str:
    """The label of a node of a program with these segments: its kind, and its segment if it has one."""
    index = nodes.segment_of(node)
    return nodes.called(node).name if index is None else f"{nodes.called(node).name} {segments[index].name}"


def label_of_micro_batch(node: str, number: int) -> str:
    """The label of a micro-batch, counted from 0, of the node with this label."""
    return f"{node}, micro-batch {number + 1}"
