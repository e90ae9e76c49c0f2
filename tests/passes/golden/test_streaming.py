"""Each streaming pass on a program of a few lines: text before, text after."""

from __future__ import annotations

import re

import torch
from captured_text import compile_text
from torch import nn

from l2l_compile import Program
from l2l_compile.options import Options
from l2l_compile.passes.compilation import Compilation, Pass
from l2l_compile.passes.pipeline import PREPARATION, SEGMENTATION
from l2l_compile.passes.streaming.differentiate import Differentiate
from l2l_compile.passes.streaming.place_stages import PlaceStages
from l2l_compile.passes.streaming.place_stash import PlaceStash
from l2l_compile.passes.streaming.place_updates import PlaceUpdates
from l2l_compile.passes.streaming.prefetch import Prefetch
from l2l_compile.passes.streaming.release import Release
from l2l_compile.passes.streaming.stream import Stream

BLOCKS = """\
blocks:
  layer      x3   inner loop
"""


def lines(text: str) -> list[str]:
    """The lines without the width of their columns."""
    return [
        re.sub(r" {2,}|(?<=compute) |(?<=disk_write) |(?<=disk_read) ", "  ", line).strip() for line in text.strip().split("\n")
    ]


def after(step: Pass, before: str, **options) -> list[str]:
    """The graphs that a pass leaves, line by line."""
    found = Compilation.of(Program.parse(BLOCKS + before), Options.build({"device": "cpu", "micro_batches": 2, **options}))
    step.apply(found)
    text = str(found.program())
    return lines(text[text.index("forward:") :])


# ---- prefetch -----------------------------------------------------------------------------------------------------------

NOT_AHEAD = """
forward:
  %x = input  host  x: float32[8, 4]  128 B
  %r = restore(%x)  h2d  x: float32[8, 4]  128 B
  %w1 = fetch_weights('one')  h2d  80 B
  %one = forward('one', %w1, (%r))  compute  layer x 2 micro-batches
  %a = %one[0]  none  a: float32[8, 4]  128 B
  %w2 = fetch_weights('two')  h2d  80 B
  %two = forward('two', %w2, (%a))  compute  layer x 2 micro-batches
  %b = %two[0]  none  b: float32[8, 4]  128 B
  %w3 = fetch_weights('three')  h2d  80 B
  %three = forward('three', %w3, (%b))  compute  layer x 2 micro-batches
  return ((-), (), ())
"""


def test_prefetch_moves_a_fetch_before_the_segment_ahead():
    assert after(Prefetch(), NOT_AHEAD, prefetch=1) == lines("""
forward:
  %x = input  host  x: float32[8, 4]  128 B
  %r = restore(%x)  h2d  x: float32[8, 4]  128 B
  %w1 = fetch_weights('one')  h2d  80 B
  %w2 = fetch_weights('two')  h2d  80 B
  %one = forward('one', %w1, (%r))  compute  layer x 2 micro-batches
  %a = %one[0]  none  a: float32[8, 4]  128 B
  %w3 = fetch_weights('three')  h2d  80 B
  %two = forward('two', %w2, (%a))  compute  layer x 2 micro-batches
  %b = %two[0]  none  b: float32[8, 4]  128 B
  %three = forward('three', %w3, (%b))  compute  layer x 2 micro-batches
  return ((-), (), ())""")


def test_without_prefetch_nothing_moves():
    assert after(Prefetch(), NOT_AHEAD, prefetch=0) == lines(NOT_AHEAD)


# ---- place_stash --------------------------------------------------------------------------------------------------------

KEPT = """
forward:
  %x = input  host  x: float32[8, 4]  128 B
  %r = restore(%x)  h2d  x: float32[8, 4]  128 B
  %one = forward('one', -, (%r))  compute  layer x 2 micro-batches
  %a = %one[0]  none  a: float32[8, 4]  128 B
  %two = forward('two', -, (%a))  compute  layer x 2 micro-batches
  %b = %two[0]  none  b: float32[8, 4]  128 B
  %three = forward('three', -, (%b))  compute  layer x 2 micro-batches
  %keep_a = stash(%a)  none  a: float32[8, 4]  128 B
  %keep_b = stash(%b)  none  b: float32[8, 4]  128 B
  return ((-), (%x, %keep_a, %keep_b), ())

backward:
  %stash_x = stash  host  x: float32[8, 4]  128 B
  %stash_a = stash  host  a: float32[8, 4]  128 B
  %stash_b = stash  host  b: float32[8, 4]  128 B
  %b = restore(%stash_b)  h2d  b: float32[8, 4]  128 B
  %three = backward('three', -, (%b), (-))  compute  layer x 2 micro-batches
  %a = restore(%stash_a)  h2d  a: float32[8, 4]  128 B
  %two = backward('two', -, (%a), (-))  compute  layer x 2 micro-batches
  return (-)
"""


def test_a_stash_that_is_needed_soon_stays_on_the_device():
    """With prefetch=0, a value may wait for one segment: b waits for none, a for segment three in forward and in backward."""
    assert after(PlaceStash(), KEPT, stash="host", prefetch=0) == lines("""
forward:
  %x = input  host  x: float32[8, 4]  128 B
  %r = restore(%x)  h2d  x: float32[8, 4]  128 B
  %one = forward('one', -, (%r))  compute  layer x 2 micro-batches
  %a = %one[0]  none  a: float32[8, 4]  128 B
  %keep_a = offload(%a)  d2h  a: float32[8, 4]  128 B
  %two = forward('two', -, (%a))  compute  layer x 2 micro-batches
  %b = %two[0]  none  b: float32[8, 4]  128 B
  %three = forward('three', -, (%b))  compute  layer x 2 micro-batches
  %keep_b = stash(%b)  none  b: float32[8, 4]  128 B
  return ((-), (%x, %keep_a, %keep_b), ())

backward:
  %stash_x = stash  host  x: float32[8, 4]  128 B
  %stash_a = stash  host  a: float32[8, 4]  128 B
  %stash_b = stash  device  b: float32[8, 4]  128 B
  %three = backward('three', -, (%stash_b), (-))  compute  layer x 2 micro-batches
  %a = restore(%stash_a)  h2d  a: float32[8, 4]  128 B
  %two = backward('two', -, (%a), (-))  compute  layer x 2 micro-batches
  return (-)""")


def test_a_stash_goes_on_from_the_host_to_the_disk():
    """It is read before each copy to the device."""
    assert after(PlaceStash(), KEPT, stash="disk", disk=".", prefetch=0) == lines("""
forward:
  %x = input  host  x: float32[8, 4]  128 B
  %r = restore(%x)  h2d  x: float32[8, 4]  128 B
  %one = forward('one', -, (%r))  compute  layer x 2 micro-batches
  %a = %one[0]  none  a: float32[8, 4]  128 B
  %keep_a = offload(%a)  d2h  a: float32[8, 4]  128 B
  %store = store(%keep_a)  disk_write  a: float32[8, 4]  128 B
  %two = forward('two', -, (%a))  compute  layer x 2 micro-batches
  %b = %two[0]  none  b: float32[8, 4]  128 B
  %three = forward('three', -, (%b))  compute  layer x 2 micro-batches
  %keep_b = stash(%b)  none  b: float32[8, 4]  128 B
  return ((-), (%x, %store, %keep_b), ())

backward:
  %stash_x = stash  host  x: float32[8, 4]  128 B
  %stash_a = stash  disk  a: float32[8, 4]  128 B
  %stash_b = stash  device  b: float32[8, 4]  128 B
  %three = backward('three', -, (%stash_b), (-))  compute  layer x 2 micro-batches
  %load = load(%stash_a)  disk_read  a: float32[8, 4]  128 B
  %a = restore(%load)  h2d  a: float32[8, 4]  128 B
  %two = backward('two', -, (%a), (-))  compute  layer x 2 micro-batches
  return (-)""")


def test_on_the_device_all_stashes_stay():
    left = after(PlaceStash(), KEPT, stash="device", prefetch=0)
    assert left[8:10] == lines(
        "%keep_a = stash(%a)  none  a: float32[8, 4]  128 B\n%keep_b = stash(%b)  none  b: float32[8, 4]  128 B"
    )
    assert [line for line in left if line.startswith("%stash_")] == lines("""
  %stash_x = stash  host  x: float32[8, 4]  128 B
  %stash_a = stash  device  a: float32[8, 4]  128 B
  %stash_b = stash  device  b: float32[8, 4]  128 B""")
    assert not any("offload" in line for line in left)


SKIP = """
forward:
  %x = input  host  x: float32[8, 4]  128 B
  %r = restore(%x)  h2d  x: float32[8, 4]  128 B
  %one = forward('one', -, (%r))  compute  layer x 2 micro-batches
  %skip = %one[0]  none  skip: float32[8, 4]  128 B
  %a = %one[1]  none  a: float32[8, 4]  128 B
  %two = forward('two', -, (%a))  compute  layer x 2 micro-batches
  %b = %two[0]  none  b: float32[8, 4]  128 B
  %between = forward('between', -, (%b))  compute  layer x 2 micro-batches
  %three = forward('three', -, (%skip))  compute  layer x 2 micro-batches
  return ((-), (), ())
"""


def test_a_skip_connection_is_on_the_host_while_others_run():
    assert after(PlaceStash(), SKIP, stash="host", prefetch=0) == lines("""
forward:
  %x = input  host  x: float32[8, 4]  128 B
  %r = restore(%x)  h2d  x: float32[8, 4]  128 B
  %one = forward('one', -, (%r))  compute  layer x 2 micro-batches
  %skip = %one[0]  none  skip: float32[8, 4]  128 B
  %offload = offload(%skip)  d2h  skip: float32[8, 4]  128 B
  %a = %one[1]  none  a: float32[8, 4]  128 B
  %two = forward('two', -, (%a))  compute  layer x 2 micro-batches
  %b = %two[0]  none  b: float32[8, 4]  128 B
  %between = forward('between', -, (%b))  compute  layer x 2 micro-batches
  %restore = restore(%offload)  h2d  skip: float32[8, 4]  128 B
  %three = forward('three', -, (%restore))  compute  layer x 2 micro-batches
  return ((-), (), ())""")


# ---- release ------------------------------------------------------------------------------------------------------------

HELD = """
forward:
  %x = input  host  x: float32[8, 4]  128 B
  %r = restore(%x)  h2d  x: float32[8, 4]  128 B
  %w = fetch_weights('one')  h2d  80 B
  %one = forward('one', %w, (%r))  compute  layer x 2 micro-batches
  %a = %one[0]  none  a: float32[8, 4]  128 B
  %b = %one[1]  none  b: float32[8, 4]  128 B
  %to_host = offload(%a)  d2h  a: float32[8, 4]  128 B
  %two = forward('two', -, (%b))  compute  layer x 2 micro-batches
  %keep = stash(%b)  none  b: float32[8, 4]  128 B
  return ((%to_host), (%keep), ())
"""


def test_release_stands_a_segment_behind_a_copy_or_last_reader():
    """b is kept for backward, so it stays. a is copied while segment two runs."""
    assert after(Release(), HELD, prefetch=1) == lines("""
forward:
  %x = input  host  x: float32[8, 4]  128 B
  %r = restore(%x)  h2d  x: float32[8, 4]  128 B
  %w = fetch_weights('one')  h2d  80 B
  %one = forward('one', %w, (%r))  compute  layer x 2 micro-batches
  %a = %one[0]  none  a: float32[8, 4]  128 B
  %b = %one[1]  none  b: float32[8, 4]  128 B
  release(%w)  none
  release(%r)  none
  %to_host = offload(%a)  d2h  a: float32[8, 4]  128 B
  %two = forward('two', -, (%b))  compute  layer x 2 micro-batches
  release(%a)  none
  %keep = stash(%b)  none  b: float32[8, 4]  128 B
  return ((%to_host), (%keep), ())""")


def test_without_prefetch_memory_is_freed_at_once():
    left = after(Release(), HELD, prefetch=0)
    assert left.index("release(%a)  none") == left.index("%to_host = offload(%a)  d2h  a: float32[8, 4]  128 B") + 1


# ---- place_updates ------------------------------------------------------------------------------------------------------

PUSHED = """
forward:
  %w1 = fetch_weights('one')  h2d  80 B
  %one = forward('one', %w1, ())  compute  layer x 2 micro-batches
  %w2 = fetch_weights('two')  h2d  80 B
  %two = forward('two', %w2, ())  compute  layer x 2 micro-batches
  return ((-), (), ())

backward:
  %w = fetch_weights('two')  h2d  80 B
  %back = backward('two', %w, (), (-))  compute  layer x 2 micro-batches
  %g = %back[0]  none
  push_gradients('two', %g)  d2h  80 B
  return (-)
"""


def updating(update: str) -> dict:
    return {"update": update, "optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))])}


def test_in_backward_an_update_follows_each_push():
    left = after(PlaceUpdates(), PUSHED, **updating("in_backward"))
    assert left[left.index("backward:") :] == lines("""
backward:
  %w = fetch_weights('two')  h2d  80 B
  %back = backward('two', %w, (), (-))  compute  layer x 2 micro-batches
  %g = %back[0]  none
  %push_gradients = push_gradients('two', %g)  d2h  80 B
  update('two', after=%push_gradients)  host
  return (-)""")
    assert left[: left.index("backward:")] == [*lines(PUSHED.split("backward:")[0]), ""]


def test_in_forward_updates_are_first_and_fetches_wait():
    left = after(PlaceUpdates(), PUSHED, **updating("in_forward"))
    assert left[: left.index("")] == lines("""
forward:
  %update = update('one')  host
  %update_1 = update('two')  host
  %w1 = fetch_weights('one', after=%update)  h2d  80 B
  %one = forward('one', %w1, ())  compute  layer x 2 micro-batches
  %w2 = fetch_weights('two', after=%update_1)  h2d  80 B
  %two = forward('two', %w2, ())  compute  layer x 2 micro-batches
  return ((-), (), ())""")


def test_at_the_step_no_update_is_placed():
    assert after(PlaceUpdates(), PUSHED) == lines(PUSHED)


# ---- differentiate, stream ----------------------------------------------------------------------------------------------


LAYERS = """
%x = value  float32[B, 4]
%w = parameter  float32[4, 4], grad
%v = parameter  float32[4, 4], grad
%up = F.linear(%x, %w)  float32[B, 4], grad  one
%act = torch.tanh(%up)  float32[B, 4], grad  one
%down = F.linear(%act, %v)  float32[B, 4], grad  two
return (%down,)
"""


def segmented(text: str) -> Compilation:
    """A captured graph after the passes before `differentiate`."""
    return compile_text(text, *PREPARATION, *SEGMENTATION, micro_batches=2)


def differentiated(text: str) -> list[str]:
    found = segmented(text)
    Differentiate().apply(found)
    kept = ", ".join(map(str, found.gradients.kept))
    return [f"kept ({kept})", f"differentiable {found.gradients.differentiable}", f"gradients of {found.gradient_mask}"]


def test_differentiate_keeps_inputs_of_segments_with_a_backward():
    assert differentiated(LAYERS) == lines("""
kept (x, act)
differentiable (True,)
gradients of (True,)""")


def test_differentiate_keeps_nothing_below_trained_parameters():
    frozen = LAYERS.replace("%w = parameter  float32[4, 4], grad", "%w = parameter  float32[4, 4]")
    frozen = re.sub(r"(%(?:up|act) = .*), grad", r"\1", frozen)
    assert differentiated(frozen) == lines("""
kept (act)
differentiable (True,)
gradients of (True,)""")


def test_differentiate_keeps_nothing_for_detached_outputs():
    """The first segment has a parameter to train, and no gradient comes to it."""
    assert differentiated(LAYERS.replace("torch.tanh(%up)  float32[B, 4], grad", "%up.detach()  float32[B, 4]")) == lines("""
kept (act)
differentiable (True,)
gradients of (True,)""")


def test_differentiate_expects_a_gradient_of_the_loss_alone():
    with_loss = LAYERS.replace("return (%down,)", "%loss = torch.mean(%down)  float32[], grad  two\nreturn (%loss, %down, %x)")
    assert differentiated(with_loss) == lines("""
kept (x, act)
differentiable (True, True, False)
gradients of (True, False, False)""")


def test_stream_writes_both_graphs():
    found = segmented(LAYERS)
    Differentiate().apply(found)
    PlaceStages().apply(found)
    Stream().apply(found)
    text = re.sub(r"\bs\d+\b", "B", str(found.program()))
    assert lines(text[text.index("forward:") :]) == lines("""
forward:
  %x = input  host  x: float32[B, 4]  96 B
  %restore = restore(%x)  h2d  x: float32[B, 4]  96 B
  %fetch_weights = fetch_weights('one')  h2d  64 B
  %split = split(%restore)  compute  x: float32[B, 4], split  96 B
  %forward = forward('one', %fetch_weights, (%split))  compute  block_0 x 2 micro-batches
  %getitem = %forward[0]  none  act: float32[B, 4], split, grad  96 B
  %fetch_weights_1 = fetch_weights('two')  h2d  64 B
  %forward_1 = forward('two', %fetch_weights_1, (%getitem), streamed_outputs=(0))  compute  block_1 x 2 micro-batches
  %getitem_1 = %forward_1[0]  none  down: float32[B, 4], split, grad, streamed to the host  96 B
  %stash = stash(%getitem)  none  act: float32[B, 4], split, grad  96 B
  return ((%getitem_1), (%x, %stash), ())

backward:
  %stash_x = stash  host  x: float32[B, 4]  96 B
  %stash_act = stash  host  act: float32[B, 4], split, grad  96 B
  %gradient_0 = gradient  host  gradient_0: float32[B, 4]  96 B
  %restore = restore(%stash_act)  h2d  act: float32[B, 4], split, grad  96 B
  %fetch_weights = fetch_weights('two')  h2d  64 B
  %backward = backward('two', %fetch_weights, (%restore), (-), streamed_gradients=(%gradient_0))  compute  block_1 x 2 micro-batches
  %getitem = %backward[0]  none  d act: float32[B, 4], split  96 B
  %getitem_1 = %backward[1]  none
  push_gradients('two', %getitem_1)  d2h  64 B
  %restore_1 = restore(%stash_x)  h2d  x: float32[B, 4]  96 B
  %fetch_weights_1 = fetch_weights('one')  h2d  64 B
  %split = split(%restore_1)  compute  x: float32[B, 4], split  96 B
  %backward_1 = backward('one', %fetch_weights_1, (%split), (%getitem))  compute  block_0 x 2 micro-batches
  %getitem_2 = %backward_1[1]  none
  push_gradients('one', %getitem_2)  d2h  64 B
  return (-)""")
