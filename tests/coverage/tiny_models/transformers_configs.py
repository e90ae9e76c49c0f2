"""Tiny configurations of transformers: fields are shrunk by their names and types (`RULES`)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from .job import LAYERS

LENGTH, VOCABULARY = 16, 128
HEADS, HEAD_DIM = 4, 16
WIDTH = HEADS * HEAD_DIM


@dataclass(frozen=True)
class Setting:
    """The settings of a model and its batch. `rules` come before `RULES`; `fill` sets some fields that have no default."""

    name: str
    image: int = 32  # pixels
    patch: int = 8
    samples: int = 4000  # samples of sound
    bins_first: bool = False  # order of dimensions in a spectrogram
    padding: bool = True
    images: bool = True  # images besides text, if a model takes both
    tiles: bool = False  # several images in a row of the batch, in a dimension of their own
    labels: bool = True  # if False, the loss is computed from the outputs
    fill: bool = False
    rules: tuple = ()
    layers: int = LAYERS  # layers in a stack


Rule = Callable[[int, Setting], int]


def at_most(most: int) -> Rule:
    return lambda value, _: min(value, most)


def default(value: int, _: Setting) -> int:
    return value


def depth(value: int, setting: Setting) -> int:
    """The number of layers of a stack. A stack of fewer than `LAYERS` keeps its number."""
    return value if value < LAYERS else setting.layers


# The first rule whose pattern is found in a field's name decides what an integer becomes: a value, or a function of the
# default. Other fields keep their values.
RULES = (
    (r"^pad_token_id$", 0),
    (r"^bos_token_id$", 1),
    (r"^eos_token_id$", 2),
    (r"decoder_start_token_id", 2),
    (r"video.*token_(id|index)$", at_most(VOCABULARY - 3)),
    (r"audio.*token_(id|index)$", at_most(VOCABULARY - 4)),
    (r"token_(id|index)$|pad_id$", at_most(VOCABULARY - 2)),
    (r"type_vocab_size", at_most(4)),
    (r"vocab", at_most(VOCABULARY)),
    (r"experts_per_tok|top_?k$|moe_k$", at_most(2)),
    (r"shared_expert(s|_num)?$", at_most(1)),
    (r"expert.*(size|dim)", 32),
    (r"n_group$|topk_group|expert_group", 1),
    (r"num.*experts?$|experts?_num|n_.*experts$", at_most(4)),
    (r"first_k_dense|num_dense_layers|_offset$", at_most(1)),
    (r"_period$|_pattern$|every_n|_interval$|_step$", at_most(2)),
    (r"nextn|mtp|shared_layers", 0),
    (r"layers?$|depths?$|num_blocks$|per_block$", depth),
    (r"(key_value|kv|groups?_query|query_groups?|multi_query).*(heads?|group)", at_most(2)),
    (r"heads?$", at_most(HEADS)),
    (r"n_?groups", at_most(2)),
    (r"rope_head_dim|nope_head_dim|rotary_dim", HEAD_DIM // 2),
    (r"head_?dim|d_head|dim_head|d_kv|head_size|kv_channels", HEAD_DIM),
    (r"rank", 16),
    (r"state_size|d_state|num_latents", 8),
    (r"source_positions", 64),
    (r"pos_shape", 4),
    (r"position|n_ctx|max_seq|max_length|context_length", at_most(256)),
    (r"num_windows", at_most(4)),
    (r"window|attention_chunk|local_attention|chunk_size|block_size", at_most(8)),
    (
        r"kernel|pool_size|stride|tubelet|merge_size|temporal_patch|scale_factor|num_channels|in_channels|audio_channels|mel_bins|input_feat|projection_input_dim",
        default,
    ),
    (r"intermediate|ffn|d_ff|dff|d_inner|n_inner|mlp_dim|dim_ff|inner|feed_forward", 2 * WIDTH),
    (r"hidden_size|d_model|d_latents|n_embd|_dim$|^dim$|embed|embd|channels$|_size$", WIDTH),
)
WIDTHS = (WIDTH, 2 * WIDTH)
SIZES = r"^(?!.*vocab).*(dim|hidden|heads?$|channels|embed|embd|rank|inter|ffn|width|groups|_size$)"

SETTINGS = (
    Setting("plain"),
    Setting("no padding", padding=False),
    Setting("default layers", rules=((r"layers?$", default),)),
    Setting("no optional field", fill=True),
    Setting(
        "eight heads",
        rules=(
            (r"kv|key_value", default),
            (r"heads?$", at_most(8)),
        ),
    ),
    Setting("one head", rules=((r"heads?$", 1),)),
    Setting("bins first", bins_first=True),
    Setting("one second", samples=16000),
    Setting("image 64", image=64),
    Setting("image 224", image=224, patch=16),
    Setting("default sizes", rules=((SIZES, default),)),
    Setting("default sizes, bins first", rules=((SIZES, default),), bins_first=True),
    Setting("default sizes, image 224", image=224, patch=16, rules=((SIZES, default),)),
    Setting(
        "heads of 128",
        rules=((r"heads?$", at_most(2)), (r"hidden_size|embed_dim", 4 * WIDTH), (r"window|section|head_dim", default)),
    ),
    Setting("images in tiles", tiles=True),
    Setting("no labels", labels=False),
    Setting("no labels, image 64", labels=False, image=64),
    Setting("no labels, default sizes", labels=False, rules=((SIZES, default),)),
    Setting("text only", images=False),
)


def shrink(config_class: type[PreTrainedConfig], setting: Setting, **given: Any) -> PreTrainedConfig:
    """A tiny configuration. Only fields with a default are set: the configuration derives the others from them."""
    made, fields = vars(config_class()), fields_of(config_class)
    staged = any(re.search(r"depths|num_heads", name) and isinstance(value, list | tuple) for name, value in fields.items())
    for name, value in fields.items():
        if name in given:
            continue
        if isinstance(made.get(name), PreTrainedConfig):
            given[name] = shrink(type(made[name]), setting, **choices(made[name], setting))
        elif isinstance(value, list | tuple) and len(value) == made.get("num_hidden_layers") > LAYERS:
            given[name] = value[: setting.layers]
        elif value is not None:
            given[name] = shrunk(name, value, setting, staged)
        elif made.get(name) is None and setting.fill and re.search(r"heads?$|head_dim|group|topk|experts|vocab_size", name):
            given[name] = shrunk(name, 1 << 20, setting, staged)
    heads, kv = "num_attention_heads", "num_key_value_heads"
    if kv in given and heads in given and made[kv] == made[heads]:
        given[kv] = given[heads]
    return config_class(**given)


def choices(config: PreTrainedConfig, setting: Setting) -> dict[str, Any]:
    """The values that an outer configuration sets in an inner one: names, flags switched off, and `out_indices`."""
    defaults = fields_of(type(config))
    fields = {name: value for name, value in vars(config).items() if name in defaults}
    chosen = {
        name: value
        for name, value in fields.items()
        if isinstance(value, str) and defaults[name] is None or value is False and defaults[name] is True
    }
    if getattr(config, "out_indices", None):
        chosen["out_indices"] = last_layers(list(config.out_indices), setting)
    return chosen


def fields_of(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The name and the default of each field; None for a field without a default."""
    made = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in dataclasses.fields(config_class)}
    return {name: None if value is dataclasses.MISSING else value for name, value in made.items()}


def shrunk(name: str, value: Any, setting: Setting, staged: bool) -> Any:
    """The small value of one field. In a model with stages, the widths and heads of stages keep their ratios."""
    if isinstance(value, bool):
        return value and not re.search("use_cache|spec_augment", name)
    if isinstance(value, list | tuple):
        return _shrunk_list(name, value, setting)
    if isinstance(value, int | float) and re.search(r"dropout|drop_|layerdrop|pdrop|jitter|mask_(time|feature)_prob", name):
        return type(value)(0)
    return _shrunk_number(name, value, setting, staged) if isinstance(value, int) else value


def _shrunk_list(name: str, value: list | tuple, setting: Setting) -> list | tuple:
    if re.search(r"out_(indices|features)$", name):
        return last_layers(value, setting)
    if re.search(r"depths|blocks|layers", name) and value and all(isinstance(v, int) for v in value):
        return type(value)(depth(v, setting) if v == max(value) else min(v, 2) for v in value)
    return type(value)(shrunk(name, v, setting, True) for v in value)


def _shrunk_number(name: str, value: int, setting: Setting, staged: bool) -> int:
    if re.search(r"image_size|crop_size|input_size", name):
        return setting.image
    if re.search(r"patch_size", name):
        return min(value, setting.patch)
    for pattern, small in (*setting.rules, *RULES):
        if re.search(pattern, name):
            if staged and small in WIDTHS:
                return max(value // 8, 4)
            if staged and pattern == r"heads?$":
                return value
            return small(value, setting) if callable(small) else small
    return value


def last_layers(value: list | tuple, setting: Setting) -> list | tuple:
    """The layers whose outputs a head reads, by number or as `stage9`: as many of the last layers of the smaller model."""
    numbers = [int(re.sub(r"\D", "", str(v)) or 0) for v in value]
    if max(numbers, default=0) <= LAYERS:
        return value
    names = [
        f"stage{n + 1}" if isinstance(v, str) else n
        for n, v in zip(range(setting.layers - len(value), setting.layers), value, strict=True)
    ]
    return type(value)(names)
