"""Tiny models of every class that transformers' auto classes list, and a batch for each.

No model has a rule of its own. The fields of a configuration are shrunk by their names and types (`RULES`), and the
inputs follow from the task and the signature of `forward`. Where that does not train, the next of `SETTINGS` is tried.
"""
from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

ROWS, LENGTH, VOCABULARY = 6, 16, 128
LAYERS, HEADS, HEAD_DIM = 4, 4, 16
WIDTH = HEADS * HEAD_DIM
MOST_PARAMETERS = 30_000_000  # a model of more has a size that no rule knows

TASKS = {
    "causal LM": "CAUSAL_LM",
    "masked LM": "MASKED_LM",
    "sequence classification": "SEQUENCE_CLASSIFICATION",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "image classification": "IMAGE_CLASSIFICATION",
    "audio classification": "AUDIO_CLASSIFICATION",
    "audio frames": "AUDIO_FRAME_CLASSIFICATION",
    "audio x-vector": "AUDIO_XVECTOR",
    "CTC": "CTC",
    "speech seq2seq": "SPEECH_SEQ_2_SEQ",
}
CLASSIFICATION = ("sequence classification", "image classification", "audio classification", "audio x-vector")


@dataclass(frozen=True)
class Job:
    """A class of transformers, the type of its configuration, and what it is trained for (a key of `TASKS`)."""

    name: str
    config: str
    task: str


def jobs() -> list[Job]:
    """Every class once, for the first task that lists it."""
    found: dict[str, Job] = {}
    for task, mapping in TASKS.items():
        for config, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, Job(name, config, task))
    return list(found.values())


# ---- configurations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What a model and its batch are made with. `rules` go before `RULES`; `fill` gives fields without a default a value."""

    name: str
    image: int = 32  # pixels
    patch: int = 8
    samples: int = 4000  # of sound
    bins_first: bool = False  # in a spectrogram
    padding: bool = True
    fill: bool = False
    rules: tuple = ()


def at_most(most: int) -> Callable[[int], int]:
    return lambda value: min(value, most)


def default(value: int) -> int:
    return value


# The first rule whose pattern is found in a field's name decides what an integer becomes: a value, or a function of the
# default. What no rule names is left as it is.
RULES = (
    (r"^pad_token_id$", 0), (r"^bos_token_id$", 1), (r"^eos_token_id$", 2), (r"decoder_start_token_id", 2),
    (r"token_(id|index)$|pad_id$", at_most(VOCABULARY - 2)),
    (r"type_vocab_size", at_most(4)), (r"vocab", at_most(VOCABULARY)),
    (r"experts_per_tok|top_?k$|moe_k$", at_most(2)), (r"shared_expert(s|_num)?$", at_most(1)), (r"expert.*(size|dim)", 32),
    (r"n_group$|topk_group|expert_group", 1), (r"num.*experts?$|experts?_num|n_.*experts$", at_most(4)),
    (r"first_k_dense|num_dense_layers|_offset$", at_most(1)), (r"_period$|_pattern$|every_n|_interval$|_step$", at_most(2)),
    (r"nextn|mtp|shared_layers", 0),
    (r"layers?$|depths?$|num_blocks$|per_block$", at_most(LAYERS)),
    (r"(key_value|kv|groups?_query|query_groups?|multi_query).*(heads?|group)", at_most(2)), (r"heads?$", at_most(HEADS)),
    (r"n_?groups", at_most(2)),
    (r"rope_head_dim|nope_head_dim|rotary_dim", HEAD_DIM // 2),
    (r"head_?dim|d_head|dim_head|d_kv|head_size|kv_channels", HEAD_DIM),
    (r"rank", 16), (r"state_size|d_state|num_latents", 8), (r"source_positions", 64), (r"pos_shape", 4),
    (r"position|n_ctx|max_seq|max_length|context_length", at_most(256)),
    (r"window|attention_chunk|local_attention|chunk_size|block_size", at_most(8)),
    (r"kernel|pool_size|stride|num_channels|in_channels|audio_channels|mel_bins|input_feat|projection_input_dim", default),
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
    Setting("eight heads", rules=((r"kv|key_value", default), (r"heads?$", at_most(8)),)),
    Setting("one head", rules=((r"heads?$", 1),)),
    Setting("bins first", bins_first=True),
    Setting("one second", samples=16000),
    Setting("image 64", image=64),
    Setting("image 224", image=224, patch=16),
    Setting("default sizes", rules=((SIZES, default),)),
    Setting("default sizes, bins first", rules=((SIZES, default),), bins_first=True),
    Setting("default sizes, image 224", image=224, patch=16, rules=((SIZES, default),)),
)


def shrink(config_class: type[PreTrainedConfig], setting: Setting, **given: Any) -> PreTrainedConfig:
    """A tiny configuration. Only fields with a default are set: the configuration derives the others from them."""
    made, fields = vars(config_class()), fields_of(config_class)
    staged = any(re.search(r"depths|num_heads", name) and isinstance(value, list | tuple) for name, value in fields.items())
    for name, value in fields.items():
        if name in given:
            continue
        if isinstance(made.get(name), PreTrainedConfig):
            given[name] = shrink(type(made[name]), setting)
        elif isinstance(value, list | tuple) and len(value) == made.get("num_hidden_layers") > LAYERS:
            given[name] = value[:LAYERS]
        elif value is not None:
            given[name] = shrunk(name, value, setting, staged)
        elif made.get(name) is None and setting.fill and re.search(r"heads?$|head_dim|group|topk|experts|vocab_size", name):
            given[name] = shrunk(name, 1 << 20, setting, staged)
    heads, kv = "num_attention_heads", "num_key_value_heads"
    if kv in given and heads in given and made[kv] == made[heads]:
        given[kv] = given[heads]
    return config_class(**given)


def fields_of(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Name and default of each field; None where there is no default."""
    made = {f.name: f.default_factory() if callable(f.default_factory) else f.default
            for f in dataclasses.fields(config_class)}
    return {name: None if value is dataclasses.MISSING else value for name, value in made.items()}


def shrunk(name: str, value: Any, setting: Setting, staged: bool) -> Any:
    """The small value of one field. In a model of stages, widths keep their ratios, as their heads do."""
    if isinstance(value, bool):
        return value and not re.search("use_cache|spec_augment", name)
    if isinstance(value, list | tuple):
        if re.search(r"depths|blocks|layers", name) and value and all(isinstance(v, int) for v in value):
            return type(value)(min(v, LAYERS if v == max(value) else 2) for v in value)
        return type(value)(shrunk(name, v, setting, True) for v in value)
    if isinstance(value, int | float) and re.search(r"dropout|drop_|layerdrop|pdrop|jitter|mask_(time|feature)_prob", name):
        return type(value)(0)
    if not isinstance(value, int):
        return value
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
            return small(value) if callable(small) else small
    return value


# ---- models and batches ----------------------------------------------------------------------------------------------


def build(job: Job, setting: Setting) -> nn.Module:
    """The model with random weights, in training mode, without dropout.

    Raises `ValueError` where it has more than `MOST_PARAMETERS`, and whatever the class raises.
    """
    cls = getattr(transformers, job.name)
    config_class = cls.config_class or CONFIG_MAPPING[job.config]
    decoder = job.task == "causal LM" and "is_decoder" in fields_of(config_class)
    config = shrink(config_class, setting, **({"is_decoder": True} if decoder else {}))
    for name, value in (("pad_token_id", 0), ("decoder_start_token_id", 0)):
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"it has {count / 1e6:.0f} M parameters after shrinking")
    torch.manual_seed(0)
    model = cls(config).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batch(model: nn.Module, job: Job, setting: Setting) -> dict[str, torch.Tensor]:
    """A batch of `ROWS` rows: the model's main input, what its `forward` requires, a mask where it takes one, labels."""
    torch.manual_seed(1)
    accepted = inspect.signature(model.forward).parameters
    wanted = {n for n, p in accepted.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    wanted |= {model.main_input_name} | ({"attention_mask", "bbox", "labels"} & set(accepted))
    made: dict[str, torch.Tensor] = {}
    for name in sorted(wanted, key=list(accepted).index):
        if name == "attention_mask":
            if "input_ids" in made and setting.padding:
                made[name] = padding(made["input_ids"], model.config)
            elif "input_features" in made and setting.padding and not setting.bins_first:
                made[name] = torch.ones(made["input_features"].shape[:2], dtype=torch.long)
        elif name == "labels":
            made[name] = labels(model, job, made)
        elif name == "bbox":
            made[name] = torch.randint(0, 30, (ROWS, LENGTH, 4)).sort(dim=-1).values
        elif name.endswith("input_ids") or name == "inputs" and job.task != "image classification":
            made[name] = tokens(model.config)
        elif name in ("pixel_values", "inputs"):
            made[name] = torch.randn(ROWS, found(model.config, "num_channels") or 3, *image_size(model.config, setting))
        elif name in ("input_values", "input_features"):
            made[name] = sound(model.config, setting)
        else:
            raise ValueError(f"no rule makes the input {name!r}")
    return made


def found(config: PreTrainedConfig, *names: str) -> Any:
    """The first of these fields that a configuration or one within it has."""
    values = vars(config)
    own = next((values[n] for n in names if values.get(n) is not None), None)
    return own or next((v for c in values.values() if isinstance(c, PreTrainedConfig) and (v := found(c, *names))), None)


def tokens(config: PreTrainedConfig) -> torch.Tensor:
    """Random tokens, the last of each row the one that ends a text."""
    made = torch.randint(3, min(found(config, "vocab_size") or VOCABULARY, 90), (ROWS, LENGTH))
    made[:, -1] = end(config)
    return made


def end(config: PreTrainedConfig) -> int:
    token = found(config, "eos_token_id") or 2
    return token if isinstance(token, int) else token[0]


def padding(input_ids: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """A mask that makes one row shorter; its tokens are changed accordingly."""
    mask = torch.ones_like(input_ids)
    mask[1, -4:] = 0
    input_ids[1, -4:] = found(config, "pad_token_id") or 0
    input_ids[1, -5] = end(config)
    return mask


def image_size(config: PreTrainedConfig, setting: Setting) -> tuple[int, int]:
    size = found(config, "image_size") or setting.image
    return (size, size) if isinstance(size, int) else tuple(size)


def sound(config: PreTrainedConfig, setting: Setting) -> torch.Tensor:
    """A spectrogram where the configuration names a number of bins, a wave otherwise."""
    bins = found(config, "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_feat_size")
    if bins is None:
        return torch.randn(ROWS, setting.samples)
    frames = found(config, "max_length") or 2 * (found(config, "max_source_positions") or 64)
    return torch.randn(ROWS, bins, frames) if setting.bins_first else torch.randn(ROWS, frames, bins)


def labels(model: nn.Module, job: Job, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the task is to learn."""
    classes = model.config.num_labels
    if job.task in CLASSIFICATION:
        return torch.randint(0, classes, (ROWS,))
    if job.task == "audio frames":
        with torch.no_grad():
            frames = model(**inputs).logits.shape[1]
        return nn.functional.one_hot(torch.randint(0, classes, (ROWS, frames)), classes)
    if job.task == "CTC":
        return torch.randint(3, 30, (ROWS, 4))
    made = tokens(model.config)
    made[0, -5:] = -100  # micro-batches with other numbers of counted tokens
    return made
