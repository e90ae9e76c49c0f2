"""`pipeline` divides the layers of a model among the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from l2l_compile.errors import L2LError, OptionError
from l2l_compile.integrations.owners import StageOwners, check_loops, owners_by_batch, owners_by_names
from l2l_compile.integrations.saved_folders import refuse_half
from l2l_compile.ranks.placement import agreed, check_mesh, pipeline_of, place
from l2l_compile.ranks.sharded import check_plain, count_steps, is_sharded
from l2l_compile.ranks.stage_norms import make_clipping_global


def pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    batch: Mapping[str, Any] | Sequence[Any] | torch.Tensor | None = None,
    *,
    stages: Sequence[Sequence[str]] | None = None,
    loops: int | None = None,
) -> nn.Module:
    """Divide the layers of a model among the ranks of a mesh of one dimension. Returns the model.

    All ranks must call this, before the optimizer is made from `model.parameters()` and before `torch.compile`. A rank keeps the
    parameters of its stages, with the values that rank 0 has; those of the others leave `parameters()` and `state_dict()`. All ranks
    then call the compiled model with the same batch, and get the same loss.

    `batch` is one like those of training: keyword arguments, positional ones, or one tensor. Rank 0 captures the model with it, finds the
    segments, and cuts them into stages of about equal cost. They go to the ranks in turn, `loops` to each: by default as many as there
    are layers for each rank, which leaves the ranks idle for the least time. `loops=1` gives each rank one run of layers, and sends
    the least. Instead of `batch`, `stages` names the modules and parameters of each stage; of two names for a parameter, the narrower
    one wins.

    Raises `OptionError` for `loops` that are not possible, and `L2LError` for a mesh of more dimensions, for a model that is not on the
    host or is sharded, for parameters without a stage, and for a rank without parameters, or with frozen ones alone.
    """
    check_mesh(mesh)
    _check(model)
    if (batch is None) == (stages is None):
        raise L2LError("l2l_compile.pipeline takes either a batch, from which it finds the stages, or the option stages")
    check_loops(loops)
    if loops is not None and stages is not None:
        raise OptionError("loops goes with a batch, from which the stages are found, and not with stages: leave it out")
    if mesh.size() == 1:
        return model
    division = agreed(mesh, lambda: _division(model, batch, stages, mesh.size(), loops))
    place(model, mesh, division.owners, division.unread)
    refuse_half(model)
    make_clipping_global()
    count_steps()
    return model


def _division(model: nn.Module, batch: Any, stages: Sequence[Sequence[str]] | None, size: int, loops: int | None) -> StageOwners:
    found = owners_by_batch(model, batch, size, loops) if stages is None else StageOwners(owners_by_names(model, stages, size))
    _check_owners(model, found.owners, size)
    return found


def _check_owners(model: nn.Module, owners: Mapping[str, int], size: int) -> None:
    """Raise `L2LError` for a rank without parameters, and for one with nothing to train in a model that has something to train."""
    trained = {owners[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
    for rank in range(size):
        if rank not in owners.values():
            raise L2LError(
                f"rank {rank} would have no parameters: the model has fewer layers than the mesh has ranks, or its layers share parameters, "
                "which keeps them on one rank"
            )
        if trained and rank not in trained:
            names = [name for name, owner in owners.items() if owner == rank]
            raise L2LError(
                f"rank {rank} would have nothing to train: its parameters, from '{names[0]}' to '{names[-1]}', are all frozen, and each rank "
                "needs an optimizer. Train a parameter of its layers as well, give each rank trained ones (stages=...), or use fewer ranks. "
                "To evaluate alone, freeze all parameters"
            )


def _check(model: nn.Module) -> None:
    if pipeline_of(model) is not None:
        raise L2LError("l2l_compile.pipeline was called on this model before: call it once, on the plain model")
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise L2LError(
                f"'{name}' is a {type(module).__name__}: a pipeline of recurrent layers is not supported yet, since they hold their parameters "
                "in a list as well, where PyTorch reads them in each call"
            )
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise L2LError(f"parameter '{name}' is sharded over ranks already: a pipeline of sharded layers is not supported yet")
        check_plain(parameter, name, "a pipeline of such weights is not supported yet")
