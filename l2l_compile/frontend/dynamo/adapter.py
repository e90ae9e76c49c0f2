"""The adapter to Dynamo's translator and to what `torch.compile` makes. docs/private_names.md lists every private name, and why.

A backend does not know which `torch.compile` call it serves. `current_owner` and `owner_of` find the backend object that
`torch.compile` made for that call, so that programs can be looked up by the compiled model.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols


def translator_at_work() -> Any:
    """Dynamo's translator of the frame that is being compiled; None if the backend was called by hand."""
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:
        return None


def current_owner() -> Any:
    """The backend object that `torch.compile` made for the call being compiled now; None outside of a compilation."""
    tx = translator_at_work()
    return innermost_backend(tx.output.compiler_fn) if tx is not None else None


def modules_in_frame() -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """The modules that the frame being compiled can reach: by a local name or a decorator's `*args`, and by a global name."""
    tx = translator_at_work()
    if tx is None:
        return [], []
    values = list(tx.output.local_scope.values())
    packed = [inner for value in values if isinstance(value, tuple) for inner in value]
    local = [v for v in (*values, *packed) if isinstance(v, torch.nn.Module)]
    return local, [v for v in tx.output.global_scope.values() if isinstance(v, torch.nn.Module)]


def owner_of(compiled: Any) -> Any:
    """The backend object behind a compiled module or function; None if `torch.compile` did not make it."""
    compiled = compiled_in_place(compiled) or compiled
    if isinstance(compiled, torch._dynamo.OptimizedModule):
        callback: Any = compiled.dynamo_ctx.callback
        return innermost_backend(callback)
    function = getattr(compiled, "__func__", compiled)
    if not callable(function) or not hasattr(function, "_torchdynamo_orig_callable"):
        return None
    context = inspect.getclosurevars(function).nonlocals.get("self")
    return innermost_backend(context.callback) if context is not None else None


def compiled_in_place(module: Any) -> Any:
    """The function that runs in the place of a module after `module.compile(...)`; None for any other object."""
    return getattr(module, "_compiled_call_impl", None) if isinstance(module, torch.nn.Module) else None


def uncompiled(model: Any) -> Any:
    """The module or function behind the result of `torch.compile`; an object that is not compiled is returned unchanged."""
    plain = getattr(model, "_orig_mod", model)
    plain = plain._call_impl if compiled_in_place(plain) is not None else plain
    return getattr(plain, "_torchdynamo_orig_callable", plain)


def uncompiled_module(compiled: Any) -> torch.nn.Module | None:
    """The module behind a compiled module, also one that was compiled in place; None for a function."""
    plain = getattr(compiled, "_orig_mod", compiled)
    return plain if isinstance(plain, torch.nn.Module) else None


def options_of(compiled: Any) -> Any:
    """The `options=` of the `torch.compile` call behind a compiled module or function; None if there are none."""
    return getattr(owner_of(compiled), "kwargs", {}).get("options")


def source_name(placeholder: torch.fx.Node) -> str:
    """Dynamo's expression for a graph input, such as `L['self']._modules['head']._parameters['weight']`."""
    if "source_name" in placeholder.meta:
        return placeholder.meta["source_name"]
    source = getattr(placeholder, "_dynamo_source", None)
    return source.name if source is not None else placeholder.name


def value_of(placeholder: torch.fx.Node) -> Any:
    """The object that a graph input is read from in the frame that is being compiled; None if it cannot be found."""
    tx, source = translator_at_work(), getattr(placeholder, "_dynamo_source", None)
    if tx is None or source is None:
        return None
    try:
        if hasattr(tx.output, "resolve_source_value"):
            return tx.output.resolve_source_value(source)
        return eval(source.name, {"L": tx.output.local_scope, "G": tx.output.global_scope})
    except Exception:  # noqa: BLE001 - sources that name helpers of guards
        return None


def float_of(placeholder: torch.fx.Node) -> torch.SymFloat | None:
    """The number that a graph input stands for, if it is a Python float that changed between calls; None for any other input.

    Dynamo passes such a number in a float64 tensor without dimensions, and reads it by `item()`.
    """
    numbers = [user.meta.get("example_value") for user in placeholder.users if user.target == "item"]
    symbolic = [n for n in numbers if isinstance(n, torch.SymFloat) and not free_unbacked_symbols(n.node.expr)]
    return symbolic[0] if symbolic and len(symbolic) == len(placeholder.users) else None


def name_the_owner_self(graph: torch.fx.Graph) -> None:
    """Give modules in a method that a decorator wraps in `wrapper(*args)` the names that they have without the decorator.

    In such a frame, Dynamo names the owner of the method `L['args'][0]`. If several arguments are modules, the names stay.
    """
    tx = translator_at_work()
    prefix = _owner_among_arguments(tx.output.root_tx) if tx is not None else None
    if prefix is None:
        return
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        if any(name.startswith(prefix) for name, _ in stack.values()):
            node.meta["nn_module_stack"] = {key: (_with_self(name, prefix), kind) for key, (name, kind) in stack.items()}
        if node.op == "placeholder":
            node.meta["source_name"] = _with_self(source_name(node), prefix)


def _owner_among_arguments(root: Any) -> str | None:
    """Dynamo's expression for the first argument of a frame with `*args` alone, if it is the only module; None otherwise."""
    code = root.f_code
    if code.co_argcount or not code.co_flags & inspect.CO_VARARGS:
        return None
    name = code.co_varnames[code.co_kwonlyargcount]
    given = root.f_locals.get(name, ())
    modules = [isinstance(value, torch.nn.Module) for value in given]
    return f"L['{name}'][0]" if modules[:1] == [True] and sum(modules) == 1 else None


def _with_self(name: str, prefix: str) -> str:
    return "L['self']" + name.removeprefix(prefix) if name.startswith(prefix) else name


def is_module_attribute(placeholder: torch.fx.Node) -> bool:
    """Whether a graph input is read from a module: a parameter, a buffer or a plain tensor attribute."""
    source = getattr(placeholder, "_dynamo_source", None)
    return source is not None and (
        source.guard_source.is_unspecialized_nn_module() or source.guard_source.is_specialized_nn_module()
    )
