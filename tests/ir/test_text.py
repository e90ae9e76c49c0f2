"""A program as text, line by line."""

from __future__ import annotations

import re

import torch
from torch import nn

import l2l_compile
from l2l_compile.units import format_bytes


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


STREAMED = """\
sizes: B = 6 (batch)

blocks:
  block_0    x1    inner loop
  block_1    x1    inner loop

forward:
  %l_args_0_ = input                                                               host    l_args_0_: float32[B, 4]  96 B
  %restore = restore(%l_args_0_)                                                   h2d     l_args_0_: float32[B, 4]  96 B
  %fetch_weights = fetch_weights('one')                                            h2d     160 B
  %split = split(%restore)                                                         compute l_args_0_: float32[B, 4], split  96 B
  release(%restore)                                                                none
  %fetch_weights_1 = fetch_weights('two')                                          h2d     72 B
  %forward = forward('one', %fetch_weights, (%split))                              compute block_0 x 3 micro-batches
  %getitem = %forward[0]                                                           none    tanh: float32[B, 8], split, grad  192 B
  release(%split)                                                                  none
  release(%fetch_weights)                                                          none
  %forward_1 = forward('two', %fetch_weights_1, (%getitem), streamed_outputs=(0))  compute block_1 x 3 micro-batches
  %getitem_1 = %forward_1[0]                                                       none    linear_1: float32[B, 2], split, grad, streamed to the host  48 B
  release(%fetch_weights_1)                                                        none
  %stash = stash(%getitem)                                                         none    tanh: float32[B, 8], split, grad  192 B
  return ((%getitem_1), (%l_args_0_, %stash), ())

backward:
  %stash_l_args_0_ = stash                                                                           host    l_args_0_: float32[B, 4]  96 B
  %stash_tanh = stash                                                                                device  tanh: float32[B, 8], split, grad  192 B
  %gradient_0 = gradient                                                                             host    gradient_0: float32[B, 2]  48 B
  %fetch_weights = fetch_weights('two')                                                              h2d     72 B
  %restore_1 = restore(%stash_l_args_0_)                                                             h2d     l_args_0_: float32[B, 4]  96 B
  %fetch_weights_1 = fetch_weights('one')                                                            h2d     160 B
  %backward = backward('two', %fetch_weights, (%stash_tanh), (-), streamed_gradients=(%gradient_0))  compute block_1 x 3 micro-batches
  %getitem = %backward[0]                                                                            none    d tanh: float32[B, 8], split  192 B
  %getitem_1 = %backward[1]                                                                          none
  release(%fetch_weights)                                                                            none
  release(%stash_tanh)                                                                               none
  push_gradients('two', %getitem_1)                                                                  d2h     72 B
  %split = split(%restore_1)                                                                         compute l_args_0_: float32[B, 4], split  96 B
  release(%restore_1)                                                                                none
  %backward_1 = backward('one', %fetch_weights_1, (%split), (%getitem))                              compute block_0 x 3 micro-batches
  %getitem_2 = %backward_1[1]                                                                        none
  release(%split)                                                                                    none
  release(%getitem)                                                                                  none
  release(%fetch_weights_1)                                                                          none
  release(%getitem_1)                                                                                none
  push_gradients('one', %getitem_2)                                                                  d2h     160 B
  release(%getitem_2)                                                                                none
  return (-)"""

RESIDENT_FORWARD = """\
  %l_args_0_ = input                                         host    l_args_0_: float32[B, 4]  96 B
  %restore = restore(%l_args_0_)                             h2d     l_args_0_: float32[B, 4]  96 B
  %fetch_weights = fetch_weights('one')                      h2d     160 B
  %forward = forward('one', %fetch_weights, (%restore))      compute block_0
  %getitem = %forward[0]                                     none    tanh: float32[B, 8], grad  192 B
  release(%fetch_weights)                                    none
  release(%restore)                                          none
  %fetch_weights_1 = fetch_weights('two')                    h2d     72 B
  %forward_1 = forward('two', %fetch_weights_1, (%getitem))  compute block_1
  %getitem_1 = %forward_1[0]                                 none    linear_1: float32[B, 2], grad  48 B
  release(%fetch_weights_1)                                  none
  %offload = offload(%getitem_1)                             d2h     linear_1: float32[B, 2], grad  48 B
  release(%getitem_1)                                        none
  %stash = stash(%getitem)                                   none    tanh: float32[B, 8], grad  192 B
  return ((%offload), (%l_args_0_, %stash), ())"""


def text(**options) -> str:
    report = l2l_compile.explain(TwoLayers(), {"device": "cpu", **options})(torch.ones(6, 4))
    return re.sub(r"\bs\d+\b", "B", str(report.programs[0]))  # Dynamo chooses the symbol's name


def lines(shown: str) -> list[str]:
    """Without the width of the columns, which the symbol's name changes."""
    return [re.sub(r"  +", "  ", line).replace("compute ", "compute  ") for line in shown.splitlines()]


def test_program_of_two_layers_with_prefetch_and_an_inner_loop():
    assert lines(text(micro_batches=3, prefetch=1, stash="host")) == lines(STREAMED)


def test_without_prefetch_a_copy_stands_right_before_its_reader():
    shown = text(micro_batches=1, prefetch=0, stash="device").split("forward:\n")[1].split("\n\nbackward:")[0]
    assert lines(shown) == lines(RESIDENT_FORWARD)


class Normed(TwoLayers):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.two(self.norm(self.one(x)))


def test_updates_and_writes_show_the_names_of_what_they_change():
    model = Normed()
    options = {"device": "cpu", "optimizer": torch.optim.SGD(model.parameters()), "update": "in_backward"}
    program = l2l_compile.explain(model, options)(torch.ones(6, 4)).programs[0]
    forward, backward = str(program).split("\n\nbackward:")
    written = re.findall(r"write_back\((.*?), %", forward)
    assert sorted(written) == ["'norm.num_batches_tracked'", "'norm.running_mean'", "'norm.running_var'"]
    names = [repr(segment.name) for segment in reversed(program.segments)]
    assert re.findall(r"update\((.*?), after=%(\w+)\)", backward) == list(
        zip(names, ("push_gradients", "push_gradients_1"), strict=True)
    )


def test_bytes_are_shown_in_binary_units():
    assert [format_bytes(n) for n in (0, 1023, 1536, 2**20, 5 * 2**30, 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 MiB",
        "5.0 GiB",
        "1.0 TiB",
    ]
