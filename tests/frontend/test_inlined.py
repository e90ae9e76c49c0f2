"""A compiled model that is called within a function that another backend compiles."""

from __future__ import annotations

import warnings

import pytest
import torch

import l2l_compile
from models import Stack, compiled, rows


def called(step):
    return lambda x: step(x).pow(2).mean()


def in_place():
    model = Stack(2).double()
    model.compile(backend="l2l", options={"device": "cpu", "block_compiler": "eager"})
    return model


@pytest.mark.parametrize("made", [lambda: compiled(Stack(2).double()), in_place], ids=["wrapped", "in place"])
def test_a_model_that_another_backend_takes_is_a_warning(made):
    step = made()
    outer = torch.compile(called(step), backend="eager")
    with pytest.warns(UserWarning, match="Stack is called within a function that another backend compiles") as caught:
        outer(rows(4)).backward()
    assert any(each.filename == __file__ for each in caught)
    assert not l2l_compile.programs(step)


def test_a_model_that_is_called_behind_a_disable_is_streamed():
    step = compiled(Stack(2).double())
    outer = torch.compile(called(torch.compiler.disable(lambda x: step(x))), backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*another backend")
        outer(rows(4)).backward()
    assert l2l_compile.programs(step)


def test_a_model_within_a_function_of_this_backend_is_no_warning():
    step = compiled(Stack(2).double())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*another backend")
        compiled(called(step))(rows(4)).backward()
