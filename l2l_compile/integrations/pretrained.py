"""Weights of a `save_pretrained` folder: each rank reads only its own rows.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    l2l_compile.shard(model, mesh)
    l2l_compile.load_pretrained(model, folder)

`torch.distributed.checkpoint` reads the rows of a rank out of safetensors files (`HuggingFaceStorageReader`). This module maps
tensors of the files to tensors of the model, and refuses tensors that do not fit. `weight_memory` allocates those on the meta device.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from l2l_compile.disk.disk_store import is_on_disk
from l2l_compile.disk.stored_entries import fill
from l2l_compile.errors import DiskError, L2LError
from l2l_compile.frontend.rewrites.wrapped_weights import is_wrapper
from l2l_compile.integrations.mapped_weights import mapped_weights
from l2l_compile.integrations.stored_files import SHOWN, stored_in
from l2l_compile.integrations.stored_weights import Conversion, Stored, TensorNames
from l2l_compile.integrations.weight_memory import give_memory, read_to_disk, store_for
from l2l_compile.ranks.placement import tensors_elsewhere
from l2l_compile.ranks.sharded import is_sharded, local, shard_spec_of

_COMPARED = 1 << 22  # entries of two tensors that are compared at once


class LoadResult(NamedTuple):
    """Names that only the model has, and names that only the folder has, as in `load_state_dict`. Empty with `strict`."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_pretrained(
    model: nn.Module,
    folder: str | Path,
    strict: bool = True,
    disk: str | Path | Sequence[str | Path] | None = None,
    *,
    in_place: bool = False,
) -> LoadResult:
    """Fill a model with the weights of a folder of safetensors files, as `from_pretrained` does; each rank reads its own rows.

    All ranks must call this, after `l2l_compile.shard` or `l2l_compile.pipeline`. A model that is not sharded can be filled as
    well. Tensors on the meta device get memory on the host: parameters keep their identity, and tied parameters stay tied. In a
    model of transformers, buffers that are not saved (such as rotary embeddings) are computed anew. Numbers are converted to the
    dtype of the model, bit-equal to `from_pretrained(folder, dtype=...)`. Names in the folder may be the model's names, or names
    that transformers maps to them: with or without the prefix of the base model, renamed, or joined. Joined parameters, such as
    the experts of a mixture, are made whole on each rank, one at a time.

    With `disk`, a folder, parameters on the meta device that are larger than 1 MiB get their memory in a file there, and no memory of the
    host: a model may be larger than this. Over several folders, they are striped. A file has no name, and is there as long as the
    parameters are. They stay ordinary tensors, and `torch.compile` with the option `disk` trains them there. For parameters that are not
    sharded.

    With `in_place=True`, parameters on the meta device of 1 MiB and more are not copied: they are read from the files of the folder, which are
    never written, and must not change as long as the parameters are there. This takes no memory of the host and no space on a disk. It is
    for weights that are frozen (below adapters, or for inference), in the dtype of the files: build the model in that dtype. Parameters that
    cannot be in place (another dtype, joined, sharded) get memory as without it, in `disk` if that is given, with a warning that
    says which and why. What is written into a weight in place stays in memory. Training with the option `disk` moves it to the disk.

    With `strict=False`, parameters that the folder lacks are initialised as transformers does, with the values of rank 0, and
    tensors that the model lacks are left out. The result names both.

    Raises `L2LError` for a folder without safetensors files or without a file that its index names, for damaged files, for
    tensors that are missing, not expected, of another shape or kind of number, or tied and unequal, and for a buffer on the meta
    device that nothing can compute, and for `in_place=True` if no parameter can be in place. Raises `DiskError` if `disk` cannot be
    written or has too little room. The model is as it was then.
    If a file cannot be read to its end, the error says that the model has changed.
    """
    folder = Path(folder)
    with _together():
        plan = _plan(model, folder, strict)
        mapped = mapped_weights(model, folder, plan.stored, plan.names.same, plan.tensors) if in_place else {}
        store = store_for(model, disk, mapped) if disk is not None else None
    give_memory(model, store, mapped)
    try:
        _read(folder, plan, mapped)
        _make(plan)
    except DiskError as error:
        raise DiskError(f"{folder} was not read to its end: {error}") from error
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
        raise L2LError(
            f"{folder} was not read to its end: {_first_line(error)}. The tensors of the model are partly those of the folder now: load "
            "it again before you use the model"
        ) from error
    if plan.names.initialise is not None:
        plan.names.initialise(plan.missing)
    return LoadResult(plan.missing, plan.unexpected)


@dataclass(frozen=True)
class _Plan:
    """What a load will do: all that can be known before the first tensor of the model changes."""

    stored: dict[str, Stored]
    tensors: dict[str, torch.Tensor]
    names: TensorNames
    missing: list[str]
    unexpected: list[str]


def _plan(model: nn.Module, folder: Path, strict: bool) -> _Plan:
    """Check that a folder fits to a model. Raises `L2LError`; changes nothing."""
    stored = stored_in(folder)
    _refuse_quantized(folder)
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)}
    elsewhere = tensors_elsewhere(model)
    names = _names(model, stored, {**tensors, **elsewhere})
    made_of = {id(made): _check_made(folder, made, stored, {**tensors, **elsewhere}) for made in names.made}
    used = {*names.same, *(source for conversion in names.made for source in conversion.sources)}
    names = replace(
        names,
        same={key: name for key, name in names.same.items() if name in tensors},
        made=[conversion for conversion in names.made if not made_of[id(conversion)].isdisjoint(tensors)],
    )
    made = {name for conversion in names.made for name in made_of[id(conversion)]}
    there = {id(tensors[name]) for name in made.union(names.same.values()) if name in tensors}
    missing = sorted(name for name, tensor in tensors.items() if id(tensor) not in there)
    unexpected = sorted(name for name in stored if name not in used and not names.ignored(name))
    if strict:
        _refuse(folder, "lacks", missing, "strict=False initialises them as the model does")
        _refuse(folder, "has tensors that the model lacks:", unexpected, "strict=False leaves them out")
    for key, name in names.same.items():
        _check(folder, key, stored[key], name, tensors[name])
    unsaved = [name for name, buffer in model.named_buffers() if id(buffer) not in set(map(id, tensors.values()))]
    if names.initialise is None:
        _refuse_meta(model, [*missing, *unsaved])
    _check_tied(folder, stored, names.same, tensors)
    return _Plan(stored, tensors, names, missing, unexpected)


@contextmanager
def _together() -> Iterator[None]:
    """If one rank cannot load, all raise its error: the others would wait for it in a collective."""
    error: L2LError | None = None
    try:
        yield
    except L2LError as raised:
        error = raised
    errors = [str(error) if error is not None else None]
    if dist.is_initialized():
        errors *= dist.get_world_size()
        dist.all_gather_object(errors, str(error) if error is not None else None)
    if error is not None:
        raise error
    if first := next(((rank, text) for rank, text in enumerate(errors) if text is not None), None):
        raise L2LError(f"rank {first[0]} cannot load the folder, so no rank does: {first[1]}")


def _first_line(error: BaseException) -> str:
    """The cause of an error as one line: errors of `torch.distributed.checkpoint` have a traceback for each rank."""
    failures = getattr(error, "failures", None)  # of a CheckpointException: by rank, each with its traceback
    cause = next(iter(failures.values()))[0] if failures else error
    return (str(cause) or type(cause).__name__).strip().splitlines()[0]


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


def _names(model: nn.Module, stored: Mapping[str, Stored], tensors: Mapping[str, torch.Tensor]) -> TensorNames:
    if hasattr(model, "base_model_prefix"):  # transformers is imported only for its own models
        from transformers import PreTrainedModel

        from l2l_compile.integrations.checkpoint_names import names_of

        if isinstance(model, PreTrainedModel):
            return names_of(model, stored, tensors)
    return TensorNames({name: name for name in stored if name in tensors}, [], lambda name: False, None)


def _check(folder: Path, key: str, stored: Stored, name: str, tensor: torch.Tensor) -> None:
    if is_wrapper(local(tensor)):
        raise L2LError(
            f"'{name}' of the model is a {type(tensor).__name__}, a quantized weight: fill the model first, and quantize it then"
        )
    if stored.shape != tuple(tensor.shape):
        raise L2LError(f"'{key}' of {folder} has the shape {list(stored.shape)}, and '{name}' of the model {list(tensor.shape)}")
    if stored.dtype != tensor.dtype and not (_is_plain(stored.dtype) and _is_plain(tensor.dtype)):
        raise L2LError(
            f"'{key}' of {folder} is {stored.dtype}, and '{name}' of the model {tensor.dtype}: quantized weights are not read"
        )


def _refuse_quantized(folder: Path) -> None:
    """Raise `L2LError` for a folder whose weights are quantized, by its config: `from_pretrained` makes the modules for them."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        method = config["quantization_config"]["quant_method"]
    except (OSError, ValueError, LookupError, TypeError):
        return  # without a config that says so, dtypes and names are compared
    raise L2LError(
        f"{folder} has weights that {str(method)[:40]!r} has quantized, for which the model needs other modules: make the model with transformers' "
        "from_pretrained(folder, device_map={'': 'cpu'}), which leaves it on the host, and compile that (docs/quantized.md)"
    )


def _is_plain(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


# ---- numbers ---------------------------------------------------------------------------------------------------------------


def _check_made(
    folder: Path, conversion: Conversion, stored: Mapping[str, Stored], tensors: Mapping[str, torch.Tensor]
) -> set[str]:
    """Check the tensors that are made from several stored ones, by their shapes. Returns their names in the model."""
    for source in conversion.sources:
        if not _is_plain(stored[source].dtype):
            raise L2LError(f"'{source}' of {folder} is {stored[source].dtype}: quantized weights are not read")
    joined = " + ".join(conversion.sources[:SHOWN])
    try:
        made = conversion.make(lambda key: torch.empty(stored[key].shape, dtype=stored[key].dtype, device="meta"))
    except (RuntimeError, ValueError, IndexError) as error:
        raise L2LError(f"'{joined}' of {folder} have shapes that do not fit together: {_first_line(error)}") from error
    for name, value in made.items():
        _check(folder, joined, Stored(folder, tuple(value.shape), value.dtype), name, tensors[name])
    return set(made)


def _check_tied(
    folder: Path, stored: Mapping[str, Stored], names: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> None:
    """If the files hold a tied tensor twice, both must be equal in the dtype of the model. Not-a-number equals itself."""
    first_of: dict[int, str] = {}
    for key, name in names.items():
        first = first_of.setdefault(id(tensors[name]), key)
        if first != key and not _equal(stored[first], first, stored[key], key, tensors[name].dtype):
            raise L2LError(f"'{name}' of the model is tied, but {folder} has other numbers in '{key}' than in '{first}'")


def _equal(one: Stored, one_key: str, other: Stored, other_key: str, dtype: torch.dtype) -> bool:
    """Whether two stored tensors have equal entries. Compares some rows at a time."""
    from safetensors import safe_open

    with safe_open(one.file, framework="pt") as one_file, safe_open(other.file, framework="pt") as other_file:
        if not one.shape or 0 in one.shape:
            return torch.equal(one_file.get_tensor(one_key).to(dtype), other_file.get_tensor(other_key).to(dtype))
        rows = max(1, _COMPARED // (math.prod(one.shape) // one.shape[0]))
        a, b = one_file.get_slice(one_key), other_file.get_slice(other_key)
        starts = range(0, one.shape[0], rows)
        return all(_same(a[start : start + rows].to(dtype), b[start : start + rows].to(dtype)) for start in starts)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _read(folder: Path, plan: _Plan, in_place: Collection[int]) -> None:
    """Fill tensors that a file holds under one name, but for those that are read in place from now on."""
    wanted: dict[int, tuple[str, torch.Tensor]] = {}
    for key, name in plan.names.same.items():
        if id(plan.tensors[name]) not in in_place:
            wanted.setdefault(id(plan.tensors[name]), (key, plan.tensors[name].detach()))
    on_disk = {key: tensor for key, tensor in wanted.values() if is_on_disk(tensor)}
    in_memory = {key: tensor for key, tensor in wanted.values() if key not in on_disk}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")
        dcp.load(in_memory, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())
    read_to_disk(on_disk, plan.stored)


@torch.no_grad()
def _make(plan: _Plan) -> None:
    """Fill tensors made from several stored tensors. Each rank makes one tensor whole, keeps its rows, then makes the next."""
    from safetensors import safe_open

    def whole(key: str) -> torch.Tensor:
        with safe_open(plan.stored[key].file, framework="pt") as opened:
            return opened.get_tensor(key)

    for conversion in plan.names.made:
        for name, value in conversion.make(whole).items():
            fill(local(plan.tensors[name]), _own_rows(value, plan.tensors[name]))


def _own_rows(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if not is_sharded(tensor):
        return whole
    spec = shard_spec_of(tensor)
    if spec.replicated:
        return whole
    span = spec.span(tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1))
    return whole[span.start : span.stop]
