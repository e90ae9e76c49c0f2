"""The values that share memory, and the effect of a write into one of them on the states of the others."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from l2l_compile.passes.batching.batch_rules.rules import BatchRule
from l2l_compile.passes.batching.batch_rules.states import Mixing, ResultState, ValueState, change_rows, each, flat


@dataclass(eq=False)
class _Shared:
    """The values that share one memory, or may share it."""

    nodes: list[fx.Node] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    invariant_source: bool = False  # holds an input or constant that every micro-batch reads
    unproven: Mixing | None = None


class States:
    """The state of every value met so far. Values that share memory become Mixing together.

    Memory is shared if storages are the same, or if the schema says so. If a write leaves the state of the written value as it
    was, all values in that memory keep their states: rows written to rows are rows in every view, though no longer equal.
    Otherwise every value in that memory becomes Mixing. A write into an invariant input has the same effect, since the next
    micro-batch would read the new contents.
    """

    def __init__(self) -> None:
        self.of: dict[fx.Node, ResultState] = {}
        self.memory: dict[Any, _Shared] = {}  # by storage, node, or the name of a constant

    def __getitem__(self, node: fx.Node) -> ResultState:
        return self.of[node]

    def add(self, node: fx.Node, state: ResultState, *keys: Any, invariant_source: bool = False) -> None:
        """Records a new value; `keys` name memory that its storage does not show."""
        memory = self._join([node, *_storages(node), *_aliased(node), *keys])
        memory.nodes.append(node)
        memory.invariant_source |= invariant_source
        self.of[node] = state if memory.unproven is None else each(memory.unproven, node.meta.get("val"))

    def write(self, node: fx.Node, rule: BatchRule) -> None:
        """Accounts for the writes of an operation, once its result is recorded."""
        result = self.of[node]
        for write in _writes_of(node, rule):
            memory = self.memory[write.into]
            if write.is_result and self._is_alone(write.into, node, memory) and not isinstance(result, Mixing):
                self.of[write.into] = result
            if not (write.is_result and result == self.of[write.into] and self._stays_proven(memory, result)):
                self._lose(memory, _cause(node, result))
            self._forget_entries(memory, node)

    def _forget_entries(self, memory: _Shared, result: fx.Node) -> None:
        """Drops the facts that entries are equal or bounded, except for the result, which was recorded after the write."""
        for node in memory.nodes:
            if node is not result:
                self.of[node] = change_rows(self.of[node], lambda rows: rows.unequal().bounded(None))

    def _is_alone(self, written: fx.Node, result: fx.Node, memory: _Shared) -> bool:
        """Whether `written` depends on the batch, and shares its memory only with the result of the write."""
        return set(memory.nodes) == {written, result} and self.of[written] is not None

    def _stays_proven(self, memory: _Shared, result: ResultState) -> bool:
        kinds = {type(s) for node in memory.nodes for s in self._of_tensors(node) if not isinstance(s, Mixing)}
        return kinds == {type(result)} and not (result is None and memory.invariant_source)

    def _of_tensors(self, node: fx.Node) -> Iterable[ValueState]:
        state = self.of[node]
        if not isinstance(state, tuple):
            return [state]
        return [s for s, value in zip(state, node.meta["val"], strict=True) if isinstance(value, torch.Tensor)]

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


def may_write(node: fx.Node) -> bool:
    """Whether a call can write into its arguments, as far as its schema tells."""
    op = node.target
    return (
        node.op == "call_function"
        and op is not operator.getitem
        and (not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable or "batch_norm" in op.name())
    )


@dataclass(frozen=True)
class _Write:
    """A value that an operation writes into; `is_result` if its single result is that very value."""

    into: fx.Node
    is_result: bool


def _writes_of(node: fx.Node, rule: BatchRule) -> list[_Write]:
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):  # a higher-order op: may write into any of its arguments
        return [_Write(n, False) for n in node.all_input_nodes]
    if rule.writes_if and _argument(node, op, rule.writes_if) is False:
        return []
    found = []
    for position, argument in enumerate(op._schema.arguments):
        if _declares_write(argument) or argument.name in rule.writes:
            is_result = _declares_write(argument) and _gives_back(op, position, rule)
            found += [_Write(n, is_result) for n in _passed(node, op, argument.name)]
    return found


def _declares_write(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _gives_back(op: torch._ops.OpOverload, position: int, rule: BatchRule) -> bool:
    """Whether the single result of an operation is the argument that it writes into, in the same view of its memory."""
    is_written_one = position == 0 or op._schema.arguments[position].is_out
    keeps_view = torch.Tag.inplace_view not in op.tags or rule.leaves_sizes
    return is_written_one and keeps_view and len(op._schema.returns) == 1


def _cause(node: fx.Node, result: ResultState) -> Mixing:
    """Why the values in a memory are no longer proven once `node` has written into it."""
    mixing = next((state for state in flat(result) if isinstance(state, Mixing)), None)
    return mixing or Mixing(str(node.target), "writes into a value that every row shares")


def _aliased(node: fx.Node) -> list[fx.Node]:
    """Arguments whose memory the results may share, by the schema; all arguments if there is no schema."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:
        several = node.all_input_nodes[0]
        return _aliased(several) and [several]
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.all_input_nodes
    return _aliased_by_schema(node, node.target)


def _aliased_by_schema(node: fx.Node, op: torch._ops.OpOverload) -> list[fx.Node]:
    if all(result.alias_info is None for result in op._schema.returns):
        return []
    aliased = [argument.name for argument in op._schema.arguments if argument.alias_info is not None]
    return [n for name in aliased for n in _passed(node, op, name)]


def _passed(node: fx.Node, op: torch._ops.OpOverload, name: str) -> list[fx.Node]:
    return [n for n in pytree.tree_leaves(_argument(node, op, name)) if isinstance(n, fx.Node)]


def _argument(node: fx.Node, op: torch._ops.OpOverload, name: str) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    if name in names and names.index(name) < len(node.args):
        return node.args[names.index(name)]
    return node.kwargs.get(name)


def _storages(node: fx.Node) -> list[int]:
    tensors = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return [t.untyped_storage()._cdata for t in tensors if t.layout == torch.strided]
