"""Without gradients, an attention cache comes back to the host as its new entries alone.

A model that generates text returns `cat([cache, new])`, or writes `new` into its cache. What the host has already does not cross
the link again: the host repeats the operation on its own tensors (`ir/replay.py`), from results that the program makes for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import sympy
import torch
from torch import fx

from l2l_compile.ir.captured import Input
from l2l_compile.ir.fx_types import function_of, name_of
from l2l_compile.ir.graph import hint_of, memory_of, written_operands
from l2l_compile.ir.replay import Given, Made, PartResults, Replay, Size
from l2l_compile.ir.values import dim_of

_MOVES = {  # operations that move entries and compute none: functions, and methods of tensors
    torch.cat, torch.concat, torch.concatenate, torch.narrow, torch.roll, torch.index_copy, torch.slice_scatter,
    torch.select_scatter, operator.getitem,
    "narrow", "roll", "index_copy", "slice_scatter", "select_scatter", "contiguous", "clone",
}  # fmt: skip
_WRITES = {"index_copy_", "copy_", "__setitem__", operator.setitem}


def take_parts(graph: fx.Graph, inputs: Sequence[Input]) -> PartResults:
    """The results and writes that the host makes itself. Adds what it needs for them to the graph's outputs."""
    taken = _Parts(graph, inputs)
    for position, node in enumerate(taken.outputs[: taken.count]):
        taken.take_output(position, node)
    for given in inputs:
        if given.kind in ("value", "state") and taken.writes_into(given):
            taken.take_writes(given)
    if taken.found:
        graph.output_node().args = (tuple(taken.outputs),)
    return taken.found


class _NotHere(Exception):
    """The host cannot make this value, or need not."""


class _Parts:
    """`outputs` are the graph's outputs, with those that the host needs besides."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[Input]):
        (returned,) = graph.output_node().args
        self.outputs: list[Any] = list(cast(Sequence, returned))
        self.count = len(self.outputs)
        self.found = PartResults(count=self.count)
        self.given = {i.node: i for i in inputs}
        self.known = {dim_of(v) for i in inputs if isinstance(v := i.node.meta.get("example_value"), torch.SymInt)}
        shapes = (v.shape for i in inputs if isinstance(v := i.node.meta.get("example_value"), torch.Tensor))
        self.known |= {dim_of(size) for shape in shapes for size in shape if isinstance(size, torch.SymInt)}
        self.written: dict[int, list[fx.Node]] = {}  # by storage: the operations that write into it
        for node in graph.nodes:
            for operand in written_operands(node):
                memory = memory_of(operand)
                if memory is not None and node not in (known := self.written.setdefault(memory, [])):
                    known.append(node)
        self.moves = {node for node in graph.nodes if _is_move(node) and memory_of(node) not in self.written}

    def writes_into(self, given: Input) -> list[fx.Node]:
        """The operations that write into an input, in order."""
        memory = memory_of(given.node)
        return self.written.get(memory, []) if memory is not None else []

    def take_output(self, position: int, node: Any) -> None:
        """Make an output on the host, if it moves entries of an input."""
        if not isinstance(node, fx.Node) or node.op == "placeholder" or node not in self.moves:
            return
        draft = _Draft(self)
        try:
            replay = draft.operand(node)
        except _NotHere:
            return
        if not isinstance(replay, Replay) or not draft.reads_inputs or sum(map(_bytes, draft.new)) >= _bytes(node):
            return
        self.outputs += draft.new
        self.found.outputs[position] = replay

    def take_writes(self, given: Input) -> None:
        """Make all writes into an input on the host."""
        first = len(self.outputs)
        replays = list(self._writes(given))
        if len(replays) == len(self.writes_into(given)) and sum(map(_bytes, self.outputs[first:])) < _bytes(given.node):
            self.found.writes[given.index] = tuple(replays)
        else:
            del self.outputs[first:]

    def _writes(self, given: Input) -> Iterator[Replay]:
        """The writes into an input, up to the first that the host cannot make."""
        for number, node in enumerate(self.writes_into(given)):
            if node.target not in _WRITES or node.kwargs or not node.args or node.args[0] is not given.node:
                return
            draft = _Draft(self, may_read=given.node if number == 0 else None)
            try:
                rest = fx.node.map_aggregate(node.args[1:], draft.operand)
            except _NotHere:
                return
            self.outputs += draft.new
            yield Replay(_function(node), (Given(given.index), *rest), {})


class _Draft:
    """A replay that is being made for one node, and the results that it needs besides."""

    def __init__(self, parts: _Parts, may_read: fx.Node | None = None):
        self._parts, self._may_read = parts, may_read
        self.new: list[fx.Node] = []
        self.reads_inputs = False

    def operand(self, value: Any) -> Any:
        """The operand of a replay for an argument of a node. Raises `_NotHere`."""
        if not isinstance(value, fx.Node):
            return value
        example = value.meta.get("example_value")
        if isinstance(example, (torch.SymInt, int)):
            return self._size(example)
        if not isinstance(example, torch.Tensor):
            raise _NotHere
        if (given := self._parts.given.get(value)) is not None:
            return self._given(given)
        if value.op == "get_attr":
            raise _NotHere
        if value in self._parts.moves and self._leads_to_an_input(value):
            args = fx.node.map_aggregate(value.args, self.operand)
            return Replay(_function(value), args, fx.node.map_aggregate(value.kwargs, self.operand))
        return self._made(value)

    def _size(self, example: torch.SymInt | int) -> Any:
        dim = dim_of(example)
        if isinstance(dim, sympy.Expr) and not dim.free_symbols <= self._parts.known:
            raise _NotHere
        return Size(dim)

    def _given(self, given: Input) -> Given:
        is_written = memory_of(given.node) in self._parts.written
        if given.kind not in ("value", "state") or is_written and given.node is not self._may_read:
            raise _NotHere
        self.reads_inputs = True
        return Given(given.index)

    def _made(self, value: fx.Node) -> Made:
        if memory_of(value) in self._parts.written:
            raise _NotHere
        if value not in self.new:
            self.new.append(value)
        return Made(len(self._parts.outputs) + self.new.index(value))

    def _leads_to_an_input(self, node: fx.Node) -> bool:
        return any(
            read in self._parts.given or _is_move(read) and self._leads_to_an_input(read)
            for read in _tensors(node.all_input_nodes)
        )


def _tensors(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    return (node for node in nodes if isinstance(node.meta.get("example_value"), torch.Tensor))


def _is_move(node: fx.Node) -> bool:
    if node.target not in _MOVES or not node.op.startswith("call_") or "out" in node.kwargs:
        return False
    indices = node.args[1:] if node.target is operator.getitem else ()
    of_tensors = [n for n in _tensors(node.all_input_nodes) if n is not node.args[0]] if indices else []
    return isinstance(node.meta.get("example_value"), torch.Tensor) and not of_tensors


def _function(node: fx.Node) -> Callable:
    return getattr(torch.Tensor, name_of(node)) if node.op == "call_method" else function_of(node)


def _bytes(node: fx.Node) -> int:
    """Bytes of a tensor in this capture."""
    value = node.meta["example_value"]
    size = value.element_size()
    for length in value.shape:
        size *= hint_of(length)
    return size
