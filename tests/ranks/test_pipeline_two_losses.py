"""A model with two losses in a pipeline: the program of a backward of one of them is written when it is first needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from pipelines import UShape
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile import VerifyError
from l2l_compile.ir import nodes

BOTH, FIRST, SECOND = (True, True), (True, False), (False, True)
OPTIONS = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager"}


class TwoLosses(UShape):
    """The second loss is made in the middle: the layers behind it take no gradient of it."""

    def forward(self, x, labels):
        middle = self.down[0](self.inside(x))
        return super().forward(x, labels), middle.pow(2).mean()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return torch.randn(6, 7, 8, generator=made), torch.randint(0, 4, (6, 7), generator=made)


def compiled(world: int, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TwoLosses()
    if world > 1:
        l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), inputs())
    return model, torch.compile(model, backend="l2l", fullgraph=True, options={**OPTIONS, **options})


def gradients(world: int) -> list[dict[str, torch.Tensor]]:
    """Those of both losses, of the first, and of the second."""
    model, step = compiled(world)
    torch.manual_seed(1)
    found = []
    for mask in (BOTH, FIRST, SECOND):
        losses = step(*inputs())
        sum(loss for loss, wanted in zip(losses, mask, strict=True) if wanted).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    return found


def equal_bits(rank, world):
    for mask, mine, of_all in zip((BOTH, FIRST, SECOND), gradients(world), gradients(1), strict=True):
        assert mine.keys() <= of_all.keys(), mask
        assert all(torch.equal(gradient, of_all[name]) for name, gradient in mine.items()), mask
    return [set(made) for made in gradients(world)]


def test_each_of_two_losses_has_the_bits_of_one_rank(ranks):
    both, first, second = (set.union(*names) for names in zip(*ranks.run(equal_bits, world=2), strict=True))
    assert both == first == {name for name, _ in TwoLosses().named_parameters()}
    assert second == {name for name in both if name.startswith(("inside", "down.0"))}


@dataclass(frozen=True)
class LeaveOut:
    """A pass of the user's that takes a message out of a backward of one loss, on the first rank."""

    name: ClassVar[str] = "leave_out"
    requires: ClassVar[frozenset] = frozenset()
    provides: ClassVar[frozenset] = frozenset()

    def apply(self, compilation):
        if compilation.stages.rank == 0 and compilation.gradient_mask == FIRST:
            graph = compilation.backward
            graph.erase_node(graph.find_nodes(op="call_function", target=nodes.send)[0])


def spoiled(rank, world):
    _, step = compiled(world, passes=[LeaveOut()])
    sum(step(*inputs())).backward()
    first, _ = step(*inputs())
    with pytest.raises(VerifyError, match="in backward: message 0 from rank 0 to rank 1 is") as caught:
        first.backward()
    assert caught.value.rule == "paired"


def test_a_message_left_out_of_one_backward_is_refused(ranks):
    ranks.run(spoiled, world=2)
