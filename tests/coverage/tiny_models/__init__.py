"""Tiny models of the classes of several libraries, and a batch for each, which `run.py` trains.

A library is a module of this package. It lists its `jobs()`, and `make(job, setting, layers)` builds a model and its
inputs with one of the `SETTINGS`, which are tried in order. No model has a rule of its own: sizes are shrunk by the
names and types of configuration fields or constructor arguments, inputs follow from the task and the signature of
`forward`. Models are in training mode without dropout, drop path or label dropout.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

from torch import nn

from .extensions import REMEDY, repair
from .job import LAYERS, ROWS, Job

__all__ = ["LAYERS", "LIBRARIES", "ROWS", "Job", "jobs", "make", "missing", "settings"]

# Each library, and its module in this package. The module is imported if the library is installed.
LIBRARIES = {
    "transformers": "transformers_models",
    "timm": "timm_models",
    "torchvision": "torchvision_models",
    "diffusers": "diffusers_models",
    "torchaudio": "torchaudio_models",
}
INSTALL = 'pip install -e ".[coverage]"'

for _name in repair():
    print(
        f"{_name}: its compiled operators do not load with this torch; its models train without them. Or {REMEDY}",
        file=sys.stderr,
    )


def missing() -> dict[str, str]:
    """The libraries that are not installed, each with the command that installs it."""
    return {name: INSTALL for name in LIBRARIES if importlib.util.find_spec(name) is None}


def module_of(library: str) -> types.ModuleType:
    return importlib.import_module(f".{LIBRARIES[library]}", __package__)


def jobs() -> list[Job]:
    """The jobs of every library that is installed."""
    absent = missing()
    return [job for library in LIBRARIES if library not in absent for job in module_of(library).jobs()]


def settings(job: Job) -> tuple:
    """The settings for `make`, in the order in which to try them; each has a `name`."""
    return module_of(job.library).SETTINGS


def make(job: Job, setting: Any, layers: int = LAYERS) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model with at most `layers` layers in a stack, and the keyword arguments of a batch of `ROWS` rows.

    The arguments may include values without the batch dimension. If the setting does not suit the class, raises the error of
    the class.
    """
    return module_of(job.library).make(job, setting, layers)
