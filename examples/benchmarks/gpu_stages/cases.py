"""A stage from inside: its cases, their context, and the loop that runs them in one process.

A case that fails becomes a row. If CUDA answers no call after a case (a device-side assert), the process ends with `RESTART`,
and the rest of the stage runs in a new process. A case that needs a process of its own has the same effect.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .rows import HOST_GB, RESTART, Journal, Row, read_journal


class Unfit(Exception):
    """Raised by a case that cannot run here. The text gives the reason."""


@dataclass
class Context:
    """Shared by the cases of a stage.

    device    where layers run
    until     end of the stage's time, by `time.time()`
    quick     whether sizes are small on a GPU as well
    on_gpu    whether the device is a GPU
    is_large  whether sizes are those of a GPU
    """

    stage: str
    device: torch.device
    until: float
    journal: Journal
    quick: bool = False

    @property
    def is_large(self) -> bool:
        return self.on_gpu and not self.quick

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds until the end of the stage's time."""
        return self.until - time.time()

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Wall-clock seconds of some work; the GPU is idle before and after."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start


class Report:
    """Receives the figures of a case, and writes them to the journal."""

    def __init__(self, context: Context, case: str):
        self._context, self.case = context, case

    def __call__(self, figure: str, value: float, unit: str = "", **limits) -> None:
        """A number, with `most=`, `least=`, `should=`, `note=` (see `Row.limited`)."""
        self._context.journal.row(Row.limited(self._context.stage, self.case, figure, value, unit, **limits))

    def fact(self, figure: str, value: str | float | None, unit: str = "", should: str = "", note: str = "") -> None:
        """A figure without a limit."""
        self._context.journal.row(Row(self._context.stage, self.case, figure, value, unit, should, note=note))

    def verdict(self, figure: str, verdict: str, should: str = "", note: str = "", value: str | float | None = None) -> None:
        self._context.journal.row(Row(self._context.stage, self.case, figure, value, "", should, verdict, note=note))


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    work      called with a `Report`
    seconds   the time after which it counts as hanging; None: the rest of the stage's time
    alone     whether it runs in a process of its own
    gpu       whether it needs a GPU
    needs     bytes of host memory that it needs: if cases before it have left less, it gets a new process
    """

    name: str
    work: Callable[[Report], None]
    seconds: float | None = None
    alone: bool = False
    gpu: bool = False
    needs: int = 0


def run_cases(context: Context, cases: Sequence[Case], path: Path) -> int:
    """Run the cases that have not begun according to the journal. Returns the exit status."""
    known = [content for kind, content in read_journal(path) if kind == "begin"]
    begun, restarted = {fact["case"] for fact in known}, bool(known)
    if not restarted:
        context.journal.write("plan", [case.name for case in cases])
    fresh = True
    for case in cases:
        if case.name in begun:
            continue
        if context.left <= 0:
            return 0
        if not fresh and (case.alone or case.needs > available_bytes()):
            return RESTART
        alive = _run_case(context, case)
        fresh = False
        if not alive or case.alone:
            return RESTART
    return 0


def _run_case(context: Context, case: Case) -> bool:
    """Run one case. Returns whether the process can go on."""
    context.journal.write("begin", {"case": case.name, "at": time.time(), "seconds": case.seconds})
    report = Report(context, case.name)
    try:
        if case.gpu and not context.on_gpu:
            report.verdict("", "needs a GPU")
        else:
            case.work(report)
    except Unfit as reason:
        report.verdict("", "skipped", note=str(reason))
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        report.verdict(type(error).__name__, "error", note=described(error))
    alive = _tidy(context)
    context.journal.write("end", {"case": case.name, "at": time.time()})
    return alive


def _tidy(context: Context) -> bool:
    """Free the memory that a case has left in use. Returns whether CUDA still answers."""
    try:
        torch._dynamo.reset()
        gc.collect()
        if context.on_gpu:
            torch.cuda.synchronize(context.device)
            torch.cuda.empty_cache()
    except Exception:  # noqa: BLE001 - the context of the process is gone
        return False
    return True


def described(error: BaseException) -> str:
    """The text of an error, its notes, and the innermost frames."""
    text = " ".join(str(error).split("Set TORCHDYNAMO_VERBOSE")[0].split())[:600]
    notes = "; ".join(getattr(error, "__notes__", ()))
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames[-6:]))
    cause = error.__cause__ or error.__context__
    because = f" | from {type(cause).__name__}: {' '.join(str(cause).split())[:300]}" if cause is not None else ""
    return f"{text}{' (' + notes + ')' if notes else ''} | at {where}{because}"


def available_bytes() -> int:
    """Available host memory. The memory of some virtual machines grows with use; then `gpu.py --host-gb` gives the total."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    known = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    available = known.get("MemAvailable", 0)
    if given := os.environ.get(HOST_GB):
        in_use = known.get("MemTotal", available) - available
        return max(int(float(given) * 1e9) - in_use, 0)
    return available
