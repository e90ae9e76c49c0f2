"""Tests that lanes wait for each other wherever they must. One lane at a time is slowed down, and freed memory is filled with
NaN. The numbers must be bit-equal to a run in which nothing overlaps.

Attention runs in PyTorch's plain kernels, whose sums have a fixed order, so that only a race can change a bit.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from l2l_compile.devices.device import Device
from l2l_compile.lanes import OF_DEVICE

from .cases import Case, Context, Report
from .lanes import PoisoningCuda, one_after_the_other, pause, restore, slow_down
from .training import Compiled, device_options, one_order_of_sums, stand_in, warm_up
from .transformer import Encoder, Size, build, token_batch

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32, stash=host, prefetch=1": {"stash": "host", "prefetch": 1},
    "bf16, in_backward, prefetch=2": {"precision": "bf16", "update": "in_backward", "prefetch": 2},
    "fp32, stash=device, prefetch=0, pinned 1 MiB": {"stash": "device", "prefetch": 0, "pinned_memory": "1MiB"},
    "fp16, in_forward, prefetch=1": {"precision": "fp16", "update": "in_forward", "prefetch": 1},
}


class WithLogits(Encoder):
    """Returns logits as well as the loss, so that outputs are copied out and gradients arrive within the inner loop."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


prepare = warm_up


def cases(context: Context) -> list[Case]:
    one_order_of_sums()
    bound = lambda work, *more: functools.partial(work, context, *more)  # noqa: E731
    found = [Case(name, bound(races, options), 40) for name, options in SETTINGS.items()]
    found = [found[0], Case("deterministic mode", bound(deterministic), 40), *found[1:]]
    return found if context.on_gpu else found[:3]


def size_of(context: Context) -> Size:
    if context.is_large:
        return Size(layers=6, hidden=512, intermediate=2048, heads=8, groups=8, vocabulary=2000, tokens=64)
    return Size(layers=3, hidden=32, intermediate=64, heads=2, groups=2, vocabulary=64, tokens=8)


class Subject:
    """A compiled model whose weights are restored before each run, so that every run takes the same steps."""

    def __init__(self, context: Context, options: dict[str, Any]):
        size = size_of(context)
        self.model, self.inputs = build(WithLogits, size), token_batch(size, 14 if context.is_large else 6)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)  # no state: only weights have to be restored
        pinned = 1 << 20 if "pinned_memory" in options else None
        self.keeps_gradients = options.get("update") != "in_backward"
        self.device: Device = PoisoningCuda(context.device, pinned) if context.on_gpu else stand_in(context, pinned_memory=pinned)
        if "update" in options:
            options = {**options, "optimizer": self.optimizer}
        self.compiled = Compiled(self.model, {**device_options(context), "micro_batches": 3, **options}, self.device)
        self.before = [p.detach().clone() for p in self.model.parameters()]

    def run(self) -> list[torch.Tensor]:
        """Take two steps from the initial weights. Returns losses, logits, gradients, and the parameters after the steps."""
        self.compiled.synchronize()
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.before, strict=True):
                parameter.copy_(value)
        found = []
        for _ in range(2):
            loss, logits = self.compiled(**self.inputs)
            (loss + logits.square().mean()).backward()
            found += [loss.detach(), logits.detach().clone()]
            if self.keeps_gradients:
                found += [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.compiled.synchronize()
        return found + [p.detach().clone() for p in self.model.parameters()]


def races(context: Context, options: dict[str, Any], report: Report) -> None:
    """Test one setting: with each lane slowed down in turn, and at full speed."""
    subject = Subject(context, options)
    for _ in range(2):  # captures, lowers, allocates page-locked memory, and finds a loss scale without overflow
        subject.run()
    one_after_the_other(subject.device)
    expected, again = subject.run(), subject.run()
    restore(subject.device)
    moved = sum(not torch.equal(p, b) for p, b in zip(expected[-len(subject.before) :], subject.before, strict=True))
    report("parameters that moved", moved, least=len(subject.before) // 2, should="most: the steps that are compared were made")
    tell(report, "one after the other, twice", expected, again, "else kernels are at fault, not lanes")
    for name in (*OF_DEVICE, None):
        if name is not None:
            slow_down(subject.device, name)
        tell(report, f"{name} slowed down" if name else "at full speed", subject.run(), expected, "another number is a race")
        restore(subject.device)


def tell(report: Report, name: str, found: list[torch.Tensor], expected: list[torch.Tensor], why: str) -> None:
    differ = [i for i, (f, e) in enumerate(zip(found, expected, strict=True)) if not torch.equal(f, e)]
    bad = sum(not bool(f.isfinite().all()) for f in found)
    note = f"the first is number {differ[:1]}; {bad} are not finite"
    report(f"{name}: tensors that differ", len(differ), most=0, should=f"0 of {len(found)}; {why}", note=note)


def deterministic(context: Context, report: Report) -> None:
    """`torch.use_deterministic_algorithms(True)` fills new memory: new slabs on the compute lane, which is delayed here."""
    torch.use_deterministic_algorithms(True)
    try:
        reference = Subject(context, {})
        one_after_the_other(reference.device)
        reference.run()
        expected = reference.run()
        torch._dynamo.reset()
        subject = Subject(context, {})
        subject.device.lanes["compute"].run(lambda: pause(subject.device, 50))
        tell(report, "deterministic mode, new slabs", subject.run(), expected, "another number is a race")
        tell(report, "deterministic mode, again", subject.run(), expected, "another number is a race")
    finally:
        torch.use_deterministic_algorithms(False)
