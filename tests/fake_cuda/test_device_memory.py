"""The memory of the device as PyTorch's allocator has it: its reserve counts as free, and a step that finds too little can be made smaller."""

from __future__ import annotations

import gc

import pytest
import torch

import l2l_compile
from l2l_compile.devices.cuda import CudaDevice
from training_loop import UPDATES, Transformer

GIB, MIB = 1 << 30, 1 << 20


def test_memory_that_the_allocator_reserves_is_free(runtime):
    torch.cuda.empty_cache()
    device = CudaDevice(torch.device("cuda", 0))
    before = device.memory()
    taken = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    assert device.memory() == (before.held + GIB, before.free - GIB, before.total)
    del taken
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() >= GIB
    assert device.memory() == before


def test_memory_of_other_processes_is_not_free(runtime):
    torch.cuda.empty_cache()
    device = CudaDevice(torch.device("cuda", 0))
    reserved = torch.cuda.memory_reserved()
    runtime.set_limit(runtime.counts["device bytes"] + GIB)
    assert device.memory().free == GIB + reserved - torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(GIB + 1, dtype=torch.uint8, device="cuda")
    assert torch.empty(GIB, dtype=torch.uint8, device="cuda").is_cuda


def kept_within(runtime, room: int, reserve: int) -> int:
    """Bytes that a step with keep="auto" keeps, where `room` is free beside a fifth of the device, `reserve` of it in the allocator."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    runtime.set_limit(None)
    total = torch.cuda.get_device_properties(0).total_memory
    runtime.set_limit(runtime.counts["device bytes"] + total // 5 + room)
    tokens = torch.zeros(32, 512, dtype=torch.int64)
    model = torch.compile(
        Transformer(4, 512),
        backend="l2l",
        fullgraph=True,
        options={"micro_batches": 4, "device": "cuda", "block_compiler": "eager", "outputs": "loss", "keep": "auto"},
    )
    model(tokens).backward()
    blocks = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(reserve // (64 * MIB))]
    del blocks
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() >= reserve
    for _ in range(2):
        model(tokens).backward()
    return l2l_compile.stats(model).kept_bytes


def test_keep_auto_counts_the_reserve_of_the_allocator(runtime):
    """The figures of the device show less free memory by what the allocator has reserved."""
    found = kept_within(runtime, GIB, 0)
    assert kept_within(runtime, GIB, GIB) == found
    assert 0 < kept_within(runtime, GIB // 2, 0) < found


class Training:
    """A transformer in float64 and its optimizer, on one device, of which steps may run out of memory."""

    def __init__(self, device: str, update: str):
        torch.manual_seed(0)
        self.plain = Transformer(2, vocabulary=64).double()
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-3, eps=1e-4)
        options = {"micro_batches": 4, "device": device, "block_compiler": "eager", "outputs": "loss", **UPDATES[update]}
        if update != "at_step":
            options["optimizer"] = self.optimizer
        self.model = torch.compile(self.plain, backend="l2l", fullgraph=True, options=options)

    def step(self, rows: int, seed: int) -> None:
        self.model(torch.randint(0, 64, (rows, 32), generator=torch.Generator().manual_seed(seed))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def error_of(self, rows: int) -> str:
        """The error of a step that runs out of memory, with its notes; "" if none does. Its frames, which hold tensors, are gone."""
        try:
            self.step(rows, 0)
        except torch.OutOfMemoryError as error:
            self.optimizer.zero_grad()
            return "\n".join([str(error), *error.__notes__])
        return ""

    def parameters(self) -> list[torch.Tensor]:
        l2l_compile.synchronize(self.model)
        return [p.detach().clone() for p in self.plain.parameters()]


@pytest.mark.parametrize(
    ("update", "more", "sentence"),
    [(update, 30, "forward of segment 'layers.0'") for update in UPDATES]
    + [
        (update, 60, "backward of segment 'layers.1'") for update in UPDATES if update != "in_backward"
    ],  # it has updated the head
)
def test_fewer_rows_go_on_after_memory_ran_out(computing, update, more, sentence):
    """In the memory in which a step of many rows has failed, with `more` MiB than the device holds between steps; as if it had not been."""
    ours, theirs = Training("cuda", update), Training("cpu", update)
    for training in (ours, theirs):
        for seed in range(2):
            training.step(8, seed)
    ours.parameters()
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    computing.set_limit(computing.counts["device bytes"] + more * MIB)
    told = ours.error_of(512)
    assert "CUDA out of memory. Tried to allocate" in told and f", {sentence}" in told
    assert "512 rows in 4 micro-batches ran out" in told and "up to micro_batches=512, prefetch=0, fewer rows" in told
    assert torch.cuda.memory_allocated() <= held
    for training in (ours, theirs):
        for seed in range(2):
            training.step(8, seed)
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (found - expected).norm() <= 1e-10 * expected.norm()
