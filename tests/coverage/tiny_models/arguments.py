"""Shrinks the arguments of constructors by their names, for libraries that have no configurations."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

from .job import LAYERS, MOST_PARAMETERS
from .randomness import calm

# `d` is the depth of a stage in the dataclasses of timm's `byobnet`.
DEPTH = re.compile(
    r"^(n|num|stage|block|encoder|decoder|d)?_?(depths?|layers|blocks|d|single_layers|refiner_layers|block_config)$"
)
CHANCE = re.compile(r"drop")
SIZE = re.compile(r"^(img|image|input|spatial|sample)_size$")


def constructor(make: Callable[[], nn.Module]) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of the model that a function makes, and the arguments, by name, that the function passes to the class."""
    with torch.device("meta"):
        cls = type(make())
    init, given = cls.__init__, []

    def record(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:
            given.append((args, kwargs))
        init(self, *args, **kwargs)

    with mock.patch.object(cls, "__init__", record), torch.device("meta"):
        make()
    args, kwargs = given[0]
    bound = inspect.signature(init).bind(None, *args, **kwargs)
    bound.apply_defaults()
    parameters = inspect.signature(init).parameters
    named: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        named |= value if parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return cls, named


def shrunk(name: str, value: Any, layers: int, image: int | None) -> Any:
    """The small value of an argument: fewer layers, no dropout, images of `image` pixels (None keeps their size)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **{n: shrunk(n, v, layers, image) for n, v in fields.items()})
    if isinstance(value, list | tuple) and any(map(dataclasses.is_dataclass, value)):
        return type(value)(shrunk(name, v, layers, image) for v in value)
    if isinstance(value, float) and CHANCE.search(name):
        return 0.0
    if SIZE.search(name) and value and image:
        return image if isinstance(value, int) else type(value)([image] * len(value))
    if DEPTH.search(name):
        return fewer(value, layers)
    return value


def fewer(value: Any, layers: int) -> Any:
    """At most `layers` layers. In a list of depths of stages, that is the deepest stage's; other stages get at most two."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if value < LAYERS else layers
    if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
        deepest = list(value).index(max(value))
        return type(value)(fewer(v, layers) if at == deepest else min(v, 2) for at, v in enumerate(value))
    return value


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """The model in training mode. Raises `ValueError` if it has more than `MOST_PARAMETERS` parameters."""
    with torch.device("meta"):
        count = sum(p.numel() for p in make().parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"it has {count / 1e6:.0f} M parameters after shrinking")
    torch.manual_seed(0)
    return calm(make().train())
