"""Parameters that are sharded over ranks: an optimizer steps on this rank's shard of each, with this rank's shards of its state."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from l2l_compile.errors import L2LError
from l2l_compile.object_copies import tensors_within
from l2l_compile.ranks.announcements import ActionKind
from l2l_compile.ranks.placement import placed
from l2l_compile.ranks.ranks import Ranks, floats_of, numbers_of
from l2l_compile.ranks.sharded import is_sharded, is_split_by_a_parallel_layer, local, ranks_behind, shard_spec_of, sharded_as


def own_state(state: Mapping[str, Any], parameter: torch.Tensor) -> Any:
    """The state of this rank's shard of a parameter; for a parameter that is not sharded, the state itself."""
    return mapped(state, local) if is_sharded(parameter) else state


def mapped(value: Any, of_tensor: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of containers within containers, with `of_tensor` of each tensor."""
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    made: Any
    if isinstance(value, dict):
        made = copy.copy(value)  # of the same class
        made.update({name: mapped(part, of_tensor) for name, part in value.items()})
        return made
    if isinstance(value, (list, deque)):
        made = copy.copy(value)
        made.clear()
        made.extend(mapped(part, of_tensor) for part in value)
        return made
    if type(value) is tuple:
        return tuple(mapped(part, of_tensor) for part in value)
    return value


def kept_state(
    made: dict[str, Any], parameter: torch.Tensor, before: Mapping[str, Any], of_entries: Callable[[], Collection[str]]
) -> dict[str, Any]:
    """State that a step on a shard has left, sharded like the parameter: a checkpoint takes plain tensors for whole ones.

    before      the state before the step
    of_entries  returns names of state with one entry for each entry of the parameter; called if sizes do not tell
    """
    if not is_sharded(parameter):
        return made
    shard = local(parameter)
    earlier = {id(local(t)): t for t in tensors_within(before)}  # by the shard: a step writes into most of its state

    def kept(value: torch.Tensor, name: str) -> torch.Tensor:
        if id(value) in earlier:
            return earlier[id(value)]
        if value.shape != shard.shape:
            return value
        if isinstance(before.get(name), torch.Tensor):
            return _like(before[name], value, parameter)
        return sharded_as(value, parameter) if shard.dim() or name in of_entries() else value

    return {name: mapped(value, functools.partial(kept, name=name)) for name, value in made.items()}


def _like(earlier: torch.Tensor, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """State that a step has made anew, sharded if it was sharded before."""
    return sharded_as(value, parameter) if is_sharded(earlier) else value


def ranks_among(parameters: Iterable[torch.Tensor]) -> Ranks | None:
    """The ranks that share parameters: among which they are sharded, or whose pipeline they are of; None for one rank."""
    ranks = next((r for p in parameters if (r := _ranks_of(p)) is not None), None)
    return ranks if ranks is not None and ranks.world_size > 1 else None


def _ranks_of(parameter: torch.Tensor) -> Ranks | None:
    if is_sharded(parameter):
        return ranks_behind(parameter)
    where = placed(parameter)
    return where.ranks if where is not None else None


def counts_here(parameter: torch.Tensor, ranks: Ranks | None) -> bool:
    """Whether this rank's shard counts in a sum over all ranks.

    Every rank has the whole of a parameter without dimensions, and every replica has each shard. Ranks that share parallel
    layers have the same shards of each parameter that is not split among them.
    """
    if ranks is None or not is_sharded(parameter):
        return True
    if ranks.tp_rank and not is_split_by_a_parallel_layer(parameter):
        return False
    return ranks.replicate_mesh_rank == 0 and (ranks.shard_mesh_rank == 0 or not shard_spec_of(parameter).replicated)


def summed_over(ranks: Ranks | None, kind: ActionKind, values: tuple[float, ...]) -> list[float]:
    """Announce `kind` together with the other ranks; the sums of `values` over all ranks, the same bits on each (caller)."""
    if ranks is None:
        return list(values)
    told = ranks.announce(kind, told=numbers_of(values))
    return [sum(column) for column in zip(*map(floats_of, told), strict=True)][: len(values)]


def check_shards_are_independent(optimizer: torch.optim.Optimizer, trial: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Raise `L2LError` if a step on a matrix differs from steps on its shards, as with a norm of the whole or factored state.

    `trial(sizes, dim)` returns a 6 x 6 matrix after some steps on shards of `sizes` rows (`dim` 0) or columns.
    """
    sharded = [p for p in parameters if is_sharded(p)]
    if ranks_among(sharded) is None:
        return
    dims = {0} | {p.placements[1].dim for p in sharded if is_split_by_a_parallel_layer(p)}  # type: ignore[attr-defined]
    if any(not torch.equal(trial([6], dim), trial([3, 3], dim)) for dim in dims):
        raise L2LError(
            f"{type(optimizer).__name__} looks at a parameter as a whole (its norm, its rows and columns), and each rank has a shard "
            "of it. Use one that updates each entry by itself, as AdamW and SGD do. With update='at_step' it runs its own step, if it can do "
            "so on PyTorch's DTensors"
        )
