"""The parts of a step that goes by turns, and the order in which calls in a row run them."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.ir.schedule import END, PAUSE, Order

Run = tuple[int, fx.Node]  # a node of the step of one of several calls


def in_parts(graph: fx.Graph) -> Iterator[tuple[str, fx.Node]]:
    """Each node with the name of its part: a turn such as "0F3", `PAUSE`, `END`, or "" for what stands before the first one."""
    part = ""
    for node in graph.nodes:
        part = nodes.operands(node).turn if node.target is nodes.begin else part
        yield part, node


def end_waits(graph: fx.Graph) -> bool:
    """Whether what is left behind the last turn waits for messages of other ranks."""
    return any(part == END and node.target is nodes.recv for part, node in in_parts(graph))


def pauses(graph: fx.Graph) -> bool:
    """Whether the last turns of a call run in the next one."""
    return nodes.pause_of(graph) is not None


def losses(graph: fx.Graph) -> dict[int, fx.Node]:
    """The copies of losses to the host in the graph of a step, by position among the outputs."""
    return {position: node for position, node in enumerate(nodes.returned(graph).outputs) if node is not None}


def received(graph: fx.Graph) -> frozenset[int]:
    """The positions of losses that another rank computes."""
    sources = {position: nodes.operands(node).x for position, node in losses(graph).items()}
    picks = {position: x for position, x in sources.items() if x.target is operator.getitem}
    return frozenset(position for position, x in picks.items() if nodes.operands(x).results.target is nodes.recv)


def calls_of(order: Order, end_waits: bool, loss_waits: bool) -> Iterator[tuple[int, str]]:
    """The parts that a call runs, in order: its own (0), and those of the step before (-1). `END` runs as soon as it waits for no message.

    Whoever runs the first call leaves out what belongs to the one before.
    """
    later = [str(action) for action in order if action.call]
    yield 0, ""
    for action in order:
        yield action.call, str(action)
        if action.call and str(action) == later[-1] and not end_waits:
            yield -1, END
    if end_waits or not later and loss_waits:
        yield -1, END
    yield 0, PAUSE
    if not (later or end_waits or loss_waits):
        yield 0, END


def calls_in_a_row(graph: fx.Graph, order: Order, calls: int) -> list[Run]:
    """The nodes of the steps of some calls in the order in which one rank runs them, until nothing is in flight any more."""
    if not pauses(graph):
        return [(call, node) for call in range(calls) for node in graph.nodes]
    parts: dict[str, list[fx.Node]] = {"": []}
    for part, node in in_parts(graph):
        parts.setdefault(part, []).append(node)
    of_call = list(calls_of(order, end_waits(graph), bool(received(graph))))
    return [
        (call + of, node) for call in range(calls + 1) for of, part in of_call if 0 <= call + of < calls for node in parts[part]
    ]
