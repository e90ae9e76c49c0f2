"""The smallest model of each module file of torchvision's classification, video and segmentation."""

from __future__ import annotations

import torch
import torchvision.models
from torch import nn
from torchvision.models import get_model, get_model_builder, get_model_weights, list_models

from .job import LAYERS, ROWS, Job
from .timm_models import CLASSES, SETTINGS, Setting, first_input, small

__all__ = ["SETTINGS", "jobs", "make"]

FRAMES = 8  # frames of a video
TASKS = {
    "image classification": torchvision.models,
    "video classification": torchvision.models.video,
    "semantic segmentation": torchvision.models.segmentation,
}


def jobs() -> list[Job]:
    """For each task, the smallest model of each module file."""
    found: dict[tuple[str, str], str] = {}
    for task, module in TASKS.items():
        for name in sorted(list_models(module=module), key=parameters):
            found.setdefault((task, get_model_builder(name).__module__), name)
    return [Job("torchvision", name, task) for (task, _), name in found.items()]


def parameters(name: str) -> int:
    """The number of parameters of a model, according to torchvision's metadata of its weights."""
    return get_model_weights(name).DEFAULT.meta["num_params"]


def make(job: Job, setting: Setting, layers: int = LAYERS) -> tuple[nn.Module, dict]:
    """The model, and a batch of images or videos."""
    unloaded = {"weights": None} | ({"weights_backbone": None} if job.task == "semantic segmentation" else {})
    model = small(lambda: get_model(job.name, **unloaded, num_classes=CLASSES), setting, layers)
    torch.manual_seed(1)
    frames = [FRAMES] if job.task == "video classification" else []
    return model, {first_input(model): torch.randn(ROWS, 3, *frames, setting.image, setting.image)}
