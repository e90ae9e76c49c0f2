"""What a manifest says of a training run: parameters, optimizer state and buffers, each a place in the file or its value.

All values are plain (numbers, texts, small tensors, and lists, tuples and dictionaries of them), so that reading them runs no code.
Of what is sharded over ranks, each rank has its own shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_compile.disk.disk_store import place_of
from l2l_compile.disk.versioned_range import StoredPlace, VersionedRange
from l2l_compile.disk.versions import VersionedStore
from l2l_compile.errors import L2LError
from l2l_compile.host.step.groups import put
from l2l_compile.host.step.small_copies import named_state
from l2l_compile.host.step.torch_step import hyperparameters
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.sharded import is_sharded, local, set_local, sharded_as

Earlier = dict[torch.Tensor, list[torch.Tensor]]  # by parameter, weights of a step before (`delay=1`)
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype)

Parameter = torch.nn.Parameter


@dataclass(frozen=True)
class _Stored:
    """A tensor on disk: the number of its range among those of a step."""

    number: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class _Parameter:
    """A parameter and its optimizer state: plain values, and `_Stored` for tensors on disk. `value` is None if it is not kept.

    before   with `delay=1`, the weights that the next step reads, of a parameter in memory; those on disk have a place for them
    shard    the shape of this rank's shard, None for a parameter that is not sharded
    sharded  names of state that is sharded like the parameter
    """

    name: str | None
    shape: torch.Size
    shard: list[int] | None
    sharded: list[Any]
    dtype: torch.dtype
    value: Any
    state: dict[Any, Any]
    before: list[torch.Tensor]


@dataclass(frozen=True)
class OfTheLoop:
    """The part of a step that the user's thread may change: taken between two steps.

    steps    complete steps
    groups   the entries of each param_group except its parameters
    buffers  of the model, by name
    extra    what the user handed in
    """

    steps: int
    groups: list[dict[str, Any]]
    buffers: dict[str, torch.Tensor]
    extra: Any


def _is_dense(tensor: torch.Tensor) -> bool:
    return (type(tensor) is torch.Tensor or isinstance(tensor, Parameter)) and tensor.layout is torch.strided


def plain(value: Any, what: str) -> Any:
    """A copy of a plain value. Raises `L2LError` for any other, of which the message says `what` it is."""
    if isinstance(value, torch.Tensor):
        if not _is_dense(value):
            raise L2LError(
                f"{what} is a {type(value).__name__}, {value.layout}: the option 'resumable' keeps dense tensors alone"
            )
        return value.detach().to("cpu", copy=True)
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        return type(value)(plain(each, f"{what}[{number}]") for number, each in enumerate(value))
    if isinstance(value, dict):
        return {plain(key, f"a key of {what}"): plain(each, f"{what}[{key!r}]") for key, each in value.items()}
    for kind in (float, int, str):  # numpy.float64, for instance
        if isinstance(value, kind):
            return kind(value)
    raise L2LError(
        f"{what} is of type {type(value).__name__}: the option 'resumable' keeps numbers, texts, tensors, and lists, tuples and dictionaries of "
        "them, so that no code runs when a run is resumed"
    )


class Contents:
    """What a step consists of. Made when its updates were made, and before any of the next step.

    ranges  of its tensors on disk
    groups  entries of param_groups, and `named` entries of the optimizer's state, which its counts may still be put into
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[Parameter, str],
        kept: set[Parameter],
        of_loop: OfTheLoop,
        before: Earlier,
    ):
        self.ranges: list[VersionedRange] = []
        self.groups = of_loop.groups
        self.named = {k: plain(v, f"the entry {k!r} of the optimizer's state") for k, v in named_state(optimizer).items()}
        self._optimizer, self._loop = type(optimizer).__name__, of_loop
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._parameters = []
        for number, p in enumerate(parameters_of(optimizer)):
            state = optimizer.state.get(p, {})
            value = self._entry(local(p), f"parameter {number}") if p in kept else None
            entries = {name: self._entry(local(each), f"state {name!r} of parameter {number}") for name, each in state.items()}
            of_step_before = plain([local(t) for t in before.get(p, [])], f"parameter {number} of a step before")
            sharded = [name for name, each in state.items() if is_sharded(each)]
            made = _Parameter(names.get(p), p.shape, _shard_of(p), sharded, p.dtype, value, entries, of_step_before)
            self._parameters.append(made)

    def _entry(self, value: Any, what: str) -> Any:
        found = place_of(value) if isinstance(value, torch.Tensor) and _is_dense(value) else None
        if found is None:
            return plain(value, what)
        assert isinstance(found, VersionedRange), f"{what} is in the file of another store"
        self.ranges.append(found)
        return _Stored(len(self.ranges) - 1, value.shape, value.dtype)

    def at(self, places: Sequence[StoredPlace]) -> dict[str, Any]:
        """The plain values, with the places of the ranges."""
        return {
            "steps": self._loop.steps,
            "extra": self._loop.extra,
            "optimizer": self._optimizer,
            "sizes": self._sizes,
            "groups": self.groups,
            "named": self.named,
            "buffers": self._loop.buffers,
            "parameters": [
                {
                    "name": p.name,
                    "shape": list(p.shape),
                    "shard": p.shard,
                    "sharded": p.sharded,
                    "dtype": p.dtype,
                    "value": _placed(p.value, places),
                    "before": p.before,
                    "state": {name: _placed(value, places) for name, value in p.state.items()},
                }
                for p in self._parameters
            ],
        }


def _shard_of(parameter: torch.Tensor) -> list[int] | None:
    return list(local(parameter).shape) if is_sharded(parameter) else None


def _placed(value: Any, places: Sequence[StoredPlace]) -> tuple:
    """("at", where in the file, shape, dtype) or ("is", value)."""
    if not isinstance(value, _Stored):
        return "is", value
    place = places[value.number]
    return "at", (place.start, place.size, place.before), list(value.shape), value.dtype


def check_fits(
    where: str,
    contents: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    names: Mapping[Parameter, str],
    buffers: Mapping[str, torch.Tensor],
) -> None:
    """Raise `L2LError` if a run, which is `where`, is not one of this model and optimizer, with the first difference."""

    def differs(theirs: str, ours: str) -> L2LError:
        return L2LError(
            f"{where} holds a run whose {theirs}, and here it is {ours}: build the same model and optimizer, or give the option 'disk' another "
            "folder"
        )

    if contents["optimizer"] != type(optimizer).__name__:
        raise differs(f"optimizer is {contents['optimizer']}", type(optimizer).__name__)
    for number, (entry, p) in enumerate(zip(contents["parameters"], parameters_of(optimizer), strict=False)):
        name = names.get(p)
        theirs, ours = (_described(*each) for each in ((entry["name"], entry["shape"], entry["dtype"]), (name, p.shape, p.dtype)))
        is_named = name is not None and entry["name"] is not None
        if (list(p.shape), p.dtype) != (entry["shape"], entry["dtype"]) or is_named and name != entry["name"]:
            raise differs(f"parameter {number} is {theirs}", ours)
        if entry.get("shard") != _shard_of(p):
            raise differs(f"parameter {number} is {theirs}, with the shard {entry.get('shard')} on this rank", str(_shard_of(p)))
        if p.device.type != "cpu":
            raise L2LError(f"parameter {number}, {ours}, is on {p.device}: resume with a model on the host")
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != contents["sizes"]:
        raise differs(f"param_groups have {contents['sizes']} parameters", str(sizes))
    for name, value in contents["buffers"].items():
        if name not in buffers or buffers[name].shape != value.shape or buffers[name].dtype != value.dtype:
            ours = _described(None, buffers[name].shape, buffers[name].dtype) if name in buffers else "missing"
            raise differs(f"buffer {name!r} is {_described(None, value.shape, value.dtype)}", ours)


def _described(name: str | None, shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{repr(name) + ' of ' if name is not None else ''}shape {list(shape)} and {dtype}"


def put_back(
    store: VersionedStore, contents: Mapping[str, Any], optimizer: torch.optim.Optimizer, buffers: Mapping[str, torch.Tensor]
) -> Earlier:
    """Give the model and the optimizer what a step has left. Nothing on disk is read.

    Returns the weights of the step before that a run with `delay=1` continues with.
    """
    earlier: Earlier = {}
    with torch.no_grad():
        for entry, p in zip(contents["parameters"], parameters_of(optimizer), strict=True):
            if before := _before(store, entry):
                earlier[p] = [sharded_as(each, p) for each in before]
            value = _value_of(store, entry["value"])
            if value is not None and entry["value"][0] == "at":
                set_local(p, value)
            elif value is not None:
                local(p).copy_(value)
            state = {name: _value_of(store, each) for name, each in entry["state"].items()}
            state |= {name: sharded_as(state[name], p) for name in entry.get("sharded", ())}
            optimizer.state.pop(p, None)
            if state:
                optimizer.state[p] = state
        for name, value in contents["buffers"].items():
            buffers[name].copy_(value)
    _put_back_groups(contents, optimizer)
    return earlier


def _value_of(store: VersionedStore, entry: Sequence[Any]) -> Any:
    if entry[0] == "is":
        return entry[1]
    _, place, shape, dtype = entry
    return store.again(StoredPlace(*place), torch.Size(shape), dtype)


def _before(store: VersionedStore, entry: Mapping[str, Any]) -> list[torch.Tensor]:
    """The weights of a step before that a manifest has of a parameter."""
    if entry["value"][0] == "is":
        return list(entry["before"])
    _, place, shape, dtype = entry["value"]
    found = store.before(StoredPlace(*place), torch.Size(shape), dtype)
    return [] if found is None else [found]


def _put_back_groups(contents: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    now = hyperparameters(optimizer)
    for group in now.groups:
        group.pop("param_names", None)
    for group, before, after in zip(optimizer.param_groups, now.groups, contents["groups"], strict=True):
        put(group, before, after)
    put(optimizer.state, now.named, contents["named"])
