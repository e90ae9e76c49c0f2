"""`package.module:function`: a function of the user that returns a model and its batch."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from l2l_compile.command.failures import failing_as
from l2l_compile.errors import OptionError


def called(given: str, sizes: Mapping[str, int | None], defaults: Mapping[str, int]) -> tuple[torch.nn.Module, Any]:
    """The model and the batch that a function returns, on the meta device.

    sizes     what the user asks for ("batch", "length"); None for a default. A function gets those that it takes
    defaults  the sizes that a function gets that takes them

    Raises `OptionError` if there is no such function, if it does not take a size that is asked for, if it fails, and for anything
    else that it returns. Errors name types and places, never values.
    """
    function = _function(given)
    taken = _taken(given, function)
    for name, size in sizes.items():
        if size is not None and name not in taken:
            raise OptionError(f"--{name} {size}: {given!r} takes no argument {name!r}, and makes the batch that it makes")
    arguments = {name: sizes[name] or default for name, default in defaults.items() if name in taken}
    with failing_as(f"{given!r} failed"), torch.device("meta"):
        made = function(**arguments)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], torch.nn.Module):
        raise OptionError(f"{given!r} is to return a module and its batch, got {_described(made)}")
    model, batch = made
    if isinstance(batch, Mapping) and all(isinstance(name, str) for name in batch):
        return model, dict(batch)
    if isinstance(batch, torch.Tensor):
        return model, (batch,)
    if isinstance(batch, (tuple, list)):
        return model, tuple(batch)
    raise OptionError(f"{given!r} is to return a batch that is a mapping, a tuple or a tensor, got {_described(batch)}")


def _function(given: str) -> Callable[..., Any]:
    module_name, _, name = given.partition(":")
    is_a_file = module_name.endswith(".py")
    if is_a_file or not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        hint = f", as in {Path(module_name).stem}:{name}" if is_a_file else ""
        raise OptionError(f"{given!r} is no package.module:function{hint}")
    found: Any = _module(given, module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            raise OptionError(f"{given!r}: module {module_name!r} has no {name!r}")
        found = getattr(found, part)
    plain = found.func if isinstance(found, functools.partial) else found
    is_function = isinstance(plain, (types.FunctionType, types.MethodType))
    calls = type(plain).__dict__.get("__call__")  # of an object of the user's class
    if not is_function and not isinstance(calls, types.FunctionType):
        raise OptionError(
            f"{given!r} is no function of Python that returns a model and its batch, but of type {type(plain).__name__}"
        )
    return found


def _module(given: str, name: str) -> Any:
    """The module, also from the current folder."""
    sys.path.insert(0, "")
    try:
        with failing_as(f"{given!r}: the module cannot be imported"):
            return importlib.import_module(name)
    finally:
        if "" in sys.path:
            sys.path.remove("")


def _taken(given: str, function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        taken = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise OptionError(f"{given!r} does not say which arguments it takes") from error
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [n for n, p in taken.items() if p.default is p.empty and p.kind not in variable and n not in ("batch", "length")]
    if needed:
        raise OptionError(f"{given!r} needs the argument {needed[0]!r}: only 'batch' and 'length' are given to it")
    return taken


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(v).__name__ for v in value[:4]) or 'nothing'}"
    return f"a {type(value).__name__}"
