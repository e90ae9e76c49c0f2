"""The model and the batch of a command: from a Hugging Face config, or from a function of the user. Allocates no weights."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from l2l_compile.command.configs import read_config
from l2l_compile.command.functions import called
from l2l_compile.command.quantized_models import entries
from l2l_compile.command.transformers_models import build, with_adapters
from l2l_compile.errors import OptionError

BATCH, LENGTH = 8, 512  # defaults
_MOST = {"batch": 10**7, "length": 10**8, "lora": 10**6}
_HUB_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")  # owner/name
_TASKS = ("ForSequenceClassification", "ForImageClassification")  # one label for each row


@dataclass(frozen=True)
class Workload:
    """A model on the meta device, and the batch of a training step.

    tokens      tokens in the batch; None for a model that takes no tokens
    can_adapt   whether the command can freeze the model and train adapters: it has made the model itself
    """

    name: str
    model: Any
    batch: dict[str, Any] | tuple
    tokens: int | None = None
    can_adapt: bool = False

    def call(self, function: Any) -> Any:
        """`function(*batch)` or `function(**batch)`."""
        return function(**self.batch) if isinstance(self.batch, dict) else function(*self.batch)

    @property
    def parameters(self) -> int:
        """The number of parameters. Quantized weights count as the weights that they stand for."""
        return entries(self.model)

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that take a gradient."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def rows(self) -> int:
        """Rows of the batch: the first size of its first tensor."""
        return next((t.shape[0] for t in tree_leaves(self.batch) if isinstance(t, torch.Tensor) and t.dim()), 1)


def load(given: str, batch: int | None, length: int | None, *, lora: int | None = None, base: str = "bf16") -> Workload:
    """The workload of a folder or `config.json` of transformers, or of `package.module:function`.

    The function returns a model and its batch (a mapping, a tuple or a tensor). It is called on the meta device, with `batch`
    and `length` if it takes them. With `lora`, the rank of adapters, a model of transformers is frozen in `base`: a precision, "nf4"
    or "int8". Raises `OptionError` if `given` is none of these, for a config or a function that gives no model, and for a size that
    is not taken.
    """
    check_sizes(batch, length, lora)
    if _exists(given):
        content = read_config(Path(given))
        model = build(content, given)
        if lora is not None:
            model = with_adapters(model, lora, base, given)
        return workload(model, batch or BATCH, length or LENGTH, given)
    if ":" not in given:
        raise OptionError(f"{given!r} is no folder, no config.json, and no package.module:function{_of_the_hub(given)}")
    if lora is not None:
        raise OptionError(
            f"--lora is for configs: give the adapters to the model that {given!r} returns, and freeze the rest of it"
        )
    sizes, defaults = {"batch": batch, "length": length}, {"batch": BATCH, "length": LENGTH}
    made, inputs = called(given, sizes, defaults)
    return Workload(given, made, inputs)


def _of_the_hub(given: str) -> str:
    """A remedy for a name such as "meta-llama/Meta-Llama-3-8B"."""
    if not _HUB_NAME.fullmatch(given):
        return ""
    folder = given.partition("/")[2]
    return (
        ". If it is a name on the Hugging Face hub: this command downloads nothing. Download the config (`hf download "
        f"{given} config.json --local-dir {folder}`), and give its folder, {folder}"
    )


def check_sizes(batch: int | None, length: int | None, lora: int | None) -> None:
    """Raise `OptionError` for a size that is out of range."""
    for name, size in (("batch", batch), ("length", length), ("lora", lora)):
        if size is not None and not 1 <= size <= _MOST[name]:
            raise OptionError(f"--{name} must be {f'at most {_MOST[name]:,}' if size > 0 else 'at least 1'}, got {size}")


def _exists(given: str) -> bool:
    try:
        return bool(given) and Path(given).exists()
    except (OSError, ValueError):  # a name that is too long for the file system, or with a null character
        return False


def workload(model: Any, batch: int, length: int, where: str = "the config") -> Workload:
    """A model of transformers with the batch of a training step. Raises `OptionError` unless it takes tokens or images."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind, config, adapted = type(plain).__name__, plain.config, plain is not model
    a_label_a_row = kind.endswith(_TASKS)
    if plain.main_input_name == "input_ids":
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
        check_length(config, length)
        tokens = _tokens(batch, length, vocabulary or 2, plain.device)
        labels = torch.zeros(batch, dtype=torch.long, device=plain.device) if a_label_a_row else tokens
        return Workload(kind, model, {"input_ids": tokens, **_labels(plain, labels)}, batch * length, not adapted)
    if plain.main_input_name == "pixel_values" and a_label_a_row:
        size = getattr(config, "image_size", None)
        if size is None:
            raise OptionError(f"{where}: the config of {kind} has no image_size. {_FUNCTION}")
        sizes = size if isinstance(size, (tuple, list)) else (size, size)
        pixels = torch.zeros(batch, getattr(config, "num_channels", 3), *sizes, device=plain.device)
        labels = torch.zeros(batch, dtype=torch.long, device=plain.device)
        return Workload(kind, model, {"pixel_values": pixels, "labels": labels}, None, not adapted)
    raise OptionError(f"{kind} takes {plain.main_input_name!r}, whose sizes its config does not say. {_FUNCTION}")


_FUNCTION = "Give a package.module:function that returns the model and its batch"


def _tokens(batch: int, length: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    if device.type == "meta":
        return torch.empty(batch, length, dtype=torch.long, device=device)
    return torch.arange(batch * length).view(batch, length) % vocabulary


def _labels(model: Any, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"labels": labels} if "labels" in inspect.signature(model.forward).parameters else {}


def check_length(config: Any, length: int, what: str = "--length") -> None:
    """Raise `OptionError` if a text is longer than a model takes. `what` names the flags that say how long it is."""
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and length > most:
        raise OptionError(f"{what} {length}: the model has {most} positions (max_position_embeddings)")
