"""Lowered blocks: code for all sizes for which its guards hold, code at one size, and the store of a process's codes."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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

    `draws`, `seeded` and `present` have the meaning that they have in `Lowered`. `taken` is the memory that its operations
    allocate (see `lifetimes`). In a graph from disk, only operands have values (see `with_values`).
    """

    graph: fx.GraphModule
    draws: tuple[Draw, ...]
    seeded: bool
    present: tuple[bool, ...]
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
    """For each storage that a node of an ATen graph allocates: bytes, position of the node, position of the last reader."""
    size: dict[int, Dim] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        for storage in storages_of(node):
            if node.op != "placeholder" and storage._cdata not in first:
                first[storage._cdata], size[storage._cdata] = position, dim_of(storage.nbytes())
        for read in (node, *node.all_input_nodes):
            last.update({storage._cdata: position for storage in storages_of(read)})
    return tuple((size[key], position, last[key]) for key, position in first.items())


def most_bytes(taken: Sequence[tuple[Dim, int, int]], bindings: Bindings) -> int:
    """The most bytes that are allocated at once, if each storage is freed after its last reader."""
    change = [0] * (max((last for _, _, last in taken), default=0) + 2)
    for size, first, last in taken:
        count = evaluate(size, bindings)
        change[first] += count
        change[last + 1] -= count
    return max(itertools.accumulate(change), default=0)


class Store:
    """The codes of this process by fingerprint, the most recently used last. At most `size` codes are kept."""

    def __init__(self, size: int):
        self._size, self._count = size, 0  # a separate count: a walk over the dictionary would hash every fingerprint
        self._codes: OrderedDict[tuple, list[Code]] = OrderedDict()

    def find(self, key: tuple, sizes: Sequence[int]) -> Code | None:
        """A code for a block with this fingerprint at these sizes, if there is one."""
        found = next((code for code in self._codes.get(key, ()) if code.guards.hold(sizes)), None)
        if found is not None:
            self._codes.move_to_end(key)
        return found

    def add(self, key: tuple, code: Code) -> None:
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


store = Store(1024)
