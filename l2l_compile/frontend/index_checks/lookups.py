"""Operations that look up entries by index: the operand with the indices, and the range of allowed indices.

An index that is not allowed raises an error on the host. On a GPU, it ends the process (`frontend/index_checks/indices.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import fx

from l2l_compile.ir.fx_types import arguments
from l2l_compile.ir.values import Dim, dim_of

_VOCABULARY = "Compare the vocabulary of the tokenizer with the rows of the embedding"
_CLASSES = "Labels number the classes from 0. Targets that shall not count have the label ignore_index, here {ignored}"


@dataclass(frozen=True)
class Lookup:
    """The indices that an operation looks up.

    operation  the name of the operation
    index      the node of the indices
    size       the number of entries: indices from 0 to `size` - 1 are allowed
    from_end   whether indices from -`size` to -1 are allowed as well
    ignored    an index that the operation does not look up
    remedy     advice to the user for an index out of range, with `{ignored}` for the ignored index; "" if there is none
    """

    operation: str
    index: fx.Node
    size: Dim
    from_end: bool = False
    ignored: Dim | None = None
    remedy: str = ""


Rule: TypeAlias = Callable[[fx.Node], Iterable[Lookup]]

_RULES: dict[Any, Rule] = {}


def lookups_of(node: fx.Node) -> list[Lookup]:
    """The look-ups of an operation of Dynamo's graph. Masks, slices and Python numbers are left out."""
    rule = _RULES.get(node.target) if node.op.startswith("call_") else None
    return [lookup for lookup in rule(node) if _is_index(lookup.index)] if rule is not None else []


def _is_index(argument: Any) -> bool:
    value = _example(argument)
    return isinstance(argument, fx.Node) and isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)


def _example(argument: Any) -> Any:
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument


def _operands(node: fx.Node, *names: str) -> dict[str, Any]:
    """The arguments of a call by name; `names` are the names of its positional parameters."""
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _size(tensor: Any, dim: int) -> Dim:
    value = _example(tensor)
    return dim_of(value.shape[dim]) if value.ndim else 1


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _rule(*targets: Any) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(targets, rule))
        return rule

    return add


def _tensor_operations(*names: str) -> list:
    """The functions of `torch` and the methods of tensors with these names, and their in-place methods."""
    functions = [getattr(torch, name) for name in names if hasattr(torch, name)]
    return [*functions, *names, *(f"{name}_" for name in names)]


@_rule(F.embedding, F.embedding_bag)
def _embedding(node: fx.Node) -> Iterator[Lookup]:
    found = _operands(node, "input", "weight")
    yield Lookup(_name(node), found["input"], _size(found["weight"], 0), remedy=_VOCABULARY)


@_rule(F.cross_entropy, F.nll_loss)
def _loss(node: fx.Node) -> Iterator[Lookup]:
    """Targets that are class probabilities are floating point, so they are no index."""
    found = _operands(node, "input", "target", "weight", "size_average", "ignore_index")
    ignored = dim_of(_example(found.get("ignore_index", -100)))
    classes = _size(found["input"], 1 if _example(found["input"]).ndim > 1 else 0)
    yield Lookup(_name(node), found["target"], classes, ignored=ignored, remedy=_CLASSES)


@_rule(F.one_hot)
def _one_hot(node: fx.Node) -> Iterator[Lookup]:
    found = _operands(node, "input", "num_classes")
    classes = _example(found.get("num_classes", -1))
    if isinstance(classes, torch.SymInt) or classes > 0:
        yield Lookup(_name(node), found["input"], dim_of(classes))


@_rule(
    *_tensor_operations(
        "index_select", "index_add", "index_copy", "index_reduce", "gather", "scatter", "scatter_add", "scatter_reduce"
    )
)
def _along_dim(node: fx.Node) -> Iterator[Lookup]:
    found = _operands(node, "input", "dim", "index")
    yield Lookup(_name(node), found["index"], _size(found["input"], found["dim"]))


@_rule(*_tensor_operations("index_fill"))
def _fill(node: fx.Node) -> Iterator[Lookup]:
    found = _operands(node, "input", "dim", "index")
    yield Lookup(_name(node), found["index"], _size(found["input"], found["dim"]), from_end=True)


@_rule(*_tensor_operations("take_along_dim"))
def _take_along_dim(node: fx.Node) -> Iterator[Lookup]:
    """Without `dim`, indices are into the flattened tensor, and negative indices are not allowed."""
    found = _operands(node, "input", "indices", "dim")
    dim = found.get("dim")
    if dim is None:
        yield Lookup(_name(node), found["indices"], dim_of(_example(found["input"]).numel()))
    else:
        yield Lookup(_name(node), found["indices"], _size(found["input"], dim), from_end=True)


@_rule(*_tensor_operations("take", "put"))
def _of_all_entries(node: fx.Node) -> Iterator[Lookup]:
    found = _operands(node, "input", "index")
    yield Lookup(_name(node), found["index"], dim_of(_example(found["input"]).numel()), from_end=True)


@_rule(operator.getitem, operator.setitem)
def _brackets(node: fx.Node) -> Iterator[Lookup]:
    of, entries, *_ = arguments(node)
    return _advanced(node, of, entries if isinstance(entries, tuple) else (entries,))


@_rule(*_tensor_operations("index_put"))
def _put(node: fx.Node) -> Iterator[Lookup]:
    found = _operands(node, "input", "indices")
    return _advanced(node, found["input"], found["indices"])


def _advanced(node: fx.Node, of: Any, entries: Iterable) -> Iterator[Lookup]:
    """The index tensors between brackets. Each looks up in the dimension that it stands for."""
    value, entries = _example(of), list(entries)
    if not isinstance(value, torch.Tensor):
        return
    taken = [_dimensions(entry) for entry in entries]
    dim = 0
    for entry, count in zip(entries, taken, strict=True):
        if _is_index(entry):
            yield Lookup(_name(node), entry, _size(of, dim), from_end=True)
        dim += value.ndim - sum(taken) if entry is Ellipsis else count


def _dimensions(entry: Any) -> int:
    """The number of dimensions that an entry between brackets stands for. There are no masks: a mask breaks the graph."""
    return 0 if entry is None or entry is Ellipsis or isinstance(entry, bool) else 1
