"""Copies of a model: the user's model stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from l2l_compile.errors import L2LError
from l2l_compile.frontend.dynamo import adapter
from l2l_compile.ranks.sharded import is_sharded

Model = TypeVar("Model", bound=Callable)


def plain(model: Callable) -> Callable:
    """The plain module or function behind a compiled one; a model that is not compiled is returned as it is."""
    model = getattr(model, "_orig_mod", model)
    return getattr(model, "_torchdynamo_orig_callable", model)


def options_of(model: Callable) -> dict[str, Any]:
    """The options that a model was compiled with; empty if it was not compiled, or compiled without options."""
    return dict(adapter.options_of(model) or {})


def copied(model: Model, dtype: torch.dtype | None) -> Model:
    """A deep copy of a module, in a dtype. A function is itself.

    Raises `L2LError` if the module cannot be copied, with the name of the part that cannot, and for a model sharded over
    ranks.
    """
    if not isinstance(model, nn.Module):
        return model
    if (name := next((n for n, p in model.named_parameters() if is_sharded(p)), None)) is not None:
        raise L2LError(
            f"parameter '{name}' of {type(model).__name__} is sharded over ranks, and eager has no sharded model to compare with: compare "
            "the plain model, before l2l_compile.shard or parallelize_module"
        )
    try:
        made = copy.deepcopy(model)
    except Exception as error:
        name, part = _first_that_fails(model)
        raise L2LError(
            f"{type(model).__name__} is compared on deep copies, so that it stays as it is, but {name or 'it'} "
            f"({type(part).__name__}) cannot be copied: {type(error).__name__}: {error}. Give the module a `__deepcopy__`, or take "
            "what cannot be copied out of its attributes"
        ) from error
    return made if dtype is None else made.to(dtype)


def _first_that_fails(model: nn.Module) -> tuple[str, nn.Module]:
    """The innermost module that cannot be copied."""
    name, found = "", model
    for candidate, module in model.named_modules():
        if candidate.startswith(name):
            try:
                copy.deepcopy(module)
            except Exception:  # noqa: BLE001 - a module may fail with anything
                name, found = candidate, module
    return name, found
