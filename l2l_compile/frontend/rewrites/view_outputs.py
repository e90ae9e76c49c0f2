"""Returns results that share memory with an input or with another result as views of it, as in eager.

A program returns each result in memory of its own. A write into such a result after a graph break would then not reach the
tensor that it is a view of in eager. Therefore the program does not make these results. After every step, they are made as
views of the argument or of the other result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from l2l_compile.ir.captured import Input, View
from l2l_compile.ir.graph import drop_dead, memory_of
from l2l_compile.ir.values import dim_of


@dataclass(frozen=True)
class _Base:
    """A tensor that views are taken from: the argument with this index, or the result at this position."""

    example: torch.Tensor
    place: int
    of_argument: bool

    def view(self, made: torch.Tensor) -> View | None:
        """The result `made` as a view of this base; None if its dtype, conjugate or negative bit differs."""
        if made.dtype != self.example.dtype or made.is_conj() != self.example.is_conj() or made.is_neg() != self.example.is_neg():
            return None
        start = dim_of(made.storage_offset() - self.example.storage_offset())
        shape, stride = tuple(map(dim_of, made.shape)), tuple(map(dim_of, made.stride()))
        return View(self.place, self.of_argument, shape, stride, start, made.requires_grad)


def take_views(graph: fx.Graph, inputs: Sequence[Input]) -> dict[int, View]:
    """The results that are views, by position. In the graph's outputs, None replaces them."""
    (outputs,) = graph.output_node().args
    assert isinstance(outputs, (tuple, list))
    tensors = {p: node for p, node in enumerate(outputs) if isinstance(node, fx.Node) and _is_strided(node)}
    made = {p: node for p, node in tensors.items() if node.op != "placeholder"}
    bases = _results(made) | _inputs(inputs)
    known = {s for i in inputs for s in _symbols_of(i.node)}
    views: dict[int, View] = {}
    for position, node in made.items():
        base = bases.get(memory_of(node))
        if base is None or not base.of_argument and made[base.place] is node:
            continue
        view = base.view(node.meta["example_value"])
        if view is None or not view.symbols <= known:
            continue
        is_weight = base.of_argument and inputs[base.place].is_weight
        if not view.differentiable or base.example.requires_grad and not is_weight:  # the program makes gradients of weights
            views[position] = view
    if views:
        graph.output_node().args = (tuple(None if p in views else node for p, node in enumerate(outputs)),)
        drop_dead(graph)
    return views


def _inputs(inputs: Sequence[Input]) -> dict[int | None, _Base]:
    return {
        memory_of(i.node): _Base(i.node.meta["example_value"], i.index, of_argument=True) for i in inputs if _is_strided(i.node)
    }


def _results(made: dict[int, fx.Node]) -> dict[int | None, _Base]:
    """Results that may be bases of other results: contiguous, with all of their storage. A gradient is preferred."""
    found: dict[int | None, _Base] = {}
    for position, node in made.items():
        example, memory = node.meta["example_value"], memory_of(node)
        if not _has_all_of_its_memory(example):
            continue
        if memory not in found or example.requires_grad and not found[memory].example.requires_grad:
            found[memory] = _Base(example, position, of_argument=False)
    return found


def _has_all_of_its_memory(example: torch.Tensor) -> bool:
    stride = 1
    for size, step in zip(reversed(example.shape), reversed(example.stride()), strict=True):
        if dim_of(step) != dim_of(stride):
            return False
        stride = stride * size
    nbytes = example.untyped_storage().nbytes()
    return dim_of(example.storage_offset()) == 0 and dim_of(stride * example.element_size()) == dim_of(nbytes)


def _is_strided(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and memory_of(node) is not None


def _symbols_of(node: fx.Node) -> set:
    value = node.meta.get("example_value")
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return {dim_of(size) for size in sizes if isinstance(size, torch.SymInt)}
