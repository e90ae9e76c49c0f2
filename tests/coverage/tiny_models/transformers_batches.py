"""A batch for a model of transformers, from the task and the signature of `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .job import ROWS, Job
from .transformers_configs import LENGTH, VOCABULARY, Setting

CHOICES, OBJECTS, FRAMES = 3, 2, 4

# Inputs that a task needs besides the required arguments of `forward`, if `forward` takes them.
OPTIONAL = {
    "question answering": {"start_positions", "end_positions"},
    "document question answering": {"start_positions", "end_positions", "pixel_values"},
    "visual question answering": {"pixel_values", "labels"},
    "image-text-to-text": {"pixel_values", "image_grid_thw", "labels"},
    "universal segmentation": {"mask_labels", "class_labels", "labels"},
    "instance segmentation": {"mask_labels", "class_labels", "labels"},
    "masked image modeling": {"bool_masked_pos"},
    "image-text contrast": {"pixel_values", "return_loss"},
    "time series prediction": {"future_values"},
    "time series classification": {"target_values"},
    "time series regression": {"target_values"},
    "zero-shot object detection": {"input_ids"},
    "pretraining": {"pixel_values", "image_grid_thw"},
}
ALWAYS = {"attention_mask", "bbox"}
TARGETS = {"labels", "start_positions", "end_positions", "mask_labels", "class_labels", "target_values", "future_values"}


@dataclass
class Batch:
    """The arguments of the functions that make inputs, and the inputs `made` so far."""

    model: nn.Module
    job: Job
    setting: Setting
    made: dict[str, Any]

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def image(self) -> tuple[int, int]:
        size = found(self.config, "image_size") or self.setting.image
        return (size, size) if isinstance(size, int) else tuple(size)

    @property
    def channels(self) -> int:
        return found(self.config, "num_channels", "in_channels", "in_chans") or 3

    @property
    def patch(self) -> int:
        size = found(self.config, "patch_size") or self.setting.patch
        return size if isinstance(size, int) else size[0]


def batch(model: nn.Module, job: Job, setting: Setting) -> dict[str, Any]:
    """A batch of `ROWS` rows: the model's main input, the required arguments of `forward`, a mask if it takes one, labels.

    Raises `ValueError` for a required input that no rule makes.
    """
    torch.manual_seed(1)
    accepted = inspect.signature(model.forward).parameters
    required = {n for n, p in accepted.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    main = model.main_input_name
    wanted = required | ALWAYS | OPTIONAL.get(job.task, {"labels"}) | ({main} if isinstance(main, str) else set(main))
    if not setting.labels:
        wanted -= TARGETS
    if setting.tiles:
        wanted |= {"image_sizes"} & set(accepted)
    if not setting.images:
        wanted -= {"pixel_values", "image_grid_thw", "image_sizes"}
    of = Batch(model, job, setting, {})
    for name in sorted(wanted & set(accepted), key=lambda name: (name in TARGETS, list(accepted).index(name))):
        value = INPUTS[name](of) if name in INPUTS else None
        if value is None and name in required:
            raise ValueError(f"no rule makes the input {name!r}")
        if value is not None:
            of.made[name] = value
    if "pixel_values" in of.made and "input_ids" in of.made and job.task in ("image-text-to-text", "pretraining"):
        place_images(of)
    return of.made


def found(config: PreTrainedConfig, *names: str) -> Any:
    """The first of these fields that a configuration, or else a configuration inside of it, has."""
    values = vars(config)
    own = next((values[n] for n in names if values.get(n) is not None), None)
    return own or next((v for c in values.values() if isinstance(c, PreTrainedConfig) and (v := found(c, *names))), None)


# ---- text ------------------------------------------------------------------------------------------------------------


def tokens(config: PreTrainedConfig, *shape: int) -> torch.Tensor:
    """Random tokens. The last token of each row is the end-of-text token."""
    made = torch.randint(3, min(found(config, "vocab_size") or VOCABULARY, 90), shape or (ROWS, LENGTH))
    made[..., -1] = end(config)
    return made


def end(config: PreTrainedConfig) -> int:
    token = found(config, "eos_token_id") or 2
    return token if isinstance(token, int) else token[0]


def text(of: Batch) -> torch.Tensor:
    return tokens(of.config, ROWS, CHOICES, LENGTH) if of.job.task == "multiple choice" else tokens(of.config)


def mask(of: Batch) -> torch.Tensor | None:
    """A mask that makes one row shorter. The tokens of that row are changed accordingly."""
    if not of.setting.padding:
        return None
    if "input_features" in of.made and not of.setting.bins_first:
        return torch.ones(of.made["input_features"].shape[:2], dtype=torch.long)
    if "input_ids" not in of.made:
        return None
    input_ids = of.made["input_ids"]
    made = torch.ones_like(input_ids)
    made[1, ..., -4:] = 0
    input_ids[1, ..., -4:] = found(of.config, "pad_token_id") or 0
    input_ids[1, ..., -5] = end(of.config)
    return made


def place_images(of: Batch) -> None:
    """If the model joins text and image by placeholders, put one before the row's text for each feature of its image."""
    token = found(of.config, "image_token_id", "image_token_index")
    features = getattr(of.model, "get_image_features", None)
    if token is None or features is None:
        return
    accepted = set(inspect.signature(features).parameters)
    with torch.no_grad():
        made = features(**{name: value for name, value in of.made.items() if name in accepted})
    made = getattr(made, "pooler_output", made)
    made = list(made) if isinstance(made, list | tuple) else [made]
    count = sum(part.numel() // part.shape[-1] for part in made) // ROWS
    before = torch.full((ROWS, count), token)
    for name, added in (("input_ids", before), ("attention_mask", torch.ones_like(before)), ("labels", before * 0 - 100)):
        if name in of.made and of.made[name].shape[:1] == before.shape[:1]:
            of.made[name] = torch.cat([added, of.made[name]], dim=1)
    if "mm_token_type_ids" in inspect.signature(of.model.forward).parameters:  # 1 for a placeholder of an image, 0 for text
        of.made["mm_token_type_ids"] = (of.made["input_ids"] == token).long()


# ---- images, sound, series -------------------------------------------------------------------------------------------


def pixels(of: Batch) -> torch.Tensor:
    height, width = of.image
    if of.job.task == "video classification":
        frames = found(of.config, "num_frames", "frames_per_clip") or FRAMES
        return torch.randn(ROWS, frames, of.channels, height, width)
    if "image_grid_thw" in inspect.signature(of.model.forward).parameters:  # patches of all images, concatenated
        patches = (height // of.patch) * (width // of.patch)
        entries = of.channels * (found(of.config, "temporal_patch_size") or 1) * of.patch**2
        return torch.randn(ROWS * patches, entries)
    return torch.randn(ROWS, *([1] if of.setting.tiles else []), of.channels, height, width)


def grid(of: Batch) -> torch.Tensor:
    """Frames, rows and columns of patches of each image."""
    height, width = of.image
    return torch.tensor([[1, height // of.patch, width // of.patch]] * ROWS)


def wave_or_spectrogram(of: Batch) -> torch.Tensor:
    """A spectrogram if the configuration has a number of bins, else a wave."""
    bins = found(of.config, "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_feat_size")
    if bins is None:
        return torch.randn(ROWS, of.setting.samples)
    frames = found(of.config, "max_length") or 2 * (found(of.config, "max_source_positions") or 64)
    return torch.randn(ROWS, bins, frames) if of.setting.bins_first else torch.randn(ROWS, frames, bins)


def series(of: Batch) -> torch.Tensor:
    length = found(of.config, "context_length") or LENGTH
    channels = found(of.config, "num_input_channels")
    return torch.randn(ROWS, length, channels) if channels else torch.randn(ROWS, length)


def hidden_patches(of: Batch) -> torch.Tensor:
    height, width = of.image
    return torch.rand(ROWS, (height // of.patch) * (width // of.patch)) > 0.5


def flattened_patches(of: Batch) -> torch.Tensor:
    """Patches with their row and column before the pixels."""
    place = torch.arange(1, LENGTH + 1).float().view(1, -1, 1).expand(ROWS, -1, 2)
    entries = found(of.config, "patch_embed_hidden_size") or of.channels * of.patch**2
    return torch.cat([place, torch.randn(ROWS, LENGTH, entries)], dim=-1)


# ---- labels ----------------------------------------------------------------------------------------------------------


def labels(of: Batch) -> Any:
    return LABELS.get(of.job.task, text_to_learn)(of)


def classes(of: Batch, *shape: int) -> torch.Tensor:
    return torch.randint(0, of.config.num_labels, (ROWS, *shape))


def audio_frames(of: Batch) -> torch.Tensor:
    with torch.no_grad():
        frames = of.model(**of.made).logits.shape[1]
    return nn.functional.one_hot(classes(of, frames), of.config.num_labels)


def text_to_learn(of: Batch) -> torch.Tensor:
    made = tokens(of.config)
    made[0, -5:] = -100  # so that micro-batches have different numbers of counted tokens
    return made


def answers(of: Batch) -> torch.Tensor:
    """The text of the answer if the model has a decoder, else a score for each answer."""
    writes = "decoder_input_ids" in inspect.signature(of.model.forward).parameters
    return text_to_learn(of) if writes else torch.rand(ROWS, of.config.num_labels)


def objects(of: Batch) -> list[dict[str, torch.Tensor]]:
    """For each image, the classes, boxes and masks of its objects."""
    boxes = torch.rand(ROWS, OBJECTS, 4) / 4 + 0.25
    return [
        {"class_labels": kinds, "boxes": b, "masks": m}
        for kinds, b, m in zip(classes(of, OBJECTS), boxes, masks(of), strict=True)
    ]


def masks(of: Batch) -> list[torch.Tensor]:
    return list((torch.rand(ROWS, OBJECTS, *of.image) > 0.5).float())


def target(of: Batch) -> torch.Tensor:
    if of.job.task == "time series classification":
        return classes(of)
    return torch.randn(ROWS, found(of.config, "num_targets") or 1)


LABELS: dict[str, Callable[[Batch], Any]] = {
    "sequence classification": classes,
    "image classification": classes,
    "audio classification": classes,
    "audio x-vector": classes,
    "video classification": classes,
    "audio frames": audio_frames,
    "CTC": lambda of: torch.randint(3, 30, (ROWS, 4)),
    "token classification": lambda of: classes(of, LENGTH),
    "multiple choice": lambda of: torch.randint(0, CHOICES, (ROWS,)),
    "next sentence": lambda of: torch.randint(0, 2, (ROWS,)),
    "visual question answering": answers,
    "object detection": objects,
    "zero-shot object detection": objects,
    "universal segmentation": objects,
    "instance segmentation": objects,
    "semantic segmentation": lambda of: classes(of, *of.image),
    "depth estimation": lambda of: torch.rand(ROWS, *of.image) + 0.5,
    "image matting": lambda of: torch.rand(ROWS, 1, *of.image),
    "image to image": lambda of: torch.rand(ROWS, of.channels, *of.image),
}

INPUTS: dict[str, Callable[[Batch], Any]] = {
    "input_ids": text,
    "decoder_input_ids": text,
    "task_inputs": text,
    "inputs": lambda of: pixels(of) if of.job.task == "image classification" else text(of),
    "attention_mask": mask,
    "bbox": lambda of: torch.randint(0, 30, (*of.made["input_ids"].shape, 4)).sort(dim=-1).values,
    "pixel_values": pixels,
    "pixel_values_videos": pixels,
    "image_grid_thw": grid,
    "image_sizes": lambda of: torch.tensor([of.image] * ROWS),
    "flattened_patches": flattened_patches,
    "bool_masked_pos": hidden_patches,
    "input_values": wave_or_spectrogram,
    "input_features": wave_or_spectrogram,
    "past_values": series,
    "future_values": series,
    "target_values": target,
    "return_loss": lambda of: True,
    "labels": labels,
    "mask_labels": masks,
    "class_labels": lambda of: list(classes(of, OBJECTS)),
    "start_positions": lambda of: torch.randint(0, LENGTH // 2, (ROWS,)),
    "end_positions": lambda of: torch.randint(LENGTH // 2, LENGTH, (ROWS,)),
}
