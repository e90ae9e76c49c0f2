"""Deep copies of what a step may change, such as an optimizer's state or an attention cache, and whether two of them are equal.

Values are of any type: tensors, numbers, containers, objects with attributes, functions with variables of their own.
"""

from __future__ import annotations

import copy
import functools
import itertools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from l2l_compile.ranks.sharded import attributes, is_sharded

_LARGEST = 1 << 20  # entries of a tensor that is copied: a larger one belongs to a model, and is copied without its data
_UNCHANGING = (
    type(None), bool, int, float, complex, str, bytes, type, range, slice, types.ModuleType, types.BuiltinFunctionType, types.CodeType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)


def is_unchanging(value: Any) -> bool:
    """Whether no code can change a value."""
    return isinstance(value, _UNCHANGING) or type(value) is tuple and all(map(is_unchanging, value))


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy that shares nothing that a step could change with `value`.

    `memo` maps the ids of objects to their copies; entries that it has already are used. Objects that cannot be copied, such as
    locks, are shared. Raises `TypeError` for iterators, which change when they are used.
    """
    memo = {} if memo is None else memo
    if is_unchanging(value):
        return value
    if id(value) not in memo:
        memo[id(value)] = _copy(value, memo)
        memo.setdefault(id(memo), []).append(value)  # as `copy.deepcopy` does: an id must not be given to another object
    return memo[id(value)]


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    for kinds, copy_of in _COPIES:
        if isinstance(value, kinds):
            return copy_of(value, memo)
    if _is_plain(value):
        return _copy_of_object(value, memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001  # any class may define how it is copied
        return value


def _copy_of_tensor(value: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if is_sharded(value):
        return value
    if value.numel() > _LARGEST:
        made = torch.empty(value.shape, dtype=value.dtype, device="meta")
    else:
        made = value.detach().clone()
    if isinstance(value, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=value.requires_grad)
    elif value.requires_grad:
        made.requires_grad_()
    made.__dict__.update(copied(attributes(value), memo))
    return made


def _copy_of_reference(value: weakref.ReferenceType, memo: dict[int, Any]) -> weakref.ReferenceType:
    """A weak reference to an object that is copied refers to the copy."""
    found = memo.get(id(value()))
    return value if found is None or type(value) is not weakref.ReferenceType else weakref.ref(found)


def _copy_of_generator(value: torch.Generator, memo: dict[int, Any]) -> torch.Generator:
    made = torch.Generator(value.device)
    made.set_state(value.get_state())
    return made


def _copy_of_method(value: types.MethodType, memo: dict[int, Any]) -> types.MethodType:
    return types.MethodType(value.__func__, copied(value.__self__, memo))


def _copy_of_partial(value: functools.partial, memo: dict[int, Any]) -> functools.partial:
    return functools.partial(copied(value.func, memo), *copied(value.args, memo), **copied(value.keywords, memo))


def _copy_of_function(value: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """A function whose own variables (its closure) are copies."""
    if not value.__closure__:
        return value
    cells = tuple(types.CellType() for _ in value.__closure__)
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__ = value.__kwdefaults__
    memo[id(value)] = made  # a function may be one of its own variables
    for cell, own in zip(cells, value.__closure__, strict=True):
        if (content := _content(own)) is not _EMPTY:
            cell.cell_contents = copied(content, memo)
    made.__dict__.update(copied(value.__dict__, memo))
    return made


_EMPTY = object()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _copy_of_container(value: Any, memo: dict[int, Any]) -> Any:
    made: Any
    if isinstance(value, dict):
        made = copy.copy(value)  # of the same class, with its default factory
        made.clear()
        memo[id(value)] = made
        made.update({copied(k, memo): copied(v, memo) for k, v in value.items()})
        return made
    if isinstance(value, (list, deque)):
        made = copy.copy(value)
        made.clear()
        memo[id(value)] = made
        made.extend(copied(v, memo) for v in value)
        return made
    entries = [copied(v, memo) for v in value]
    return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)  # a named tuple takes them apart


_COPIES: tuple[tuple[Any, Callable[[Any, dict[int, Any]], Any]], ...] = (
    (torch.Tensor, _copy_of_tensor),
    (weakref.ReferenceType, _copy_of_reference),
    (torch.Generator, _copy_of_generator),
    (types.FunctionType, _copy_of_function),
    (types.MethodType, _copy_of_method),
    (functools.partial, _copy_of_partial),
    (_CONTAINERS, _copy_of_container),
    (Iterator, lambda value, memo: copy.deepcopy(value)),  # `itertools.count` has a copy; a generator raises TypeError
)


def _is_plain(value: Any) -> bool:
    """Whether all that an object holds is in its attributes."""
    kind = type(value)
    has_own_way = any(hasattr(kind, name) for name in ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__"))
    return (
        not has_own_way
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and hasattr(value, "__dict__")
    )


def _copy_of_object(value: Any, memo: dict[int, Any]) -> Any:
    try:
        made = object.__new__(type(value))
    except TypeError:  # a class of an extension
        return value
    memo[id(value)] = made
    for name, content in attributes_of(value).items():
        object.__setattr__(made, name, copied(content, memo))
    return made


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, in `__dict__` and in slots."""
    slots = [name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    in_slots = {name: getattr(value, name) for name in slots if name not in ("__dict__", "__weakref__") and hasattr(value, name)}
    return {**in_slots, **getattr(value, "__dict__", {})}


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def same(a: Any, b: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Whether two values, of which one may be a copy of the other, are equal to the last bit. NaN equals NaN."""
    seen = set() if seen is None else seen
    if a is b or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b):
        return False
    seen.add((id(a), id(b)))
    for kinds, are_same in _COMPARISONS:
        if isinstance(a, kinds):
            return are_same(a, b, seen)
    if hasattr(a, "__dict__"):
        return same(attributes_of(a), attributes_of(b), seen)
    return bool(a == b)


_Seen = set[tuple[int, int]]


def _same_mappings(a: Mapping, b: Mapping, seen: _Seen) -> bool:
    if any(isinstance(k, torch.Tensor) for k in (*a, *b)):  # the keys of a copy are copies
        return same(list(a.items()), list(b.items()), seen)
    return a.keys() == b.keys() and all(same(v, b[k], seen) for k, v in a.items())


def _same_in_order(a: Any, b: Any, seen: _Seen) -> bool:
    return len(a) == len(b) and all(same(v, w, seen) for v, w in zip(a, b, strict=True))


def _same_sets(a: Any, b: Any, seen: _Seen) -> bool:
    return len(a) == len(b) and all(any(same(v, w, set(seen)) for w in b) for v in a - b)


def _same_functions(a: types.FunctionType, b: types.FunctionType, seen: _Seen) -> bool:
    mine, theirs = ([_content(cell) for cell in f.__closure__ or ()] for f in (a, b))
    return a.__code__ is b.__code__ and same(mine, theirs, seen) and same(a.__dict__, b.__dict__, seen)


def _same_partials(a: functools.partial, b: functools.partial, seen: _Seen) -> bool:
    return same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords), seen)


_COMPARISONS: tuple[tuple[Any, Callable[[Any, Any, _Seen], bool]], ...] = (
    (torch.Tensor, lambda a, b, seen: _same_tensors(a, b)),
    (torch.Generator, lambda a, b, seen: torch.equal(a.get_state(), b.get_state())),
    (Mapping, _same_mappings),
    ((list, tuple, deque), _same_in_order),
    ((set, frozenset), _same_sets),
    ((int, float, complex), lambda a, b, seen: a == b or (a != a and b != b)),
    (types.FunctionType, _same_functions),
    (weakref.ReferenceType, lambda a, b, seen: same(a(), b(), seen)),
    (types.MethodType, lambda a, b, seen: a.__func__ is b.__func__ and same(a.__self__, b.__self__, seen)),
    (functools.partial, _same_partials),
    (itertools.count, lambda a, b, seen: repr(a) == repr(b)),
)


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    if a.is_meta or torch.equal(a, b):
        return True
    return a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a value: in containers, and in attributes of objects. Each once."""
    return (found for found in objects_within(value) if isinstance(found, torch.Tensor))


def objects_within(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """A value and what it holds, in containers and in attributes of objects, without what a tensor holds. Each once."""
    seen = set() if seen is None else seen
    if isinstance(value, _UNCHANGING) or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, _CONTAINERS):
        parts = value
    else:
        parts = attributes_of(value).values()
    for part in parts:
        yield from objects_within(part, seen)
