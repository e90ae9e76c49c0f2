"""A folder for transformers, of a model that is divided among ranks: each rank writes its own files.

    model-00001-of-00002.safetensors  the tensors of rank 0
    model-00002-of-00002.safetensors  those of rank 1
    model.safetensors.index.json      the file of each tensor

Each rank has transformers write its tensors into a folder of its own first, within the folder. The files are moved when all ranks have
written theirs, and rank 0 writes the index last.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from l2l_compile.errors import L2LError
from l2l_compile.integrations.stored_files import INDEX, stored_in
from l2l_compile.ranks.placement import names_elsewhere
from l2l_compile.ranks.sharded import is_sharded

_WHOLE = "model.safetensors"
_OLD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(INDEX))


def save_pretrained(model: nn.Module, folder: str | Path, max_shard_size: int | str = "5GB") -> None:
    """Write a folder for `from_pretrained`, with the weights of all ranks of a pipeline. Each rank writes its own files.

    All ranks must call this at the same place, with a folder that all of them reach. A stage that is sharded is gathered, tensor by
    tensor, on the host of the first rank that has it. A file has at most `max_shard_size` bytes, in the words of transformers. Of a
    model with adapters of PEFT, the trained parameters are gathered on rank 0, which writes the adapter's folder.

    Raises `L2LError` on all ranks for a model that is not of transformers or PEFT, and if a rank cannot write.
    """
    plain = getattr(model, "_orig_mod", model)
    if not _is_of_transformers(plain) and not _has_adapters(plain):
        raise L2LError(
            f"l2l_compile.save_pretrained writes models of transformers, and {type(plain).__name__} is none: torch.distributed.checkpoint saves "
            "it, as docs/pipelines.md shows"
        )
    (_save_adapters if _has_adapters(plain) else _save)(plain, Path(folder), max_shard_size)


class OwnWeights(dict[str, torch.Tensor]):
    """Weights that are not all of a model's, and that its `save_pretrained` is to write nevertheless."""


@dataclass(frozen=True)
class _Written:
    """The files that a rank has written into its own folder, and the names of the tensors in each; or why it has written none."""

    files: tuple[tuple[str, tuple[str, ...]], ...] = ()
    size: int = 0  # bytes of the tensors
    error: str = ""


def _save(model: nn.Module, folder: Path, max_shard_size: int | str) -> None:
    own, weights = folder / f".rank-{_rank()}", _own_weights(model)
    try:
        written = _together(folder, lambda: _write(model, own, weights, max_shard_size))
        names = _names(written)
        _together(folder, lambda: _remove_old(folder))
        _together(folder, lambda: _move(folder, own, dict(zip(_files(written[_rank()]), names[_rank()], strict=True))))
        _together(folder, lambda: _write_index(folder, written, names))
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _files(written: _Written) -> list[str]:
    return [file for file, _ in written.files]


def _names(written: Sequence[_Written]) -> list[list[str]]:
    """The names of the files of each rank in the folder."""
    total = sum(len(each.files) for each in written)
    names = iter([f"model-{number:05}-of-{total:05}.safetensors" for number in range(1, total + 1)] if total > 1 else [_WHOLE])
    return [[next(names) for _ in each.files] for each in written]


def _own_weights(model: nn.Module) -> OwnWeights:
    """The tensors that no rank before this one has. Those that are sharded are gathered, one after another."""
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)}
    writer: dict[str, int] = {}
    for rank, names in enumerate(_gathered(list(state))):
        writer |= {name: rank for name in names if name not in writer}
    found, whole_of = OwnWeights(), dict[int, torch.Tensor | None]()
    for name, tensor in state.items():
        if id(tensor) not in whole_of:  # a tied one is gathered once, on all ranks
            whole = tensor.full_tensor() if is_sharded(tensor) else tensor
            whole_of[id(tensor)] = whole.detach() if writer[name] == _rank() else None
        if (mine := whole_of[id(tensor)]) is not None:
            found[name] = mine
    return found


def _write(model: Any, own: Path, weights: OwnWeights, max_shard_size: int | str) -> _Written:
    shutil.rmtree(own, ignore_errors=True)  # of a run that was killed
    if not weights:
        return _Written()
    with _writing_on_any_rank(model):
        model.save_pretrained(own, state_dict=weights, max_shard_size=max_shard_size)
    tensors_of: dict[str, list[str]] = {}
    size = 0
    for name, stored in stored_in(own).items():
        tensors_of.setdefault(stored.file.name, []).append(name)
        size += math.prod(stored.shape) * stored.dtype.itemsize
    return _Written(tuple((file, tuple(names)) for file, names in sorted(tensors_of.items())), size)


@contextmanager
def _writing_on_any_rank(model: Any) -> Iterator[None]:
    """With `torch.distributed`, `save_pretrained` of transformers writes on rank 0 alone."""
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del model.should_save_on_this_rank


def _move(folder: Path, own: Path, names: Mapping[str, str]) -> None:
    """Move files of weights into the folder, and from rank 0 all others as well."""
    for file in sorted(own.iterdir()) if own.exists() else ():
        if file.name in names:
            file.replace(folder / names[file.name])
        elif _rank() == 0 and file.name != INDEX:
            file.replace(folder / file.name)
    shutil.rmtree(own, ignore_errors=True)  # before the other ranks go on


def _remove_old(folder: Path) -> None:
    """Remove weights that were in the folder before: they may be more files than those of now."""
    for file in folder.iterdir() if _rank() == 0 else ():
        if _OLD.fullmatch(file.name):
            file.unlink()


def _write_index(folder: Path, written: Sequence[_Written], names: Sequence[Sequence[str]]) -> None:
    """Write the file of each tensor, on rank 0; transformers finds a single file by its name."""
    of: dict[str, str] = {}
    for each, own in zip(written, names, strict=True):
        for (_, tensors), name in zip(each.files, own, strict=True):
            of |= dict.fromkeys(tensors, name)
    if _rank() == 0 and len(set(of.values())) > 1:
        index = {"metadata": {"total_size": sum(each.size for each in written)}, "weight_map": of}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _save_adapters(model: Any, folder: Path, max_shard_size: int | str) -> None:
    """Adapters are one file, and small: rank 0 writes those of all ranks."""
    trained = {name: p for name, p in model.state_dict(keep_vars=True).items() if p.requires_grad}
    own = {name: (p.full_tensor() if is_sharded(p) else p).detach() for name, p in trained.items()}
    whole = OwnWeights()
    for part in _gathered(own):
        whole |= {name: tensor for name, tensor in part.items() if name not in whole}
    _together(folder, lambda: model.save_pretrained(folder, state_dict=whole) if _rank() == 0 else None)


def _is_of_transformers(model: nn.Module) -> bool:
    return hasattr(type(model), "base_model_prefix")


def _has_adapters(model: nn.Module) -> bool:
    return type(model).__module__.partition(".")[0] == "peft" and hasattr(type(model), "save_pretrained")


# ---- ranks -----------------------------------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _gathered(mine: Any) -> list[Any]:
    found = [mine]
    if dist.is_initialized():
        found *= dist.get_world_size()
        dist.all_gather_object(found, mine)
    return found


def _together(folder: Path, write: Callable[[], _Written | None]) -> list[_Written]:
    """What each rank writes. Raises `L2LError` on all ranks if one cannot."""
    error: Exception | None = None
    try:
        mine = write() or _Written()
    except Exception as caught:  # noqa: BLE001 - the others wait for it
        error, mine = caught, _Written(error=f"{type(caught).__name__}: {caught}")
    found = _gathered(mine)
    for rank, each in enumerate(found):
        if each.error:
            raise L2LError(f"rank {rank} could not write its weights to {folder}: {each.error}") from error
    return found


# ---- save_pretrained of transformers -----------------------------------------------------------------------------------------


def refuse_half(model: nn.Module) -> None:
    """Have `save_pretrained` of a pipeline raise `L2LError` on a rank that lacks tensors of others, in place of leaving them out."""
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            module.__class__ = _saving_all(type(module))  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _saving_all(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a model's class, with the same name, whose `save_pretrained` writes nothing if tensors are missing."""
    own: Callable = getattr(kind, "save_pretrained")  # noqa: B009 - of transformers and PEFT, not of nn.Module

    @functools.wraps(own)
    def save_pretrained(self: nn.Module, *args: Any, **named: Any) -> Any:
        given = inspect.signature(own).bind(self, *args, **named).arguments
        _refuse_missing(self, given.get("state_dict", given.get("kwargs", {}).get("state_dict")))
        return own(self, *args, **named)

    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {"save_pretrained": save_pretrained, **same})


def _refuse_missing(model: nn.Module, weights: Mapping[str, torch.Tensor] | None) -> None:
    if isinstance(weights, OwnWeights):
        return
    prefix_of = {id(module): prefix for prefix, module in model.named_modules()}
    lost = [
        name
        for module, own, tensor in names_elsewhere(model)
        if own not in module._non_persistent_buffers_set and (_is_of_transformers(model) or tensor.requires_grad)
        if (name := f"{prefix_of[id(module)]}.{own}".lstrip(".")) not in (weights or ())
    ]
    if lost:
        raise L2LError(
            f"save_pretrained would leave out {len(lost)} tensors that other ranks of the pipeline have, such as '{lost[0]}': call "
            "l2l_compile.save_pretrained(model, folder) on all ranks, which writes those of all"
        )
