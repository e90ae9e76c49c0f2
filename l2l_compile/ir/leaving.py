"""Results of segments that leave for other ranks of a pipeline, micro-batch by micro-batch, and the values that come from there."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from l2l_compile.ir import nodes


def leaving(given: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each segment that runs, the messages that have results of this segment alone."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in given:
        if node.target is nodes.send and not _is_turn(node) and (maker := _maker(node)) is not None:
            found.setdefault(maker, []).append(node)
    return found


def _is_turn(message: fx.Node) -> bool:
    """Whether a message is one micro-batch of values that are made in turns."""
    return any("turn" in value.meta for value in nodes.operands(message).values)


def _maker(message: fx.Node) -> fx.Node | None:
    """The node that runs the segment which makes all values of a message; None for any other message."""
    makers = {value.args[0] if value.target is operator.getitem else value for value in nodes.operands(message).values}
    (maker, *others) = makers
    return maker if isinstance(maker, fx.Node) and not others and nodes.runs_segment(maker) else None


def picked(message: fx.Node) -> list[fx.Node]:
    """The values that a node `recv` receives, in order."""
    found = (user for user in message.users if user.target is operator.getitem)
    return sorted(found, key=lambda user: nodes.operands(user).index)


def passes_on(result: fx.Node) -> bool:
    """Whether a result of a segment is read by messages to other ranks alone: each micro-batch is freed when it has left."""
    spec = result.meta.get("spec")
    if (
        spec is None
        or "turn" in result.meta
        or not result.meta.get("split")
        or spec.computed_once
        or spec.equal_rows
        or not spec.splits
    ):
        return False
    readers = [user for user in result.users if user.target is not nodes.release]
    return bool(readers) and all(reader.target is nodes.send and _maker(reader) is not None for reader in readers)
