"""All ranks of a pipeline in virtual time, in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from l2l_compile.devices.host import HOST
from l2l_compile.object_copies import copied, tensors_within
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.pipeline_ranks import PipelineRanks
from l2l_compile.ranks.placement import STAND_IN, names_elsewhere, parameters_by_rank
from l2l_compile.ranks.shard_spec import ShardSpec, stride_of
from l2l_compile.ranks.sharded import placements_of
from l2l_compile.simulation.result import Simulation
from l2l_compile.simulation.simulated_loop import Rank, Setting, SimulatedLoop, Stage
from l2l_compile.simulation.simulated_pipeline import Messages
from l2l_compile.simulation.simulated_ranks import Division, modules_of


def simulate_stages(setting: Setting, pipeline: PipelineRanks) -> Simulation:
    """Steps of all ranks of a pipeline. Returns that of this rank, with those of all in `stages`.

    Each rank captures the model, and has its own programs, clocks and host side. The parameters of other ranks are those without
    memory, and the first group of the optimizer has the hyperparameters of all of them.
    """
    (model,) = modules_of(setting.plain)
    messages = Messages(setting.machine, pipeline.members, pipeline.parameters)
    if setting.division is not None:
        _shard_other_stages(model, setting.division)
    parameters = parameters_by_rank(model)
    modes = _modes_of_thread(setting)

    def simulated(number: int) -> Simulation:
        with modes():
            mine = parameters[number]
            optimizer, fake = setting.options.optimizer, setting.call.fake
            if optimizer is not None:
                optimizer = on_fakes(optimizer, fake)
                if number != pipeline.world_rank:
                    optimizer.state.clear()
                    optimizer.param_groups = [{**optimizer.param_groups[0], "params": [p for p in mine if p.requires_grad]}]
            return SimulatedLoop(setting, Rank(mine, optimizer), Stage(number, pipeline, messages)).simulation()

    found = messages.turns.run([functools.partial(simulated, number) for number in range(pipeline.world_size)])
    return replace(found[pipeline.world_rank], stages=tuple(found))


def _shard_other_stages(model: torch.nn.Module, division: Division) -> None:
    """Give the parameters of other ranks, which are fake and whole here, the form that they have there."""
    mesh = division.mesh
    made: dict[int, torch.nn.Parameter] = {}
    for module, name, whole in names_elsewhere(model):
        if not isinstance(whole, torch.nn.Parameter):
            continue
        if id(whole) not in made:
            spec = ShardSpec(tuple(whole.shape), mesh.size(mesh.ndim - 1), replicated=not whole.dim())
            shard = whole.detach().new_empty(spec.shape_of(division.ranks.shard_mesh_rank))
            sharded = DTensor.from_local(
                shard, mesh, placements_of(whole, mesh), run_check=False, shape=whole.shape, stride=stride_of(tuple(whole.shape))
            )
            made[id(whole)] = torch.nn.Parameter(sharded, requires_grad=whole.requires_grad)
        vars(module)[STAND_IN + name] = made[id(whole)]


def _modes_of_thread(setting: Setting) -> Callable:
    """A function that makes a context with the modes of this thread, for another one: autograd, autocast, fake tensors."""
    trains, dtype = torch.is_grad_enabled(), torch.get_autocast_dtype(HOST.type)
    casts = torch.is_autocast_enabled(HOST.type)

    @contextmanager
    def modes() -> Iterator[None]:
        with torch.set_grad_enabled(trains), torch.autocast(HOST.type, dtype, enabled=casts), setting.call.mode or nullcontext():
            yield

    return modes


def on_fakes(optimizer: torch.optim.Optimizer, fake: Callable[[torch.Tensor], torch.Tensor]) -> torch.optim.Optimizer:
    """A copy of an optimizer in which fake tensors replace parameters and state. Hooks, which may belong to a whole loop, are left out."""
    held = [*parameters_of(optimizer), *tensors_within(optimizer.state)]
    hooks = [value for name, value in vars(optimizer).items() if name.endswith("_hooks") and isinstance(value, dict)]
    return copied(optimizer, {id(tensor): fake(tensor) for tensor in held} | {id(value): type(value)() for value in hooks})
