"""Questions about a graph of Dynamo: which memory a value is in, what an operation writes into, what is dead."""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from l2l_compile.ir.fx_types import name_of

AT_READER = "at_reader"  # in the meta of a view right before its reader: it belongs to the reader's segment
ANEW = {  # operators that may write into their first operand, and those that make a new value
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_SILENT = {torch._C._log_api_usage_once}  # calls that only count uses of an API
_STATISTICS = (torch.nn.functional.batch_norm, torch.nn.functional.instance_norm)


def memory_of(node: fx.Node) -> int | None:
    """The storage of a tensor; None for other values, and within functorch's transforms."""
    value = node.meta.get("example_value")
    try:
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
    except NotImplementedError:
        return None


def dims_of_memory(value: torch.Tensor) -> list[int] | None:
    """The dimensions of a tensor in the order of its memory, outermost first; None if the memory holds other entries too."""
    sizes, strides = ([hint_of(n) for n in numbers] for numbers in (value.shape, value.stride()))
    dims = sorted(range(value.ndim), key=lambda dim: -strides[dim])
    inner = 1
    for dim in reversed([dim for dim in dims if sizes[dim] != 1]):
        if strides[dim] != inner:
            return None
        inner *= sizes[dim]
    alone = hint_of(value.untyped_storage().nbytes()) == inner * value.element_size()
    return dims if alone and hint_of(value.storage_offset()) == 0 else None


def share_memory(one: fx.Node, other: fx.Node) -> bool:
    """Whether two tensors may have entries in common: they are in one storage, and their ranges of entries overlap."""
    if one is other or memory_of(one) is None or memory_of(one) != memory_of(other):
        return False
    first, second = sorted((_range(one.meta["example_value"]), _range(other.meta["example_value"])), key=lambda r: r.start)
    return second.start < first.stop


def _range(value: torch.Tensor) -> range:
    """The range from the first to the last entry of a tensor, counted in entries of its storage."""
    start = hint_of(value.storage_offset())
    reach = sum((hint_of(size) - 1) * hint_of(stride) for size, stride in zip(value.shape, value.stride(), strict=True))
    return range(start, start + reach + 1)


def hint_of(size: int | torch.SymInt) -> int:
    """The value that a size has in this capture."""
    return size if isinstance(size, int) else size.node.hint


def writes(node: fx.Node) -> bool:
    """Whether the name, the schema or an argument of an operation says that it writes into an argument."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if not node.op.startswith("call_"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    inplace = node.kwargs.get("inplace")
    if isinstance(node.target, types.FunctionType):
        inplace = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get("inplace")
    return _writes_by_name(name) or name == "setitem" or node.target in ANEW or "out" in node.kwargs or bool(inplace)


def _writes_by_name(name: str) -> bool:
    """Whether a method of this name writes into its tensor, such as `add_` and `__iadd__`; `__eq__` does not."""
    if not name.startswith("__"):
        return name.endswith("_")
    operation = name.strip("_")
    return operation == "setitem" or operation.startswith("i") and hasattr(operator, f"__{operation[1:]}__")


def is_pure(node: fx.Node) -> bool:
    """Whether it is certain that an operation writes into none of its arguments."""
    if not isinstance(node.meta.get("example_value"), (torch.Tensor, torch.SymInt, torch.SymFloat, int)):
        return False
    if any(a is True for a in node.args) or "inplace" in node.kwargs or "out" in node.kwargs:
        return False  # functional.relu(x, True) writes into x
    if node.op == "call_method":
        return not _writes_by_name(name_of(node))
    name = getattr(node.target, "__name__", "")
    if getattr(operator, name, None) is node.target:
        return name != "setitem" and not (name.startswith("i") and hasattr(operator, name[1:]))
    return isinstance(node.target, types.BuiltinFunctionType) and not name.endswith("_")


def written_operands(node: fx.Node) -> list[fx.Node]:
    """The operands that an operation writes into, according to its schema, its name or its arguments."""
    if node.target in _STATISTICS:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        training = bound.arguments.get("training", bound.arguments.get("use_input_stats"))
        return _nodes([bound.arguments["running_mean"], bound.arguments["running_var"]]) if training else []
    if not writes(node):
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        declared = [a.alias_info is not None and a.alias_info.is_write for a in node.target._schema.arguments]
        names = [a.name for a in node.target._schema.arguments]
        by_name = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        return _nodes([by_name.get(name) for name, is_write in zip(names, declared, strict=True) if is_write])
    if "out" in node.kwargs:
        return _nodes(node.kwargs["out"])
    return _nodes(node.args[0] if node.args else node.kwargs.get("input"))


def _nodes(arguments: Any) -> list[fx.Node]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, fx.Node)]


def touches(nodes: Iterable[fx.Node], memories: Iterable[int | None]) -> dict[int, list[fx.Node]]:
    """For each storage, the operations that read it or write into it. Operations that only make a view do not count."""
    found: dict[int, list[fx.Node]] = {memory: [] for memory in memories if memory is not None}
    for node in nodes:
        if not node.op.startswith("call_"):
            continue
        for memory in found.keys() & {memory_of(a) for a in node.all_input_nodes}:
            if memory_of(node) != memory or not is_pure(node):
                found[memory].append(node)
    return found


def may_be_size(node: fx.Node) -> bool:
    """Whether a node makes a zero-dimensional integer tensor from numbers alone: PyTorch accepts such a tensor as a size."""
    value = node.meta.get("example_value")
    return (
        node.op == "call_function"
        and isinstance(value, torch.Tensor)
        and value.ndim == 0
        and value.dtype in (torch.int64, torch.int32)
        and getattr(value, "constant", None) is not None
        and is_pure(node)
    )


def drop_dead(graph: fx.Graph) -> None:
    """Erase operations that have no reader and no side effect. An operation stays if it may have one."""
    for node in reversed(list(graph.nodes)):
        if node.op.startswith("call_") and not node.users and (node.target in _SILENT or is_pure(node)):
            graph.erase_node(node)


def first_operation(graph: fx.Graph) -> fx.Node:
    """The node behind the placeholders."""
    return next(node for node in graph.nodes if node.op != "placeholder")
