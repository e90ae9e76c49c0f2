"""Imports torchvision and torchaudio whose compiled operators were built for another torch (CUDA wheels next to a CPU torch).

Their models are Python code and train without these operators, but the import of both packages fails: torchvision describes two
operators that do not exist, and torchaudio cannot load its library. transformers and timm import both packages. `repair`
makes them importable; a model that calls a compiled operator still fails.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import torch

# `torchvision/_meta_registrations.py` describes these operators even if they do not exist.
OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
REMEDY = "pip install --index-url https://download.pytorch.org/whl/cpu torchvision torchaudio"


def repair() -> list[str]:
    """Make both packages importable, before anything imports them. Returns the names of those whose operators do not load."""
    broken = [
        name
        for name, library in (("torchvision", "_C*"), ("torchaudio", "lib/_torchaudio*"))
        if name not in sys.modules and not loads(name, library)
    ]
    if "torchvision" in broken:
        for name, schema in OPERATORS.items():
            torch.library.define(f"torchvision::{name}", schema)
    if "torchaudio" in broken:
        sys.modules["torchaudio._extension"] = without_extension()
    return broken


def loads(package: str, library: str) -> bool:
    """Whether the compiled operators of a package load. True for a package that is not installed or has none."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return True
    try:
        for path in Path(spec.origin).parent.glob(f"{library}.so"):
            torch.ops.load_library(path)
    except OSError:
        return False
    return True


def without_extension() -> types.ModuleType:
    """`torchaudio._extension` as it is in a build without compiled operators."""
    module = types.ModuleType("torchaudio._extension")
    module._IS_TORCHAUDIO_EXT_AVAILABLE = module._IS_ALIGN_AVAILABLE = False
    module.fail_if_no_align = lambda function: function
    return module
