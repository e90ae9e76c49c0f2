"""Maps the tensors of a checkpoint to the tensors of a model of transformers. The adapter to how transformers loads weights."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from l2l_compile.disk.stored_entries import fill
from l2l_compile.integrations.stored_weights import Conversion, Stored, TensorNames
from l2l_compile.ranks.placement import names_elsewhere
from l2l_compile.ranks.sharded import local, whole_of_rank_0

_IGNORED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")  # buffers that checkpoints had once, as in from_pretrained


def names_of(model: PreTrainedModel, stored: Mapping[str, Stored], tensors: Mapping[str, torch.Tensor]) -> TensorNames:
    """Map names as `convert_and_load_state_dict_in_model` does: rename, and add or remove the prefix of the base model."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found = TensorNames({}, [], _ignored(model), functools.partial(_initialise, model))
    made: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}
    prefix = model.base_model_prefix
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, tensors)
        if name not in tensors and key in tensors:
            name, pattern = rename_source_key(key, [], [], prefix, tensors)
        if name in tensors and pattern is None:
            found.same[key] = name
        elif name in tensors:
            assert pattern is not None
            made.setdefault(name, (of_pattern[pattern], []))[1].append((key, pattern))
    for name, (converter, sources) in made.items():
        keys = tuple(key for key, _ in sources)
        found.made.append(Conversion(keys, functools.partial(_converted, model, converter, name, sources)))
    return found


def _converted(
    model: PreTrainedModel,
    converter: WeightConverter,
    name: str,
    sources: list[tuple[str, str]],
    whole: Callable[[str], torch.Tensor],
) -> dict[str, torch.Tensor]:
    own = copy.deepcopy(converter)  # it collects the tensors of one parameter
    for key, pattern in sources:
        own.add_tensor(name, key, pattern, functools.partial(whole, key))
    made: dict[str, Any] = own.convert(name, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _ignored(model: PreTrainedModel) -> Callable[[str], bool]:
    """A predicate: whether `from_pretrained` silently ignores a name that the model lacks."""
    buffers = [name for name, _ in model.named_buffers()]
    patterns = [
        *(model._keys_to_ignore_on_load_unexpected or ()),
        *(p for p in _IGNORED if any(re.search(p, b) for b in buffers)),
    ]
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


@torch.no_grad()
def _initialise(model: PreTrainedModel, missing: list[str]) -> None:
    """Compute unsaved buffers and the parameters `missing`, as `from_pretrained` does. Other tensors do not change."""
    with _alone(model, missing) as plain:
        model.initialize_weights()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in plain.items():
        fill(local(parameters[name]), local(whole_of_rank_0(value, parameters[name])))


def _mark(tensor: torch.Tensor, initialised: bool) -> None:
    """Mark a tensor: initialisations of transformers skip tensors with `_is_hf_initialized`."""
    tensor._is_hf_initialized = initialised  # type: ignore[attr-defined]


@contextmanager
def _alone(model: PreTrainedModel, missing: list[str]) -> Iterator[dict[str, nn.Parameter]]:
    """A context in which the parameters `missing` are whole host tensors, given by name.

    All other parameters, also those that other ranks of a pipeline have, are on meta in it, and marked as initialised.
    """
    wanted = {id(model.state_dict(keep_vars=True)[name]) for name in missing}
    stands: dict[int, nn.Parameter] = {}
    plain: dict[str, nn.Parameter] = {}
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    for path, module in model.named_modules(remove_duplicate=False):
        module.__dict__.pop("_is_hf_initialized", None)
        for buffer in module._buffers.values():
            if buffer is not None:
                _mark(buffer, id(buffer) in saved and id(buffer) not in wanted)
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in map(id, stands.values()):
                continue
            before.append((module, name, parameter))
            if id(parameter) not in stands:
                new = id(parameter) in wanted
                made = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=None if new else "meta"), False)
                _mark(made, not new)
                stands[id(parameter)] = made
                if new:
                    plain[f"{path}.{name}".removeprefix(".")] = made
            module._parameters[name] = stands[id(parameter)]
    try:
        with _elsewhere_on_meta(model):
            yield plain
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter


@contextmanager
def _elsewhere_on_meta(model: PreTrainedModel) -> Iterator[None]:
    """A context in which parameters that other ranks of a pipeline have are there, on meta, and marked as initialised."""
    elsewhere = list(names_elsewhere(model))
    for module, name, tensor in elsewhere:
        made = module._parameters[name] = nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), False)
        _mark(made, True)
    try:
        yield
    finally:
        for module, name, _ in elsewhere:
            del module._parameters[name]
