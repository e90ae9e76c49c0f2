"""Every layer is a segment, whichever way a model combines its stacks: numbers, segments, blocks and peak at two depths."""

from __future__ import annotations

import functools

import pytest
import torch

import l2l_compile
from l2l_compile import Options
from l2l_compile.passes.compilation import Compilation
from l2l_compile.passes.pipeline import PREPARATION, SEGMENTATION, run
from l2l_compile.runtime.dry_run import device_memory
from models import PREPARED, backward_of_loss, compilation, pair_of
from structures import MODELS, WIDTH, units

OPTIONS = {"micro_batches": 3, "block_compiler": "eager"}
SEQUENCE_OPERATIONS, CUT = PREPARATION[-1], SEGMENTATION[:2]


def inputs():
    torch.manual_seed(1)
    return [torch.randn(6, 5, WIDTH, dtype=torch.float64) for _ in range(2)]


def layers_in_segments(model, segments) -> int:
    """The most layers that have parameters in one segment."""
    owner = {parameter: unit for unit, parameters in units(model).items() for parameter in parameters}
    return max(len({owner[p] for p in s.parameter_names if p in owner}) for s in segments)


@functools.cache
def cut(name: str, depth: int) -> Compilation:
    return compilation(MODELS[name](depth).double(), *inputs(), passes=CUT)


def cut_without_names(name: str, depth: int, monkeypatch) -> Compilation:
    """The same graph, cut again as if no module had a name."""
    monkeypatch.setattr("l2l_compile.passes.operation_sequence.module_stack", lambda node: [])
    found = cut(name, depth)
    again = Compilation(found.captured, found.options)
    run(again, (SEQUENCE_OPERATIONS, *CUT), PREPARED)
    return again


@pytest.mark.parametrize("named", [True, False], ids=["names", "no names"])
@pytest.mark.parametrize("name", MODELS)
def test_no_segment_holds_two_layers_and_blocks_do_not_grow_with_depth(name, named, monkeypatch):
    shallow, deep = (cut(name, depth) if named else cut_without_names(name, depth, monkeypatch) for depth in (4, 8))
    assert layers_in_segments(MODELS[name](8), deep.segments) <= 1
    assert len(deep.blocks) <= len(shallow.blocks)
    assert max(s.parameter_bytes for s in deep.segments) <= max(s.parameter_bytes for s in shallow.segments)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_exact_and_the_peak_does_not_grow_with_depth(name):
    peaks = []
    for depth in (5, 9):  # deep enough for copies that overlap with compute to be at their most
        torch.manual_seed(0)
        pair = pair_of(MODELS[name](depth).double())
        pair.run(backward_of_loss, *inputs()).check()
        peaks.append(l2l_compile.stats(pair.compiled).peak_device_bytes)
        programs, options = l2l_compile.programs(pair.compiled), Options.build({**OPTIONS, "device": "cpu"})
        grows = device_memory(programs, options).grows
        assert not grows  # segments that hold several layers would be among them
    assert peaks[1] <= 1.01 * peaks[0]


def test_layers_that_hold_one_module_are_cut_at_their_borders_alone():
    found = compilation(MODELS["Lent"](4).double(), *inputs(), passes=CUT)
    assert [s.name for s in found.segments] == ["layers.0", "layers.1", "layers.2", "layers.3", "mse_loss"]
