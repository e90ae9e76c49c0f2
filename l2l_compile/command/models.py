"""The model and the batch of a command: from a Hugging Face config, or from a function of the user. Allocates no weights."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..errors import OptionError

BATCH, LENGTH = 8, 512  # defaults
_TASKS = ("ForSequenceClassification", "ForImageClassification")  # one label for each row


@dataclass(frozen=True)
class Workload:
    """A model on the meta device, and the batch of a training step.

    tokens  tokens in the batch; None for a model that takes no tokens
    """

    name: str
    model: Any
    batch: dict[str, Any] | tuple
    tokens: int | None = None

    def call(self, function: Any) -> Any:
        """`function(*batch)` or `function(**batch)`."""
        return function(**self.batch) if isinstance(self.batch, dict) else function(*self.batch)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def rows(self) -> int:
        """Rows of the batch: the first size of its first tensor."""
        return next((t.shape[0] for t in tree_leaves(self.batch) if isinstance(t, torch.Tensor) and t.dim()), 1)


def load(given: str, batch: int | None, length: int | None) -> Workload:
    """The workload of a folder or `config.json` of transformers, or of `package.module:function`.

    The function returns a model and its batch (a mapping, a tuple or a tensor). It is called on the meta device, with `batch`
    and `length` if it takes them. Raises `OptionError` if `given` is none of these, and for a size that the function does not
    take.
    """
    path = Path(given)
    for name, size in (("batch", batch), ("length", length)):
        if size is not None and size < 1:
            raise OptionError(f"--{name} must be at least 1, got {size}")
    if path.exists():
        return _of_config(path, batch or BATCH, length or LENGTH)
    if ":" in given:
        return _of_function(given, batch, length)
    raise OptionError(f"{given!r} is no folder, no config.json, and no package.module:function")


def _of_function(given: str, batch: int | None, length: int | None) -> Workload:
    module_name, name = given.split(":", 1)
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{given!r}: {error}") from error
    finally:
        sys.path.remove("")
    taken = inspect.signature(function).parameters
    for key, size in (("batch", batch), ("length", length)):
        if size is not None and key not in taken:
            raise OptionError(f"--{key} {size}: {given!r} takes no argument {key!r}, and makes the batch that it makes")
    sizes = {key: value for key, value in (("batch", batch or BATCH), ("length", length or LENGTH)) if key in taken}
    with torch.device("meta"):
        made = function(**sizes)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], torch.nn.Module):
        raise OptionError(f"{given!r} is to return a module and its batch, got {type(made).__name__}")
    model, inputs = made
    return Workload(given, model, inputs if isinstance(inputs, (dict, tuple)) else (inputs,))


def _of_config(path: Path, batch: int, length: int) -> Workload:
    try:
        import transformers
    except ImportError as error:
        raise OptionError("a config needs transformers: pip install 'l2l-compile[transformers]'") from error
    config = transformers.AutoConfig.from_pretrained(path)
    config.use_cache = False
    classes = [getattr(transformers, name, None) for name in config.architectures or ()]
    with torch.device("meta"), _dtype(torch.float32):
        if classes and classes[0] is not None:
            model = classes[0](config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return workload(model, batch, length)


def workload(model: Any, batch: int, length: int) -> Workload:
    """A model of transformers with the batch of a training step. Raises `OptionError` unless it takes tokens or images."""
    kind, config = type(model).__name__, model.config
    a_label_a_row = kind.endswith(_TASKS)
    if model.main_input_name == "input_ids":
        tokens = torch.arange(batch * length).view(batch, length) % config.vocab_size
        labels = torch.zeros(batch, dtype=torch.long) if a_label_a_row else tokens
        _check_length(config, length)
        return Workload(kind, model, {"input_ids": tokens, **_labels(model, labels)}, batch * length)
    if model.main_input_name == "pixel_values" and a_label_a_row:
        size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size, config.image_size)
        pixels = torch.zeros(batch, config.num_channels, *size, device=model.device)
        return Workload(kind, model, {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)})
    raise OptionError(
        f"{kind} takes {model.main_input_name!r}, whose sizes its config does not say: give a package.module:function that returns the "
        "model and its batch"
    )


def _labels(model: Any, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"labels": labels} if "labels" in inspect.signature(model.forward).parameters else {}


def _check_length(config: Any, length: int) -> None:
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and length > most:
        raise OptionError(f"--length {length}: the model has {most} positions (max_position_embeddings)")


class _dtype:
    """Sets the default dtype within a `with` block: parameters are kept in fp32 on the host."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
