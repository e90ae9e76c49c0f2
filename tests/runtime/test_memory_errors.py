"""Device memory that runs out: the error names the node, its segment and the options that leave more."""

from __future__ import annotations

import pytest
import torch

from l2l_compile.devices.cpu import CpuDevice
from models import Stack, compiled, rows


def notes_of(monkeypatch, where: str, number: int, **options) -> list[str]:
    """The notes of a step in which this call of a method of the device finds no memory."""
    step, method, calls = compiled(Stack(3), **options), getattr(CpuDevice, where), []
    step(rows(6, dtype=torch.float32)).pow(2).mean().backward()

    def fails(device, *arguments):
        calls.append(1)
        if len(calls) == number:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return method(device, *arguments)

    monkeypatch.setattr(CpuDevice, where, fails)
    with pytest.raises(torch.OutOfMemoryError) as error:
        step(rows(6, dtype=torch.float32)).pow(2).mean().backward()
    return error.value.__notes__


@pytest.mark.parametrize(
    ("where", "number", "sentence"),
    [
        ("upload", 1, "no memory left for node 'restore'"),
        ("load_weights", 2, "no memory left for node 'fetch_weights_1', fetch_weights of segment 'layers.0'"),
        ("begins_micro_batch", 5, "no memory left for node 'forward_1', forward of segment 'layers.0'"),
        ("begins_micro_batch", 17, "no memory left for node 'backward', backward of segment 'head'"),
        ("push", 2, "no memory left for node 'push_gradients_1', push_gradients of segment 'layers.2'"),
        ("reserve_slabs", 1, "no memory left for 2 slabs of 2.0 KiB, the weights of segment 'layers.0'"),
    ],
)
def test_memory_that_runs_out_names_what_had_no_room(monkeypatch, where, number, sentence):
    assert [note for note in notes_of(monkeypatch, where, number) if sentence in note]


FIRST = {"outputs": "all", "precision": "fp32", "prefetch": 1}


@pytest.mark.parametrize(
    ("options", "remedies"),
    [
        (FIRST, ["up to micro_batches=6", "outputs='loss'", "precision='bf16'", "prefetch=0"]),
        ({**FIRST, "micro_batches": 6, "outputs": "loss"}, ["precision='bf16'", "prefetch=0"]),
        (
            {**FIRST, "prefetch": 0, "stash": "device"},
            ["up to micro_batches=6", "outputs='loss'", "precision='bf16'", "stash='host'"],
        ),
        ({**FIRST, "micro_batches": 6, "outputs": "loss", "precision": "bf16", "prefetch": 0}, []),
    ],
    ids=["none used", "two used", "stashes on the device", "all used"],
)
def test_memory_that_runs_out_names_options_not_used_yet(monkeypatch, options, remedies):
    *_, told = notes_of(monkeypatch, "load_weights", 1, **options)
    assert f"in this order: {', '.join([*remedies, 'fewer rows, or shorter ones'])} (docs" in told
    assert f"a step of 6 rows in {options.get('micro_batches', 3)} micro-batches" in told
