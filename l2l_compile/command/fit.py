"""Whether a model fits on a machine, by how many bytes, and which changes would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..devices.machine import Machine
from ..host.memory import host_memory
from ..options import Options
from ..report import Report
from ..runtime.dry_run import device_memory
from ..units import format_bytes


@dataclass(frozen=True)
class Need:
    """Bytes that a step needs of a memory, and the bytes that the machine has."""

    memory: str
    need: int
    room: int
    remedies: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.need <= self.room

    def __str__(self) -> str:
        line = f"{self.memory}: {format_bytes(self.need)} of {format_bytes(self.room)}"
        if self.fits:
            return f"fits      {line}"
        lines = [f"too large {line}, {format_bytes(self.need - self.room)} too much"]
        return "\n".join([*lines, *(f"          {remedy}" for remedy in self.remedies)])


def needs(report: Report, machine: Machine, with_micro_batches: Callable[[int], Report]) -> list[Need]:
    """The memory that a step needs on the device and on the host, each with remedies if it does not fit.

    `with_micro_batches` makes the report for another number of micro-batches. It is needed if the report has one micro-batch:
    such a program runs whole-batch, so it does not show the memory at other numbers.
    """
    device, host = report.device_memory.peak, _host_bytes(report, report.options)
    device_room, host_room = int(machine.device_memory), int(machine.host_memory)
    on_device = _remedies(_on_device(report, with_micro_batches), device_room) if device > device_room else ()
    on_host = _remedies(_on_host(report), host_room) if host > host_room else ()
    together = [Need("device memory", device, device_room, on_device), Need("host memory", host, host_room, on_host)]
    return together if machine.overlaps else together[1:]


def _remedies(candidates: Iterator[tuple[str, Callable[[], int]]], room: int) -> tuple[str, ...]:
    """Each change with the bytes that are then needed, up to the first change that makes the model fit."""
    said = []
    for change, bytes_with in candidates:
        left = bytes_with()
        enough = left <= room
        said.append(f"{change}: {format_bytes(left)}{'' if enough else ', still too much'}")
        if enough:
            return tuple(said)
    return (*said, "less of the model, a shorter sequence, or a larger machine")


def _on_device(report: Report, with_micro_batches: Callable[[int], Report]) -> Iterator[tuple[str, Callable[[], int]]]:
    rows = max((p.bindings.get(p.captured.batch, 1) for p in report.programs), default=1)
    count = report.options.micro_batches
    if count == 1 and rows > 1:
        report = with_micro_batches(2)
    options = report.options
    while count < rows:
        count = min(2 * count, rows)
        yield f"--micro-batches {count}", lambda count=count: _device_bytes(report, replace(options, micro_batches=count))  # type: ignore[misc]


def _device_bytes(report: Report, options: Options) -> int:
    return device_memory(report.programs, options).peak


def _on_host(report: Report) -> Iterator[tuple[str, Callable[[], int]]]:
    options = report.options
    if options.optimizer is not None and options.update != "in_backward" and options.precision != "fp16":
        yield "--update in_backward (no clipping)", lambda: _host_bytes(report, replace(options, update="in_backward"))
    if options.optimizer is not None:
        least = "at_step" if options.precision == "fp16" else "in_backward"
        without = (report.host_memory.optimizer_state or 0) if options.update == least else 0
        yield (
            "and an optimizer without state (--optimizer sgd)",
            lambda: _host_bytes(report, replace(options, update=least)) - (without or report.host_memory.optimizer_state or 0),
        )


def _host_bytes(report: Report, options: Options) -> int:
    return host_memory(report.programs, options).total + stashes_on_host(report)


def stashes_on_host(report: Report) -> int:
    """Bytes of the stashes that wait on the host for backward."""
    return sum(sum(program.host_stashes.values()) for program in report.programs)
