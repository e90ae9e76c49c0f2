"""A program graph made ready to be run many times: its nodes in the order in which they are given to their lanes.

Values are numbered. An operand is a number, or a tuple of numbers, so a step does not look operands up in the graph.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.ir.leaving import leaving, passes_on

Read = Callable[[list], Any]


@dataclass(frozen=True, slots=True)
class Instruction:
    """A node, the number of its value, and a function that reads its operands from the list of all values."""

    node: fx.Node
    value: int
    operands: Read


class Instructions:
    """The nodes of a graph in the order in which they are given to their lanes.

    With `launches_first`, weights are fetched and gathered after the next launch of a segment, unless that segment reads them, or brings
    what forward has kept on the host: copies of its micro-batches wait for those before, and the fetch would wait for the copies.

    inputs    the number of placeholders; their values come first, in order
    fetches   how many of the nodes fetch weights
    nodes     the instructions
    parts     for each part of a step that goes by turns, such as "0F3", its instructions; "" is what stands before the first one
    output    reads the values that the graph returns, in its structure
    leaving   for each segment that runs, the messages of its results to other ranks: `send` nodes of nothing else
    passing   for each of these segments, the results that nothing but messages reads
    """

    def __init__(self, graph: fx.Graph, launches_first: bool):
        self._numbers: dict[fx.Node, int] = {}
        self._values: list[Any] = []  # at the beginning: constants in their place
        inputs = graph.find_nodes(op="placeholder")
        *given, end = (node for node in graph.nodes if node.op != "placeholder")
        for node in [*inputs, *given]:
            self._numbers[node] = self._number(None)
        self.inputs, self.fetches = len(inputs), sum(node.target is nodes.fetch_weights for node in given)
        ordered = _launches_before_fetches(given) if launches_first else given
        self.nodes = [Instruction(node, self._numbers[node], self._all(node.args)) for node in ordered]
        self.parts = _parts(self.nodes)
        self.output = self._read(end.args[0])
        self.leaving = leaving(given)
        self.passing = {
            maker: frozenset(nodes.operands(result).index for result in maker.users if passes_on(result))
            for maker in self.leaving
        }

    def values(self, inputs: Sequence[Any]) -> list[Any]:
        """The values at the beginning of a run."""
        values = self._values.copy()
        values[: self.inputs] = inputs
        return values

    def _number(self, content: Any) -> int:
        self._values.append(content)
        return len(self._values) - 1

    def _read(self, argument: Any) -> Read:
        if isinstance(argument, (tuple, list)):
            return self._all(argument)
        number = self._numbers[argument] if isinstance(argument, fx.Node) else self._number(argument)
        return operator.itemgetter(number)

    def _all(self, arguments: Sequence[Any]) -> Read:
        """Reads all of these arguments, as a tuple."""
        if len(arguments) > 1 and not any(isinstance(argument, (tuple, list)) for argument in arguments):
            numbers = [self._numbers[a] if isinstance(a, fx.Node) else self._number(a) for a in arguments]
            return operator.itemgetter(*numbers)
        reads = [self._read(argument) for argument in arguments]
        return lambda values: tuple([read(values) for read in reads])


def _parts(given: Sequence[Instruction]) -> dict[str, range]:
    starts = {nodes.operands(each.node).turn: place for place, each in enumerate(given) if each.node.target is nodes.begin}
    places = [0, *starts.values(), len(given)]
    return {name: range(*span) for name, span in zip(["", *starts], itertools.pairwise(places), strict=True)}


_MADE = "_l2l_instructions"  # stored on the graph: instructions hold its nodes, which hold the graph


def instructions_of(graph: fx.Graph, launches_first: bool) -> Instructions:
    """The instructions of a graph, made at the first call. Code that edits the graph afterwards calls `edited`."""
    known = vars(graph).setdefault(_MADE, {})
    if launches_first not in known:
        known[launches_first] = Instructions(graph, launches_first)
    return known[launches_first]


def edited(graph: fx.Graph) -> None:
    """Drop the instructions of a graph that was edited after it may have run."""
    vars(graph).pop(_MADE, None)


def _brings_activations(node: fx.Node) -> bool:
    return node.target is nodes.backward and nodes.operands(node).restored_activations is not None


def _launches_before_fetches(given: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes, with each fetch moved after the next launch that does not read it. Slabs rotate, so fetches keep their order
    among themselves."""
    ordered: list[fx.Node] = []
    deferred: list[fx.Node] = []
    for node in given:
        if nodes.carries(node) is nodes.Carries.WEIGHTS:
            deferred.append(node)
            continue
        read = [i for i, fetch in enumerate(deferred, 1) if fetch in node.all_input_nodes]
        count = max(read, default=0) if not _brings_activations(node) else len(deferred)
        ordered += [*deferred[:count], node]
        del deferred[:count]
        if nodes.runs_segment(node):
            ordered += deferred
            deferred.clear()
    return ordered + deferred
