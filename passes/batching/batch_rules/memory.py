"""Which values share memory, and what a write into one of them does to the others."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ....ir.batch import Batch
from .rules import Rule
from .values import Mixing, State


@dataclass(eq=False)
class _Shared:
    """The values that live in one memory, or may."""

    nodes: list[fx.Node] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    invariant_source: bool = False  # holds an input or constant that every micro-batch reads
    unproven: Mixing | None = None


class States:
    """The state of every value met so far; values that share memory lose theirs together.

    Memory is shared where storages are the same, and where the schema says so. A write keeps all states if it leaves the
    written value in its own: rows written to rows are rows in every view of them, though no longer equal. Otherwise every
    value in that memory becomes Mixing. Writes into an invariant input do so too: the next micro-batch would find it written.
    """

    def __init__(self) -> None:
        self.of: dict[fx.Node, State | tuple[State, ...]] = {}
        self.memory: dict[Any, _Shared] = {}  # by storage, node, or the name of a constant

    def __getitem__(self, node: fx.Node) -> State | tuple[State, ...]:
        return self.of[node]

    def add(self, node: fx.Node, state: State | tuple[State, ...], *keys: Any, invariant_source: bool = False) -> None:
        """Records a new value; `keys` name memory that its storage does not show."""
        memory = self._join([node, *_storages(node), *_aliased(node), *keys])
        memory.nodes.append(node)
        memory.invariant_source |= invariant_source
        self.of[node] = state if memory.unproven is None else each(memory.unproven, node.meta.get("val"))

    def write(self, node: fx.Node, rule: Rule | None) -> None:
        """Accounts for what an op has written, once its result is recorded."""
        result = self.of[node]
        for written, is_result in _written(node, rule):
            memory = self.memory[written]
            if (
                is_result
                and set(memory.nodes) == {written, node}
                and not isinstance(result, Mixing)
                and self.of[written] is not None
            ):
                self.of[written] = result  # nothing else sees it
            if not (is_result and result == self.of[written] and self._stays_proven(memory, result)):
                why = next((state for state in flat(result) if isinstance(state, Mixing)), None)
                self._lose(memory, why or Mixing(str(node.target), "writes into a value that every row shares"))
            for other in memory.nodes:
                if other is not node:
                    self.of[other] = without_equal_rows(self.of[other])

    def _stays_proven(self, memory: _Shared, result: State) -> bool:
        kinds = {type(s) for node in memory.nodes for s in self._of_tensors(node) if not isinstance(s, Mixing)}
        return kinds == {type(result)} and not (result is None and memory.invariant_source)

    def _of_tensors(self, node: fx.Node) -> Iterable[State]:
        state, value = self.of[node], node.meta.get("val")
        if not isinstance(state, tuple):
            return [state]
        return [s for s, v in zip(state, value, strict=True) if isinstance(v, torch.Tensor)]

    def _join(self, keys: Iterable[Any]) -> _Shared:
        keys = list(dict.fromkeys(keys))
        known = list({id(m): m for key in keys if (m := self.memory.get(key)) is not None}.values())
        merged = max(known, key=lambda memory: len(memory.keys), default=None) or _Shared()
        for memory in known:
            if memory is not merged:
                merged.nodes += memory.nodes
                merged.invariant_source |= memory.invariant_source
                merged.unproven = merged.unproven or memory.unproven
                keys += memory.keys
        merged.keys += keys
        self.memory.update(dict.fromkeys(keys, merged))
        if merged.unproven and len(known) > 1:
            self._lose(merged, merged.unproven)
        return merged

    def _lose(self, memory: _Shared, why: Mixing) -> None:
        memory.unproven = memory.unproven or why
        for node in memory.nodes:
            kept = tuple(state if isinstance(state, Mixing) else why for state in flat(self.of[node]))
            self.of[node] = kept if isinstance(self.of[node], tuple) else kept[0]


def flat(state: State | tuple[State, ...]) -> tuple[State, ...]:
    """The states of all results of an op."""
    return state if isinstance(state, tuple) else (state,)


def without_equal_rows(state: State | tuple[State, ...], upper_bound: bool = False) -> State | tuple[State, ...]:
    """The same rows, of which nothing more is known, but their range if that is to be kept."""
    if isinstance(state, tuple):
        return tuple(without_equal_rows(s, upper_bound) for s in state)
    return (
        replace(state, equal_entries=False, equal_rows=False, upper_bound=state.upper_bound if upper_bound else None)
        if isinstance(state, Batch)
        else state
    )


def each(state: State, value: Any) -> State | tuple[State, ...]:
    """The same state for every result of an op whose results are `value`."""
    return (state,) * len(value) if isinstance(value, (list, tuple)) else state


def may_write(node: fx.Node) -> bool:
    """Whether a call can write into its arguments, as far as its schema tells."""
    op = node.target
    return (
        node.op == "call_function"
        and op is not operator.getitem
        and (not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable or "batch_norm" in op.name())
    )


def _written(node: fx.Node, rule: Rule | None) -> list[tuple[fx.Node, bool]]:
    """The nodes an op writes into, and whether its single result is that very value."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):  # a higher-order op: may write into anything it is given
        return [(n, False) for n in node.all_input_nodes]
    found = []
    for position, argument in enumerate(op._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or (rule is not None and argument.name in rule.writes):
            inplace = declared and (position == 0 or argument.is_out) and len(op._schema.returns) == 1
            keeps_view = torch.Tag.inplace_view not in op.tags or (rule is not None and rule.leaves_sizes)
            found += [(n, inplace and keeps_view) for n in _passed(node, position)]
    if rule is not None and rule.writes_if and _argument(node, rule.writes_if) is False:
        return []
    return found


def _aliased(node: fx.Node) -> list[fx.Node]:
    """Arguments whose memory the results may share, by the schema; all of them where there is none."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:
        return _aliased(node.args[0]) and [node.args[0]]
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.all_input_nodes
    schema = node.target._schema
    if all(result.alias_info is None for result in schema.returns):
        return []
    return [
        n
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        for n in _passed(node, position)
    ]


def _passed(node: fx.Node, position: int) -> list[fx.Node]:
    value = _argument(node, node.target._schema.arguments[position].name)
    return [n for n in pytree.tree_leaves(value) if isinstance(n, fx.Node)]


def _argument(node: fx.Node, name: str) -> Any:
    names = [argument.name for argument in node.target._schema.arguments]
    if name in names and names.index(name) < len(node.args):
        return node.args[names.index(name)]
    return node.kwargs.get(name)


def _storages(node: fx.Node) -> list[int]:
    tensors = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return [t.untyped_storage()._cdata for t in tensors if t.layout == torch.strided]
