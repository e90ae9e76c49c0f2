"""What a process gets from `import l2l_compile`."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import l2l_compile

MOST_SECONDS = 0.05
SCRIPT = """
import sys, time, torch
before, start = set(sys.modules), time.thread_time()
import l2l_compile
print(time.thread_time() - start, "torch._dynamo" in set(sys.modules) - before)
model = torch.compile(torch.nn.Linear(2, 2), backend="l2l", options={"block_compiler": "eager", "device": "cpu"})
model(torch.ones(3, 2)).sum().backward()
print(len(l2l_compile.programs(model)))
"""


def test_an_import_takes_no_time_beyond_that_of_torch():
    """Seconds of its thread: the machine may do other things. The backend needs no import, and finds its names later."""
    printed = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout.split()
    seconds, imports_dynamo, programs = printed
    assert float(seconds) < MOST_SECONDS and imports_dynamo == "False" and programs == "1"


def test_names_are_those_of_the_package():
    assert set(l2l_compile.__all__) == set(l2l_compile._MODULE_OF) <= set(dir(l2l_compile))
    for name in l2l_compile.__all__:
        assert getattr(l2l_compile, name).__name__ == name
    assert l2l_compile.session.Session and importlib.import_module("l2l_compile.session") is l2l_compile.session
    with pytest.raises(AttributeError, match="'l2l_compile' has no attribute 'explian'"):
        l2l_compile.explian  # noqa: B018
