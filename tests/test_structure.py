"""Every layer is a segment, whichever way a model combines its stacks: numbers, segments, blocks and peak at two depths."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import fx

import l2l_compile
from l2l_compile import Options, backend
from l2l_compile.estimate.device_memory import device_memory
from l2l_compile.frontend.capture import capture
from l2l_compile.ir.captured import Captured
from l2l_compile.passes.compilation import Compilation
from l2l_compile.passes.pipeline import PREPARATION, SEGMENTATION, run
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.testing import Comparison
from models import PREPARED, backward_of_loss, compilation, pair_of
from structures import MODELS, WIDTH, units

OPTIONS = {"micro_batches": 3, "block_compiler": "eager"}
DEPTHS = (5, 9)  # deep enough for copies that overlap with compute to be at their most
SEQUENCE_OPERATIONS, CUT = PREPARATION[-1], SEGMENTATION[:2]


def inputs():
    torch.manual_seed(1)
    return [torch.randn(6, 5, WIDTH, dtype=torch.float64) for _ in range(2)]


def layers_in_segments(model, segments) -> int:
    """The most layers that have parameters in one segment."""
    owner = {parameter: unit for unit, parameters in units(model).items() for parameter in parameters}
    return max(len({owner[p] for p in s.parameter_names if p in owner}) for s in segments)


@dataclass(frozen=True)
class Trained:
    """A model of some depth behind one step: what the passes made of its graph, and what the step showed."""

    cut: Compilation
    comparison: Comparison
    peak: int
    grows: tuple


@functools.cache
def trained(name: str, depth: int) -> Trained:
    """One capture of a model serves all tests of it."""
    torch.manual_seed(0)
    cuts: list[Compilation] = []
    with mock.patch.object(backend, "capture", functools.partial(capture_twice, cuts)):
        pair = pair_of(MODELS[name](depth).double())
        comparison = pair.run(backward_of_loss, *inputs())
    (found,) = cuts
    programs, options = l2l_compile.programs(pair.compiled), Options.build({**OPTIONS, "device": "cpu"})
    peak = l2l_compile.stats(pair.compiled).peak_device_bytes
    return Trained(found, comparison, peak, device_memory(programs, options).grows)


def capture_twice(cuts: list[Compilation], gm: fx.GraphModule) -> tuple[Captured, Ranks | None]:
    """Dynamo's graph for the backend, and a copy of it that is cut."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for copied, node in zip(graph.nodes, gm.graph.nodes, strict=True):
        copied.__dict__ |= {name: value for name, value in vars(node).items() if name == "_dynamo_source"}
    copy = fx.GraphModule(gm, graph)
    copy.compile_subgraph_reason = gm.compile_subgraph_reason
    found = Compilation(capture(copy)[0], Options.build({**OPTIONS, "device": "cpu"}))
    run(found, PREPARATION)
    run(found, CUT, PREPARED)
    cuts.append(found)
    return capture(gm)


def cut_without_names(name: str, depth: int, monkeypatch) -> Compilation:
    """The same graph, cut again as if no module had a name."""
    found = trained(name, depth).cut
    again = Compilation(found.captured, found.options)
    with monkeypatch.context() as patched:
        patched.setattr("l2l_compile.passes.operation_sequence.module_stack", lambda node: [])
        run(again, (SEQUENCE_OPERATIONS, *CUT), PREPARED)
    return again


QUICK = ("Siamese", "Branches", "InterleavedKinds", "Odd", "Lent")  # the other models are trained in `make slow`


@pytest.fixture(params=[pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MODELS], scope="module")
def name(request):
    """Of the module, so that the tests of one model run one after the other."""
    return request.param


@pytest.mark.parametrize("named", [True, False], ids=["names", "no names"])
def test_segments_hold_one_layer_and_blocks_do_not_grow(name, named, monkeypatch):
    shallow, deep = (trained(name, d).cut if named else cut_without_names(name, d, monkeypatch) for d in DEPTHS)
    assert layers_in_segments(MODELS[name](DEPTHS[1]), deep.segments) <= 1
    assert len(deep.blocks) <= len(shallow.blocks)
    assert max(s.parameter_bytes for s in deep.segments) <= max(s.parameter_bytes for s in shallow.segments)


def test_gradients_are_exact_and_the_peak_does_not_grow(name):
    found = [trained(name, depth) for depth in DEPTHS]
    for step in found:
        step.comparison.check()
        assert not step.grows  # segments that hold several layers would be among them
    assert found[1].peak <= 1.01 * found[0].peak


def test_layers_of_one_shared_module_are_cut_at_borders_alone():
    found = compilation(MODELS["Lent"](4).double(), *inputs(), passes=CUT)
    assert [s.name for s in found.segments] == ["layers.0", "layers.1", "layers.2", "layers.3", "mse_loss"]
