"""The models of diffusers: UNets, transformers, autoencoders, controlnets.

Constructor arguments are shrunk by their names; inputs follow from the signature of `forward`. The signature does not show
whether a transformer reads images, videos, sound or tokens, so each of them is a setting.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import diffusers.models
import torch
from torch import nn

from .arguments import built, fewer, shrunk
from .job import LAYERS, ROWS, Job

__all__ = ["SETTINGS", "jobs", "make"]

TASKS = {
    "unets": "denoising UNet",
    "transformers": "denoising transformer",
    "autoencoders": "autoencoder",
    "controlnets": "controlnet",
}
WIDTH, HEADS, TOKENS, TEXT, FRAMES = 64, 2, 16, 8, 5


@dataclass(frozen=True)
class Setting:
    """The shape of an input without rows and channels, and the place of channels. Arguments matching `default` keep sizes."""

    name: str
    shape: tuple[int, ...]
    channels_last: bool = False
    default: str = "$^"


KEPT = r"heads?$|_dim$|channels$|_size$|^dim$"
SETTINGS = (
    Setting("image", (16, 16)),
    Setting("tokens", (TOKENS,), channels_last=True),
    Setting("video", (FRAMES, 16, 16)),
    Setting("sound", (64,)),
    Setting("image, default sizes", (16, 16), default=KEPT),
    Setting("tokens, default sizes", (TOKENS,), channels_last=True, default=KEPT),
    Setting("video, default sizes", (FRAMES, 16, 16), default=KEPT),
    Setting("image of 32", (32, 32)),
    Setting("image of 64", (64, 64)),
    Setting("video of 64", (FRAMES, 64, 64)),
    Setting("frames first", (16, 16), default="frames first"),
)

# The first pattern that is found in an argument's name decides.
RULES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"heads?$", lambda value: min(value, HEADS)),
    (r"head_dim$|^(in|out|latent|z)_(channels|dim)$|time.*dim|freq_dim", lambda value: value),
    (r"out_channels|block_channels", lambda value: 32 * math.ceil(value / 256)),
    (r"^base_(dim|channels)$|^(encoder|decoder)_base_(dim|channels)$|^dim$", lambda value: min(value, 32)),
    (r"sample_size", lambda value: 16),
    (
        r"(attention|text|caption|pooled|projection|context|embed|hid|hidden|ffn|intermediate|mlp|cap_feat|image)\w*_(dim|channels|size)$",
        lambda value: min(value, WIDTH),
    ),
)
TEXT_WIDTH = (
    "joint_attention_dim",
    "text_embed_dim",
    "text_dim",
    "caption_channels",
    "cap_feat_dim",
    "caption_dim",
    "encoder_hid_dim",
    "context_in_dim",
    "cross_attention_dim",
)


def jobs() -> list[Job]:
    """Every model class, with a task given by the folder that it is in."""
    # The index for lazy imports of diffusers. Reading the classes themselves would import all of them.
    listed = [(path.split(".")[0], name) for path, names in diffusers.models._import_structure.items() for name in names]
    return [
        Job("diffusers", name, TASKS[folder])
        for folder, name in listed
        if folder in TASKS and "Multi" not in name and hasattr(diffusers, name)
    ]


def make(job: Job, setting: Setting, layers: int = LAYERS) -> tuple[nn.Module, dict]:
    diffusers.logging.set_verbosity_error()
    cls = getattr(diffusers, job.name)
    defaults = {name: p.default for name, p in inspect.signature(cls.__init__).parameters.items()}
    given = {name: value for name, default in defaults.items() if (value := small(name, default, setting, layers)) != default}
    inner = width(defaults)
    same = [name for name, value in defaults.items() if inner and value == inner and not re.search(setting.default, name)]
    given |= dict.fromkeys(same, width(defaults | given))
    model = built(lambda: cls(**given))
    torch.manual_seed(1)
    return model, inputs(model, setting)


def width(arguments: dict[str, Any]) -> int | None:
    """The width of all heads of an attention together. Arguments with this value have to change with it."""
    heads, size = (arguments.get(name) for name in ("num_attention_heads", "attention_head_dim"))
    return heads * size if isinstance(heads, int) and isinstance(size, int) else None


def small(name: str, value: Any, setting: Setting, layers: int) -> Any:
    if value is inspect.Parameter.empty or isinstance(value, bool) or re.search(setting.default, name):
        return fewer(value, layers) if name == "num_layers" and isinstance(value, int) else value
    if isinstance(value, tuple | list) and value and all(type(v) is int for v in value):
        return type(value)(small(name, v, setting, layers) for v in value)
    rule = next((rule for pattern, rule in RULES if re.search(pattern, name)), None) if type(value) is int else None
    return rule(value) if rule else shrunk(name, value, layers, None)


# ---- inputs ----------------------------------------------------------------------------------------------------------


def inputs(model: nn.Module, setting: Setting) -> dict[str, Any]:
    """The required arguments of `forward` and its conditions. Raises `ValueError` for an input that no rule makes."""
    made: dict[str, Any] = {}
    for name, parameter in inspect.signature(model.forward).parameters.items():
        value = MAKERS[name](model.config, setting) if name in MAKERS else None
        if value is None and parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            raise ValueError(f"no rule makes the input {name!r}")
        if value is not None:
            made[name] = value
    return made


def sample(config: Any, setting: Setting) -> torch.Tensor:
    channels = channels_of(config, "in_channels", "latent_channels", "image_channels", "audio_channels") or 3
    if setting.name == "frames first":
        return torch.randn(ROWS, FRAMES, channels, *setting.shape)
    return torch.randn(ROWS, *setting.shape, channels) if setting.channels_last else torch.randn(ROWS, channels, *setting.shape)


def channels_of(config: Any, *names: str) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def text(config: Any, setting: Setting) -> torch.Tensor | None:
    size = channels_of(config, *TEXT_WIDTH)
    return None if size is None else torch.randn(ROWS, TEXT, size)


def pooled(config: Any, setting: Setting) -> torch.Tensor | None:
    size = channels_of(config, "pooled_projection_dim")
    return None if size is None else torch.randn(ROWS, size)


def kinds(config: Any, setting: Setting) -> torch.Tensor | None:
    count = channels_of(config, "num_class_embeds", "num_embeds_ada_norm")
    return None if count is None else torch.randint(0, count, (ROWS,))


def places(config: Any, count: int) -> torch.Tensor:
    """The place of each token: a number for every axis of the rotary embedding. The last two axes are row and column."""
    axes = config.get("axes_dims_rope") or config.get("axes_dims") or (0, 0, 0)
    made = torch.zeros(count, len(axes))
    made[:, -2:] = torch.stack([torch.arange(count) // 4, torch.arange(count) % 4], dim=1)
    return made


def time(config: Any, setting: Setting) -> torch.Tensor:
    return 1000 * torch.rand(ROWS)


def text_mask(config: Any, setting: Setting) -> torch.Tensor:
    made = torch.ones(ROWS, TEXT, dtype=torch.long)
    made[1, -2:] = 0
    return made


def size(config: Any, setting: Setting) -> torch.Tensor:
    return torch.full((ROWS, 2), 128)


MAKERS: dict[str, Callable[[Any, Setting], Any]] = {
    "sample": sample,
    "hidden_states": sample,
    "x": sample,
    "encoder_hidden_states": text,
    "pooled_projections": pooled,
    "timestep": time,
    "timesteps": time,
    "timestep_r": time,
    "r_timestep": time,
    "class_labels": kinds,
    "encoder_attention_mask": text_mask,
    "encoder_mask": text_mask,
    "encoder_hidden_states_mask": text_mask,
    "guidance": lambda config, setting: torch.rand(ROWS) if config.get("guidance_embeds") else None,
    "img_ids": lambda config, setting: places(config, TOKENS),
    "txt_ids": lambda config, setting: places(config, TEXT),
    "img_shapes": lambda config, setting: [[(1, 4, 4)]] * ROWS,
    "num_frames": lambda config, setting: 1 if setting.channels_last else None,
    "height": lambda config, setting: 4 if setting.channels_last else None,
    "width": lambda config, setting: 4 if setting.channels_last else None,
    "original_size": size,
    "target_size": size,
    "crop_coords": size,
    "added_cond_kwargs": lambda config, setting: {"resolution": None, "aspect_ratio": None},
    "controlnet_cond": lambda config, setting: torch.randn(ROWS, 3, *(8 * n for n in setting.shape)),
    "conditioning_scale": lambda config, setting: 1.0,
}
