"""The norm of all gradients of a pipeline, of which each rank has some: with the bits that one rank would compute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad

from l2l_compile.errors import L2LError
from l2l_compile.ranks.announcements import ActionKind
from l2l_compile.ranks.pipeline_ranks import PipelineRanks
from l2l_compile.ranks.placement import Placed, all_placed, placed
from l2l_compile.ranks.sharded import is_sharded, ranks_behind

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_GRADIENT: Any = torch.Tensor.grad  # the attribute itself, also of parameters whose class has a property of this name


def in_order_of_model(
    norms: Mapping[Any, torch.Tensor], ranks: PipelineRanks, sums: Callable[[Sequence[float]], Sequence[float]]
) -> list[torch.Tensor]:
    """The norm of each gradient of the whole model, in the order of its parameters. `norms` has those of this rank, by parameter.

    `sums` adds numbers up over the ranks. Raises `L2LError` for a parameter that is not of the pipeline.
    """
    count = ranks.parameters
    values, is_there, dtypes = ([0.0] * count for _ in range(3))
    for parameter, norm in norms.items():
        where = placed(parameter)
        if where is None or where.ranks is not ranks:
            raise L2LError(
                "a parameter that is not of the pipeline has a gradient in a norm over its ranks, each of which may have another one: give it "
                "an optimizer and a norm of its own"
            )
        values[where.number], is_there[where.number] = float(norm.double()), 1.0
        dtypes[where.number] = float(_DTYPES.index(norm.dtype))
    summed = sums([*values, *is_there, *dtypes])
    found = zip(summed[:count], summed[count : 2 * count], summed[2 * count :], strict=True)
    return [torch.tensor(value, dtype=_DTYPES[int(dtype)]) for value, there, dtype in found if there]


@functools.cache
def make_clipping_global() -> None:
    """From now on, `torch.nn.utils.clip_grad_norm_` takes the norm over all ranks of a pipeline, not of this rank's gradients."""
    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = _over_stages(clip_grad._get_total_norm)


def _over_stages(of_this_rank: Any) -> Any:
    @functools.wraps(of_this_rank)
    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        mine = _parameters_of(gradients)
        if not mine:
            return of_this_rank(gradients, norm_type, error_if_nonfinite, foreach)
        some, ranks = mine[0][0], mine[0][1].ranks
        with torch.no_grad():
            (ranks_behind(some) if is_sharded(some) else ranks).announce(ActionKind.NORM)
            norms = {p: _whole(torch.linalg.vector_norm(g, norm_type)) for (p, _), g in zip(mine, gradients, strict=True)}
            ordered = _grouped(in_order_of_model(norms, ranks, ranks.sum_of_callers))
            total = torch.linalg.vector_norm(torch.stack(ordered), norm_type)
        return of_this_rank([total.reshape(1)], norm_type, error_if_nonfinite, foreach)

    return total_norm


def _parameters_of(gradients: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, Placed]]:
    """The parameters of a pipeline with these gradients, in the same order; empty for gradients of other models.

    Raises `L2LError` if some are of a pipeline, and some are not.
    """
    held = {id(gradient): number for number, gradient in enumerate(gradients)}
    found: dict[int, tuple[torch.Tensor, Placed]] = {}
    for parameter, where in all_placed():
        gradient = _GRADIENT.__get__(parameter)
        if gradient is not None and id(gradient) in held:
            found[held[id(gradient)]] = parameter, where
    if found and len(found) < len(gradients):
        raise L2LError(
            f"{len(gradients) - len(found)} of {len(gradients)} gradients in a norm are not of the pipeline whose others are: take their norm "
            "apart"
        )
    return [found[number] for number in sorted(found)]


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if is_sharded(norm) else norm


def _grouped(norms: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Norms in the order in which PyTorch stacks them: those of one dtype together."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for norm in norms:
        groups.setdefault(norm.dtype, []).append(norm)
    return [norm for group in groups.values() for norm in group]
