"""Faults: too little page-locked memory, no device memory in the middle of backward, a page-lock that the system refuses, a
token that is out of range. After each fault but the last, the next step must be right.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from l2l_compile.devices.device import Device, LaneQueue
from l2l_compile.ir import nodes
from l2l_compile.ir.segments import Segment
from l2l_compile.memory.pages import PinnedMemory

from .cases import Case, Context, Report
from .lanes import Around, Work, restore
from .out_of_range import DIFFERENCE, REFUSED
from .training import Compiled, device_options, one_order_of_sums, stand_in, warm_up
from .transformer import Decoder, Size, build, token_batch

ENDS_WITHIN = 30.0  # seconds for a process that meets a token out of range, its start included


prepare = warm_up


def cases(context: Context) -> list[Case]:
    one_order_of_sums()
    bound = lambda work: functools.partial(work, context)  # noqa: E731
    return [
        Case("a page-lock that fails, then a kernel", bound(page_lock), 20),
        Case("out of memory in the middle of backward", bound(out_of_memory), 30),
        Case("a token out of range", bound(out_of_range), 45),
        Case('pinned_memory="64MiB"', bound(little_pinned), 40),
    ]


def size_of(context: Context) -> Size:
    if context.is_large:  # layers of 50 MB
        return Size(layers=6, hidden=1024, intermediate=2816, heads=16, groups=16, vocabulary=4096, tokens=128)
    return Size(layers=3, hidden=64, intermediate=128, heads=4, groups=4, vocabulary=256, tokens=16)


def compiled_model(context: Context, device: Device | None = None, **options: Any) -> Compiled:
    given = {**device_options(context), "micro_batches": 4, **options}
    return Compiled(build(Decoder, size_of(context)), given, device)


def gradients(compiled: Compiled, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of one step, which begins without gradients."""
    compiled.model.zero_grad(set_to_none=True)
    compiled(**inputs).backward()
    return [p.grad.clone() for p in compiled.model.parameters()]


def worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative difference; NaN if any is."""
    each = [(f - e).norm() / e.norm().clamp_min(1e-30) for f, e in zip(found, expected, strict=True)]
    return torch.stack(each).max().item()


def little_pinned(context: Context, report: Report) -> None:
    """With 64 MiB (1 MiB on a CPU) of page-locked memory, the numbers equal a run without a limit."""
    bound, words = (64 << 20, "64MiB") if context.is_large else (1 << 20, "1MiB")
    inputs = token_batch(size_of(context), 8)
    expected = gradients(compiled_model(context, stand_in(context), precision="bf16"), inputs)
    torch._dynamo.reset()
    bounded = compiled_model(context, stand_in(context, pinned_memory=bound), precision="bf16", pinned_memory=words)
    for turn in (1, 2):
        found = worst(gradients(bounded, inputs), expected)
        report(f"largest difference of gradients, step {turn}", found, most=1e-6, should="0 but for sums whose order is open")
        report(f"page-locked over the bound, step {turn}", bounded.device.pinned.used / bound, most=1.0)


def out_of_memory(context: Context, report: Report) -> None:
    """The allocator refuses in the fourth `backward` node. The error reaches the user, and the next step is right."""
    compiled, inputs = compiled_model(context, stand_in(context)), token_batch(size_of(context), 8)
    expected = gradients(compiled, inputs)
    held = allocated(context, compiled)
    error = fails_in_backward(compiled, inputs)
    report.fact("error", error[:100], should="out of memory, as PyTorch says it")
    report("the error is another one", float("memory" not in error), most=0, should="0: it is one of memory")
    report("largest difference of gradients after it", worst(gradients(compiled, inputs), expected), most=1e-6)
    over = allocated(context, compiled) / max(held, 1)
    report("device memory held, over that before", over, most=1.01, should="at most 1: nothing is left behind")


def allocated(context: Context, compiled: Compiled) -> int:
    """Bytes of device memory in use once the device is idle; on the stand-in, bytes of values."""
    gc.collect()
    compiled.device.synchronize()
    context.synchronize()
    return torch.cuda.memory_allocated(context.device) if context.on_gpu else compiled.device.ledger.held


def fails_in_backward(compiled: Compiled, inputs: dict[str, torch.Tensor]) -> str:
    """Run a step in which compute asks for too much memory. Returns the error as text, since its frames hold tensors."""
    device = compiled.device
    lane = device.lanes["compute"] = Refusing(device.lanes["compute"], device.torch_device)
    device.begins = lane.begins
    try:
        compiled.model.zero_grad(set_to_none=True)
        compiled(**inputs).backward()
    except Exception as error:  # noqa: BLE001 - the error is the result
        return f"{type(error).__name__}: {error}"
    finally:
        del device.begins
        restore(device)
    raise AssertionError("the step did not fail")


class Refusing(Around):
    """A lane on which the allocator refuses in the fourth `backward` node of a program."""

    def __init__(self, lane: LaneQueue, device: torch.device):
        super().__init__(lane)
        self._device, self._backwards, self._done = device, 0, False

    def begins(self, node: fx.Node, segments: Sequence[Segment]) -> None:
        self._backwards += node.target is nodes.backward

    def run(self, work: Work) -> None:
        if self._backwards == 4 and not self._done:
            self._done = True
            self.lane.run(self._refuse)
        self.lane.run(work)

    def _refuse(self) -> None:
        torch.empty(1 << 50, dtype=torch.uint8, device=self._device)


def page_lock(context: Context, report: Report) -> None:
    """Page-locking memory twice raises an error, and the next kernel does not raise it again."""
    buffer = torch.zeros(1 << 20, dtype=torch.uint8)
    address = buffer.data_ptr()
    if context.on_gpu:
        from l2l_compile.devices.cuda import _page_lock, _page_unlock

        torch.ones(1, device=context.device)
        lock = lambda: _page_lock(context.device, address, buffer.numel())  # noqa: E731
        lock()
    else:
        _page_unlock = None

        def lock() -> None:
            raise RuntimeError("already locked")

    error = refused(lock)
    report("page-locking twice raises", float(error is None), most=0, should="0: it raises", note=str(error))
    report(
        "the next kernel raises", float(kernel_fails(context)), most=0, should="0: the error of the page-lock is not the kernel's"
    )
    if _page_unlock is not None:
        _page_unlock(context.device, os.getpid(), address)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _page_unlock(context.device, os.getpid(), address)
        report("unlocking what is not locked is silent", float(not said), most=0, should="0: it warns")
        report("the kernel after it raises", float(kernel_fails(context)), most=0, should="0")
    step_without_locks(context, report)


def refused(work) -> Exception | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the error is the result
        return error
    return None


def kernel_fails(context: Context) -> bool:
    try:
        value = (torch.ones(8, device=context.device) * 2).sum().item()
    except RuntimeError:
        return True
    return value != 16


def step_without_locks(context: Context, report: Report) -> None:
    """If page-locks are refused, the error names the option. When page-locks work again, the step is right."""
    compiled, inputs = compiled_model(context, stand_in(context), precision="bf16"), token_batch(size_of(context), 8)
    pinned: PinnedMemory = compiled.device.pinned
    lock, pinned._lock = pinned._lock, _refuse
    error = refused(lambda: gradients(compiled, inputs))
    pinned._lock = lock
    report(
        "a step without page-locks names the option",
        float("pinned_memory" not in str(error)),
        most=0,
        should="0",
        note=str(error)[:300],
    )
    found = gradients(compiled, inputs)
    torch._dynamo.reset()
    expected = gradients(compiled_model(context, stand_in(context), precision="bf16"), inputs)
    report("largest difference of gradients after it", worst(found, expected), most=1e-6)


def _refuse(address: int, size: int) -> None:
    raise RuntimeError("the system refuses")


def out_of_range(context: Context, report: Report) -> None:
    """Start a process that trains on tokens beyond the vocabulary.

    A step with a token that the host finds is refused, and the next step is right. With a token that the host cannot find, the
    process names the error and ends.
    """
    allowed = min(ENDS_WITHIN, max(context.left, 5.0))
    start = time.time()
    command = [sys.executable, "-m", "gpu_stages.out_of_range", str(context.device)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=allowed, env=os.environ)
    except subprocess.TimeoutExpired as late:
        verdict = "hang" if allowed == ENDS_WITHIN else "out of time"
        said = (late.stderr or b"").decode(errors="replace")[-300:]
        report.verdict(
            "seconds until the end",
            verdict,
            value=time.time() - start,
            should=f"at most {ENDS_WITHIN:g}",
            note=f"it was killed; {said}",
        )
        return
    refused_step(done.stdout, report)
    said = done.stderr.strip().splitlines() or [""]
    report("seconds until the end", time.time() - start, "s", most=ENDS_WITHIN)
    report.fact("exit status", done.returncode, should="1: an error, not a signal")
    report("it ends as if all were well", float(done.returncode == 0), most=0, should="0")
    report.fact("what it says last", said[-1][-160:], should="IndexError, or a device-side assert that names the operation")
    named = any("IndexError" in line or "device-side assert" in line or "out of range" in line for line in said)
    report("nothing says what is wrong", float(not named), most=0, should="0", note=" / ".join(said[-6:])[-500:])


def refused_step(printed: str, report: Report) -> None:
    """Report the lines that the process printed about the token that the host finds."""
    lines = printed.splitlines()
    refusal = next((line for line in lines if line.startswith(REFUSED)), "")
    difference = next((float(line.removeprefix(DIFFERENCE)) for line in lines if line.startswith(DIFFERENCE)), math.nan)
    report.fact("a step with a token that the host finds", refusal[-160:], should="IndexRangeError; on the host IndexError")
    report("the step is not refused", float(not refusal), most=0, should="0")
    report("loss of the next step, less that before", difference, most=1e-6, should="0: the process goes on")
