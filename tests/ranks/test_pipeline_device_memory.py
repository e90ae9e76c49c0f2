"""Device memory of a stage: a mask whose rows are all equal comes from another rank once, and is held as on one rank."""

from __future__ import annotations

from pipelines import STEPS, Case, train

import l2l_compile

TURNS, ROWS, LENGTH, WIDTH = 16, 2, 128, 16
LONG = Case("llama", options={"micro_batches": TURNS}, rows=(TURNS * ROWS,) * STEPS, lengths=(LENGTH,) * STEPS)


def peaks(rank, world):
    return [l2l_compile.stats(train(LONG, ranks).compiled).peak_device_bytes for ranks in (1, world)]


def test_a_mask_of_equal_rows_is_received_once(ranks):
    for alone, staged in ranks.run(peaks, world=2):
        assert staged <= alone + 3 * 4 * ROWS * LENGTH * WIDTH
