"""The tensors of safetensors files, and how they map to the tensors of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: where it is, its shape and its dtype."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Conversion:
    """Makes one or several whole tensors of a model from tensors in files. `make` gets a function that reads one by name."""

    sources: tuple[str, ...]
    make: Callable[[Callable[[str], torch.Tensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class TensorNames:
    """The map from tensors in files to tensors of a model."""

    same: dict[str, str]  # name in the files -> name in the model
    made: list[Conversion]
    ignored: Callable[[str], bool]  # whether the model has no use for a name in the files
    initialise: Callable[[list[str]], None] | None  # computes unsaved buffers, and the tensors of these names
