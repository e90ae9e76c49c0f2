"""The classes of watched parameters, when a signal handler asks for the same in the middle of a change."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from l2l_compile.host import watched_parameters
from l2l_compile.host.watched_parameters import ParameterWatch

CHANGES = ("begin", "end", "_watch")


class Watcher:
    """Ends its watch as PyTorch is about to read a parameter."""

    def __init__(self):
        self.parameters = [nn.Parameter(None) for _ in range(3)]
        self.watch = ParameterWatch(self)

    def before_reading(self):
        self.watch.end()

    def is_at_work(self):
        return False

    def watch_again(self):
        self.begin()

    def read_gradient(self, parameter, own):
        return own

    def begin(self):
        self.watch.begin(gradients=self.parameters[1:], entries=self.parameters[:2])

    def change(self):
        self.begin()
        self.begin()
        self.watch.end()
        self.begin()


def interrupted(change, handlers, at: int) -> bool:
    """Call one handler at bytecode number `at` of the functions of a watch, one at the next. False if there are not as many."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename != watched_parameters.__file__ or frame.f_code.co_name not in CHANGES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if at < count <= at + len(handlers):
                handlers[count - at - 1]()
        return trace

    sys.settrace(trace)
    try:
        change()
    finally:
        sys.settrace(None)
    return count >= at + len(handlers)


@pytest.mark.parametrize("handlers", ["begin", "end", "begin end", "end begin", "begin begin", "end end"])
def test_an_interrupted_watch_forgets_no_parameter(handlers):
    """What has a class of a watch is ended by the watch, and what it should watch, it watches."""
    at, found = 0, True
    while found:
        watcher = Watcher()
        calls = {"begin": watcher.begin, "end": watcher.watch.end}
        found = interrupted(watcher.change, [calls[name] for name in handlers.split()], at)
        entries, both, gradient = map(type, watcher.parameters)
        if found and handlers.endswith("begin"):
            assert entries is both and nn.Parameter not in (entries, both, gradient), at
        watcher.watch.end()
        assert {type(p) for p in watcher.parameters} == {nn.Parameter}, at
        assert not watcher.watch.is_on
        at += 1
    assert at > 100
