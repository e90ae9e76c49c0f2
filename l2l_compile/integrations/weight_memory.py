"""Memory for the tensors of a model on the meta device: of the host, in a file of the disk tier (`load_pretrained(disk=...)`), or none.

    file of weights (mapped, clean pages) -> one block of memory, in the dtype of the model -> file of the disk tier

So neither the parameters on disk nor their files are in the memory of the process, and no page of a file waits to be written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from l2l_compile.disk.disk_file import whole_pages
from l2l_compile.disk.disk_store import DiskStore, is_on_disk
from l2l_compile.disk.stored_entries import fill
from l2l_compile.errors import L2LError
from l2l_compile.host.disk_plan import can_move
from l2l_compile.integrations.mapped_weights import MappedWeight
from l2l_compile.integrations.stored_weights import Stored
from l2l_compile.options import folders_of
from l2l_compile.ranks.sharded import is_sharded, local, sharded_as


def store_for(model: nn.Module, disk: str | Path | Sequence[str | Path], in_place: Mapping[int, MappedWeight]) -> DiskStore:
    """A file in a folder, or striped over several, with room for the parameters on the meta device that are not read in place.

    Raises `DiskError` and `L2LError`; the model is as it was.
    """
    folders = folders_of(disk, "'disk'")
    shown = repr(folders[0] if len(folders) == 1 else list(folders))
    parameters = list(model.parameters())
    if any(map(is_sharded, parameters)):
        raise L2LError(
            f"disk={shown} is for parameters that are whole on their rank, and those of {type(model).__name__} are divided among "
            "several: leave out 'disk', or leave out shard()"
        )
    if not any(p.is_meta or is_on_disk(p) for p in parameters):
        raise L2LError(
            f"disk={shown} is for parameters on the meta device, and all of {type(model).__name__} have memory already: build the model "
            "under torch.device('meta'), or leave out 'disk'"
        )
    store = DiskStore(*folders)
    store.reserve(sum(whole_pages(p.nbytes) for p in parameters if p.is_meta and can_move(p) and id(p) not in in_place))
    return store


def give_memory(model: nn.Module, store: DiskStore | None, in_place: Mapping[int, MappedWeight]) -> None:
    """Give every tensor on the meta device memory: its file, if it is read in place, the store if there is one, for a large parameter, or the host.

    It stays the same object, so ties and optimizers stay valid. Raises `DiskError`.
    """
    for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
        if local(tensor).is_meta:
            empty = in_place[id(tensor)].tensor(tensor) if id(tensor) in in_place else _empty(tensor, store)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            empty.__dict__.update({name: value for name, value in tensor.__dict__.items() if name not in empty.__dict__})
            torch.utils.swap_tensors(tensor, empty)


def _empty(tensor: torch.Tensor, store: DiskStore | None) -> torch.Tensor:
    if store is not None and isinstance(tensor, nn.Parameter) and can_move(tensor):
        return store.empty(tensor.shape, tensor.dtype)
    return sharded_as(torch.empty_like(local(tensor).detach(), device="cpu"), tensor)


def read_to_disk(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Stored]) -> None:
    """Fill tensors on disk, each from the one of its name in the files, file by file. Raises `DiskError`."""
    from safetensors import safe_open

    of_file: defaultdict[Path, list[str]] = defaultdict(list)
    for name in tensors:
        of_file[stored[name].file].append(name)
    for file, names in of_file.items():
        with safe_open(file, framework="pt") as opened:
            for name in names:
                fill(tensors[name], opened.get_tensor(name))  # a view of the file's mapping
