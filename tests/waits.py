"""The waits of the executor and of the host, found in the source, and the code without one of them."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import types
from collections.abc import Sequence
from dataclasses import dataclass, field

MODULES = (
    "runtime.executor", "runtime.weight_handlers", "runtime.overlapped_copies", "runtime.activation_copies", "runtime.stashes",
    "runtime.stored_stashes", "runtime.runner", "runtime.outputs", "runtime.segment_run", "host.server", "host.updates.overlapped",
    "host.updates.other_models", "host.updates.in_forward", "host.updates.in_backward", "host.updates.delayed",
    "host.updates.without_flush", "host.updates.interface", "host.updates.deferred_updates", "host.double_buffer",
)  # fmt: skip
WAITS = ("wait", "wait_on_host", "synchronize", "drain", "_drain", "settle")


@dataclass(frozen=True)
class Wait:
    """A statement that waits, the function that it is in, and its place there."""

    module: str
    function: str
    statement: str
    line: int = field(compare=False, hash=False)

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.statement}"

    @property
    def called(self) -> str:
        """The function or the method that waits."""
        return _called(ast.parse(self.statement, mode="eval").body)

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
        function = inspect.unwrap(function)  # a context manager
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


def waits(modules: Sequence[str] = MODULES, names: Sequence[str] = WAITS) -> list[Wait]:
    """Every statement of the modules that waits: that calls a function or a method of these names."""
    found = []
    for module in modules:
        tree = ast.parse(inspect.getsource(importlib.import_module(f"l2l_compile.{module}")))
        for function, inside in _functions(tree):
            for node in ast.walk(inside):
                call = node.value if isinstance(node, ast.Expr) else None
                if isinstance(call, ast.Call) and _called(call) in names:
                    found.append(Wait(module, function, ast.unparse(call), node.lineno))
    return found


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _functions(tree: ast.AST, prefix: str = ""):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


BY_NAME = {str(wait): wait for wait in waits()}
