"""Weights of a `save_pretrained` folder: each rank reads only its own rows.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    l2l_compile.shard(model, mesh)
    l2l_compile.load_pretrained(model, folder)

`torch.distributed.checkpoint` reads the rows of a rank out of safetensors files (`HuggingFaceStorageReader`). This module maps
tensors of the files to tensors of the model, allocates tensors that are on the meta device, and refuses tensors that do not
fit.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import L2LError
from ..ranks.sharded import divided_as, is_divided, local, pieces_of
from .stored_weights import Conversion, Names, Stored

INDEX = "model.safetensors.index.json"
SHOWN = 8  # names in an error


class LoadResult(NamedTuple):
    """Names that only the model has, and names that only the folder has, as in `load_state_dict`. Empty with `strict`."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_pretrained(model: nn.Module, folder: str | Path, strict: bool = True) -> LoadResult:
    """Fill a model with the weights of a folder of safetensors files, as `from_pretrained` does; each rank reads its own rows.

    All ranks must call this, after `l2l_compile.shard`. A model that is not divided can be filled as well. Tensors on the meta
    device get memory on the host: parameters keep their identity, and tied parameters stay tied. In a model of transformers,
    buffers that are not saved (such as rotary embeddings) are computed anew. Numbers are converted to the dtype of the model,
    bit-equal to `from_pretrained(folder, dtype=...)`. Names in the folder may be the model's names, or names that transformers
    maps to them: with or without the prefix of the base model, renamed, or joined. Joined parameters, such as the experts of a
    mixture, are made whole on each rank, one at a time.

    With `strict=False`, parameters that the folder lacks are initialised as transformers does, with the values of rank 0, and
    tensors that the model lacks are left out. The result names both.

    Raises `L2LError` for a folder without safetensors files or without a file that its index names, for tensors that are
    missing, not expected, of another shape or kind of number, and for a buffer on the meta device that nothing can compute.
    """
    folder = Path(folder)
    stored = _stored(folder)
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)}
    names = _names(model, stored, tensors)
    made = {
        name for conversion in names.made for name in conversion.make(lambda key: torch.empty(stored[key].shape, device="meta"))
    }
    there = {id(tensors[name]) for name in made.union(names.same.values())}
    missing = sorted(name for name, tensor in tensors.items() if id(tensor) not in there)
    used = {*names.same, *(source for conversion in names.made for source in conversion.sources)}
    unexpected = sorted(name for name in stored if name not in used and not names.ignored(name))
    if strict:
        _refuse(folder, "lacks", missing, "strict=False initialises them as the model does")
        _refuse(folder, "has tensors that the model lacks:", unexpected, "strict=False leaves them out")
    for key, name in names.same.items():
        _check(folder, key, stored[key], name, tensors[name])
    unsaved = [name for name, buffer in model.named_buffers() if id(buffer) not in set(map(id, tensors.values()))]
    if names.initialise is None:
        _refuse_meta(model, [*missing, *unsaved])
    _materialise(model)
    _read(folder, stored, names.same, tensors)
    _make(folder, names.made, stored, tensors)
    if names.initialise is not None:
        names.initialise(missing)
    return LoadResult(missing, unexpected)


def _refuse(folder: Path, what: str, names: list[str], remedy: str) -> None:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise L2LError(f"{folder} {what} {', '.join(names[:SHOWN])}{more}: {remedy}")


def _refuse_meta(model: nn.Module, names: list[str]) -> None:
    here = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    if lost := [name for name in names if local(here[name]).is_meta]:
        raise L2LError(
            f"{', '.join(lost[:SHOWN])} of {type(model).__name__}: on the meta device, in no file, and only a model of transformers can "
            "compute it. Build the model on the host, or give it a tensor of the host first"
        )


def _stored(folder: Path) -> dict[str, Stored]:
    """Every tensor in the files of a folder. If the folder has an index, only the tensors that the index names."""
    files = {file.name for file in folder.glob("*.safetensors")}
    index = folder / INDEX
    named: dict[str, str] | None = json.loads(index.read_text())["weight_map"] if index.exists() else None
    if lost := sorted(set((named or {}).values()) - files):
        raise L2LError(f"{folder} lacks {', '.join(lost[:SHOWN])}, which {INDEX} names: download or copy it again")
    if not files:
        raise L2LError(
            f"{folder} has no *.safetensors: load_pretrained reads folders that save_pretrained of transformers has written. Another "
            "format becomes one with from_pretrained and save_pretrained"
        )
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    found: dict[str, Stored] = {}
    for where, part in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata[where.fqn]
        if named is not None and where.fqn not in named:
            continue  # from a file that the index does not name, such as Mistral's consolidated.safetensors
        assert isinstance(tensor, TensorStorageMetadata)
        if len(tensor.chunks) > 1:
            raise L2LError(f"{folder} has '{where.fqn}' in several files: leave one of them there")
        found[where.fqn] = Stored(Path(part.relative_path), tuple(tensor.size), tensor.properties.dtype)
    if lost := sorted(set(named or {}) - set(found)):
        raise L2LError(f"{folder} lacks the tensors {', '.join(lost[:SHOWN])}, which {INDEX} names: download or copy it again")
    return found


def _names(model: nn.Module, stored: Mapping[str, Stored], tensors: Mapping[str, torch.Tensor]) -> Names:
    if hasattr(model, "base_model_prefix"):  # transformers is imported only for its own models
        from transformers import PreTrainedModel

        from .checkpoint_names import names_of

        if isinstance(model, PreTrainedModel):
            return names_of(model, stored, tensors)
    return Names({name: name for name in stored if name in tensors}, [], lambda name: False, None)


def _check(folder: Path, key: str, stored: Stored, name: str, tensor: torch.Tensor) -> None:
    if stored.shape != tuple(tensor.shape):
        raise L2LError(f"'{key}' of {folder} has the shape {list(stored.shape)}, and '{name}' of the model {list(tensor.shape)}")
    if stored.dtype != tensor.dtype and not (_is_plain(stored.dtype) and _is_plain(tensor.dtype)):
        raise L2LError(
            f"'{key}' of {folder} is {stored.dtype}, and '{name}' of the model {tensor.dtype}: quantized weights are not read"
        )


def _is_plain(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


# ---- from the meta device to the host --------------------------------------------------------------------------------------


def _materialise(model: nn.Module) -> None:
    """Give every tensor on the meta device memory on the host. It stays the same object, so ties and optimizers stay valid."""
    for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
        if local(tensor).is_meta:
            empty = divided_as(torch.empty_like(local(tensor).detach(), device="cpu"), tensor)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            empty.__dict__.update({name: value for name, value in tensor.__dict__.items() if name not in empty.__dict__})
            torch.utils.swap_tensors(tensor, empty)


# ---- numbers ---------------------------------------------------------------------------------------------------------------


def _read(folder: Path, stored: Mapping[str, Stored], names: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors that a file holds without conversion. If the files hold a tied tensor twice, both must be equal."""
    owners: dict[int, str] = {}
    wanted: dict[str, torch.Tensor] = {}
    for key, name in names.items():
        tensor = tensors[name].detach()
        first = owners.setdefault(id(tensors[name]), key)
        wanted[key] = tensor if first == key else divided_as(torch.empty_like(local(tensor)), tensor)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")
        dcp.load(dict(wanted), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())
    for key, name in names.items():
        first = owners[id(tensors[name])]
        if not torch.equal(local(wanted[key]), local(wanted[first])):
            raise L2LError(f"'{name}' of the model is tied, but {folder} has other numbers in '{key}' than in '{first}'")


@torch.no_grad()
def _make(folder: Path, made: Iterable[Conversion], stored: Mapping[str, Stored], tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors made from several stored tensors. Each rank makes one tensor whole, keeps its rows, then makes the next."""
    from safetensors import safe_open

    def whole(key: str) -> torch.Tensor:
        with safe_open(stored[key].file, framework="pt") as opened:
            return opened.get_tensor(key)

    for conversion in made:
        for source in conversion.sources:
            if not _is_plain(stored[source].dtype):
                raise L2LError(f"'{source}' of {folder} is {stored[source].dtype}: quantized weights are not read")
        for name, value in conversion.make(whole).items():
            tensor = tensors[name]
            _check(folder, " + ".join(conversion.sources[:SHOWN]), Stored(folder, tuple(value.shape), value.dtype), name, tensor)
            local(tensor).copy_(_own_rows(value, tensor))


def _own_rows(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if not is_divided(tensor):
        return whole
    pieces = pieces_of(tensor)
    if pieces.replicated:
        return whole
    span = pieces.span(tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1))
    return whole[span.start : span.stop]
