"""The cost model of L2L (arXiv 2002.05645, section 2.2.1) in virtual time, with overlap switched off.

In the paper's units, a layer has L MB and a forward of c giga-operations for a micro-batch of `ub` samples. The link carries B GB/s, and
the device computes F TFLOP/s. So X = L / B is the transfer of a layer and C = c / F its forward, both in milliseconds. Gradients, stashes
and updates are free, as in the paper. `prefetch=0` has one slab for weights: a layer is fetched when the layer before it is done.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from l2l_compile import Machine, simulate

FREE = 1e29  # bytes a second


@dataclass(frozen=True)
class Case:
    """A model and a machine, drawn at random."""

    layers: int
    width: int
    samples: int
    micro_batches: int
    link: float
    flops: float

    @staticmethod
    def draw(seed: int) -> Case:
        """A transfer takes between a tenth of a layer's forward and thirty times as long."""
        draw = random.Random(seed)
        width, samples = draw.choice((64, 96, 128, 256)), draw.randint(2, 64)
        link = 10 ** draw.uniform(8, 10.5)
        transfer = 4 * width**2 / link
        flops = 2 * samples * width**2 / transfer * 10 ** draw.uniform(-1, 1.5)
        return Case(draw.randint(1, 96), width, samples, draw.randint(1, 12), link, flops)

    @property
    def transfer(self) -> float:
        """X, in milliseconds."""
        megabytes, gigabytes_a_second = 4 * self.width**2 / 1e6, self.link / 1e9
        return megabytes / gigabytes_a_second

    @property
    def forward(self) -> float:
        """C, in milliseconds."""
        giga_operations, teraflops = 2 * self.samples * self.width**2 / 1e9, self.flops / 1e12
        return giga_operations / teraflops

    def machine(self) -> Machine:
        return Machine(
            "of the equations", flops={"float32": self.flops}, memory_bandwidth=FREE, device_memory=1e15, h2d=self.link, d2h=FREE,
            pageable=FREE, host_bandwidth=FREE, host_memory=1e15, latency=0.0, launch=0.0, node=0.0, micro_batch=0.0, flops_share=1.0,
            memory_share=1.0,
        )  # fmt: skip


class Layer(nn.Module):
    """One product. Its backward takes the product again and two of its size, since `tanh` needs what forward has computed."""

    def __init__(self, width: int):
        super().__init__()
        self.product = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.product(x))


class Stack(nn.Module):
    """Equal layers between a factor and a sum, which take no time. The factor is trained, so that the first layer has a gradient to pass on."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.factor
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def milliseconds(case: Case, trains: bool) -> float:
    """Simulated time of a step."""
    with torch.device("meta"):
        model = Stack(case.layers, case.width)
    options = {"micro_batches": case.micro_batches, "prefetch": 0, "stash": "device", **({} if trains else {"resident": 0})}
    with torch.set_grad_enabled(trains):
        found = simulate(model, case.machine(), options)(torch.zeros(case.micro_batches * case.samples, 1))
    return 1000 * found.seconds


CASES = [Case.draw(seed) for seed in range(20)]


def equation_2(case: Case) -> float:
    """Samples a second of forward, of equation 5, which is equation 2 for one micro-batch."""
    u = case.micro_batches
    return 1000 * u * case.samples / (case.layers * (u * case.forward + case.transfer))


def equation_4(case: Case) -> float:
    """Milliseconds of a step, which is equation 1 for one micro-batch."""
    return case.layers * (4 * case.micro_batches * case.forward + 2 * case.transfer)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.slow(but="Case(layers=*7, *")
def test_the_equations_of_the_paper_are_those_of_a_program(case):
    """A step has one transfer less: backward begins with the layer with which forward ends, and its weights are still there."""
    rate = 1000 * case.micro_batches * case.samples / milliseconds(case, trains=False)
    assert rate == pytest.approx(equation_2(case), rel=2e-3)
    assert milliseconds(case, trains=True) == pytest.approx(equation_4(case) - case.transfer, rel=2e-3)


def test_ten_micro_batches_hide_transfers_as_in_the_paper():
    """With X = C, the paper says that transfers take less than a tenth of a step; by its equation it is a twentieth."""
    case = Case(24, 128, 16, 10, link=1e9, flops=2 * 16 * 128**2 / (4 * 128**2 / 1e9))
    assert case.transfer == pytest.approx(case.forward)
    whole = milliseconds(case, trains=True)
    assert (whole - case.layers * 40 * case.forward) / whole == pytest.approx(1 / 21, rel=0.03)
