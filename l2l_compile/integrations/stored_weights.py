"""The tensors of safetensors files, and what each is in a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Stored:
    """A tensor of a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Conversion:
    """Tensors of files, by name, of which one or several tensors of a model are made as a whole."""

    sources: tuple[str, ...]
    make: Callable[[Callable[[str], torch.Tensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Names:
    """Which tensor of a model each one of the files is."""

    same: dict[str, str]  # name in the files -> name in the model
    made: list[Conversion]
    ignored: Callable[[str], bool]  # names in the files that the model has no use for
    initialise: Callable[[list[str]], None] | None  # computes buffers that are not saved, and tensors of these names
