"""Which rank of a pipeline has each parameter and buffer of a model.

`pipeline` leaves to a rank its own parameters. The others leave the registry of their modules: `parameters()`, `state_dict()` and
optimizers do not see them. Dynamo finds tensors of their shape in their place, without memory, so that each rank captures the whole
model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from l2l_compile.errors import L2LError
from l2l_compile.ranks.pipeline_ranks import PipelineRanks


@dataclass(frozen=True, eq=False)
class Placed:
    """A parameter or a buffer of a pipeline.

    name    its name in the model, the same on each rank
    rank    the rank that has it
    number  its position among the parameters of the whole model
    """

    ranks: PipelineRanks
    name: str
    rank: int
    number: int


_placed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def placed(tensor: Any) -> Placed | None:
    """Where a parameter or a buffer of a pipeline is; None for any other object."""
    return _placed.get(tensor) if isinstance(tensor, torch.Tensor) else None


def all_placed() -> list[tuple[torch.Tensor, Placed]]:
    """The parameters and buffers of all pipelines."""
    return list(_placed.items())


def anything_is_placed() -> bool:
    """Whether a model of this process is a pipeline."""
    return len(_placed) > 0


def place(model: nn.Module, mesh: DeviceMesh, owners: Mapping[str, int]) -> PipelineRanks:
    """Leave to this rank the parameters that `owners` gives it, by name. Buffers go with the parameters of their module.

    Values of parameters are those of rank 0.
    """
    ranks = PipelineRanks(mesh)
    tied = _names_of_each(model)
    number = {id(parameter): position for position, parameter in enumerate(model.parameters())}
    ranks.parameters = len(number)
    replaced: dict[int, torch.Tensor] = {}
    for parameter, (name, *_) in tied:
        rank = owners[name]
        if not parameter.is_meta:
            _take_from_first(ranks, parameter, rank)
        mine = parameter if rank == ranks.world_rank else _without_memory(parameter)
        replaced[id(parameter)] = mine
        _placed[mine] = Placed(ranks, name, rank, number[id(parameter)])
    for prefix, module in model.named_modules():
        _leave_own(module, prefix, ranks, replaced)
    return ranks


def _names_of_each(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Each parameter of a model once, with all its names."""
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    return list(found.values())


def _take_from_first(ranks: PipelineRanks, parameter: nn.Parameter, owner: int) -> None:
    """Fill the owner's parameter with the values of rank 0."""
    if owner != 0 and ranks.world_rank in (0, owner):
        with torch.no_grad():
            if ranks.world_rank == 0:
                message = ranks.send(parameter.detach(), owner)
                ranks.finish_message(message)
            else:
                values = parameter.detach().new_empty(parameter.shape)
                ranks.finish_message(ranks.receive(values, 0))
                parameter.copy_(values)


def _without_memory(tensor: torch.Tensor) -> Any:
    """A tensor, or parameter, with the same shape on the host, and no memory; Dynamo reads those without dimensions."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.dim():
        empty.untyped_storage().resize_(0)
    else:
        empty.zero_()
    if not isinstance(tensor, nn.Parameter):
        return empty
    stand_in = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    stand_in.__dict__.update(vars(tensor))
    return stand_in


def _leave_own(module: nn.Module, prefix: str, ranks: PipelineRanks, replaced: Mapping[int, torch.Tensor]) -> None:
    """Take from a module what other ranks have."""
    registered = {name: placed(replaced[id(p)]) for name, p in module._parameters.items() if p is not None}
    owners = {where.rank for where in registered.values() if where is not None}
    elsewhere = [name for name, where in registered.items() if where is not None and where.rank != ranks.world_rank]
    taken: dict[str, torch.Tensor] = {}
    for name in elsewhere:
        parameter = module._parameters.pop(name)
        taken[name] = replaced[id(parameter)]
    if len(owners) == 1:
        (owner,) = owners
        for name, buffer in module._buffers.items():
            if buffer is not None:
                mine = buffer if owner == ranks.world_rank else _without_memory(buffer)
                _placed[mine] = Placed(ranks, f"{prefix}.{name}".lstrip("."), owner, -1)
                if owner != ranks.world_rank:
                    taken[name] = mine
        for name in taken.keys() - set(elsewhere):
            module._buffers.pop(name)
    if taken:
        for name, stand_in in taken.items():
            vars(module)[STAND_IN + name] = stand_in
        module.register_load_state_dict_pre_hook(functools.partial(_leave_out, names=tuple(taken)))
        module.__class__ = _naming_owner(type(module), tuple(sorted(taken)))  # type: ignore[arg-type]  # a class is hashable
        _replace_flat_weights(module)


STAND_IN = "_l2l_elsewhere_"  # begins the names of attributes that hold tensors without memory


def _leave_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any, names: Sequence[str]) -> None:
    """Drop the entries of a state_dict of the whole model that other ranks load."""
    for name in names:
        state_dict.pop(prefix + name, None)


def _replace_flat_weights(module: nn.Module) -> None:
    """Recurrent layers hold their parameters in a list as well."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


@functools.cache
def _naming_owner(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of a module's class, with the same name. Reading the attributes `names` is an error that names their rank."""
    properties: dict[str, Any] = {name: property(functools.partial(_elsewhere, name=name)) for name in names}
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**properties, **same})


def _elsewhere(module: nn.Module, name: str) -> Any:
    stand_in = getattr(module, STAND_IN + name)
    if torch.compiler.is_compiling():
        return stand_in
    where = placed(stand_in)
    assert where is not None
    raise L2LError(
        f"'{where.name}' is on rank {where.rank} of the pipeline, and this is rank {where.ranks.world_rank}: call the compiled model, "
        "which runs each layer on its rank"
    )


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise `L2LError` if `mesh` is not a mesh that a pipeline can run on."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise L2LError(
            f"l2l_compile.pipeline takes a DeviceMesh of one dimension, such as init_device_mesh('cpu', (stages,)), or a dimension of a "
            f"mesh, as in mesh['pp'], got {mesh!r}"
        )


def agreed(mesh: DeviceMesh, decide: Callable[[], Any]) -> Any:
    """What the first rank decides, on every rank. Raises its error there, and `L2LError` on the others."""
    group = mesh.get_group()
    first = dist.get_process_group_ranks(group)[0]
    found: list[Any] = [None, ""]
    error: Exception | None = None
    if dist.get_rank() == first:
        try:
            found[0] = decide()
        except Exception as caught:  # noqa: BLE001 - the others wait for it
            error, found[1] = caught, f"{type(caught).__name__}: {caught}"
    dist.broadcast_object_list(found, src=first, group=group)
    if error is not None:
        raise error
    if found[1]:
        raise L2LError(f"rank 0 could not divide the model into stages: {found[1]}")
    return found[0]
