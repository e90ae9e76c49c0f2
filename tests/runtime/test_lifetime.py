"""What was made for a model goes with it: programs, their graphs, what captures remember."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import l2l_compile
from l2l_compile.frontend.faster.propagation import FakeResult
from models import Stack, compiled, rows


@pytest.mark.parametrize("update", ["at_step", "in_backward"])
def test_graphs_of_programs_go_with_the_model(update):
    model = Stack(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {} if update == "at_step" else {"optimizer": optimizer, "update": update, "compile_update": False}
    step = compiled(model, **options)
    step(rows(6).float()).sum().backward()
    optimizer.step()
    l2l_compile.synchronize(step)
    graphs = [weakref.ref(program.forward.graph) for program in l2l_compile.programs(step)]
    graphs += [weakref.ref(program.backward.graph) for program in l2l_compile.programs(step)]
    assert len(graphs) == 2
    del model, optimizer, options, step
    torch._dynamo.reset()
    gc.collect()
    assert [graph() for graph in graphs] == [None, None]


def test_captures_remember_nothing_once_they_are_over():
    compiled(Stack(2))(rows(6).float()).sum().backward()
    assert not [found for found in gc.get_objects() if type(found) is FakeResult]
