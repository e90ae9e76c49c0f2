"""What does not depend on the rows is made by the first micro-batch for all: masks, positions, rotary tables."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import l2l_compile
from models import assert_parity, backward_twice, compiled, pair_of, rows

WIDTH = 8


class Attends(nn.Module):
    def __init__(self, in_place: bool = False, batch_first: bool = True):
        super().__init__()
        self.inside, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.in_place, self.batch_first = in_place, batch_first

    def forward(self, x, mask, turn):
        q, k, v = self.inside(x * turn).chunk(3, -1)
        if self.in_place:
            mask.masked_fill_(x.mean(-1).unsqueeze(1) > 0.5, -1.0)
        scores = q @ k.transpose(-1, -2) + mask if self.batch_first else torch.einsum("tbc,sbc->tsb", q, k) + mask
        mixed = scores.softmax(-1) @ v if self.batch_first else torch.einsum("tsb,sbc->tbc", scores.softmax(1), v)
        return x + self.out(mixed).tanh()


class Masked(nn.Module):
    """A mask with rows that are alike, a table without rows, positions with gradients; rows of their own if there is padding."""

    def __init__(self, depth: int = 3, batch_first: bool = True, **layer):
        super().__init__()
        self.batch_first, self.places = batch_first, nn.Parameter(torch.randn(6, WIDTH))
        self.inside = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList([Attends(batch_first=batch_first, **layer) for _ in range(depth)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, padding=None):
        batch, tokens = x.shape[:2] if self.batch_first else (x.shape[1], x.shape[0])
        mask = torch.full((tokens, tokens), -9.0, dtype=x.dtype).triu(1)
        if self.batch_first:
            mask, places = mask.expand(batch, -1, -1), self.places.expand(batch, -1, -1)
        else:
            mask, places = mask.unsqueeze(-1).expand(-1, -1, batch), self.places.unsqueeze(1).expand(-1, batch, -1)
        mask = mask * 1.5 if padding is None else mask + padding.unsqueeze(1)
        turn = torch.arange(tokens, dtype=x.dtype).cos().view((tokens, 1) if self.batch_first else (tokens, 1, 1))
        x = self.inside(x) + places.sigmoid()
        for layer in self.layers:
            x = layer(x, mask, turn)
        return {"scores": self.head(x), "mask": mask}


def scores_and_mask(call, x):
    """A step with a loss of the scores."""
    outputs = call(x)
    outputs["scores"].pow(2).mean().backward()
    return outputs


def calls(model: nn.Module, *inputs) -> dict[str, int]:
    """How often the operations of a second step are called."""
    step = compiled(model, micro_batches=3)
    step(*inputs)
    with torch.profiler.profile() as profile:
        step(*inputs)
    return {event.key.removeprefix("aten::"): event.count for event in profile.key_averages()}


def test_what_every_row_shares_is_computed_once():
    counted = calls(Masked().double(), rows(8, 6, 5))
    assert (counted["triu"], counted["cos"]) == (1, 1)
    assert counted["_softmax"] == 9


def test_a_mask_that_was_written_into_is_not_shown_as_made_once():
    report = l2l_compile.explain(Masked(2, in_place=True).double(), {"micro_batches": 3})(rows(8, 6, 5))
    values = re.findall(r"(\w+)(\.\d+)?: \w+\[.*?\](.*?)  ", str(report.programs[0]))  # name, version, flags
    equal = {(name, version) for name, version, flags in values if "equal rows" in flags}
    written = {name for name, version, _ in values if version}
    assert written and any((name, "") in equal for name in written)
    assert not any(version for _, version in equal)


def test_what_rows_have_of_their_own_is_computed_for_each():
    counted = calls(Masked().double(), rows(8, 6, 5), rows(8, 6))
    assert counted["cos"] == 1
    (program,) = l2l_compile.explain(Masked().double(), {"micro_batches": 3})(rows(8, 6, 5), rows(8, 6)).programs
    masks = [o for segment in program.segments for o in segment.block.outputs if o.batch and o.shape[1:] == (6, 6)]
    assert masks and not any(o.equal_rows for o in masks)


@pytest.mark.parametrize("options", [{}, {"stash": "device"}, {"prefetch": 0}, {"check": True}], ids=str)
@pytest.mark.parametrize(
    "model",
    [Masked, lambda: Masked(5), lambda: Masked(in_place=True), lambda: Masked(batch_first=False)],
    ids=["", "deep", "written by a layer", "time first"],
)
@pytest.mark.slow(but="*-{}")
def test_parity(threaded, model, options):
    made = model().double()
    pair = pair_of(made, **options)
    for count in (7, 6, 2):
        x = rows(count, 6, 5) if made.batch_first else rows(6, count, 5)
        found = pair.run(scores_and_mask, x).check()
        assert {d.key.name for d in found.differences if d.key.kind == "output"} == {"['scores']", "['mask']"}
    assert threaded.devices[-1].ledger.held == 0


@pytest.mark.slow
def test_parity_of_compiled_blocks():
    pair_of(Masked(2).double(), block_compiler="inductor").run(scores_and_mask, rows(6, 6, 5)).check()


def test_the_mask_of_one_micro_batch_is_held_and_copied():
    """As much of the device, and of the link, for eight micro-batches as for one of the same size."""

    class Wide(Masked):
        def forward(self, x, padding=None):
            return super().forward(x, padding)["scores"].pow(2).mean()

    def figures(count, micro_batches, tokens=64):
        model = Wide(6)
        model.places = nn.Parameter(torch.randn(tokens, WIDTH))
        step = compiled(model, micro_batches=micro_batches)
        step(torch.randn(count, tokens, 5)).backward()
        return l2l_compile.stats(step)

    mask, state = 2 * 64 * 64 * 4, 2 * 64 * WIDTH * 4
    one, eight = figures(2, 1), figures(16, 8)
    assert eight.peak_device_bytes - one.peak_device_bytes < 7 * mask / 2
    assert eight.offloaded_bytes - one.offloaded_bytes < 7 * (state * 8) + mask


def test_a_draw_that_every_row_reads_is_not_shared():
    """Random numbers are drawn for every micro-batch, as they are for every row in eager."""

    class Noisy(Masked):
        def forward(self, x):
            noise = F.dropout(torch.ones(x.shape[0], 6, 1, dtype=x.dtype), 0.5)
            return super().forward(x * noise)["scores"], noise

    _, noise = compiled(Noisy().double(), micro_batches=3)(rows(12, 6, 5))
    assert len({tuple(r.flatten().tolist()) for r in noise}) > 6


def test_shared_inputs_and_results_stay_apart():
    """A step that is differentiated twice, with what was made once in between."""
    pair_of(nn.Sequential(Masked(2), Scores()).double()).run(backward_twice, rows(8, 6, 5)).check()


def test_uneven_batches_of_every_size(threaded):
    for count in range(1, 8):
        assert_parity(nn.Sequential(Masked(2), Scores()).double(), rows(count, 6, 5), micro_batches=4)


class Scores(nn.Module):
    def forward(self, outputs):
        return outputs["scores"]
