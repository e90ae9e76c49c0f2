"""Host memory of a rank of a pipeline: the bytes that tensors hold are those of its part of the model."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from pipelines import Case, llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile.session import session_of

LAYERS, WIDTH = 8, 64
BATCH = Case("llama").batch(0)
SLACK = 1.02


@dataclass(frozen=True)
class Held:
    """Bytes of the memory that tensors hold: parameters, AdamW's state, copies on the wire, and all that training has made."""

    parameters: int
    state: int
    wires: int
    everything: int

    @property
    def of_parameters(self) -> int:
        return self.parameters + self.state + self.wires


def memory(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The bytes of the memory of tensors on the host, by its address."""
    found = (t.untyped_storage() for t in tensors if t.device.type == "cpu")
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def all_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]


def tensors_of(model: nn.Module) -> Iterable[torch.Tensor]:
    """Those of a rank, and those that stand in for parameters that another rank has."""
    for module in model.modules():
        for values in (vars(module), module._parameters, module._buffers):
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def held(world: int, update: str) -> tuple[Held, float]:
    """What a rank holds in the third forward, and the largest share of a segment in the parameters of the model."""
    torch._dynamo.reset()
    earlier = all_tensors()  # held until the end, so that no other tensor takes their memory
    model = llama(LAYERS, WIDTH)
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    if world > 1:
        l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", "outputs": "loss", "precision": "bf16"}
    options |= {"update": update, "optimizer": optimizer}
    step = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    for _ in range(2):
        step(**BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    output = step(**BATCH)  # with at_step, its backward frees the wires
    l2l_compile.synchronize(step)
    (program,) = l2l_compile.programs(step)
    share = max(sum(sizes[name] for name in segment.parameter_names) for segment in program.segments) / sum(sizes.values())
    parameters = memory(model.parameters())
    assert memory(tensors_of(model)).keys() == parameters.keys() | memory(model.buffers()).keys()
    state = memory(t for each in optimizer.state.values() for t in each.values())
    wires = memory(wire.buffer for wire in session_of(step).server.wires._wires.values())
    before = memory(earlier)
    new = {address: size for address, size in memory(all_tensors()).items() if address not in before}
    del output
    return Held(*(sum(each.values()) for each in (parameters, state, wires, new))), share


def of_ranks(rank, world, update):
    return held(world, update)


@pytest.mark.parametrize("update", ["in_forward", "at_step"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_holds_its_part_of_the_host_memory(ranks, world, update):
    ((alone, share),) = ranks.run(of_ranks, update, world=1)
    found = [mine for mine, _ in ranks.run(of_ranks, update, world=world, seconds=200)]
    most = SLACK * (1 / world + share)
    assert all(mine.of_parameters <= most * alone.of_parameters for mine in found)
    assert all(mine.everything <= most * alone.everything for mine in found)
    assert [sum(each.parameters for each in found), sum(each.state for each in found)] == [alone.parameters, alone.state]
    assert sum(each.wires for each in found) == alone.wires
