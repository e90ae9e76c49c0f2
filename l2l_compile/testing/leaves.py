"""Nested arguments and results as tensors by name."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def leaves_of(tree: Any, name: str = "") -> dict[str, Any]:
    """Tensors and plain values by their path: `['logits']`, `[0].loss`. Other objects are left out."""
    found: dict[str, Any] = {}
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        where = name + pytree.keystr(path)
        if isinstance(leaf, (torch.Tensor, *_PLAIN)):
            found[where] = leaf
        elif isinstance(leaf, SimpleNamespace) or (dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)):
            for attribute, value in vars(leaf).items():
                found |= leaves_of(value, f"{where}.{attribute}")
    return found


def inputs_of(args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors and plain values in the arguments of a call, by their path: `0`, `1['mask']`, `labels`."""
    found: dict[str, Any] = {}
    for name, value in (*enumerate(args), *kwargs.items()):
        found |= leaves_of(value, str(name))
    return found


def mapped(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The tree with each tensor replaced by `function(tensor)`. A tensor in several places is replaced by the same result."""
    made: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = function(tensor)
        return made[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, once, tree)


def own_copy(tree: Any) -> Any:
    """The tree with its tensors copied, as autograd leaves: a step may write into the copies, and they receive its gradients.

    Tensors that share memory share one copy of that memory.
    """
    memory: dict[int, Any] = {}
    return mapped(lambda t: like(t, copy.deepcopy(t.detach(), memory)), tree)


def converted(tree: Any, dtype: torch.dtype | None) -> Any:
    """The tree with its floating-point tensors in a dtype; None leaves them as they are."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if dtype is None or not tensor.is_floating_point() or tensor.dtype is dtype:
            return tensor
        return like(tensor, tensor.detach().to(dtype))

    return mapped(convert, tree)


def like(given: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """`made` as an autograd leaf like `given`: a parameter or a tensor, with or without a gradient."""
    if isinstance(given, torch.nn.Parameter):
        return torch.nn.Parameter(made, given.requires_grad)
    return made.requires_grad_(given.requires_grad)
