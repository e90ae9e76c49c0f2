"""Parameters that are sharded over ranks: host `DTensor`s, `Shard(0)`. The adapter to DTensor.

`shard` gives the modules of a model class properties, as torchtitan's simple_fsdp does. Reading `module.weight` then evaluates

    self._parameters["weight"].redistribute(Replicate()).to_local()

Dynamo captures the two calls, and capture removes them again (`frontend/rewrites/sharded_weights.py`): a program gathers weights layer by layer.
A model that runs uncompiled gathers each weight when it is read, and its gradients become the mean over the ranks.
"""

from __future__ import annotations

import functools
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from l2l_compile.errors import L2LError
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.gathered import gathered, whole_of
from l2l_compile.ranks.pipeline_ranks import PipelineRanks
from l2l_compile.ranks.placement import LEFT, pipeline_of, placed
from l2l_compile.ranks.ranks import Ranks, is_known, ranks_of, replicates, tp_size_of
from l2l_compile.ranks.shard_spec import ShardSpec, stride_of
from l2l_compile.ranks.sharing import ranks_sharing


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divide the parameters of a model among the ranks of a mesh, in shards of `ceil(rows / ranks)` rows. Returns the model.

    The ranks of each stage of a pipeline may call this after `l2l_compile.pipeline`, with a mesh of these ranks; a mesh
    ("replicate", "shard") may then have one shard, which makes copies of the stage.

    All ranks must call this, before the optimizer is made from `model.parameters()` and before `torch.compile`. Every rank
    keeps its own rows of the values that rank 0 has. A model on the meta device stays there, and `to_empty(device="cpu")` then
    allocates only the shards. Parameters without dimensions and buffers are whole on every rank. Shared parameters stay shared.

    With a mesh of the dimensions ("replicate", "shard"), also with a prefix as in "dp_replicate", parameters are sharded along
    the second dimension. The gradients of a shard are averaged along the first dimension, on the host. With another mesh of two
    dimensions, such as ("dp", "tp"), parameters are sharded along the first one. Layers that `parallelize_module` has sharded
    along the second dimension are sharded along both.

    Raises `L2LError` for any other mesh, for a second dimension that neither shards parameters nor has parallel layers, and
    for parameters that are not on the host, that are sharded already, or whose part of a parallel layer has indivisible rows.
    """
    pipeline = pipeline_of(model)
    _check_mesh(mesh, pipeline)
    for name, whole in model.named_parameters():
        _check(whole, mesh, name)
    data = _data(mesh)
    if data is not mesh and mesh.size(1) > 1:
        _check_parallel(model, mesh)
    ranks_of(data, True, mesh if data is not mesh else None, pipeline)
    count_steps()
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        parallel = {}
        for name in names:
            parameter = module._parameters[name]
            assert parameter is not None
            if parameter not in made:
                made[parameter] = _sharded(parameter, mesh)
                setattr(parameter, _REPLACED, True)
            module._parameters[name] = made[parameter]
            if is_sharded_twice(made[parameter]):
                parallel[name] = mesh
        if names:
            module.register_load_state_dict_pre_hook(_take_rows)
            module.__class__ = _reading_whole(type(module), tuple(names), _data(mesh).ndim, tuple(parallel.items()))  # type: ignore[arg-type]  # a class is hashable
    return model


def _take_rows(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole tensors in a state_dict, which every rank has, by this rank's rows. `L2LError` for parallel layers."""
    for name, parameter in module._parameters.items():
        whole = state_dict.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(whole, torch.Tensor) and not isinstance(whole, DTensor):
            if is_sharded_twice(parameter):
                raise L2LError(
                    f"'{prefix}{name}' is of a parallel layer, and whole in the state_dict: load it with set_model_state_dict(..., "
                    "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict"
                )
            if whole.shape == parameter.shape:
                spec, ranks = shard_spec_of(parameter), ranks_behind(parameter)
                span = slice(None)
                if not spec.replicated:
                    own = spec.span(ranks.shard_mesh_rank)
                    span = slice(own.start, own.stop)
                state_dict[prefix + name] = sharded_as((whole[span] if whole.dim() else whole).clone(), parameter)


_REPLACED = "_l2l_replaced"  # an attribute of parameters that `shard` has taken out of a model


def _data(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of parameters outside of parallel layers: for ("dp", "tp") its first dimension, else the whole mesh."""
    return mesh if mesh.ndim == 1 or replicates(mesh) else mesh[_names(mesh)[0]]


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names


@functools.cache
def count_steps() -> None:
    """Install a hook that counts every step of an optimizer of sharded parameters. Ranks compare the counts."""
    register_optimizer_step_pre_hook(_refuse_parameters_of_before)
    register_optimizer_step_post_hook(_counted)


def _refuse_parameters_of_before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise `L2LError` for an optimizer that was made before `shard`: its parameters are no longer part of the model."""
    replaced = sum(hasattr(p, _REPLACED) for p in parameters_of(optimizer))
    if replaced:
        raise L2LError(
            f"{type(optimizer).__name__} holds {replaced} parameters that l2l_compile.shard has replaced by sharded ones, so it trains "
            "nothing: make it from model.parameters() after l2l_compile.shard"
        )

    if left := sum(hasattr(p, LEFT) for p in parameters_of(optimizer)):
        raise L2LError(
            f"{type(optimizer).__name__} holds {left} parameters that other ranks of a pipeline have, so this rank keeps their memory: make it "
            "from model.parameters() after l2l_compile.pipeline"
        )


def _counted(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    ranks = next((r for p in parameters_of(optimizer) if (r := _stepping_together(p)) is not None), None)
    if ranks is not None:
        ranks.steps += 1
        if not ranks.compares_settings:
            return
        ranks.settings = tuple(
            f"{name}={value} in group {number}"
            for number, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if isinstance(value, (int, float, tuple)) or isinstance(value, torch.Tensor) and not value.dim()
        )


def _stepping_together(parameter: torch.Tensor) -> Ranks | None:
    """The ranks that take the steps of a parameter's optimizer together; None for a parameter of one rank."""
    if is_sharded(parameter):
        return ranks_sharing(parameter.device_mesh) if is_of_a_parallel_layer(parameter) else ranks_behind(parameter)
    where = placed(parameter)
    return where.ranks if where is not None else None


def _is_of_this_parallel_layer(parameter: torch.Tensor, mesh: DeviceMesh) -> TypeGuard[DTensor]:
    """Whether `parallelize_module` has sharded a parameter along the second dimension of the mesh."""
    if not isinstance(parameter, DTensor) or mesh.ndim != 2 or replicates(mesh):
        return False
    return parameter.device_mesh == mesh[_names(mesh)[1]]


def _check(parameter: nn.Parameter, mesh: DeviceMesh, name: str) -> None:
    """Raise `L2LError` if a parameter cannot be sharded."""
    if _is_of_this_parallel_layer(parameter, mesh):
        rows, data = parameter.to_local().shape[0], _data(mesh)
        if parameter.placements[0].is_shard(0) and rows % data.size():
            raise L2LError(
                f"parameter '{name}' has {rows} rows on each rank of {parameter.device_mesh}, which cannot be sharded evenly over {data}"
            )
    elif isinstance(parameter, DTensor):
        raise L2LError(
            f"parameter '{name}' is sharded over ranks already: call l2l_compile.shard once, on the plain model; "
            "after parallelize_module, with the mesh of both dimensions, its own the second"
        )
    else:
        check_plain(parameter, name, "it cannot be sharded by rows")


def check_plain(parameter: nn.Parameter, name: str, cannot: str) -> None:
    """Raise `L2LError` for a parameter that is more than its entries, which `cannot` says of it, or that is on a device."""
    if type(parameter).__module__.partition(".")[0] != "torch":
        raise L2LError(
            f"parameter '{name}' is a {type(parameter).__name__}, whose class keeps more than its entries, such as scales of a quantized "
            f"weight: {cannot}. Stream the model on one rank, or keep the weights in 16 bits"
        )
    if parameter.device.type not in ("cpu", "meta"):
        raise L2LError(f"parameter '{name}' is on {parameter.device}: leave the model on the host, or on meta")


def _check_mesh(mesh: DeviceMesh, pipeline: PipelineRanks | None) -> None:
    """Raise `L2LError` if `mesh` is not a mesh over which a model can be sharded."""
    if not isinstance(mesh, DeviceMesh):
        raise L2LError(f"l2l_compile.shard takes a DeviceMesh, as init_device_mesh('cpu', (ranks,)) makes it, got {mesh!r}")
    if mesh.ndim > 2 or mesh.ndim == 2 and not mesh.mesh_dim_names:
        raise L2LError(f"l2l_compile.shard takes a mesh of one dimension, or of two with names, got one of {mesh.ndim}: {mesh}")
    if pipeline is not None and len(shared := {*mesh.mesh.flatten().tolist()} & {*pipeline.members}) > 1:
        raise L2LError(
            f"ranks {', '.join(map(str, sorted(shared)))} of {mesh} are stages of one pipeline: l2l_compile.shard takes the ranks of one stage, such "
            "as mesh['dp'] of a mesh ('dp', 'pp')"
        )
    if pipeline is not None and _data(mesh) is not mesh:
        raise L2LError(f"the layers of a pipeline cannot be parallel as well: pass {mesh[_names(mesh)[0]]} to l2l_compile.shard")
    if pipeline is None and replicates(mesh) and mesh.size(1) == 1:
        raise L2LError(f"{mesh} repeats the model and shards nothing: use DistributedDataParallel, or a mesh of one dimension")


def _check_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise `L2LError` if no layer is parallel along the second dimension: nothing would average gradients over its ranks.

    A model without parallel layers may take the mesh after another model, which has some, was sharded over it.
    """
    if any(_is_of_this_parallel_layer(p, mesh) for p in model.parameters()) or tp_size_of(_data(mesh)):
        return
    first, second = _names(mesh)
    raise L2LError(
        f"l2l_compile.shard is given the dimensions ('{first}', '{second}'), and no layer of the model is parallel along '{second}'. To "
        f"average gradients over both, name them ('replicate', 'shard'); for parallel layers, call parallelize_module(model, "
        f"mesh['{second}'], ...) first"
    )


def _sharded(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    if _is_of_this_parallel_layer(parameter, mesh):
        return _sharded_twice(parameter, mesh)
    made = distribute_tensor(parameter.detach(), _data(mesh), placements_of(parameter, _data(mesh)))
    set_local(made, _without_padding(made.to_local()))
    sharded = nn.Parameter(made, requires_grad=parameter.requires_grad)
    sharded.__dict__.update(attributes(parameter))
    return sharded


def placements_of(whole: torch.Tensor, mesh: DeviceMesh) -> list[Placement]:
    """How `shard` places a tensor on the mesh of its parameters: by rows along the last dimension, or whole if it has none."""
    return [*[Replicate()] * (mesh.ndim - 1), Shard(0) if whole.dim() else Replicate()]


def _sharded_twice(parameter: DTensor, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's rows of its part of a parallel layer's parameter."""
    (placement,), data, part = parameter.placements, _data(mesh), parameter.to_local().detach()
    rows: Shard | _StridedShard = Shard(0)
    if placement.is_shard(0):  # the rows of each part are sharded: the shard of rank (0, 1) does not follow that of rank (0, 0)
        rows = _StridedShard(0, split_factor=parameter.device_mesh.size())
    shard = _without_padding(distribute_tensor(part, data, [Shard(0)]).to_local())
    shape = parameter.shape
    made = DTensor.from_local(shard, mesh, [rows, placement], run_check=False, shape=shape, stride=stride_of(shape))
    sharded = nn.Parameter(made, requires_grad=parameter.requires_grad)
    sharded.__dict__.update(attributes(parameter))
    return sharded


def _without_padding(shard: torch.Tensor) -> torch.Tensor:
    """A shard in memory of its size: `distribute_tensor` leaves one with fewer rows than others in memory for as many."""
    return shard if shard.untyped_storage().nbytes() == shard.nbytes else shard.clone()


@functools.cache
def _reading_whole(
    kind: type[nn.Module], names: tuple[str, ...], dims: int, parallel: tuple[tuple[str, DeviceMesh], ...]
) -> type[nn.Module]:
    """A subclass of a module's class, with the same name. Reading the attributes `names` gives whole parameters."""
    properties: dict[str, Any] = {name: property(functools.partial(_whole, name=name, dims=dims)) for name in names}
    for name, mesh in parallel:
        tensor = mesh[_names(mesh)[1]]
        properties[name] = property(functools.partial(_whole_part, name=name, data=_data(mesh), tensor=tensor))
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**properties, **same})


def _whole(module: nn.Module, name: str, dims: int) -> Any:
    parameter = module._parameters[name]
    if not isinstance(parameter, DTensor):
        return parameter
    whole = whole_of(parameter, dims)
    if torch.compiler.is_compiling():
        return whole
    return gathered(whole, parameter, f"the '{name}' of a {type(module).__name__}")


def _whole_part(module: nn.Module, name: str, data: DeviceMesh, tensor: DeviceMesh) -> Any:
    """A parameter of a parallel layer as it was before `shard`: a `DTensor` along the second dimension of the mesh."""
    parameter = module._parameters[name]
    if not isinstance(parameter, DTensor):
        return parameter
    shape = _shape_of_part(parameter)
    rows = DTensor.from_local(parameter.to_local(), data, [Shard(0)], run_check=False, shape=shape, stride=stride_of(shape))
    part = rows.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
    return DTensor.from_local(part, tensor, [parameter.placements[1]], run_check=False)


def _shape_of_part(parameter: DTensor) -> torch.Size:
    """The shape of the part of a parameter that a rank of the second dimension has, before `shard` shards its rows."""
    sizes, placement = list(parameter.shape), parameter.placements[1]
    if placement.is_shard():
        sizes[placement.dim] //= parameter.device_mesh.size(1)  # type: ignore[attr-defined]
    return torch.Size(sizes)


def is_sharded_twice(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sharded twice: by `parallelize_module`, and then by `shard`."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 2 and not replicates(tensor.device_mesh)


def is_split_by_a_parallel_layer(tensor: torch.Tensor) -> bool:
    """Whether the ranks that share a parallel layer have different parts of a parameter; False if each has the whole."""
    return isinstance(tensor, DTensor) and is_sharded_twice(tensor) and tensor.placements[1].is_shard()


def is_sharded(tensor: Any) -> TypeGuard[DTensor]:
    """Whether a tensor is a `DTensor`."""
    return isinstance(tensor, DTensor)


def is_of_a_parallel_layer(tensor: Any) -> TypeGuard[DTensor]:
    """Whether a tensor is a `DTensor` on a mesh that `shard` was not called with, as `parallelize_module` makes them."""
    if not isinstance(tensor, DTensor):
        return False
    mesh = tensor.device_mesh
    return mesh.ndim > 2 or mesh.ndim == 2 and not mesh.mesh_dim_names or not is_known(_data(mesh))


def shard_spec_of(tensor: DTensor) -> ShardSpec:
    """How a parameter is sharded. Raises `L2LError` if `shard` has not sharded it."""
    placements = tensor.placements
    if is_sharded_twice(tensor):
        return ShardSpec(tuple(_shape_of_part(tensor)), tensor.device_mesh.size(0))
    if replicates(tensor.device_mesh) and placements[0].is_replicate():
        placements = placements[1:]
    if len(placements) != 1 or not (placements[0].is_replicate() or placements[0].is_shard(0)):
        raise L2LError(f"a parameter is a DTensor with {placements}: backend 'l2l' takes those of l2l_compile.shard, [Shard(0)]")
    return ShardSpec(tuple(tensor.shape), tensor.device_mesh.size(tensor.device_mesh.ndim - 1), placements[0].is_replicate())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a sharded tensor, the same object in every call. Any other tensor is returned as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def set_local(tensor: torch.Tensor, shard: torch.Tensor) -> None:
    """Have a tensor, which stays the same object, its entries in other memory: those of this rank, if it is sharded."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = shard
    else:
        tensor.data = shard


def attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """The Python attributes that user code has set on a parameter. DTensor sets `_is_param`, and Dynamo has names of its own."""
    return {k: v for k, v in parameter.__dict__.items() if k != "_is_param" and not k.startswith("_dynamo_")}


def sharded_as(shard: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A `DTensor` sharded as `parameter` is, with `shard` as its local shard; `shard` itself if `parameter` is not sharded."""
    if not isinstance(parameter, DTensor):
        return shard
    shape = parameter.shape
    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride_of(shape)
    )


def whole_of_rank_0(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Shard a tensor, which every rank has whole, as `parameter` is sharded. The values are taken from rank 0."""
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else whole


def ranks_behind(tensor: DTensor) -> Ranks:
    """The ranks among which a parameter is sharded. Raises `L2LError` if `shard` was not called with its mesh."""
    return ranks_of(_data(tensor.device_mesh))
