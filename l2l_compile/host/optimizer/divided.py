"""Parameters that are divided among ranks: an optimizer steps on this rank's piece of each, with this rank's pieces of its state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from ...errors import L2LError
from ...ranks.announcements import Kind
from ...ranks.ranks import Ranks, floats_of, numbers_of
from ...ranks.sharded import divided_as, is_divided, is_split_by_a_parallel_layer, local, pieces_of, ranks_behind


def own_state(state: Mapping[str, Any], parameter: torch.Tensor) -> Any:
    """The state of this rank's piece of a parameter; for a parameter that is not divided, the state itself."""
    if not is_divided(parameter):
        return state
    return {name: local(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def kept_state(
    made: dict[str, Any], parameter: torch.Tensor, before: Mapping[str, Any], of_entries: Callable[[], Collection[str]]
) -> dict[str, Any]:
    """State that a step on a piece has left, divided like the parameter: a checkpoint takes plain tensors for whole ones.

    before      the state before the step
    of_entries  returns names of state with one entry for each entry of the parameter; called if sizes do not tell
    """
    if not is_divided(parameter):
        return made
    piece, kept = local(parameter), {}
    for name, value in made.items():
        earlier = before.get(name)
        if not isinstance(value, torch.Tensor) or value.shape != piece.shape:
            kept[name] = value
        elif earlier is not None:
            kept[name] = earlier if local(earlier) is value else _like(earlier, value, parameter)
        else:
            kept[name] = divided_as(value, parameter) if piece.dim() or name in of_entries() else value
    return kept


def _like(earlier: torch.Tensor, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """State that a step has made anew, divided if it was divided before."""
    return divided_as(value, parameter) if is_divided(earlier) else value


def ranks_among(parameters: Iterable[torch.Tensor]) -> Ranks | None:
    """The ranks among which parameters are divided; None if there is one rank, or if no parameter is divided."""
    ranks = next((ranks_behind(p) for p in parameters if is_divided(p)), None)
    return ranks if ranks is not None and ranks.count > 1 else None


def counts_here(parameter: torch.Tensor, ranks: Ranks | None) -> bool:
    """Whether this rank's piece counts in a sum over all ranks.

    Every rank has the whole of a parameter without dimensions, and every replica has each piece. Ranks that share parallel
    layers have the same pieces of each parameter that is not split among them.
    """
    if ranks is None or not is_divided(parameter):
        return True
    if ranks.part and not is_split_by_a_parallel_layer(parameter):
        return False
    return ranks.replica == 0 and (ranks.rank == 0 or not pieces_of(parameter).replicated)


def summed_over(ranks: Ranks | None, kind: Kind, values: tuple[float, ...]) -> list[float]:
    """Announce `kind` together with the other ranks; the sums of `values` over all ranks, the same bits on each (caller)."""
    if ranks is None:
        return list(values)
    told = ranks.announce(kind, told=numbers_of(values))
    return [sum(column) for column in zip(*map(floats_of, told), strict=True)][: len(values)]


def check_pieces_are_independent(optimizer: torch.optim.Optimizer, trial: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Raise `L2LError` if a step on a matrix differs from steps on its pieces, as with a norm of the whole or factored state.

    `trial(sizes, dim)` returns a 6 x 6 matrix after some steps on pieces of `sizes` rows (`dim` 0) or columns.
    """
    divided = [p for p in parameters if is_divided(p)]
    if ranks_among(divided) is None:
        return
    dims = {0} | {p.placements[1].dim for p in divided if is_split_by_a_parallel_layer(p)}  # type: ignore[attr-defined]
    if any(not torch.equal(trial([6], dim), trial([3, 3], dim)) for dim in dims):
        raise L2LError(
            f"{type(optimizer).__name__} looks at a parameter as a whole (its norm, its rows and columns), and each rank has a piece "
            "of it. Use one that updates each entry by itself, as AdamW and SGD do. With update='at_step' it runs its own step, if it can do "
            "so on PyTorch's DTensors"
        )
