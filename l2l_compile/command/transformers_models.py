"""A model of transformers on the meta device, from the content of its config. Runs no code of the config's folder."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from typing import Any

import torch

from l2l_compile.command.failures import failing_as
from l2l_compile.command.quantized_models import QUANTIZED, quantize
from l2l_compile.errors import OptionError
from l2l_compile.ir.precision import DTYPES

INSTALL = "pip install transformers accelerate peft"


def transformers_library() -> Any:
    """The library. Raises `OptionError` if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise OptionError(f"a config needs transformers, which is not installed: {INSTALL}") from error
    return transformers


def build(content: dict[str, Any], where: str) -> Any:
    """The model of a config, on the meta device, with parameters in float32. `where` names the config in errors.

    The class is the first of `architectures`; a config without them is one of a causal language model. Raises `OptionError` if
    transformers has no such class, or if the class does not take the config.
    """
    transformers = transformers_library()
    config = _config_of(content, where, transformers)
    kind = _class_of(content, config, where, transformers)
    failing = failing_as(f"{where}: {kind.__name__} cannot be made from this config")
    with failing, quiet(transformers), torch.device("meta"), _default_dtype(torch.float32):
        return kind(config)


def _config_of(content: dict[str, Any], where: str, transformers: Any) -> Any:
    known, name = transformers.CONFIG_MAPPING, content["model_type"]
    if name not in known:
        raise OptionError(f"{where}: transformers has no model_type {name[:80]!r}{_nearest(name, known)}{_own_code(content)}")
    with failing_as(f"{where}: no config of model_type {name!r}"), quiet(transformers):
        config = known[name].from_dict(content)
        config.use_cache = False
        return config


def _class_of(content: dict[str, Any], config: Any, where: str, transformers: Any) -> Any:
    named = content.get("architectures")
    if not named and named is not None and named != []:
        raise OptionError(f"{where}: architectures must be a list of names of classes, got {type(named).__name__}")
    if not named:
        causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) not in causal:
            raise OptionError(
                f"{where}: the config has no `architectures`, and model_type {config.model_type!r} has no causal language model"
            )
        return causal[type(config)]
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise OptionError(f"{where}: architectures must be a list of names of classes")
    kind = _model_class(named[0], transformers)
    if kind is None:
        raise OptionError(
            f"{where}: transformers has no model class {named[0][:80]!r}{_own_code(content)}. Name a class of transformers in `architectures`, "
            "or give a package.module:function that returns the model and its batch"
        )
    if kind.config_class is None or not isinstance(config, kind.config_class):
        raise OptionError(
            f"{where}: {named[0]} takes {getattr(kind.config_class, '__name__', 'no config')}, and model_type {config.model_type!r} gives "
            f"{type(config).__name__}"
        )
    return kind


def _model_class(name: str, transformers: Any) -> Any:
    """The model class of transformers with this name; None if there is none, or if the name is of anything else."""
    try:
        found = getattr(transformers, name, None)
    except Exception:  # noqa: BLE001 - a class whose libraries are missing
        return None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model and found is not transformers.PreTrainedModel else None


def _own_code(content: dict[str, Any]) -> str:
    return "; `auto_map` names code of the folder, which is not run" if "auto_map" in content else ""


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Context manager in which the library logs errors alone."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def with_adapters(model: Any, rank: int, base: str, where: str) -> Any:
    """The model with LoRA adapters of this rank on all its linear layers; the model itself is frozen.

    `base` is a precision of the library or a kind of quantized weights. Raises `OptionError` if a library is not installed, or does
    not take the model.
    """
    try:
        import peft
    except ImportError as error:
        raise OptionError("--lora needs PEFT, which is not installed: pip install peft") from error
    with failing_as(f"{where}: PEFT makes no adapters"), torch.device("meta"):
        adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        adapted = peft.get_peft_model(model.to(DTYPES.get(base, torch.bfloat16)), adapters)
    if base in QUANTIZED:
        quantize(adapted, base)
    return adapted
