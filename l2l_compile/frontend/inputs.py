"""The inputs of a captured graph by kind, their names, and the symbol of the batch size."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

import sympy
import torch
from torch import fx

from l2l_compile.frontend.draft import Draft
from l2l_compile.frontend.dynamo import adapter, batch_marks
from l2l_compile.frontend.rewrites.wrapped_weights import is_wrapper
from l2l_compile.frontend.rewrites.writes import with_states
from l2l_compile.ir.captured import Input, with_float_operands
from l2l_compile.ir.values import dim_of
from l2l_compile.ranks.placement import STAND_IN


def describe(draft: Draft) -> None:
    """Sort the placeholders by kind, and find the batch."""
    nodes = draft.graph.find_nodes(op="placeholder")
    inputs = tuple(replace(_describe(i, n), shard_spec=draft.sharded.get(n)) for i, n in enumerate(nodes))
    draft.batch, draft.why_static = _batch_symbol(inputs)
    draft.inputs = with_states([_functional_weight(i, draft.batch) for i in inputs], draft.graph)


def _describe(index: int, node: fx.Node) -> Input:
    example = node.meta.get("example_value")
    name = readable(adapter.source_name(node))
    if not isinstance(example, torch.Tensor) or adapter.float_of(node) is not None:
        return Input(index, node, name, "symbol")
    wrapped = "wrapped " if is_wrapper(example) else ""
    if isinstance(example, torch.nn.Parameter):
        return Input(index, node, name, f"{wrapped}parameter")
    if adapter.is_module_attribute(node):
        return Input(index, node, name, f"{wrapped}buffer")
    return Input(index, node, name, "value")


def _functional_weight(found: Input, batch: sympy.Symbol | None) -> Input:
    """Turn a leaf that requires a gradient and has no batch dimension into a parameter: models may be plain functions."""
    if found.kind != "value":
        return found
    example = found.node.meta["example_value"]
    if not example.requires_grad or not example.is_leaf:
        return found
    batched = batch is not None and any(dim_of(s) == batch for s in example.shape)
    return found if batched else replace(found, kind="parameter")


def readable(source: str) -> str:
    """`L['self']._modules['h']._modules['0']._parameters['w']` -> `h.0.w`; `L['kwargs']['labels']` -> `labels`."""
    source = re.sub(r"^___as_tensor\((.*)\)$", r"\1", source)  # a Python float that changed between calls
    source = re.sub(r"\.__dict__\['(_modules|_parameters|_buffers)'\]", r".\1", source)
    name = re.sub(r"\._(modules|parameters|buffers)\['([^']*)'\]", r".\2", source)
    name = name.replace(STAND_IN, "")
    name = re.sub(r"^L\['\w+'\]\.(__self__\.)?(?=.)", "", name)
    name = re.sub(r"\['?([^']*?)'?\]", r".\1", name)
    return re.sub(r"^L\.(kwargs\.|args\.)?", "", name) or source


def _batch_symbol(inputs: tuple[Input, ...]) -> tuple[sympy.Symbol | None, str]:
    """The symbol of the batch size, or why there is none. All inputs with the most frequent batch size share the symbol."""
    tensors = [i for i in inputs if i.kind == "value" and i.node.meta["example_value"].dim()]
    data = [i for i in tensors if not i.node.meta["example_value"].requires_grad] or tensors
    candidates = _batch_sizes(data)
    symbolic = [s for s in candidates if _is_symbol(s)]
    if not symbolic:
        if not candidates:
            return None, "no input of this graph is a batched tensor"
        if any(s == 1 for s in candidates):
            return None, "a batch of one row cannot be split"
        return None, "Dynamo specialised the size of the batch to a number"
    size = Counter(s.node.hint for s in symbolic).most_common(1)[0][0]
    handed_on = [i for i in tensors if i not in data and not i.node.meta["example_value"].is_leaf]  # across a graph break
    same = [s for s in (*symbolic, *filter(_is_symbol, _batch_sizes(handed_on))) if s.node.hint == size]
    for other in same[1:]:
        bool(same[0] == other)  # adds a guard: Dynamo captures anew if these batch sizes differ
    batch = dim_of(same[0])
    return (batch, "") if isinstance(batch, sympy.Symbol) else (None, "Dynamo specialised the size of the batch")


def _batch_sizes(inputs: Sequence[Input]) -> list[int | torch.SymInt]:
    """The sizes of these inputs in their batch dimensions; inputs without rows are left out."""
    places = [(i.node.meta["example_value"].shape, batch_marks.batch_dimension_of(i.node)) for i in inputs]
    return [shape[place] for shape, place in places if place is not None and place < len(shape)]


def _is_symbol(size: int | torch.SymInt) -> TypeGuard[torch.SymInt]:
    return isinstance(size, torch.SymInt) and isinstance(dim_of(size), sympy.Symbol)


def symbols_of(inputs: tuple[Input, ...]) -> tuple[dict, dict]:
    """Where a call has the value of each symbol, as in `Captured.symbol_at`, and the values that symbols have in this capture."""
    where: dict[sympy.Symbol, tuple[int, int | None]] = {}
    hints: dict[sympy.Symbol, int | float] = {}
    for i in inputs:
        example = i.node.meta.get("example_value")
        number = adapter.float_of(i.node)
        if number is not None:
            if isinstance(number.node.expr, sympy.Symbol):
                where[number.node.expr] = (i.index, None)
                hints[number.node.expr] = float(number.node.hint)
            continue
        sizes = enumerate(example.shape) if isinstance(example, torch.Tensor) else [(None, example)]
        for dim, size in sizes:
            if isinstance(size, torch.SymInt) and isinstance(dim_of(size), sympy.Symbol):
                where.setdefault(dim_of(size), (i.index, dim))
                hints.setdefault(dim_of(size), int(size.node.hint))
    return where, with_float_operands(hints)
