"""Calls that raise an error of the model's own, and the calls after them."""

from __future__ import annotations

import warnings

import pytest
import torch

import l2l_compile
from models import Stack, compiled, rows


class Inner(Stack):
    def forward(self, x=None, y=None):
        if x is None:
            raise ValueError("x is needed")
        return super().forward(x)


class Outer(torch.nn.Module):
    """A function that calls others, in which the mistake shows."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = Inner(3), torch.nn.Linear(3, 2)

    def forward(self, x=None, y=None):
        return self.last(self.inner(x, y=y))


@pytest.mark.parametrize("well_before", [False, True])
def test_the_next_call_runs_whole_and_nobody_warns(well_before):
    model = Outer().double()
    step = compiled(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if well_before:
            step(rows(6)).sum().backward()
        with pytest.raises(ValueError, match="x is needed"):
            step(y=rows(6))
        step(rows(6)).sum().backward()
    assert_whole(step)
    another = compiled(Outer().double())
    another(rows(6)).sum().backward()
    assert_whole(another)


def assert_whole(step):
    (program,) = l2l_compile.programs(step)
    assert {w.name for segment in program.segments for w in segment.weights} == {
        name for name, _ in step._orig_mod.named_parameters()
    }


class Lookup(torch.nn.Module):
    """Raises for a purpose, in each call."""

    def __init__(self):
        super().__init__()
        self.model = Stack(2)

    def forward(self, x):
        if x.shape[0] > 1:
            raise KeyError("one at a time")
        return self.model(x)


def test_a_function_that_raises_is_named_and_left_uncompiled(monkeypatch):
    model = Lookup().double()
    step, looked_at = compiled(model), []
    from l2l_compile.frontend.dynamo import watched_frames

    monkeypatch.setattr(watched_frames, "_is_of_python", lambda code: looked_at.append(code.co_name))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            with pytest.raises(KeyError, match="one at a time"):
                step(rows(2))
    assert looked_at == ["forward"] * 8
    assert "does not run Lookup.forward" in str(caught[0].message)
