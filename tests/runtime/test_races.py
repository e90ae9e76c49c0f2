"""No races, by proof: each wait of the executor and of the host, deleted, is refused by the watch, and shows on slow threads.

The waits are found in the source: one that no case here names fails a test. The watch runs on the host, where lanes do their
work at once and every number is right.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import inspect
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile import RaceError
from l2l_compile import session as sessions
from l2l_compile.devices.cpu import CpuDevice
from l2l_compile.devices.threaded import ThreadedDevice
from l2l_compile.devices.watched import watch
from models import Stack, compiled, rows

MODULES = (
    "runtime.executor", "runtime.streaming", "runtime.stashes", "runtime.runner", "runtime.segment_run",
    "host.server", "host.optimizer.updates", "host.optimizer.in_forward", "host.optimizer.in_backward",
)  # fmt: skip
WAITS = ("wait", "wait_on_host", "synchronize", "drain", "_drain")


# ---- the waits, and the code without one of them -----------------------------------------------------------------------


@dataclass(frozen=True)
class Wait:
    """A statement that waits, the function that it is in, and its place there."""

    module: str
    function: str
    statement: str
    line: int = field(compare=False, hash=False)

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.statement}"

    @contextlib.contextmanager
    def deleted(self):
        """The function without the statement."""
        module = importlib.import_module(f"l2l_compile.{self.module}")
        tree = ast.parse(inspect.getsource(module))
        for node in ast.walk(tree):
            for name, statements in ast.iter_fields(node):
                if name in ("body", "orelse") and isinstance(statements, list):
                    statements[:] = [self._never(s) if getattr(s, "lineno", 0) == self.line else s for s in statements]
        function = module
        for part in self.function.split("."):
            function = getattr(function, part)
        before = function.__code__
        function.__code__ = _code_of(compile(tree, module.__file__, "exec"), self.function)
        try:
            yield
        finally:
            function.__code__ = before

    @staticmethod
    def _never(statement: ast.stmt) -> ast.stmt:
        if not isinstance(statement, ast.Expr):
            return statement
        never = ast.If(ast.Constant(False), [statement], [])
        return ast.fix_missing_locations(ast.copy_location(never, statement))


def _code_of(code: types.CodeType, name: str) -> types.CodeType:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    found = [c for c in inner if c.co_qualname == name]
    return found[0] if found else next(filter(None, (_code_of(c, name) for c in inner if name.startswith(f"{c.co_qualname}."))))


def waits() -> list[Wait]:
    """Every statement of the modules that waits."""
    found = []
    for name in MODULES:
        tree = ast.parse(inspect.getsource(importlib.import_module(f"l2l_compile.{name}")))
        for function, inside in _functions(tree):
            for node in ast.walk(inside):
                call = node.value if isinstance(node, ast.Expr) else None
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in WAITS:
                    found.append(Wait(name, function, ast.unparse(call), node.lineno))
    return found


def _functions(tree: ast.AST, prefix: str = ""):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


# ---- what is run -------------------------------------------------------------------------------------------------------


class Detached(nn.Module):
    """The head passes no gradient on: the layers' weights are fetched in backward, and nothing reads them."""

    def __init__(self):
        super().__init__()
        self.stack, self.skip = Stack(3), nn.Linear(5, 3)

    def forward(self, x):
        return self.stack(x).detach() * self.skip(x) + self.stack.head.bias


class WithBuffer(nn.Module):
    """Layers, and a buffer that each step writes into and reads."""

    def __init__(self):
        super().__init__()
        self.stack = Stack(2)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count.add_(1)
        return self.stack(x) * self.count


def one_step(step, optimizer):
    for number in range(2):
        step(batch(number)).pow(2).sum().backward()


def two_forwards(step, optimizer):
    """The stashes of the first forwards go to the host until their backward."""
    outputs = [step(batch(number)) for number in range(4)]
    for output in outputs:
        output.pow(2).sum().backward()


def training(step, optimizer):
    for number in range(3):
        step(batch(number)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def a_failed_step(step, optimizer):
    """A gradient that came before the failure belongs to no step."""
    output = step(batch(0))
    with failing("host.server", "ParameterServer.end_backward"), contextlib.suppress(OSError):
        output.pow(2).sum().backward()
    training(step, optimizer)


def reading(step, optimizer):
    """Parameters are read while updates are under way."""
    step(batch(0)).pow(2).sum().backward()
    optimizer.step()
    state = step.state_dict()
    read.extend(tensor.clone() for tensor in state.values())


def the_norm(step, optimizer):
    step(batch(0)).pow(2).sum().backward()
    optimizer.step()
    read.append(torch.tensor(l2l_compile.stats(step).gradient_norm))


def an_output_is_held(step, optimizer):
    held = step(batch(1))
    step(batch(0)).pow(2).sum().backward()
    optimizer.step()
    read.extend(p.detach().clone() for p in step.parameters())
    del held


read: list[torch.Tensor] = []  # what a run of a case has read on its way


@contextlib.contextmanager
def failing(module: str, name: str):
    """A method fails as if the disk did."""
    owner, method = name.split(".")

    def fails(*_):
        raise OSError("on purpose")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(importlib.import_module(f"l2l_compile.{module}"), owner), method, fails)
        yield


def batch(number: int) -> torch.Tensor:
    return rows(6, generator=torch.Generator().manual_seed(number))
