"""One model for each module file of timm: a model whose name says that it is small, with fewer layers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

import timm
import torch
from torch import nn

from .arguments import built, constructor, shrunk
from .job import LAYERS, ROWS, Job

__all__ = ["SETTINGS", "jobs", "make"]

CLASSES = 10
# Names of small models, the smallest first. timm's `test_…` models are for tests and have few layers of small width.
SMALL = (
    "test",
    "atto",
    "femto",
    "pico",
    "zepto",
    "nano",
    "xxs",
    "xxtiny",
    "xtiny",
    "tiny",
    "_xs",
    "mini",
    "_s$|_s_|small",
    "_t$|_t_|t0",
    "b0|_0$|_0_",
    "18",
    "26",
    "5m|7m|11m|050|_m0|_x0",
    "",
)


@dataclass(frozen=True)
class Setting:
    """The size of images. `shrink` says whether the arguments of the constructor are shrunk."""

    name: str
    image: int
    shrink: bool = True


SETTINGS = (
    Setting("64 pixels", 64),
    Setting("128 pixels", 128),
    Setting("224 pixels", 224),
    Setting("256 pixels", 256),
    Setting("all layers, 64 pixels", 64, shrink=False),
    Setting("all layers, 224 pixels", 224, shrink=False),
    Setting("all layers, 256 pixels", 256, shrink=False),
    Setting("all layers, 299 pixels", 299, shrink=False),
)


def jobs() -> list[Job]:
    """One job for each module that has models of its own."""
    return [
        Job("timm", smallest(names), "image classification", module)
        for module in timm.list_modules()
        if (names := timm.list_models(module=module, include_tags=False))
    ]


def smallest(names: list[str]) -> str:
    """The model whose name matches the earliest entry of `SMALL`; of several such models, the one with the shortest name."""
    rank = {name: next(at for at, word in enumerate(SMALL) if re.search(word, name)) for name in names}
    return min(names, key=lambda name: (rank[name], len(name), name))


def make(job: Job, setting: Setting, layers: int = LAYERS) -> tuple[nn.Module, dict]:
    """The model, and its inputs by name: images of `setting.image` pixels."""
    model = small(lambda: timm.create_model(job.name, pretrained=False, num_classes=CLASSES), setting, layers)
    torch.manual_seed(1)
    return model, {first_input(model): torch.randn(ROWS, 3, setting.image, setting.image)}


def small(create: Callable[[], nn.Module], setting: Setting, layers: int) -> nn.Module:
    """A model of the class that `create` builds, with smaller arguments."""
    if not setting.shrink:
        return built(create)
    cls, given = constructor(create)
    given = {name: shrunk(name, value, layers, setting.image) for name, value in given.items()}
    return built(lambda: cls(**given))


def first_input(model: nn.Module) -> str:
    return next(iter(inspect.signature(model.forward).parameters))
