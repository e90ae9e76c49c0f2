"""The speed of the link, of page-locking and of a matrix product: they bound all other figures."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
from collections.abc import Callable

import torch

from l2l_compile import measure_machine

from .cases import Case, Context, Report

SIZES = (8, 64, 512)  # MiB
REPEATS = 5


def cases(context: Context) -> list[Case]:
    bound = lambda work, *more: functools.partial(work, context, *more)  # noqa: E731
    return [
        *(Case(f"copies of {size} MiB", bound(copies, size), 15, gpu=True) for size in SIZES[: 2 if context.quick else None]),
        Case("page-locking", bound(page_locking), 15, gpu=True),
        Case("a product in bf16" if context.is_large else "a product in fp32", bound(product), 15),
        Case("copies within the host", bound(host_copies), 15),
        Case("a machine file", bound(machine_file), 40),
    ]


def machine_file(context: Context, report: Report) -> None:
    """The figures of `measure_machine`, from which `simulate` and `plan` predict steps."""
    machine = measure_machine(context.device)
    for field in dataclasses.fields(machine):
        value = getattr(machine, field.name)
        if field.name not in ("name", "sources"):
            report.fact(field.name, value if isinstance(value, (int, float, str)) else json.dumps(value, default=str))


def median(context: Context, work: Callable[[], object]) -> float:
    """Median seconds of some work after a warm-up."""
    work()
    return statistics.median(context.seconds(work) for _ in range(REPEATS))


def copies(context: Context, size: int, report: Report) -> None:
    """GB/s each way, and both ways at once on two streams, for memory of PyTorch's pinned allocator and for pageable memory."""
    count = size << 20
    there = [torch.zeros(count, dtype=torch.uint8, device=context.device) for _ in range(2)]
    streams = [torch.cuda.Stream(context.device) for _ in range(2)]
    context.synchronize()
    for kind in ("pinned", "pageable"):
        here = [torch.zeros(count, dtype=torch.uint8, pin_memory=kind == "pinned") for _ in range(2)]

        def send(here=here) -> None:
            with torch.cuda.stream(streams[0]):
                there[0].copy_(here[0], non_blocking=True)

        def fetch(here=here) -> None:
            with torch.cuda.stream(streams[1]):
                here[1].copy_(there[1], non_blocking=True)

        def both() -> None:
            send()
            fetch()

        should = "the link: about 25 (PCIe 4 x16), 50 (PCIe 5 x16)" if kind == "pinned" else "less than pinned"
        one_way = {name: median(context, work) for name, work in (("to the device", send), ("to the host", fetch))}
        for name, seconds in one_way.items():
            report.fact(f"{kind} {name}", count / seconds / 1e9, "GB/s", should=should)
        if kind == "pinned":
            seconds = median(context, both)
            report.fact(f"{kind} both at once, in all", 2 * count / seconds / 1e9, "GB/s", should="near the sum of both")
            ratio = seconds / max(one_way.values())
            report("both at once over the slower alone", ratio, most=1.5, should="1: they do not share; 2 is one after the other")


def page_locking(context: Context, report: Report) -> None:
    """GB/s of page-locking fresh pages, with the project's own code, and of copies from pages that were locked in place."""
    from l2l_compile.devices.cuda import _page_lock, _page_unlock
    from l2l_compile.memory.pages import pages

    torch.ones(1, device=context.device)
    for size in (64, 512):
        buffer = pages(size << 20, "the stage copies")
        seconds = context.seconds(lambda b=buffer: _page_lock(context.device, b.data_ptr(), b.numel()))
        report.fact(f"page-locking {size} MiB of fresh pages", buffer.numel() / seconds / 1e9, "GB/s", should="above 1")
        there = torch.zeros(buffer.numel(), dtype=torch.uint8, device=context.device)
        found = median(context, lambda b=buffer, t=there: t.copy_(b, non_blocking=True))
        report.fact(
            f"copies from {size} MiB that were locked in place",
            buffer.numel() / found / 1e9,
            "GB/s",
            should="that of pinned memory",
        )
        calls = call_seconds(context, lambda b=buffer, t=there: t.copy_(b, non_blocking=True))
        report(
            "time of the call over that of the copy",
            calls / found,
            most=0.5,
            should="near 0: the call does not wait for the copy",
        )
        seconds = context.seconds(lambda b=buffer: _page_unlock(context.device, os.getpid(), b.data_ptr()))
        report.fact(f"unlocking {size} MiB", buffer.numel() / seconds / 1e9, "GB/s")


def call_seconds(context: Context, work: Callable[[], object]) -> float:
    """Seconds until a call returns, without the asynchronous work that it starts."""
    import time

    context.synchronize()
    start = time.perf_counter()
    work()
    found = time.perf_counter() - start
    context.synchronize()
    return found


def host_copies(context: Context, report: Report) -> None:
    """GB/s of copies of 256 MiB (64 on a CPU) and of casts to bf16, as for the wire, with one and with PyTorch's threads."""
    count = (256 if context.is_large else 64) << 20
    source, target = torch.ones(count, dtype=torch.uint8), torch.zeros(count, dtype=torch.uint8)
    wide, narrow = torch.ones(count // 4), torch.zeros(count // 4, dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    for chosen in dict.fromkeys((1, threads)):
        torch.set_num_threads(chosen)
        copied, cast = median(context, lambda: target.copy_(source)), median(context, lambda: narrow.copy_(wide))
        report.fact(
            f"copy, {chosen} threads", count / copied / 1e9, "GB/s read", should="above the link's, or staging is the slower one"
        )
        report.fact(f"fp32 to bf16, {chosen} threads", count / cast / 1e9, "GB/s read")
    torch.set_num_threads(threads)


def product(context: Context, report: Report) -> None:
    """TFLOP/s of a square product: 8192 in bf16 on a GPU, 512 in fp32 elsewhere."""
    side = 8192 if context.is_large else 512
    dtype = torch.bfloat16 if context.is_large else torch.float32
    a, b = (torch.randn(side, side, device=context.device).to(dtype) for _ in range(2))
    seconds = median(context, lambda: a @ b)
    report.fact(
        f"product of {side} x {side}",
        2 * side**3 / seconds / 1e12,
        "TFLOP/s",
        should="H200: about 780" if context.is_large else "",
    )
