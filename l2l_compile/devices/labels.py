"""How pieces of work are called in a timeline, measured or simulated."""

from __future__ import annotations

from torch import fx

from ..ir import nodes


def label_of(node: fx.Node, segment: str) -> str:
    """The label of a node of a program: its kind, and its segment if it has one."""
    return f"{nodes.called(node).name} {segment}".rstrip()


def label_of_micro_batch(node: str, number: int) -> str:
    """The label of a micro-batch, counted from 0, of the node with this label."""
    return f"{node}, micro-batch {number + 1}"
