"""Lowered blocks: code for all sizes for which its guards hold, code at one size, and the store of a process's codes."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from l2l_compile.ir.values import Bindings, Dim, dim_of, evaluate
from l2l_compile.lowering.randomness import Draw
from l2l_compile.lowering.sizes import Guards
from l2l_compile.lowering.widening import storages_of


@dataclass(frozen=True, eq=False)
class Traced:
    """The ATen graph of a block, before it is compiled. Its operands are symbolic sizes, tensors and random draws.

    `draws`, `seeded`, `present` and `dtypes` have the meaning that they have in `Lowered`. `taken` is the memory that its operations
    allocate (see `lifetimes`). In a graph from disk, only operands have values (see `with_values`).
    """

    graph: fx.GraphModule
    draws: tuple[Draw, ...]
    seeded: bool
    present: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    taken: tuple[tuple[Dim, int, int], ...]

    @functools.cached_property
    def read(self) -> tuple[bool, ...]:
        """For each operand that is a tensor, whether an operation reads it: backward of a lookup needs no table."""
        operands = self.graph.graph.find_nodes(op="placeholder")
        return tuple(bool(node.users) for node in operands if isinstance(node.meta["val"], torch.Tensor))


@dataclass(frozen=True, eq=False)
class Lowered:
    """A block at one size. `run` executes it, with flat sequences of tensors.

    draws    random draws to append to the operands, in the order of forward's operations
    workspace_bytes   the most bytes that its operations hold at once besides the operands, if no operations are fused
    """

    traced: Traced
    run: Callable[..., Sequence[torch.Tensor]]
    draws: tuple[Draw, ...]
    workspace_bytes: int = 0

    @property
    def graph(self) -> fx.GraphModule:
        """Its ATen graph; the value of each node, a fake tensor, is in its `meta["val"]`."""
        return with_values(self.traced.graph)

    @property
    def seeded(self) -> bool:
        """Whether operations remain that draw from the device's default generator themselves."""
        return self.traced.seeded

    @property
    def present(self) -> tuple[bool, ...]:
        """For each output (backward: gradient of an operand), whether it exists; `run` returns only existing ones."""
        return self.traced.present

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of each output that exists."""
        return self.traced.dtypes

    @property
    def random(self) -> bool:
        return self.seeded or bool(self.draws)

    def unread(self, count: int) -> frozenset[int]:
        """The positions among the first `count` operands that no operation reads: their contents do not matter."""
        return frozenset(i for i, is_read in enumerate(self.traced.read[:count]) if not is_read)


@dataclass(frozen=True, eq=False)
class Code:
    """A lowered block for all sizes for which its guards hold; `run` takes the operands of the traced graph."""

    traced: Traced
    run: Callable[..., Sequence[torch.Tensor]]
    guards: Guards

    def at(self, sizes: Sequence[int | float]) -> Lowered:
        """The code at these sizes, for which its guards must hold."""
        bindings, traced = dict(zip(self.guards.symbols, sizes, strict=True)), self.traced
        draws = tuple(draw.at(bindings) for draw in traced.draws)
        return Lowered(traced, self._with(sizes), draws, most_bytes(traced.taken, bindings))

    def with_floats(self, before: Lowered, sizes: Sequence[int | float]) -> Lowered:
        """The code at these numbers, given the code at the same sizes with other floats. Its guards must hold."""
        return replace(before, run=self._with(sizes))

    def _with(self, sizes: Sequence[int | float]) -> Callable[..., Sequence[torch.Tensor]]:
        return functools.partial(self.run, *sizes) if self.guards.symbolic else self.run


def with_values(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph. Nodes without a fake value in `meta["val"]` get one, computed from the operands' values."""
    operands = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    mode = detect_fake_mode(operands)
    if mode is not None and any(node.op == "call_function" and "val" not in node.meta for node in module.graph.nodes):
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*operands)
    return module


def lifetimes(graph: fx.Graph) -> tuple[tuple[Dim, int, int], ...]:
    """For each piece of memory that a node of an ATen graph allocates: bytes, position of the node, position of the last reader."""
    held: dict[fx.Node, dict[int, int]] = {}  # of each result, by the address of its fake storage: the number of its memory
    size: list[Dim] = []
    first: list[int | None] = []  # None: an operand's
    last: list[int] = []
    for position, node in enumerate(graph.nodes):
        held[node] = {}
        for storage in storages_of(node):
            number = _viewed(node, storage._cdata, held)
            if number is None:
                number = len(size)
                size.append(dim_of(storage.nbytes()))
                first.append(None if node.op == "placeholder" else position)
                last.append(position)
            held[node][storage._cdata] = number
        for read in (node, *node.all_input_nodes):
            for number in held[read].values():
                last[number] = position
    return tuple((count, at, until) for count, at, until in zip(size, first, last, strict=True) if at is not None)


def _viewed(node: fx.Node, storage: int, held: Mapping[fx.Node, Mapping[int, int]]) -> int | None:
    """The number of the memory that a result shares with an operand, or with an earlier result of the node; None for new memory.

    A pass may have replaced a view's operand by one with another fake storage. So what the schema says comes first.
    """
    operand = node.args[0] if node.args and _is_view(node) else None
    if isinstance(operand, fx.Node) and len(held[operand]) == 1:
        return next(iter(held[operand].values()))
    return next((held[n][storage] for n in (node, *node.all_input_nodes) if storage in held[n]), None)


def _is_view(node: fx.Node) -> bool:
    """Whether an operation returns its first operand's memory."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    operands, results = node.target._schema.arguments, node.target._schema.returns
    of_first = bool(operands) and operands[0].alias_info is not None and any(r.alias_info is not None for r in results)
    return of_first or node.target is torch.ops.aten._unsafe_view.default


def most_bytes(taken: Sequence[tuple[Dim, int, int]], bindings: Bindings) -> int:
    """The most bytes that are allocated at once, if each storage is freed after its last reader."""
    change = [0] * (max((last for _, _, last in taken), default=0) + 2)
    for size, first, last in taken:
        count = evaluate(size, bindings)
        change[first] += count
        change[last + 1] -= count
    return max(itertools.accumulate(change), default=0)


class Guarded(Protocol):
    """What is valid for the sizes for which its guards hold."""

    @property
    def guards(self) -> Guards: ...


Kept = TypeVar("Kept", bound=Guarded)


class Store(Generic[Kept]):
    """The codes of this process by fingerprint, the most recently used last. At most `size` codes are kept."""

    def __init__(self, size: int):
        self._size, self._count = size, 0  # a separate count: a walk over the dictionary would hash every fingerprint
        self._codes: OrderedDict[tuple, list[Kept]] = OrderedDict()

    def find(self, key: tuple, sizes: Sequence[int]) -> Kept | None:
        """A code for a block with this fingerprint at these sizes, if there is one."""
        found = next((code for code in self._codes.get(key, ()) if code.guards.hold(sizes)), None)
        if found is not None:
            self._codes.move_to_end(key)
        return found

    def add(self, key: tuple, code: Kept) -> None:
        """Keep a code."""
        self._codes.setdefault(key, []).append(code)
        self._codes.move_to_end(key)
        self._count += 1
        while self._count > self._size:
            self._count -= len(self._codes.popitem(last=False)[1])

    def clear(self) -> None:
        """Remove all codes."""
        self._codes.clear()
        self._count = 0


store: Store[Code] = Store(1024)
