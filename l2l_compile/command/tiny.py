"""Tiny models of classes of transformers, for `l2l coverage`."""

from __future__ import annotations

from typing import Any

import torch

from l2l_compile.command.models import Workload, load, workload
from l2l_compile.command.transformers_models import transformers_library
from l2l_compile.errors import OptionError

_ROWS, _LENGTH = 4, 8
# Sizes of a config, by their usual names. Names that a config lacks are left out.
_SIZES = {
    "hidden_size": 16, "d_model": 16, "n_embd": 16, "dim": 16, "intermediate_size": 24, "d_ff": 24, "hidden_dim": 24,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 2, "num_heads": 2, "n_head": 2, "n_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "d_kv": 8,
    "vocab_size": 32, "max_position_embeddings": 32, "n_positions": 32, "image_size": 16, "patch_size": 8,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
_DROPOUT = ("dropout", "_pdrop", "drop_rate", "dropout_prob", "dropout_rate")


def tiny(name: str) -> Workload:
    """A tiny model of a class of transformers, without dropout, or the model of `package.module:function`.

    Raises `OptionError` if there is no such class or function.
    """
    if ":" in name:
        return load(name, _ROWS, _LENGTH)
    transformers = transformers_library()
    kind: Any = getattr(transformers, name, None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model or kind.config_class is None:
        raise OptionError(f"transformers has no model class {name!r}")
    torch.manual_seed(0)
    model = kind(_small(kind.config_class()))
    return workload(model.train(), _ROWS, _LENGTH)


def _small(config: Any) -> Any:
    for name, value in _SIZES.items():
        if hasattr(config, name) or name.endswith("_token_id"):
            setattr(config, name, value)
    for name, value in list(vars(config).items()):
        if name.endswith(_DROPOUT) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config
