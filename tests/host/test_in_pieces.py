"""First steps on pieces of a parameter: the bits of one on the whole, for optimizers that take each entry by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from l2l_compile.host.step import in_pieces
from l2l_compile.host.step.in_pieces import taken_in_pieces
from l2l_compile.host.stored_parameters import StoredParameters
from slow_disk import Faults, slow_disk
from stored_training import OPTIMIZERS, matrices, same, training

ELEMENTWISE = ("Adagrad", "Adam", "Adamax", "AdamW", "Adadelta", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


@pytest.mark.parametrize("name", [*ELEMENTWISE, *OPTIMIZERS])
def test_a_trial_tells_which_optimizers_take_pieces(name):
    made = OPTIMIZERS[name] if name in OPTIMIZERS else getattr(torch.optim, name)
    large = [p for p in matrices().parameters() if p.dim() == 2]
    assert len(taken_in_pieces(made(large))) == (len(large) if name not in ("lamb", "adafactor") else 0)


class Spread(torch.optim.SGD):
    """Divides by the largest entry of the gradient: of the whole parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad / parameter.grad.abs().max()
        return super().step(closure)


class Drawn(torch.optim.SGD):
    """Adds noise."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad + torch.rand_like(parameter)
        return super().step(closure)


@pytest.mark.parametrize("kind", [Spread, Drawn])
def test_a_step_that_looks_at_a_whole_parameter_takes_none(kind):
    assert not taken_in_pieces(kind(matrices().parameters(), lr=0.1, momentum=0.9))


class OfConvolutions(torch.optim.SGD):
    """Takes the mean off the gradients of convolutions alone."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() > 3:
                    parameter.grad = parameter.grad - parameter.grad.mean((1, 2, 3), keepdim=True)
        return super().step(closure)


def test_each_number_of_dimensions_is_tried():
    made = [nn.Parameter(torch.zeros(4, 4, 3, 3)), nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))]
    assert taken_in_pieces(OfConvolutions(made, lr=0.1, momentum=0.9)) == set(made[1:])


def test_a_step_without_state_takes_none(tmp_path):
    assert not taken_in_pieces(torch.optim.SGD(matrices().parameters(), lr=0.1))


def test_attributes_of_parameters_are_tried():
    """transformers sets one on each parameter."""
    model = matrices()
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    assert len(taken_in_pieces(torch.optim.AdamW(model.parameters()))) == len(list(model.parameters()))


def test_each_kind_of_group_is_tried():
    class Mixed(Spread):
        def step(self, closure=None):
            return super().step(closure) if self.param_groups[1]["params"] else torch.optim.SGD.step(self, closure)

    first, *others = matrices().parameters()
    groups = [{"params": [first], "momentum": 0.9, "nesterov": True}, {"params": others, "momentum": 0.9}]
    assert taken_in_pieces(Mixed(groups, lr=0.1)) == {first}
    assert taken_in_pieces(torch.optim.SGD(groups, lr=0.1)) == {first, *others}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize(
    "options", [{"precision": "fp16", "update": "in_forward"}, {"update": "in_backward"}], ids=["fp16", "fp32"]
)
def test_pieces_leave_the_bits_of_the_whole(optimizer, options, tmp_path, monkeypatch):
    """Four pieces of each matrix, of which half of the state is in memory; no parameter is taken whole."""

    def refuse(*arguments):
        raise AssertionError("taken whole")

    expected = training(optimizer, **options)
    expected.step(8)
    monkeypatch.setattr(in_pieces, "PIECE", 1 << 16)
    monkeypatch.setattr(StoredParameters, "_on_whole", refuse)
    for spare in (200_000, 3 << 20):
        with slow_disk(Faults(rate=6e7)):
            made = training(optimizer, disk=tmp_path, spare=spare, stored_copies=True, **options)
            made.step(8)
            assert same(expected.tensors(), made.tensors())
