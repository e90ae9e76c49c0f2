"""Each batching pass on a captured graph of a few lines: the graph before, segments and blocks after."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from captured_text import compile_text, lines, shown

from l2l_compile import L2LError
from l2l_compile.dumps import text_of
from l2l_compile.ir.segments import Block
from l2l_compile.passes.batching.prove_row_independence import ProveRowIndependence
from l2l_compile.passes.batching.split_regions import SplitRegions
from l2l_compile.passes.compilation import Compilation, Pass
from l2l_compile.passes.segmentation.cut_segments import instantiate
from l2l_compile.passes.segmentation.sequence_operations import SequenceOperations


def after(step: Pass, before: str, *cuts: int, **options) -> Compilation:
    """A compilation whose segments lie between these cuts of the line, after a pass."""
    found = compile_text(before, SequenceOperations(), **options)
    instantiate(found, [range(a, b) for a, b in itertools.pairwise((0, *cuts, len(found.sequence)))])
    step.apply(found)
    return found


# ---- split_regions ------------------------------------------------------------------------------------------------------

CENTRED = """
%x = value  float32[B, 4]
%w = parameter  float32[4, 4], grad
%v = parameter  float32[3, 4], grad
%up = F.linear(%x, %w)  float32[B, 4], grad
%largest = torch.amax(%up, 0)  float32[4], grad
%centred = operator.sub(%up, %largest)  float32[B, 4], grad
%down = F.linear(%centred, %v)  float32[B, 3], grad
return (%down,)
"""


def test_split_regions_cuts_a_segment_where_rows_mix():
    """Only the maximum over the batch needs all rows at once."""
    found = after(SplitRegions(), CENTRED)
    assert lines(text_of(found)) == lines("""
segments:
linear#1: block_0, 64 B, reads (x), makes (up)
amax: block_1, 0 B, reads (up), makes (largest)
linear#2: block_2, 48 B, reads (up, largest), makes (down)""")
    assert shown(found.captured) == lines(CENTRED)


def test_one_micro_batch_needs_no_regions():
    assert lines(text_of(after(SplitRegions(), CENTRED, micro_batches=1))) == lines("""
segments:
linear: block_0, 112 B, reads (x), makes (down)""")


def test_row_wise_operations_move_before_those_they_do_not_read():
    """The mean is a partial sum of each micro-batch. The product reads the maximum, and makes one number of the four of a row."""
    found = after(
        SplitRegions(),
        """
%x = value  float32[B, 4]
%w = parameter  float32[3, 4], grad
%largest = torch.amax(%x, 0)  float32[4]
%up = F.linear(%x, %w)  float32[B, 3], grad
%product = torch.matmul(%x, %largest)  float32[B]
%mean = torch.mean(%up)  float32[], grad
return (%mean, %product)
""",
    )
    assert shown(found.captured) == lines("""
%x = value  float32[B, 4]
%w = parameter  float32[3, 4], grad
%up = F.linear(%x, %w)  float32[B, 3], grad
%mean = torch.mean(%up)  float32[], grad
%largest = torch.amax(%x, 0)  float32[4]
%product = torch.matmul(%x, %largest)  float32[B]
return (%mean, %product)""")
    assert lines(text_of(found)) == lines("""
segments:
mean: block_0, 48 B, reads (x), makes (mean)
amax: block_1, 0 B, reads (x), makes (largest)
matmul: block_2, 0 B, reads (x, largest), makes (product)""")


def test_a_row_wise_part_that_saves_no_memory_stays_whole_batch():
    """The quotient uses no parameter, and makes as many numbers as it reads."""
    found = after(
        SplitRegions(),
        """
%x = value  float32[B, 4]
%w = parameter  float32[4, 4], grad
%up = F.linear(%x, %w)  float32[B, 4], grad
%largest = torch.amax(%up, 0)  float32[4], grad
%scaled = operator.truediv(%up, %largest)  float32[B, 4], grad
return (%scaled,)
""",
    )
    assert lines(text_of(found)) == lines("""
segments:
linear: block_0, 64 B, reads (x), makes (up)
truediv: block_1, 0 B, reads (up), makes (scaled)""")


# ---- prove_row_independence ---------------------------------------------------------------------------------------------


def proven(found: Compilation) -> list[str]:
    """The blocks with how they run, and the segments that are instances of them."""
    return [*map(_how, found.blocks), *lines(text_of(found))[1:], f"micro-batches: {[s.micro_batches for s in found.segments]}"]


def _how(block: Block) -> str:
    runs = "inner loop" if block.inner_looped else f"whole batch: {block.reason}"
    return ", ".join([f"{block.name} {runs}", *_parts(block)])


def _parts(block: Block) -> Iterator[str]:
    for index, spec in enumerate(block.outputs):
        if spec.partial:
            yield f"output {index} partial {spec.partial}"


MIXING = """
%x = value  float32[B, 4]
%w = parameter  float32[4, 4], grad
%v = parameter  float32[3, 4], grad
%up = F.linear(%x, %w)  float32[B, 4], grad
%shares = torch.softmax(%up, 0)  float32[B, 4], grad
%down = F.linear(%shares, %v)  float32[B, 3], grad
%loss = torch.mean(%down)  float32[], grad
return (%loss,)
"""


def test_prove_row_independence_keeps_mixing_blocks_whole_batch():
    """A mean over rows is one of means over micro-batches; a softmax over rows needs them all."""
    assert proven(after(ProveRowIndependence(), MIXING, 1, 2)) == lines("""
block_0 inner loop
block_1 whole batch: aten._softmax.default computes along the batch dimension
block_2 inner loop, output 0 partial mean
linear: block_0, 64 B, reads (x), makes (up)
softmax: block_1, 0 B, reads (up), makes (shares)
mean: block_2, 48 B, reads (shares), makes (loss)
micro-batches: [3, 1, 3]""")


def test_with_one_micro_batch_all_blocks_run_on_the_whole_batch():
    assert proven(after(ProveRowIndependence(), MIXING, 1, 2, micro_batches=1))[:3] == lines("""
block_0 whole batch: micro_batches is 1
block_1 whole batch: micro_batches is 1
block_2 whole batch: micro_batches is 1""")


def test_there_are_no_more_micro_batches_than_rows():
    """The batch has six rows."""
    assert proven(after(ProveRowIndependence(), MIXING, 1, 2, micro_batches=8))[-1] == "micro-batches: [6, 1, 6]"


def test_prove_row_independence_makes_a_write_a_new_version():
    assert proven(
        after(
            ProveRowIndependence(),
            """
%x = value  float32[B, 4]
%seen = state  float32[4]
%w = parameter  float32[4, 4], grad
%v = parameter  float32[4, 4], grad
%up = F.linear(%x, %w)  float32[B, 4], grad
%counted = %seen.add_(1)  float32[4]
%down = F.linear(%up, %v)  float32[B, 4], grad
%shifted = operator.add(%down, %seen)  float32[B, 4], grad
return (%shifted,)
""",
            2,
        )
    ) == lines("""
block_0 inner loop
block_1 inner loop
add_: block_0, 64 B, reads (x, seen), makes (up, seen.1)
add: block_1, 64 B, reads (up, seen.1), makes (shifted)
micro-batches: [3, 3]""")


def test_a_write_that_another_value_would_show_is_refused():
    """The view is in the memory that the last segment writes into, and is read behind the write."""
    message = "segment 'cat' writes in place into 'turned', whose memory 'view' shares, which is read as well"
    with pytest.raises(L2LError, match=message):
        after(
            ProveRowIndependence(),
            """
%x = value  float32[B, 4]
%w = parameter  float32[4, 4], grad
%turned = torch.flip(%x, (1,))  float32[B, 4]
%view = torch.narrow(%turned, 1, 0, 2)  float32[B, 2]
%up = F.linear(%turned, %w)  float32[B, 4], grad
%doubled = %turned.mul_(2)  float32[B, 4]
%both = torch.cat((%up, %view), 1)  float32[B, 6], grad
return (%both,)
""",
            2,
            3,
        )
