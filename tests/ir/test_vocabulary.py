"""The vocabulary is declared in one place: handlers cover it, and a new node needs its declaration and a handler."""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import l2l_compile
from l2l_compile import Program, VerifyError, backend
from l2l_compile.ir import nodes
from l2l_compile.lanes import OF_DEVICE, Lane
from l2l_compile.options import Options
from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.passes.pipeline import PIPELINE
from l2l_compile.passes.streaming.place_stash import PlaceStash
from l2l_compile.passes.verify import verify
from l2l_compile.runtime import executor
from l2l_compile.runtime.runtime_value import RuntimeValue
from models import Stack, compilation, compiled, rows

FACTS = frozenset().union(*(step.provides for step in PIPELINE))


def test_every_node_has_a_handler_that_takes_its_operands():
    assert set(executor.HANDLERS) == set(nodes.VOCABULARY)
    for function, word in nodes.VOCABULARY.items():
        _, _, *taken = inspect.signature(executor.HANDLERS[function]).parameters.values()
        assert [p.name for p in taken] == [o.name for o in word.operands], word.name
        assert [p.default for p in taken] == [o.default for o in word.operands], word.name


def test_every_node_says_what_it_does_and_runs_on_a_lane():
    for word in nodes.VOCABULARY.values():
        assert word.description.endswith(".") and word.lane in (*OF_DEVICE, Lane.HOST, Lane.DISK_READ, Lane.DISK_WRITE, Lane.NONE)


def test_an_operand_of_no_kind_is_refused():
    with pytest.raises(TypeError, match="operand 'x' of node 'strange' is annotated with no kind of operand"):

        @nodes.operation(Lane.COMPUTE, nodes.Result.DEVICE)
        def strange(x: float):
            """Nothing."""


@pytest.fixture
def double():
    """A node that no file of the package knows: one declaration and a handler."""
    words, handlers = dict(nodes.VOCABULARY), dict(executor.HANDLERS)

    @nodes.operation(Lane.COMPUTE, nodes.Result.DEVICE)
    def double(x: nodes.OnDevice, times: int = 2):
        """Multiply a value by a whole number."""

    @executor.handles(double)
    def run_double(run, node, x: RuntimeValue, times: int = 2):
        return run.change_layout(x, lambda tensors: [tensor * times for tensor in tensors])

    yield double
    for table, before in ((nodes.VOCABULARY, words), (executor.HANDLERS, handlers)):
        table.clear()
        table.update(before)


@dataclass(frozen=True)
class DoubleTheEmbedding:
    """Put the node behind the first segment of forward."""

    double: object
    name: ClassVar = "double_the_embedding"
    requires: ClassVar = frozenset({Fact.PROGRAM})
    provides: ClassVar = frozenset()

    def apply(self, compilation):
        made = compilation.forward.find_nodes(op="call_function", target=operator.getitem)[0]
        with compilation.forward.inserting_after(made):
            doubled = compilation.forward.call_function(self.double, (made, 3))
        doubled.meta.update(made.meta)
        for reader in [user for user in made.users if user is not doubled]:
            reader.replace_input_with(made, doubled)


def with_pass(step):
    place = next(i for i, other in enumerate(PIPELINE) if isinstance(other, PlaceStash))
    return (*PIPELINE[:place], step, *PIPELINE[place:])


def test_a_new_node_prints_parses_verifies_is_released_and_runs(double, monkeypatch):
    torch.manual_seed(0)
    model, x = Stack(3).double(), rows(6)
    monkeypatch.setattr(backend, "PIPELINE", with_pass(DoubleTheEmbedding(double)))
    step = compiled(model)
    with torch.no_grad():
        expected = model.embed(x) * 3
        for layer in model.layers:
            expected = layer(expected)
        torch.testing.assert_close(step(x), model.head(expected), rtol=1e-12, atol=0)
    (program,) = l2l_compile.programs(step)
    shown = str(program)
    assert "%double = double(%getitem, times=3)" in shown
    assert "release(%double)" in shown and "release(%getitem)" in shown
    parsed = Program.parse(shown)
    assert str(parsed) == shown
    verify(Compilation.of(parsed, Options.build({"device": "cpu"})), FACTS)


def test_a_new_node_is_held_to_the_rules_of_its_operands(double):
    found = compilation(Stack(3).double(), rows(6), passes=with_pass(DoubleTheEmbedding(double)))
    verify(found, FACTS)
    node = found.forward.find_nodes(op="call_function", target=double)[0]
    made = nodes.operands(node).x
    nodes.set_operands(node, x=found.forward.find_nodes(op="placeholder")[0])
    with pytest.raises(VerifyError, match="lane: node 'double' reads .* on the host, where it needs the device"):
        verify(found, FACTS)
    nodes.set_operands(node, x=made)
    release = next(user for user in node.users if user.target is nodes.release)
    found.forward.erase_node(release)
    with pytest.raises(VerifyError, match="released_once: node 'double' is released 0 times"):
        verify(found, FACTS)
    node.args = ()
    with pytest.raises(VerifyError, match="known_node: node 'double' does not have the operands of 'double'"):
        verify(found, FACTS)
