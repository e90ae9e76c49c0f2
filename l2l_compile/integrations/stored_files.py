"""The tensors in the safetensors files of a folder, by the headers of the files. Every header is checked before anything is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from l2l_compile.errors import L2LError
from l2l_compile.integrations.stored_weights import Stored

INDEX = "model.safetensors.index.json"
SHOWN = 8  # names in an error
_AGAIN = "download or copy it again"
_LENGTH = 8  # bytes at the beginning of a file: how long its header is
_DTYPES = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64},
    **{"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}


def stored_in(folder: Path) -> dict[str, Stored]:
    """Every tensor in the files of a folder; if the folder has an index, only the tensors that it names. Raises `L2LError`."""
    if not folder.is_dir():
        raise L2LError(
            f"{folder} is {'a file' if folder.exists() else 'not there'}: load_pretrained takes a folder of save_pretrained"
        )
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".safetensors")
    except OSError as error:
        raise L2LError(f"{folder} cannot be read: {error}") from error
    named = _index(folder)
    if named is not None:
        _refuse_outside(folder, named.values())
        if lost := sorted(set(named.values()) - {file.name for file in files}):
            raise L2LError(f"{folder} lacks {_some(lost)}, which {INDEX} names: {_AGAIN}")
    if not files:
        raise L2LError(
            f"{folder} has no *.safetensors: load_pretrained reads folders that save_pretrained of transformers has written. Another "
            "format becomes one with from_pretrained and save_pretrained"
        )
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in _header(file).items():
            if name in found and (named is None or name in named):
                both = f"{found[name].file.name} or {file.name}"
                raise L2LError(f"{folder} has '{name}' in several files: leave one of them there, {both}")
            found[name] = stored
    return found if named is None else _named(folder, found, named)


def _named(folder: Path, found: Mapping[str, Stored], named: Mapping[str, str]) -> dict[str, Stored]:
    """The tensors that the index names. Other files may be there, such as Mistral's consolidated.safetensors."""
    if lost := sorted(set(named) - set(found)):
        raise L2LError(f"{folder} lacks the tensors {_some(lost)}, which {INDEX} names: {_AGAIN}")
    for name, file in named.items():
        if found[name].file.name != file:
            raise L2LError(f"{INDEX} of {folder} names {file} for '{name}', which is in {found[name].file.name}: {_AGAIN}")
    return {name: stored for name, stored in found.items() if name in named}


def _index(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, by the index of a folder; None if it has none."""
    path = folder / INDEX
    if not path.exists() and not path.is_symlink():
        return None
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise L2LError(f"{path} cannot be read as JSON: {error}. {_AGAIN.capitalize()}") from error
    named = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise L2LError(f"{path} has no 'weight_map' from names of tensors to names of files: {_AGAIN}")
    return named


def _refuse_outside(folder: Path, files: Iterable[str]) -> None:
    if outside := sorted({file for file in files if Path(file).name != file}):
        raise L2LError(f"{INDEX} of {folder} names {_some(outside)}: only files in the folder itself are read")


def _header(file: Path) -> dict[str, Stored]:
    """The tensors of a file. Raises `L2LError` if its header is damaged, or does not fit to the size of the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            described = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            shapes = {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in described.items()}
    except OSError as error:
        raise L2LError(f"{file} cannot be opened: {error}. {_AGAIN.capitalize()}") from error
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise L2LError(f"{file} is damaged or no safetensors file: {error}. {_AGAIN.capitalize()}") from error
    for name, (_, dtype) in shapes.items():
        if dtype not in _DTYPES:
            raise L2LError(f"'{name}' of {file} has the dtype {dtype}: such weights are not read")
    return {name: Stored(file, shape, _DTYPES[dtype]) for name, (shape, dtype) in shapes.items()}


def begins_in(file: Path, names: Sequence[str]) -> dict[str, int]:
    """Where the entries of these tensors of a file begin, in bytes. The header was checked (`stored_in`). Raises `L2LError`.

    The format: https://huggingface.co/docs/safetensors/index#format
    """
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(_LENGTH), "little")
            header = json.loads(opened.read(size))
        return {name: _LENGTH + size + int(header[name]["data_offsets"][0]) for name in names}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise L2LError(f"{file} has changed while it was loaded: {error}. {_AGAIN.capitalize()}") from error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
