"""Steps with the option `disk` against steps without it, on a disk that is slowed to a share of the step: time, and processor time a GB.

All parameters and optimizer state are on disk; copies that cross the link are in memory. The disk is slowed to take `LOADS` times the step
without it, each way. A step cannot take less than the longer of both. Layers run on one core: needs two.

Processor time is that of the host side, the threads that update and those of the disk, on the disk as it is. Its model is wider and has
fewer rows: a transfer costs processor time whatever its size, and only parameters and buffers of some megabytes have transfers of `BLOCK`.

    python examples/benchmarks/disk.py --disk /nvme
"""

from __future__ import annotations

import contextlib
import copy
import gc
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import l2l_compile
from l2l_compile.disk import striped_file
from l2l_compile.disk.disk_file import DiskFile
from l2l_compile.host.disk_plan import disk_plan
from l2l_compile.options import Options
from measuring import Limit, arguments, llama, report, token_batch

MODES = {
    "in_backward": {"update": "in_backward"},
    "in_forward": {"update": "in_forward"},
    "in_forward, delay=1": {"update": "in_forward", "delay": 1},
}
LOADS = (0.5, 1.0, 2.0)  # the disk alone, over the step without it
NEAR = 1.15  # limit for a step over the longer of both, where the disk has work in forward and in backward
HAS_WORK = ("in_backward", "in_forward, delay=1")
PROCESSOR = 0.06  # limit, seconds a GB that is moved
RING, WIDE_RING = 32 << 20, 256 << 20


class SlowedFile(DiskFile):
    """Moves `rate` bytes a second each way; None for those of the disk."""

    rate: float | None = None

    def __init__(self, folder: str, name: str | None):
        self._until, self._guard = {}, threading.Lock()
        super().__init__(folder, name)

    def _preadv(self, buffer: memoryview, offset: int) -> int:
        with self._as_long_as("read", len(buffer)):
            return super()._preadv(buffer, offset)

    def _pwritev(self, buffer: memoryview, offset: int) -> int:
        with self._as_long_as("write", len(buffer)):
            return super()._pwritev(buffer, offset)

    @contextlib.contextmanager
    def _as_long_as(self, way: str, size: int) -> Iterator[None]:
        """The transfer within is part of the time that the slowed disk takes, behind those before it."""
        if self.rate is not None:
            with self._guard:
                end = self._until[way] = max(time.perf_counter(), self._until.get(way, 0.0)) + size / self.rate
        yield
        if self.rate is not None:
            time.sleep(max(0.0, end - time.perf_counter()))


class Training:
    """A model, its optimizer, and one step of its training."""

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor, disk: str | None, ring: int = RING, **given):
        self.model, self.ids = copy.deepcopy(model), ids
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        options = {"optimizer": self.optimizer, "precision": "bf16", "micro_batches": 2, "device": torch.device("cpu"), **given}
        if disk is not None:
            asked = Options.build({**options, "disk": disk, "host_memory": "1TB"})
            plan = disk_plan(asked, largest=max(sum(p.numel() for p in layer.parameters()) for layer in self.model.model.layers))
            small = sum(size.master + size.state for size in plan.sizes if not size.leaves)
            copies = sum(size.copy for size in plan.sizes)
            waiting = copies // 3 if given["update"] == "in_backward" else 0  # gradients of updates that go on in forward
            least = plan.beside + small + copies + waiting
            options |= {"disk": disk, "host_memory": max(least + ring, least * 8 // 7 + 2**20)}
        self.compiled = torch.compile(self.model, backend="l2l", options=options)

    def step(self) -> None:
        self.compiled(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def moved(self) -> tuple[int, int]:
        """Bytes that the updates of a step read and write."""
        found = l2l_compile.stats(self.compiled)
        return found.disk_read_bytes, found.disk_written_bytes


@contextlib.contextmanager
def slowed() -> Iterator[None]:
    """Context manager in which stores are on a disk that can be slowed."""
    before, striped_file.DiskFile = striped_file.DiskFile, SlowedFile
    try:
        yield
    finally:
        striped_file.DiskFile = before


def processor_seconds() -> tuple[float, float]:
    """Of all threads of this process, and of those of the host side: the disk's, and those that update."""
    mine = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("l2l-")]
    on_run = (int(Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]) for number in mine)
    return time.process_time(), sum(on_run) / 1e9


@dataclass(frozen=True)
class Timed:
    """Steps: the seconds of each, and the processor seconds of all of them, of all threads and of those of the host side."""

    seconds: list[float]
    every: float
    host: float

    def __add__(self, other: Timed) -> Timed:
        return Timed(self.seconds + other.seconds, self.every + other.every, self.host + other.host)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def processor_beyond(self, other: Timed) -> tuple[float, float]:
        """Processor seconds of a step beyond those of another one, of all threads and of those of the host side."""
        mine, its = len(self.seconds), len(other.seconds)
        return self.every / mine - other.every / its, self.host / mine - other.host / its


def timed(work: Training, count: int) -> Timed:
    for _ in range(2):
        work.step()  # its updates may be those of the step before
    seconds, before = [], processor_seconds()
    for _ in range(count):
        start = time.perf_counter()
        work.step()
        seconds.append(time.perf_counter() - start)
    every, host = (now - then for now, then in zip(processor_seconds(), before, strict=True))
    return Timed(seconds, every, host)


def pairs(model: torch.nn.Module, ids: torch.Tensor, disk: str, ring: int) -> Iterator[tuple[str, Training, Training]]:
    """Of every mode, a training without the disk and one with it, behind their first steps."""
    for mode, given in MODES.items():
        gc.collect()  # threads of trainings before end
        alone, on_disk = Training(model, ids, None, **given), Training(model, ids, disk, ring, **given)
        with slowed():  # the first step opens the file
            for each in (alone, on_disk):
                for _ in range(2):
                    each.step()
        yield mode, alone, on_disk


def measured(alone: Training, on_disk: Training, load: float, repeats: int) -> dict[str, Any]:
    """One row: the step with the disk slowed to `load` times the step without it, which is measured before and behind; as it is if 0."""
    SlowedFile.rate = None
    without = timed(alone, repeats)
    disk_alone = load * without.median
    SlowedFile.rate = max(on_disk.moved()) / disk_alone if load else None
    found = timed(on_disk, repeats)
    SlowedFile.rate = None
    without += timed(alone, repeats)
    moved = sum(on_disk.moved()) / 1e9
    every, host = (each / moved for each in found.processor_beyond(without))
    return {
        "disk alone over step": load or "as it is",
        "without s": round(without.median, 3),
        "disk alone s": round(disk_alone, 3) if load else "",
        "with s": round(found.median, 3),
        "over the longer": round(found.median / max(without.median, disk_alone), 3) if load else "",
        "GB moved": round(moved, 2),
        "host side s/GB": round(host, 4),
        "all threads s/GB": round(every, 4),
    }


def main() -> int:
    parser = arguments(__doc__, layers=20, width=768, rows=4, repeats=3)
    parser.add_argument("--wide", type=int, default=2048, help="the width of the model of which processor time is measured")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a folder of the disk")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.rows, options.repeats, options.wide = 3, 2, 2, options.width
    torch.set_num_threads(1)  # layers take one core, and the host side has the others: so they do not fight
    rows, limits = [], []

    def llama_of(layers: int, width: int) -> torch.nn.Module:
        return llama(layers, width, 4 * width, width // 64)

    for mode, *both in pairs(llama_of(3, options.wide), token_batch(1), options.disk, WIDE_RING):
        row = measured(*both, 0.0, options.repeats)
        limits.append(Limit(f"processor s/GB of the host side, {mode}", row["host side s/GB"], PROCESSOR))
        rows.append({"update": mode, "width": options.wide, **row})
    for mode, *both in pairs(llama_of(options.layers, options.width), token_batch(options.rows), options.disk, RING):
        for load in LOADS:
            row = measured(*both, load, options.repeats)
            if mode in HAS_WORK:
                limits.append(Limit(f"over the longer, {mode}, {load:g}", row["over the longer"], NEAR))
            rows.append({"update": mode, "width": options.width, **row})
    return report(options, torch.device("cpu"), rows, limits)


if __name__ == "__main__":
    sys.exit(main())
