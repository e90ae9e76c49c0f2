"""Training that is interrupted: by signal handlers at random moments or at every line, and by finalizers at every line.

Run in a process of its own: a handler that waits for ever ends it, with the stack of every thread.

    python tests/interruptions.py 2000      # so many signals in each update mode, in training and while models are compiled
"""

from __future__ import annotations

import copy
import dataclasses
import faulthandler
import io
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.devices.cpu import CPU
from l2l_compile.devices.registry import KINDS
from l2l_compile.runtime.kept_activations import Room
from l2l_compile.session import session_of
from l2l_compile.testing.strict_device import ThreadedDevice
from models import Stack

PACKAGE = str(Path(l2l_compile.__file__).parent)
LONGEST = 5.0  # seconds that a call may take that is refused; one that is not may compile, which takes longer on a busy machine
HANGS = 60.0  # seconds after which the process ends
UPDATES = {
    "at_step": {"update": "at_step"},
    "in_backward": {"update": "in_backward"},
    "in_forward": {"update": "in_forward", "max_grad_norm": 1.0},
    "delayed": {"update": "in_forward", "delay": 1},
    "bf16": {"update": "in_forward", "precision": "bf16"},
}


def on_threads() -> None:
    """Compiled models run on the device of the tests whose lanes are threads."""
    KINDS[CPU.name] = dataclasses.replace(CPU, open=lambda device, pinned: ThreadedDevice(1e-4, 0, pinned))


def batch(number: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(number))


class Training:
    """A model, its optimizer and a loop of one line a call."""

    def __init__(self, update: str):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model, self.other = Stack(3), batch(1000)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        options = {"micro_batches": 2, "block_compiler": "eager", "device": "cpu", "optimizer": self.optimizer, **UPDATES[update]}
        self.step = torch.compile(self.model, backend="l2l", options=options)

    def run(self, numbers) -> None:
        for number in numbers:
            self.step(batch(number)).pow(2).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        l2l_compile.synchronize(self.step)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.step(self.other)

    def state(self) -> list[torch.Tensor]:
        l2l_compile.synchronize(self.step)
        return [p.detach().clone() for p in self.model.parameters()]


class Handler:
    """What a handler may do, chosen at random. Counts what happened, and ends the process if a call takes too long."""

    def __init__(self, training: Training, seed: int):
        self.training, self.random = training, random.Random(seed)
        self.calls: Counter[str] = Counter()
        self.longest = self.longest_refused = 0.0
        self.unexpected: list[str] = []

        self.choices = (self._save, self._save_optimizer, self._synchronize, self._forward, self._figures)

    def __call__(self, *_) -> None:
        self.call(self.random.choice(self.choices))

    def call(self, chosen) -> None:
        began = time.monotonic()
        faulthandler.dump_traceback_later(HANGS, exit=True)
        try:
            chosen()
            self.calls["done"] += 1
        except L2LError as error:
            assert "docs/saving.md" in str(error), error
            self.calls["refused"] += 1
            self.longest_refused = max(self.longest_refused, time.monotonic() - began)
        except Exception as error:  # noqa: BLE001 - counted
            self.calls["other"] += 1
            self.unexpected.append(f"{chosen.__name__}: {type(error).__name__}: {error}")
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.longest = max(self.longest, time.monotonic() - began)

    def _save(self) -> None:
        torch.save(self.training.model.state_dict(), io.BytesIO())

    def _save_optimizer(self) -> None:
        torch.save(self.training.optimizer.state_dict(), io.BytesIO())

    def _synchronize(self) -> None:
        l2l_compile.synchronize(self.training.step)

    def _forward(self) -> None:
        self.training.evaluate()

    def _figures(self) -> None:
        l2l_compile.stats(self.training.step)

    def report(self) -> str:
        assert self.longest_refused < LONGEST, self.longest_refused
        others = Counter(text[:100] for text in self.unexpected).most_common(3)
        return f"{sum(self.calls.values())} calls: {dict(sorted(self.calls.items()))}, longest {self.longest:.2f} s {others}"


def of_package(frame) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


def reference(update: str, steps: int) -> list[torch.Tensor]:
    undisturbed = Training(update)
    undisturbed.run(range(steps))
    return undisturbed.state()


def check_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, found, expected)), "an interrupted run has other numbers"


# ---- a handler at every line ---------------------------------------------------------------------------------------------


def at_every_line(update: str, steps: int = 5, every_call: bool = False) -> str:
    """Call a handler once at each line of the package that the caller's thread reaches, while it compiles and while it trains.

    With `every_call`, it does all that a handler may do, one after the other.
    """
    training = Training(update)
    handler, seen = Handler(training, 0), set()

    def trace(frame, event, argument):
        if event == "call":
            return trace if of_package(frame) else None
        place = frame.f_code, frame.f_lineno
        if event == "line" and place not in seen:
            seen.add(place)
            for chosen in handler.choices if every_call else [handler.random.choice(handler.choices)]:
                handler.call(chosen)  # without tracing, as Python calls a trace function
        return trace

    sys.settrace(trace)
    try:
        training.run(range(steps))
    finally:
        sys.settrace(None)
    check_same(training.state(), reference(update, steps))
    return handler.report()


# ---- an error at every line ----------------------------------------------------------------------------------------------


class Raised(Exception):
    """The error of a handler."""


def errors_at_lines(update: str, share: float, kinds=(Raised, KeyboardInterrupt), seed: int = 0, within: str = "") -> str:
    """Raise an error at a share of the lines that a step reaches, one a step. Behind it, the step is made again from a checkpoint.

    The lines are those of files with `within` in their paths.
    """
    training, generator = Training(update), random.Random(seed)
    training.run(range(2))
    lines = sorted(_lines_of_a_step(training), key=lambda place: (place[0].co_filename, place[1]))
    expected = training.state()
    saved = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    training.run([2])
    expected = training.state()
    count = 0
    for place in lines:
        if generator.random() > share or within not in place[0].co_filename:
            continue
        count += 1
        faulthandler.dump_traceback_later(HANGS, exit=True)
        _step_with_an_error(training, place, generator.choice(kinds))
        _load(training, saved)
        training.run([2])
        faulthandler.cancel_dump_traceback_later()
        for found, value in zip(training.state(), expected, strict=True):
            assert torch.equal(found, value), f"other numbers behind an error at {place[0].co_filename}:{place[1]}"
        _load(training, saved)
    return f"{count} errors"


def _load(training: Training, saved) -> None:
    model, optimizer = copy.deepcopy(saved)
    training.optimizer.load_state_dict(optimizer)
    training.model.load_state_dict(model)
    for parameter in training.model.parameters():
        parameter.grad = None
    training.optimizer.zero_grad()


def _lines_of_a_step(training: Training) -> set:
    seen = set()

    def trace(frame, event, argument):
        if event == "call":
            return trace if of_package(frame) else None
        if event == "line":
            seen.add((frame.f_code, frame.f_lineno))
        return trace

    sys.settrace(trace)
    training.run([2])
    sys.settrace(None)
    return seen


def _step_with_an_error(training: Training, place: tuple, kind: type[BaseException]) -> None:
    def trace(frame, event, argument):
        if event == "call":
            return trace if frame.f_code is place[0] else None
        if event == "line" and frame.f_lineno == place[1]:
            sys.settrace(None)
            raise kind
        return trace

    sys.settrace(trace)
    try:
        training.run([2])
    except kind:
        pass
    finally:
        sys.settrace(None)


# ---- finalizers at every line --------------------------------------------------------------------------------------------


def finalizers_at_every_line(update: str, steps: int = 4) -> str:
    """Let go of buffers, stashes and pending backwards at each line of the package, on whichever thread it runs."""
    seen, stock, armed = set(), [], threading.Event()

    def trace(frame, event, argument):
        if event == "call":
            return trace if of_package(frame) else None
        place = frame.f_code, frame.f_lineno
        if event == "line" and armed.is_set() and place not in seen:
            seen.add(place)
            if stock:
                stock.pop()
        return trace

    on_threads()
    threading.settrace(trace)
    training = Training(update)
    training.run([0])
    stock += _finalized(session_of(training.step), 1500)
    count = len(stock)
    faulthandler.dump_traceback_later(HANGS, exit=True)
    armed.set()
    sys.settrace(trace)
    try:
        training.run(range(1, steps))
    finally:
        sys.settrace(None)
        armed.clear()
    faulthandler.cancel_dump_traceback_later()
    gone = count - len(stock)
    stock.clear()
    check_same(training.state(), reference(update, steps))
    session = session_of(training.step)
    for pool in (session.device._pool, session.server._memory._pool):
        pool._take_back()
        assert not any(pool._in_use.values()), pool._in_use
    training.run([0])
    assert session.device.ledger.held == 0, session.device.ledger.held
    return f"{gone} finalizers"


def _finalized(session, count: int) -> list:
    """Objects whose finalizers touch what the lanes use: three in one list, so that they go at once."""
    from l2l_compile.host.updates.gradient_ledger import PendingBackward
    from l2l_compile.runtime.runtime_value import RuntimeValue
    from l2l_compile.runtime.stashes import Stashes

    found: list = []
    ledger = getattr(session.server.updates, "ledger", None)
    for number in range(count):
        stashed = RuntimeValue([torch.zeros(3)])
        stashed.lane = "compute"
        session.device.hold(stashed.tensors)
        together = [
            session.device._pool.empty(torch.Size([64 + number % 7]), torch.uint8, "a test"),
            session.server._memory._pool.empty(torch.Size([64]), torch.uint8, "a test"),
            Stashes(session.device, [stashed], Room()),
        ]
        if ledger is not None:
            together.append(PendingBackward(ledger, ()))
        found.append(together)
    return found


# ---- signals at random ---------------------------------------------------------------------------------------------------


def at_random(update: str, count: int, seed: int = 0, compiles: bool = True) -> str:
    """Send signals at random moments until the handler has run `count` times. Every few steps, the model is compiled again."""
    training = Training(update)
    training.run([0])
    training.evaluate()
    handler, moments = Handler(training, seed), random.Random(seed)

    def handle(*_) -> None:
        handler()
        if sum(handler.calls.values()) < count:
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-4, 2e-2))

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    number = 1
    while sum(handler.calls.values()) < count:
        if compiles and number % 20 == 0:
            torch._dynamo.reset()
        training.run([number])
        number += 1
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    check_same(training.state(), reference(update, number))
    return f"{number} steps, {handler.report()}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for threads in (False, True):
        if threads:
            on_threads()
        for chosen in UPDATES:
            print("lanes are threads," if threads else "lanes are inline,", chosen, at_random(chosen, many), flush=True)
