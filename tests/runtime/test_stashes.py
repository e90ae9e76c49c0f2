"""Where stashes wait while other forwards run before their backward: device memory does not grow with the number of forwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile.devices.cpu import CpuDevice
from l2l_compile.runtime.kept_activations import Room
from l2l_compile.runtime.runtime_value import RuntimeValue
from l2l_compile.runtime.stashes import Stashes
from models import WIDTH, Layer, backward_twice, compiled, pair_of, rows


class Broken(nn.Module):
    """A graph break behind every layer: all layers are calls of one program."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def train(model, calls=1, **options):
    """Two steps, each with so many forwards before its backward; gradients are eager's. The peak of the last step."""
    pair = pair_of(model, **options)
    for _ in range(2):
        inputs = [rows(6, 4, WIDTH) for _ in range(calls)]
        pair.run(lambda call, *inputs: sum(call(x).square().mean() for x in inputs).backward(), *inputs).check()
    return l2l_compile.stats(pair.compiled).peak_device_bytes


@pytest.mark.parametrize("on_threads", [False, True])
@pytest.mark.slow(only="True")
def test_memory_does_not_grow_with_the_programs_of_a_model(on_threads, request):
    if on_threads:
        request.getfixturevalue("threaded")
    peaks = [train(Broken(depth).double()) for depth in (3, 6, 12)]
    assert peaks[0] == peaks[1] == peaks[2]


def test_memory_does_not_grow_with_the_calls_before_backward():
    stack = nn.Sequential(*(Layer() for _ in range(4))).double()
    peaks = [train(copy.deepcopy(stack), calls) for calls in (3, 6)]
    assert peaks[0] == peaks[1]


def test_stashes_that_shall_stay_on_the_device_do():
    peaks = [train(Broken(depth).double(), stash="device") for depth in (3, 12)]
    assert peaks[1] > 2 * peaks[0]


def test_backward_twice_through_stashes_that_went_to_the_host():
    pair_of(Broken(4).double()).run(backward_twice, rows(6, 4, WIDTH)).check()


def test_a_forward_without_a_backward_leaves_nothing():
    model = Broken(4).double()
    step = compiled(model)
    step(rows(6, 4, WIDTH)).square().mean().backward()
    for _ in range(3):
        step(rows(6, 4, WIDTH))  # evaluated with gradients on, and thrown away
    step(rows(6, 4, WIDTH)).square().mean().backward()
    assert l2l_compile.session.session_of(step).device.ledger.held == 0


@pytest.mark.parametrize("keep", [False, True])
def test_values_on_the_host_are_on_the_device_for_backward(keep):
    device, box = CpuDevice(), RuntimeValue([torch.ones(4, dtype=torch.float64)])
    box.lane = "compute"
    device.hold(box.tensors)
    stashes = Stashes(device, [box], Room())
    stashes.to_host()
    assert device.ledger.held == 0
    (taken,) = stashes.take(keep)
    assert (
        device.ledger.held == 32 and taken.lane == "compute" and torch.equal(taken.tensors[0], torch.ones(4, dtype=torch.float64))
    )
