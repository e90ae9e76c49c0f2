"""Each segmentation pass on a captured graph of a few lines: the graph before, the facts after."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from captured_text import compile_text, lines, of_block

from l2l_compile.dumps import text_of
from l2l_compile.passes.compilation import Compilation
from l2l_compile.passes.segmentation.cut_segments import CutSegments, instantiate
from l2l_compile.passes.segmentation.find_blocks import FindBlocks
from l2l_compile.passes.segmentation.granularity import MeasureGranularity
from l2l_compile.passes.segmentation.sequence_operations import SequenceOperations

LAYERS = """
%x = value  float32[B, 5]
%w0 = parameter  float32[4, 5], grad
%w1 = parameter  float32[4, 4], grad
%w2 = parameter  float32[4, 4], grad
%w3 = parameter  float32[3, 4], grad
%embed = F.linear(%x, %w0)  float32[B, 4], grad  embed
%up = F.linear(%embed, %w1)  float32[B, 4], grad  layers.0
%one = torch.tanh(%up)  float32[B, 4], grad  layers.0
%up_1 = F.linear(%one, %w2)  float32[B, 4], grad  layers.1
%two = torch.tanh(%up_1)  float32[B, 4], grad  layers.1
%head = F.linear(%two, %w3)  float32[B, 3], grad  head
return (%head,)
"""
WITHOUT_NAMES = (
    LAYERS.replace("grad  embed", "grad").replace("grad  head", "grad").replace("  layers.0", "").replace("  layers.1", "")
)


# ---- sequence_operations ------------------------------------------------------------------------------------------------


def sequence_of(text: str) -> list[str]:
    """For each operation, the bytes that cross a cut before it, and the parameters that it reads with their labels."""
    sequence = compile_text(text, SequenceOperations()).sequence
    used: dict[int, str] = {}
    for use in sequence.uses:
        used[use.position] = f"  {use.weight.name} as use {use.label}"
    found = [f"{node.name}  {sequence.crossing[i]:g} B{used.get(i, '')}" for i, node in enumerate(sequence.nodes)]
    return [*found, *(f"cuts {b.cuts.start} to {b.cuts.stop - 1} may not be: {b.why}" for b in sequence.barriers)]


def test_sequence_operations_counts_bytes_and_labels_equal_uses():
    """Both up and gate cross the cut before their product: 2 * 6 * 4 * 4 bytes. w and v have one shape, u has another."""
    assert sequence_of("""
%x = value  float32[B, 4]
%w = parameter  float32[4, 4], grad
%v = parameter  float32[4, 4], grad
%u = parameter  float32[3, 4], grad
%up = F.linear(%x, %w)  float32[B, 4], grad
%gate = torch.sigmoid(%up)  float32[B, 4], grad
%gated = operator.mul(%up, %gate)  float32[B, 4], grad
%down = F.linear(%gated, %v)  float32[B, 4], grad
%out = F.linear(%down, %u)  float32[B, 3], grad
return (%out,)
""") == lines("""
up  0 B  w as use 0
gate  96 B
gated  192 B
down  96 B  v as use 0
out  96 B  u as use 1""")


def test_sequence_operations_forbids_cuts_within_uses_of_a_state():
    """No parameter is used between the write and the read, so they are one step. The new contents wait for the end of the line."""
    assert sequence_of("""
%x = value  float32[B, 4]
%seen = state  float32[4]
%w = parameter  float32[4, 4], grad
%up = F.linear(%x, %w)  float32[B, 4], grad
%counted = %seen.add_(1)  float32[4]
%scaled = operator.mul(%up, %seen)  float32[B, 4], grad
%out = torch.tanh(%scaled)  float32[B, 4], grad
return (%out,)
""") == lines("""
up  0 B  w as use 0
counted  96 B
scaled  inf B
out  112 B
cuts 2 to 2 may not be: 'seen' is written and read there""")


# ---- find_blocks --------------------------------------------------------------------------------------------------------


def layers_of(text: str) -> list[str]:
    found = compile_text(text, SequenceOperations(), FindBlocks())
    return [*lines(text_of(found)), f"cuts by names: {sorted(found.forced_cuts)}"]


def test_find_blocks_finds_the_layers_between_embedding_and_head():
    assert layers_of(LAYERS) == lines("""
layers:
2 operations from 'up' to 'one'
2 operations from 'up_1' to 'two'
cuts by names: [1, 3, 5]""")


def test_find_blocks_needs_no_names():
    assert layers_of(WITHOUT_NAMES) == lines("""
layers:
2 operations from 'up' to 'one'
2 operations from 'up_1' to 'two'
cuts by names: []""")


def test_copies_that_do_not_read_one_another_are_no_layers():
    """As in attention: four projections of equal shape, of which only the last one reads another."""
    projections = """
%x = value  float32[B, 4]
%q = parameter  float32[4, 4], grad
%k = parameter  float32[4, 4], grad
%v = parameter  float32[4, 4], grad
%o = parameter  float32[4, 4], grad
%query = F.linear(%x, %q)  float32[B, 4], grad
%key = F.linear(%x, %k)  float32[B, 4], grad
%values = F.linear(%x, %v)  float32[B, 4], grad
%product = operator.mul(%query, %key)  float32[B, 4], grad
%added = operator.add(%product, %values)  float32[B, 4], grad
%out = F.linear(%added, %o)  float32[B, 4], grad
return (%out,)
"""
    found = compile_text(projections, SequenceOperations(), FindBlocks())
    assert found.layers == []


# ---- cut_segments -------------------------------------------------------------------------------------------------------


def cut(text: str) -> list[str]:
    return segments_and_blocks(compile_text(text, SequenceOperations(), FindBlocks(), CutSegments()))


def segments_and_blocks(found: Compilation) -> list[str]:
    return lines("\n".join([text_of(found), *_blocks(found)]))


def _blocks(found: Compilation) -> Iterator[str]:
    for block in found.blocks:
        yield f"{block.name} x{block.repeats}:"
        yield from of_block(block.graph)


def test_cut_segments_makes_equal_layers_instances_of_one_block():
    assert cut(LAYERS) == lines("""
segments:
embed: block_0, 80 B, reads (x), makes (embed)
layers.0: block_1, 64 B, reads (embed), makes (one)
layers.1: block_1, 64 B, reads (one), makes (two)
head: block_2, 48 B, reads (two), makes (head)
block_0 x1:
(%w0, %x)
%embed = F.linear(%x, %w0)
return (%embed,)
block_1 x2:
(%w1, %embed)
%up = F.linear(%embed, %w1)
%one = torch.tanh(%up)
return (%one,)
block_2 x1:
(%w3, %two)
%head = F.linear(%two, %w3)
return (%head,)""")


def test_layers_that_differ_in_one_operation_are_two_blocks():
    other = LAYERS.replace("%two = torch.tanh(%up_1)", "%two = torch.sigmoid(%up_1)")
    assert cut(other)[:5] == lines("""
segments:
embed: block_0, 80 B, reads (x), makes (embed)
layers.0: block_1, 64 B, reads (embed), makes (one)
layers.1: block_2, 64 B, reads (one), makes (two)
head: block_3, 48 B, reads (two), makes (head)""")


def test_without_layers_cuts_are_where_the_fewest_bytes_cross():
    """Between the two uses of parameters, 96 bytes cross the cut before the concatenation, and 288 the one behind it."""
    assert cut("""
%x = value  float32[B, 4]
%w = parameter  float32[4, 4], grad
%v = parameter  float32[4, 12], grad
%up = F.linear(%x, %w)  float32[B, 4], grad
%wide = torch.cat((%up, %up, %up), 1)  float32[B, 12], grad
%down = F.linear(%wide, %v)  float32[B, 4], grad
return (%down,)
""") == lines("""
segments:
linear#1: block_0, 64 B, reads (x), makes (up)
linear#2: block_1, 192 B, reads (up), makes (down)
block_0 x1:
(%w, %x)
%up = F.linear(%x, %w)
return (%up,)
block_1 x1:
(%v, %up)
%wide = torch.cat((%up, %up, %up), 1)
%down = F.linear(%wide, %v)
return (%down,)""")


# ---- measure_granularity ------------------------------------------------------------------------------------------------


def uncut(text: str, *cuts: int) -> list[str]:
    """What is said of segments between these cuts of the line."""
    found = compile_text(text, SequenceOperations())
    instantiate(found, [range(a, b) for a, b in itertools.pairwise((0, *cuts, len(found.sequence)))])
    MeasureGranularity().apply(found)
    return list(map(str, found.uncut))


def test_measure_granularity_names_a_segment_of_two_layers():
    assert uncut(LAYERS, 1, 5) == [
        "segment 'layers' holds 2 layers (128 B), and device memory grows with their number: it is not cut because no repeat was "
        "found there whose copies feed one another. Remedy: put the layers into one torch.nn.ModuleList, so that their names tell"
    ]


def test_measure_granularity_is_silent_on_segments_of_a_layer():
    assert uncut(LAYERS, 1, 3, 5) == []


def test_measure_granularity_says_why_a_cut_may_not_be():
    """The state is written and read between the layers, with no parameter in between."""
    stateful = LAYERS.replace("%w3 =", "%seen = state  float32[4]\n%w3 =").replace(
        "%up_1 = F.linear(%one,",
        "%counted = %seen.add_(1)  float32[4]  layers.0\n%shifted = operator.add(%one, %seen)  float32[B, 4], grad  layers.1\n%up_1 = F.linear(%shifted,",
    )
    assert uncut(stateful, 1, 7) == [
        "segment 'layers' holds 2 layers (128 B), and device memory grows with their number: it is not cut because 'seen' is written "
        "and read there. Remedy: compute that inside of each layer, or hand tensors from layer to layer"
    ]
