"""Which rank of a pipeline has each parameter and buffer of a model.

`pipeline` leaves to a rank its own parameters. The others leave the registry of their modules: `parameters()`, `state_dict()` and
optimizers do not see them. Dynamo finds tensors of their shape in their place, without memory, so that each rank captures the whole
model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from l2l_compile.errors import L2LError, OptionError
from l2l_compile.ranks.collectives import gather_objects, is_fake
from l2l_compile.ranks.gathered import whole_of
from l2l_compile.ranks.pipeline_ranks import PipelineRanks, pipeline_ranks_of
from l2l_compile.ranks.ranks import acting_for


@dataclass(frozen=True, eq=False)
class Placed:
    """A parameter or a buffer of a pipeline.

    of        the ranks of the pipeline
    name      its name in the model, the same on each rank
    rank      the rank that has it
    number    its position among the parameters of all models of these ranks
    was_read  whether the batch of `pipeline`, if there was one, read it
    """

    of: PipelineRanks
    name: str
    rank: int
    number: int
    was_read: bool = True

    @property
    def ranks(self) -> PipelineRanks:
        """The ranks of the pipeline, or those that stand in for them."""
        return acting_for(self.of)  # type: ignore[return-value]  # a pipeline stands in for a pipeline

    def __deepcopy__(self, memo: dict[int, Any]) -> Placed:
        """A copy of the model is of the same pipeline."""
        return self


_placed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_has_begun = False


def placed(tensor: Any) -> Placed | None:
    """Where a parameter or a buffer of a pipeline is; None for any other object."""
    return _placed.get(tensor) if isinstance(tensor, torch.Tensor) else None


def all_placed() -> list[tuple[torch.Tensor, Placed]]:
    """The parameters and buffers of all pipelines."""
    return list(_placed.items())


def anything_is_placed() -> bool:
    """Whether a model of this process is, or was, a pipeline."""
    return _has_begun


def place(model: nn.Module, mesh: DeviceMesh, owners: Mapping[str, int], unread: Collection[str] = ()) -> PipelineRanks:
    """Leave to this rank the parameters that `owners` gives it, by name. Buffers go with the parameters of their module.

    `unread` are names of parameters that the batch of `pipeline` did not read.

    Values are those of rank 0. Raises `L2LError` if the models of the ranks differ.
    """
    global _has_begun
    _has_begun = True
    ranks = pipeline_ranks_of(mesh)
    _refuse_others(ranks, model)
    for buffer in model.buffers():
        _take_buffer(ranks, buffer)
    replaced: dict[int, torch.Tensor] = {}
    places: dict[int, Placed] = {}
    for number, (name, parameter) in enumerate(model.named_parameters(), ranks.parameters):
        rank = owners[name]
        if not parameter.is_meta:
            _take_from_first(ranks, parameter, rank)
        mine = parameter if rank == ranks.world_rank else _without_memory(parameter)
        if mine is not parameter:
            setattr(parameter, LEFT, True)
        replaced[id(parameter)] = mine
        places[id(parameter)] = Placed(ranks, name, rank, number, name not in unread)
        _note(mine, places[id(parameter)])
    ranks.parameters += len(places)
    for prefix, module in model.named_modules():
        _leave_own(module, prefix, ranks, replaced, places)
    return ranks


def _refuse_others(ranks: PipelineRanks, model: nn.Module) -> None:
    """Raise `L2LError` on each rank if their models differ: a rank would wait for values that nobody sends."""
    named = [*model.named_parameters(), *model.named_buffers()]
    mine = [(name, tuple(t.shape), str(t.dtype), t.is_meta, t.requires_grad) for name, t in named]
    found = gather_objects(mine, ranks.control_group)
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            one, other = next((a, b) for a, b in itertools.zip_longest(found[0], theirs) if a != b)
            raise L2LError(
                f"the model of rank {rank} is another one than that of rank 0: {_described(other)} in the place of {_described(one)}. Make the "
                "same model on each rank, on the host or on meta, before l2l_compile.pipeline"
            )


def _described(entry: tuple | None) -> str:
    if entry is None:
        return "nothing"
    name, shape, dtype, is_meta, needs = entry
    return f"'{name}' {dtype.removeprefix('torch.')}{list(shape)}{' on meta' * is_meta}{', trained' * needs}"


def _take_buffer(ranks: PipelineRanks, buffer: torch.Tensor) -> None:
    """Give a buffer the values of rank 0."""
    if not buffer.is_meta and buffer.numel():
        values = buffer.detach().contiguous().clone()
        dist.broadcast(values.view(-1).view(torch.uint8), ranks.members[0], group=ranks.control_group)
        with torch.no_grad():
            buffer.copy_(values)


def _take_from_first(ranks: PipelineRanks, parameter: nn.Parameter, owner: int) -> None:
    """Fill the owner's parameter with the values of rank 0."""
    if owner != 0 and ranks.world_rank in (0, owner) and not is_fake(ranks.control_group):
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
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if tensor.dim():
        empty.untyped_storage().resize_(0)
    else:
        empty.zero_()
    stand_in: Any = empty
    if isinstance(tensor, nn.Parameter):
        stand_in = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        stand_in.__dict__.update(vars(tensor))
    stand_in.__deepcopy__ = lambda memo: _without_memory(stand_in)  # PyTorch's would read the memory
    return stand_in


def _leave_own(
    module: nn.Module, prefix: str, ranks: PipelineRanks, replaced: Mapping[int, torch.Tensor], places: Mapping[int, Placed]
) -> None:
    """Take from a module what other ranks have, and note where each of its parameters and buffers is."""
    notes = {name: places[id(p)] for name, p in module._parameters.items() if p is not None}
    stand_ins = {name: replaced[id(module._parameters[name])] for name in notes}
    if len({place.rank for place in notes.values()}) == 1:
        owner = next(iter(notes.values())).rank
        for name, buffer in module._buffers.items():
            if buffer is not None:
                notes[name] = Placed(ranks, f"{prefix}.{name}".lstrip("."), owner, -1)
                _note(buffer, notes[name])
                if owner != ranks.world_rank:
                    stand_ins[name] = _without_memory(buffer)
    if notes:
        vars(module)[_NOTES] = notes
    elsewhere = [name for name, place in notes.items() if place.rank != ranks.world_rank]
    if not elsewhere:
        return
    for name in elsewhere:
        registry = module._parameters if name in module._parameters else module._buffers
        del registry[name]
        vars(module)[STAND_IN + name] = stand_ins[name]
    module.register_load_state_dict_pre_hook(functools.partial(_leave_out, names=tuple(elsewhere)))
    module.__class__ = _naming_owner(type(module), tuple(sorted(elsewhere)))  # type: ignore[arg-type]  # a class is hashable


def places_in(roots: Iterable[nn.Module]) -> dict[int, Placed]:
    """Where the parameters and buffers of models are, by `id`. Notes those that took the place of others: `to_empty` makes new ones.

    A tensor on meta is not noted: a weak reference to it would forbid `swap_tensors`, which gives it memory.
    """
    found: dict[int, Placed] = {}
    for module in {id(module): module for root in roots for module in root.modules()}.values():
        for name, where in vars(module).get(_NOTES, {}).items():
            tensor: torch.Tensor | None = module._parameters.get(name)
            tensor = tensor if tensor is not None else module._buffers.get(name, vars(module).get(STAND_IN + name))
            if tensor is not None:
                found[id(tensor)] = where
                _note(tensor, where)
    return found


def pipeline_of(model: nn.Module) -> PipelineRanks | None:
    """The ranks among which `pipeline` has divided a model; None for any other model."""
    places = (place for module in model.modules() for place in vars(module).get(_NOTES, {}).values())
    return next((place.ranks for place in places), None)


def _note(tensor: torch.Tensor, where: Placed) -> None:
    if not tensor.is_meta and tensor not in _placed:
        _placed[tensor] = where


def parameters_by_rank(model: nn.Module) -> dict[int, list[nn.Parameter]]:
    """The parameters of the whole model, in order, by their rank in the pipeline; of other ranks those without memory."""
    places = places_in([model])
    found: dict[int, dict[nn.Parameter, None]] = {}
    for module in model.modules():
        for name in vars(module).get(_NOTES, {}):
            tensor = module._parameters.get(name, vars(module).get(STAND_IN + name))
            if isinstance(tensor, nn.Parameter):
                found.setdefault(places[id(tensor)].rank, {})[tensor] = None
    return {rank: list(parameters) for rank, parameters in found.items()}


def names_elsewhere(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """The parameters and buffers of a model that other ranks have: the module, the name in it, and a tensor without memory."""
    for module in model.modules():
        for name, tensor in vars(module).copy().items():
            if name.startswith(STAND_IN):
                yield module, name.removeprefix(STAND_IN), tensor


def tensors_elsewhere(model: nn.Module) -> dict[str, torch.Tensor]:
    """As `names_elsewhere`, by their names in the model."""
    prefix_of = {id(module): prefix for prefix, module in model.named_modules()}
    return {f"{prefix_of[id(module)]}.{name}".lstrip("."): tensor for module, name, tensor in names_elsewhere(model)}


LEFT = "_l2l_left"  # an attribute of parameters that `pipeline` has taken out of a model
_NOTES = "_l2l_placed"  # an attribute of a module: where each of its parameters and buffers is, by name
STAND_IN = "_l2l_elsewhere_"  # begins the names of attributes that hold tensors without memory


def _leave_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any, names: Sequence[str]) -> None:
    """Drop the entries of a state_dict of the whole model that other ranks load."""
    for name in names:
        state_dict.pop(prefix + name, None)


@functools.cache
def _naming_owner(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of a module's class, with the same name. Reading the attributes `names` is an error that names their rank."""
    properties: dict[str, Any] = {name: property(functools.partial(_elsewhere, name=name)) for name in names}
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**properties, **same})


def _elsewhere(module: nn.Module, name: str) -> Any:
    if torch.compiler.is_compiling():
        stand_in = getattr(module, STAND_IN + name)  # sharded in virtual time, where this process stands for all ranks
        return whole_of(stand_in, stand_in.device_mesh.ndim) if isinstance(stand_in, DTensor) else stand_in
    if name in module._parameters:  # while transformers initialises a model
        return module._parameters[name]
    where = vars(module)[_NOTES][name]
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
    """What the first rank decides, on every rank. Raises its error there, and on the others `OptionError` for one, or `L2LError`."""
    group = mesh.get_group()
    first = dist.get_process_group_ranks(group)[0]
    found: list[Any] = [None, "", L2LError]
    error: Exception | None = None
    if dist.get_rank() == first:
        try:
            found[0] = decide()
        except Exception as caught:  # noqa: BLE001 - the others wait for it
            error, found[1] = caught, f"{type(caught).__name__}: {caught}"
            if isinstance(caught, OptionError):  # each rank was given the same
                found[1:] = [str(caught), OptionError]
    dist.broadcast_object_list(found, src=first, group=group)
    if error is not None:
        raise error
    if found[2] is OptionError:
        raise OptionError(found[1])
    if found[1]:
        raise L2LError(f"rank 0 could not divide the model into stages: {found[1]}")
    return found[0]
