"""Checks the indices of look-ups on the host before a step, where they are known there.

    labels = F.pad(labels, (0, 1), value=-100)             check(tokens, 32000)
    x = F.embedding(tokens, table)                  =>     labels = F.pad(labels, (0, 1), value=-100)
    ...                                                    check(labels, 32000)
    loss = F.cross_entropy(logits, labels)

A GPU detects an index that is out of range while a kernel runs. The kernel ends with a device-side assert, and the process
cannot use the GPU any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from l2l_compile.errors import IndexRangeError
from l2l_compile.frontend.index_checks.known_values import KnownValues, size_of
from l2l_compile.frontend.index_checks.lookups import Lookup, lookups_of
from l2l_compile.ir.captured import Captured, Input
from l2l_compile.ir.modules import module_stack
from l2l_compile.ir.values import Bindings, Dim, evaluate

Operand: TypeAlias = Input | Dim  # an argument of a call, or a size


@dataclass(frozen=True)
class LookupCheck:
    """The check of one look-up.

    reader   the operation that looks up
    needed   all nodes that the index is computed from, except sizes
    inputs   the inputs among these nodes
    """

    lookup: Lookup
    reader: fx.Node
    needed: frozenset[fx.Node]
    inputs: tuple[Input, ...]

    def run(self, index: torch.Tensor, size: int, ignored: int | None) -> None:
        """Raises `IndexRangeError` if a number in `index` is not allowed for `size` entries. `ignored` is always allowed."""
        if not index.numel():
            return
        index = index[tuple(slice(1) if stride == 0 else slice(None) for stride in index.stride())]  # expanded entries once
        if ignored is not None:
            index = torch.where(index == ignored, 0, index)
        extremes = [int(number) for number in torch.aminmax(index)]
        least = -size if self.lookup.from_end else 0
        wrong = [str(number) for number in dict.fromkeys(extremes) if not least <= number < size]
        if wrong:
            allowed = f"{least} to {size - 1} are allowed" if size else "it has nothing to look up in"
            remedy = ". " + self.lookup.remedy.format(ignored=ignored) if self.inputs and self.lookup.remedy else ""
            given = f"{'index' if len(wrong) == 1 else 'indices'} {' and '.join(wrong)}"
            raise IndexRangeError(
                f"{self._where()}: {self.lookup.operation} is given the {given}, but {allowed}. {self._origin()}{remedy}"
            )

    def _where(self) -> str:
        """The module that looks up, or the operation if no module is known."""
        stack = module_stack(self.reader)
        path = stack[-1][0] if stack else ()
        return f"'{'.'.join(path) or self.reader.name}'"

    def _origin(self) -> str:
        if not self.inputs:
            return "The index depends on the sizes of the inputs alone: they are larger than the model allows"
        values = [f"input '{i.name}'" for i in self.inputs if i.kind == "value"]
        buffers = [f"buffer '{i.name}'" for i in self.inputs if i.kind != "value"]
        return f"The index comes from {' and '.join([*values, *buffers])}"


class IndexCheck:
    """Checks all indices of a captured graph that are known on the host. Indices of sizes alone: once per sizes."""

    def __init__(self, captured: Captured):
        checks = list(_checks(captured))
        self._of_sizes = _Checks(captured, [check for check in checks if not check.inputs])
        self._of_inputs = _Checks(captured, [check for check in checks if check.inputs])
        self._passed: set[tuple[int, ...]] = set()

    def __call__(self, arguments: Sequence, bindings: Bindings) -> None:
        """Raises `IndexRangeError` if the arguments of a call, with these sizes, lead to an index out of range."""
        if (sizes := tuple(bindings.values())) not in self._passed:
            self._of_sizes.run(arguments, bindings)
            self._passed.add(sizes)
        self._of_inputs.run(arguments, bindings)


def _checks(captured: Captured) -> Iterator[LookupCheck]:
    """A check for each look-up with a known index, in order. Equal look-ups get one check."""
    known, seen = KnownValues(captured), set()
    for node in captured.graph.nodes:
        for lookup in lookups_of(node):
            same = (lookup, len(known.writes_into(lookup.index)))
            if lookup.index in known and same not in seen:
                seen.add(same)
                needed = known.leads_to(lookup.index)
                inputs = tuple(i for i in captured.inputs if i.node in needed)
                yield LookupCheck(lookup, node, frozenset(needed), inputs)
        known.visit(node)


class _Checks:
    """A graph with some checks and the operations that make their indices. A check stands in the place of its look-up."""

    def __init__(self, captured: Captured, checks: Sequence[LookupCheck]):
        self._module, self._graph = captured.module, fx.Graph()
        self._operands: list[Operand] = []  # one for each placeholder of the graph
        self._inputs = {i.node: i for i in captured.inputs}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._sizes: dict[Dim, fx.Node] = {}
        needed = frozenset[fx.Node]().union(*(check.needed for check in checks))
        of_reader: defaultdict[fx.Node, list[LookupCheck]] = defaultdict(list)
        for check in checks:
            of_reader[check.reader].append(check)
        for node in captured.graph.nodes:
            for check in of_reader.get(node, ()):
                lookup = check.lookup
                ignored = None if lookup.ignored is None else self._size(lookup.ignored)
                self._graph.call_function(check.run, (self._copy_of(lookup.index), self._size(lookup.size), ignored))
            if node in needed:
                self._copies[node] = self._copy(node)
        self._graph.output(None)

    def run(self, arguments: Sequence, bindings: Bindings) -> None:
        """Raises `IndexRangeError` for an index out of range."""
        values = [arguments[o.index] if isinstance(o, Input) else evaluate(o, bindings) for o in self._operands]
        fx.Interpreter(self._module, graph=self._graph).run(*values)

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            return self._operand(self._inputs[node])
        made = self._graph.node_copy(node, self._copy_of)
        made.meta = {}
        return made

    def _copy_of(self, node: fx.Node) -> Any:
        size = size_of(node)
        return self._copies[node] if size is None else self._size(size)

    def _size(self, size: Dim) -> Any:
        if isinstance(size, int):
            return size
        if size not in self._sizes:
            self._sizes[size] = self._operand(size)
        return self._sizes[size]

    def _operand(self, operand: Operand) -> fx.Node:
        self._operands.append(operand)
        return self._graph.placeholder(f"operand_{len(self._operands)}")
