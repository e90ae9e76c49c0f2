"""Steps with the option `disk` against steps without it, on a disk that is slowed to a share of the step: time, and processor time a GB.

Processor time is that of the host side, the threads that update and those of the disk. Layers run on one core: needs two.

All parameters and optimizer state are on disk; copies that cross the link are in memory. The disk is slowed to take `LOADS` times the step
without it, each way. A step cannot take less than the longer of both.

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
from pathlib import Path

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
NEAR = 1.15  # limit for a step over the longer of both, where the disk can work all the time
PROCESSOR = 0.06  # limit, seconds a GB that is moved
RING = 32 << 20


class SlowedFile(DiskFile):
    """Moves `rate` bytes a second each way; None for those of the disk."""

    rate: float | None = None

    def __init__(self, folder: str, name: str | None):
        self._until, self._guard = {}, threading.Lock()
        super().__init__(folder, name)

    def _preadv(self, buffer: memoryview, offset: int) -> int:
        self._wait("read", len(buffer))
        return super()._preadv(buffer, offset)

    def _pwritev(self, buffer: memoryview, offset: int) -> int:
        self._wait("write", len(buffer))
        return super()._pwritev(buffer, offset)

    def _wait(self, way: str, size: int) -> None:
        if self.rate is None:
            return
        with self._guard:
            self._until[way] = end = max(time.perf_counter(), self._until.get(way, 0.0)) + size / self.rate
        time.sleep(max(0.0, end - time.perf_counter()))


class Training:
    """A model, its optimizer, and one step of its training."""

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor, disk: str | None, **given):
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
            options |= {"disk": disk, "host_memory": max(least + RING, least * 8 // 7 + 2**20)}
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


def timed(work: Training, count: int) -> tuple[float, float, float]:
    """Median seconds of steps, and processor seconds of one of them: of all threads, and of those of the host side."""
    for _ in range(2):
        work.step()  # its updates may be those of the step before
    seconds, before = [], processor_seconds()
    for _ in range(count):
        start = time.perf_counter()
        work.step()
        seconds.append(time.perf_counter() - start)
    every, host = ((now - then) / count for now, then in zip(processor_seconds(), before, strict=True))
    return statistics.median(seconds), every, host


def main() -> int:
    parser = arguments(__doc__, layers=10, width=768, rows=8, repeats=5)
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a folder of the disk")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.rows, options.repeats = 3, 2, 2
    torch.set_num_threads(1)  # layers take one core, and the host side has the others: so they do not fight
    ids = token_batch(options.rows)
    model = llama(options.layers, options.width, 4 * options.width, options.width // 64)
    rows, limits = [], []
    for mode, given in MODES.items():
        gc.collect()  # threads of trainings before end
        alone = Training(model, ids, None, **given)
        on_disk = Training(model, ids, options.disk, **given)
        with slowed():  # the first step opens the file
            for each in (alone, on_disk):
                for _ in range(2):
                    each.step()
        for load in (0.0, *LOADS):
            SlowedFile.rate = None
            without, every, host = timed(alone, options.repeats)
            SlowedFile.rate = max(on_disk.moved()) / (load * without) if load else None
            seconds, every_with, host_with = timed(on_disk, options.repeats)
            moved = sum(on_disk.moved()) / 1e9
            row = {
                "update": mode,
                "disk alone over step": load or "as it is",
                "without s": round(without, 3),
                "with s": round(seconds, 3),
                "over the longer": round(seconds / (without * max(1.0, load)), 3) if load else "",
                "GB moved": round(moved, 2),
                "host side s/GB": round((host_with - host) / moved, 4),
                "all threads s/GB": round((every_with - every) / moved, 4),
            }
            if not load:
                limits.append(Limit(f"processor s/GB of the host side, {mode}", row["host side s/GB"], PROCESSOR))
            elif "delay" in mode:
                limits.append(Limit(f"over the longer, {mode}, {load:g}", row["over the longer"], NEAR))
            rows.append(row)
            SlowedFile.rate = None
    return report(options, torch.device("cpu"), rows, limits)


if __name__ == "__main__":
    sys.exit(main())
