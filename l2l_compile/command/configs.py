"""Reads a `config.json` of transformers and checks its sizes, before any library is imported. Runs no code of the folder."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from l2l_compile.errors import OptionError

_MOST_BYTES = 10_000_000  # of a config
_MOST = 10**8  # of a size
_MOST_LAYERS = 1000  # each is built and traced
_MOST_EXPERTS = 10_000
_SIZE = re.compile(
    r"(\w+_)?(hidden_size|intermediate_size|vocab_size|num_heads)|num_(\w+_)?(layers|heads)|(num|n)_(\w+_)?experts|(de|en)coder_layers"
    r"|n_(layers?|heads?|embd|positions)|d_(model|ff|kv)|head_dim|max_position_embeddings|image_size|patch_size|num_channels"
)
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "n_embd", "n_layer", "n_head", "d_model")


def read_config(path: Path) -> dict[str, Any]:
    """The content of a `config.json`, or of the one in a folder.

    Raises `OptionError` if there is none, if it cannot be read, if it is no config of transformers, and for a size that is no
    whole number or is out of range.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _parsed(file, _text_of(file))
    if not isinstance(config, dict):
        raise OptionError(f"{file}: a config holds names with values, got a {type(config).__name__}")
    _check_library(config, file)
    for name, value in _sizes_in(config):
        _check_size(name, value, file)
    return config


def _text_of(file: Path) -> str:
    try:
        about = file.stat()
        if not stat.S_ISREG(about.st_mode):
            raise OptionError(f"{file} is no file")
        if about.st_size > _MOST_BYTES:
            raise OptionError(f"{file} has {about.st_size:,} bytes: a config has at most {_MOST_BYTES:,}")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if (file.parent / "model_index.json").exists():
            raise OptionError(
                f"{file.parent} is a folder of diffusers, with a model in each folder below it. {_FUNCTION}"
            ) from error
        raise OptionError(f"{file.parent} has no config.json") from error
    except OSError as error:
        raise OptionError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{file} is no text: a config is JSON in UTF-8") from error


_FUNCTION = "Give a package.module:function that returns the model and its batch"


def _parsed(file: Path, text: str) -> Any:
    def refuse(constant: str) -> None:
        raise OptionError(f"{file}: {constant} is not a number of JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise OptionError(f"{file} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise OptionError(f"{file} is nested too deeply for a config") from error
    except ValueError as error:  # a number with thousands of digits
        raise OptionError(f"{file} is not a config: {error}") from error


def _check_library(config: dict[str, Any], file: Path) -> None:
    kind = config.get("model_type")
    if isinstance(kind, str) and kind:
        return
    if "_class_name" in config:
        raise OptionError(f"{file} is a config of diffusers ({config['_class_name']!s:.80}), not of transformers. {_FUNCTION}")
    if "architecture" in config and "num_features" in config:
        raise OptionError(f"{file} is a config of timm, not of transformers. {_FUNCTION}")
    if "model_type" in config:
        raise OptionError(f"{file}: model_type must be the name of a model of transformers, got {json.dumps(kind)[:80]}")
    raise OptionError(f"{file} has no model_type, so it is no config of transformers. {_FUNCTION}")


def _sizes_in(config: dict[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Names of sizes with their values, those of nested configs as well ("text_config.hidden_size")."""
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            yield from _sizes_in(value, f"{within}{name}.")
        elif _SIZE.fullmatch(name):
            yield f"{within}{name}", value


def _check_size(name: str, value: Any, file: Path) -> None:
    own = name.rpartition(".")[2]
    if value is None:
        if own in _NEEDED:
            raise OptionError(f"{file}: {name} is null, and the model needs a number")
        return
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, bool) or not isinstance(each, int):
            raise OptionError(f"{file}: {name} must be a whole number, got {json.dumps(each)[:80]}")
        least = 1 if own in _NEEDED else 0
        most = _MOST_LAYERS if "layer" in own else _MOST_EXPERTS if "experts" in own else _MOST
        if not least <= each <= most:
            raise OptionError(f"{file}: {name} must be between {least} and {most:,}, got {each:,}")
