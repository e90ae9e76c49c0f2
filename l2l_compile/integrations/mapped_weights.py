"""Parameters that need no memory of their own: they are read in place, from their safetensors files (`load_pretrained(in_place=True)`)."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from l2l_compile.disk.file_in_place import StoreInPlace, stores_in_place
from l2l_compile.errors import L2LError
from l2l_compile.host.disk_placement import SMALL
from l2l_compile.host.disk_plan import can_move
from l2l_compile.integrations.stored_files import begins_in
from l2l_compile.integrations.stored_weights import Stored
from l2l_compile.ranks.sharded import is_sharded
from l2l_compile.units import format_bytes
from l2l_compile.user_line import warn


@dataclass(frozen=True)
class MappedWeight:
    """Where the entries of a parameter begin, in bytes, in its file."""

    store: StoreInPlace
    begin: int

    def tensor(self, parameter: torch.Tensor) -> torch.Tensor:
        """The weight, in the shape and the dtype of a parameter. Reads nothing. Raises `DiskError`."""
        return self.store.tensor(self.begin, parameter.shape, parameter.dtype)


def mapped_weights(
    model: nn.Module, folder: Path, stored: Mapping[str, Stored], same: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> dict[int, MappedWeight]:
    """The parameters that can be read in place, by their `id`, with a warning that says which large ones cannot, and why.

    stored   the tensors in the files
    same     name in the files -> name in the model, for tensors that a file holds under one name
    tensors  of the model

    Raises `L2LError` if there are none, and `DiskError`; the model is as it was.
    """
    parameters = {id(p): p for p in model.parameters() if p.nbytes >= SMALL}
    places = _places(parameters.keys(), stored, same, tensors)
    others: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    for known, parameter in parameters.items():
        why = _why_not(parameter, places.get(known))
        if why is not None:
            places.pop(known, None)
            others[why].append(parameter)
    _say_others(model, folder, len(parameters), others)
    stores = stores_in_place(sorted({place.of.file for place in places.values()}))
    return {known: MappedWeight(stores[place.of.file], place.begin) for known, place in places.items()}


class _Place(NamedTuple):
    """A tensor in a file, and the byte of the file with which its entries begin."""

    of: Stored
    begin: int


def _places(
    wanted: Collection[int], stored: Mapping[str, Stored], same: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> dict[int, _Place]:
    """Where the files hold the tensors with these `id`s, as far as they hold them under one name."""
    keys: dict[int, str] = {}
    for key, name in same.items():
        if id(tensors[name]) in wanted:
            keys.setdefault(id(tensors[name]), key)
    of_file: defaultdict[Path, list[str]] = defaultdict(list)
    for key in keys.values():
        of_file[stored[key].file].append(key)
    begins = {key: begin for file, names in of_file.items() for key, begin in begins_in(file, names).items()}
    return {known: _Place(stored[key], begins[key]) for known, key in keys.items()}


def _why_not(parameter: torch.Tensor, place: _Place | None) -> str | None:
    """Why a large parameter cannot be read in place, and a remedy; None if it can."""
    if is_sharded(parameter):
        return "divided among ranks (leave out shard())"
    if not parameter.is_meta:
        return "in memory already (build the model under torch.device('meta'))"
    if place is None:
        return "joined from several tensors of the files, or in none (give 'disk' a folder, which they go to)"
    if place.of.dtype != parameter.dtype:
        return f"{parameter.dtype} in the model and {place.of.dtype} in the files (build the model in {place.of.dtype})"
    if not can_move(parameter):
        return "parts of other tensors, or not dense (leave out in_place=True)"
    if place.begin % parameter.itemsize or sys.byteorder != "little":
        return "in the files where no entry may begin (save the folder again with save_pretrained)"
    return None


def _say_others(model: nn.Module, folder: Path, count: int, others: Mapping[str, Sequence[torch.Tensor]]) -> None:
    shown = "; ".join(_shown(why, parameters) for why, parameters in others.items())
    left = sum(map(len, others.values()))
    if count == 0:
        raise L2LError(
            f"in_place=True is for parameters of {format_bytes(SMALL)} and more, and {type(model).__name__} has none: leave it out"
        )
    if left == count:
        raise L2LError(
            f"in_place=True, but no parameter of {type(model).__name__} can be read from {folder} in place: {shown}. Or leave out in_place=True"
        )
    if left:
        warn(
            f"backend 'l2l': in_place=True, but {left} of {count} large parameters of {type(model).__name__} are not read from {folder} in place: "
            f"{shown}"
        )


def _shown(why: str, parameters: Sequence[torch.Tensor]) -> str:
    return f"{len(parameters)}, of {format_bytes(sum(p.nbytes for p in parameters))}, are {why}"
