"""Treats a model on `torch.device("meta")` as a model on the host, without memory: `explain` needs only sizes."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from l2l_compile.devices.host import HOST
from l2l_compile.object_copies import copied, is_unchanging, objects_within, tensors_within
from l2l_compile.ranks.sharded import is_sharded, local, sharded_as


@dataclass(frozen=True)
class OnTheHost:
    """Arguments of a model, with tensors that stand for tensors on the host.

    fake  gives the stand-in for a tensor
    mode  the mode of the stand-ins, which holds for one thread; None if there are none
    """

    args: tuple
    kwargs: dict[str, Any]
    fake: Callable[[torch.Tensor], torch.Tensor]
    mode: FakeTensorMode | None = None


@contextmanager
def on_the_host(function: Callable, args: tuple, kwargs: dict[str, Any], all_fake: bool = False) -> Iterator[OnTheHost]:
    """Context manager in which fake tensors on the host replace meta tensors of a module and of the arguments.

    With `all_fake`, they replace all tensors that `_can_be_fake`.

    All tensors stay as they are if there are no meta tensors and `all_fake` is False. Afterwards, the module has its own tensors
    again, and attributes that a forward has set are as before, with what lists, sets and dictionaries there have held. Objects among
    the arguments that hold tensors, such as attention caches, are copies: Dynamo writes new attributes into them.
    """
    module = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    with (
        attributes_stay(module if isinstance(module, torch.nn.Module) else None),
        _tensors_on_the_host(module, args, kwargs, all_fake) as call,
    ):
        yield call


@contextmanager
def _tensors_on_the_host(module: Any, args: tuple, kwargs: dict[str, Any], all_fake: bool) -> Iterator[OnTheHost]:
    chosen = _can_be_fake if all_fake else _is_meta
    places = list(_tensors_of(module, chosen)) if isinstance(module, torch.nn.Module) else []
    if not places and not all_fake and not any(map(chosen, tensors_within((args, kwargs)))):
        args, kwargs = _copies((args, kwargs), lambda tensor: tensor)
        yield OnTheHost(args, kwargs, lambda tensor: tensor)
        return
    made: dict[int, torch.Tensor] = {}  # by identity: a tensor that is in several places stays one tensor
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = _on_the_host(tensor) if tensor.is_meta or is_sharded(tensor) else mode.from_tensor(tensor)
            return made[id(tensor)]

        try:
            for values, name, tensor in places:
                values[name] = fake(tensor)
            args, kwargs = _copies((args, kwargs), fake)
            yield OnTheHost(args, kwargs, fake, mode)
        finally:
            for values, name, tensor in places:
                values[name] = tensor


@contextmanager
def attributes_stay(model: torch.nn.Module | None) -> Iterator[None]:
    """Context manager behind which all modules have the attributes that they had before it, and containers there the same entries."""
    modules = list(model.modules()) if model is not None else []
    kinds = [type(module) for module in modules]
    before = [(vars(module), dict(vars(module))) for module in modules]
    held = {id(c): (c, copy.copy(c)) for _, values in before for value in values.values() for c in _containers(value)}
    try:
        yield
    finally:
        for module, kind, (now, values) in zip(modules, kinds, before, strict=True):
            if type(module) is kind:  # a lazy module has become another one, with parameters
                now.clear()
                now.update(values)
        for container, entries in held.values():
            if type(container) in (dict, OrderedDict, set):
                container.clear()
                container.update(entries)
            else:
                container.clear()
                container.extend(entries)


def _containers(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """A container that can change, and those within it."""
    seen = set() if seen is None else seen
    if type(value) not in (list, dict, OrderedDict, set, deque, tuple) or id(value) in seen:
        return
    seen.add(id(value))
    if type(value) is not tuple:
        yield value
    for entry in value.values() if isinstance(value, dict) else value:
        yield from _containers(entry, seen)


def _copies(arguments: Any, other: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The arguments with `other(tensor)` in place of each tensor. Objects that hold tensors are copied, but for modules."""
    held = list(objects_within(arguments))
    modules = {id(value): value for value in held if isinstance(value, torch.nn.Module)}
    memo = {id(value): other(value) for value in held if isinstance(value, torch.Tensor)} | modules
    made = tree_map(lambda leaf: leaf if is_unchanging(leaf) else copied(leaf, memo), arguments)
    for holder in objects_within(tree_leaves(made), set(modules)):
        for name, value in getattr(holder, "__dict__", {}).items():
            if isinstance(value, torch.device) and value == _META:
                setattr(holder, name, HOST)
    return made


_META = torch.device("meta")


def _can_be_fake(value: object) -> bool:
    """Whether a fake tensor can take the place of a tensor.

    Not of a frozen one of another library's class, which may keep more than its entries, as bitsandbytes' weights do.
    """
    if not isinstance(value, torch.Tensor):
        return False
    return value.is_meta or value.requires_grad or type(value) in _OF_TORCH or is_traceable_wrapper_subclass(value)


_OF_TORCH = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _tensors_of(module: torch.nn.Module, chosen: Callable[[object], bool]) -> Iterator[tuple[dict, str, torch.Tensor]]:
    """The chosen tensors of a module and its submodules (parameters, buffers, attributes), and the dictionaries they are in."""
    for part in module.modules():
        for values in (part._parameters, part._buffers, part.__dict__):
            yield from ((values, name, value) for name, value in list(values.items()) if chosen(value))


def _on_the_host(tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor on the host like `tensor`, which is on meta or sharded over ranks. Must be called in a fake mode."""
    shard = local(tensor)
    made = sharded_as(torch.empty_strided(shard.size(), shard.stride(), dtype=shard.dtype, device=HOST), tensor)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
