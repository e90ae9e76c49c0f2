"""Stores ATen graphs of blocks as entries of `disk`: nodes by name, only PyTorch's own operators, sizes as expressions."""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy import functions as sympy_functions

from l2l_compile.devices.host import is_host
from l2l_compile.errors import ReentryError
from l2l_compile.ir.values import Bindings, Dim, dim_of, evaluate
from l2l_compile.lowering.code_cache import Traced
from l2l_compile.lowering.faster import trace_cache
from l2l_compile.lowering.faster.fast_make_fx import TraceMode
from l2l_compile.lowering.faster.trace_cache import Untold
from l2l_compile.lowering.randomness import FILLS, Draw
from l2l_compile.lowering.sizes import Sizes

_log = logging.getLogger(__name__)
_LARGEST = 1024  # elements of a constant
_NUMBERS = {
    f.__name__: f
    for f in (torch.sym_float, torch.sym_int, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_ite, torch.sym_sqrt)
}
_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "neg",
    "pow",
    "getitem",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and_",
    "or_",
)
_EXPRESSIONS = {
    **{c.__name__: c for c in (
        sympy.Add, sympy.Mul, sympy.Pow, sympy.Max, sympy.Min, sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.And, sympy.Or,
        sympy.Not,
    )},
    **{name: getattr(sympy_functions, name) for name in (
        "FloorDiv", "CleanDiv", "CeilToInt", "CeilDiv", "ModularIndexing", "Mod", "PythonMod", "Max", "Min", "IntTrueDiv", "FloatTrueDiv",
        "FloorToInt", "ToFloat", "Identity",
    ) if hasattr(sympy_functions, name)},
}  # fmt: skip


def save(name: str, traced: Traced | None, sizes: Sizes) -> None:
    """Keep a trace under a digest, for all sizes that meet the same conditions. A trace without a form on disk is not kept."""
    try:
        trace_cache.write(name, _encoded(traced, sizes))
    except Untold as reason:
        _log.debug("a trace is not kept on disk: %s", reason)


def load(name: str, sizes: Sizes) -> tuple[bool, Traced | None]:
    """Find a trace that is valid for these sizes. Returns whether there is one, and the trace.

    The conditions that PyTorch recorded when the trace was made are recorded again, in `sizes`.
    """
    for entry, drop in trace_cache.read(name):
        try:
            if sizes.decide([_from_expression(c, sizes.names) for c in entry["conditions"]]):
                return True, _decoded(entry, sizes)
        except ReentryError:
            raise
        except Exception as error:  # noqa: BLE001 - with any error, the entry is unusable: it is made again
            drop(f"{type(error).__name__}: {error}")
    return False, None


def _encoded(traced: Traced | None, sizes: Sizes) -> dict:
    symbols = {symbol: index for index, symbol in enumerate(sizes.names)}
    conditions = [_expression(c, symbols) for c in sizes.guards().conditions]
    if traced is None:
        return {"conditions": conditions, "graph": None}
    return {
        "conditions": conditions,
        "graph": _graph(traced.graph, symbols),
        "draws": [
            [
                [_expression(d, symbols) for d in draw.shape],
                _plain(draw.dtype),
                str(draw.device),
                draw.fill,
                list(draw.arguments),
                draw.number,
            ]
            for draw in traced.draws
        ],
        "seeded": traced.seeded,
        "present": list(traced.present),
        "dtypes": [_plain(dtype) for dtype in traced.dtypes],
        "taken": [[_expression(size, symbols), first, last] for size, first, last in traced.taken],
    }


def _decoded(entry: dict, sizes: Sizes) -> Traced | None:
    if entry["graph"] is None:
        return None
    dim = functools.partial(_from_expression, symbols=sizes.names)
    draws = tuple(
        Draw(tuple(map(dim, shape)), _from_plain(dtype), torch.device(device), _of(FILLS, fill), tuple(arguments), number)
        for shape, dtype, device, fill, arguments, number in entry["draws"]
    )
    taken = tuple((dim(size), first, last) for size, first, last in entry["taken"])
    graph = _from_graph(entry["graph"], sizes)
    dtypes = tuple(map(_from_plain, entry["dtypes"]))
    return Traced(graph, draws, entry["seeded"], tuple(entry["present"]), dtypes, taken)


def _graph(module: fx.GraphModule, symbols: dict[sympy.Symbol, int]) -> list:
    number: dict[fx.Node, int] = {}
    nodes = []
    for node in module.graph.nodes:
        number[node] = len(number)
        if node.op == "placeholder":
            nodes.append(["placeholder", node.name, node.target, _operand(node.meta["val"], symbols)])
        elif node.op == "call_function":
            nodes.append(["call", node.name, _target(node.target), _argument(node.args, number), _argument(node.kwargs, number)])
        elif node.op == "get_attr":
            nodes.append(["constant", node.name, node.target, _constant(getattr(module, node.target, None))])
        elif node.op == "output":
            nodes.append(["output", node.name, "output", _argument(node.args, number)])
        else:
            raise Untold(f"a {node.op} in a graph")
    return nodes


def _from_graph(nodes: list, sizes: Sizes) -> fx.GraphModule:
    graph = fx.Graph()
    made: list[fx.Node] = []
    constants: dict[str, torch.Tensor] = {}
    fake = TraceMode(sizes.environment)
    numbers = dict(zip(sizes.names, sizes.numbers, strict=True))
    for op, name, target, *rest in nodes:
        if op == "placeholder":
            node = graph.create_node("placeholder", _identifier(target), name=name)
            with fake:
                node.meta["val"] = _from_operand(rest[0], sizes, numbers)
        elif op == "constant":
            constants[_identifier(target)] = _from_constant(rest[0])
            node = graph.create_node("get_attr", target, name=name)
        elif op == "call":
            node = graph.create_node(
                "call_function", _from_target(target), _from_argument(rest[0], made), _from_argument(rest[1], made), name=name
            )
        else:
            node = graph.create_node("output", "output", _from_argument(rest[0], made), name=name)
        if node.name != name:
            raise ValueError(f"the name {name} is taken")
        made.append(node)
    return fx.GraphModule(constants, graph)


def _constant(value: Any) -> list:
    """A small constant tensor of a trace, as shape, dtype and content. Raises `Untold` for any other value."""
    if type(value) is not torch.Tensor or not is_host(value.device) or value.numel() > _LARGEST or value.requires_grad:
        raise Untold("a large constant in a graph")
    content = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist() if value.numel() else []
    return [list(value.shape), _plain(value.dtype), bytes(content).hex()]


def _from_constant(kept: list) -> torch.Tensor:
    shape, dtype, content = kept
    return torch.tensor(list(bytes.fromhex(content)), dtype=torch.uint8).view(_from_plain(dtype)).reshape(shape)


def _operand(value: Any, symbols: dict[sympy.Symbol, int]) -> list:
    if isinstance(value, torch.SymInt):
        return ["size", _expression(dim_of(value), symbols)]
    if isinstance(value, torch.SymFloat):
        return ["float", _expression(value.node.expr, symbols)]
    if not isinstance(value, torch.Tensor) or not value.is_contiguous() or value.requires_grad:
        raise Untold(f"the operand {value}")
    return ["tensor", [_expression(dim_of(d), symbols) for d in value.shape], _plain(value.dtype), str(value.device)]


def _from_operand(kept: list, sizes: Sizes, numbers: Bindings) -> Any:
    if kept[0] in ("size", "float"):
        return evaluate(_from_expression(kept[1], sizes.names), numbers)
    shape = [evaluate(_from_expression(d, sizes.names), numbers) for d in kept[1]]
    return torch.empty(shape, dtype=_from_plain(kept[2]), device=kept[3])


def _target(target: Callable) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return trace_cache.target_name(target)
    name = getattr(target, "__name__", "")
    if _NUMBERS.get(name) is target or name in _OPERATORS and getattr(operator, name) is target:
        return name
    raise Untold(f"the function {target} in a graph")


def _from_target(name: str) -> Callable:
    if name in _NUMBERS:
        return _NUMBERS[name]
    if name in _OPERATORS:
        return getattr(operator, name)
    library, operation, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, _of(trace_cache.OPERATORS, library)), operation), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"{name} is no operator")
    return found


def _argument(value: Any, number: dict[fx.Node, int]) -> Any:
    """An argument as JSON: numbers, strings and None stay as they are, any other value becomes a dictionary of one entry."""
    if isinstance(value, fx.Node):
        return {"node": number[value]}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_argument(v, number) for v in value]}
    if isinstance(value, dict):
        return {"dict": {key: _argument(v, number) for key, v in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_argument(v, number) for v in (value.start, value.stop, value.step)]}
    return _plain(value)


def _from_argument(kept: Any, made: Sequence[fx.Node]) -> Any:
    if not isinstance(kept, dict):
        return kept
    [(kind, value)] = kept.items()
    if kind == "node":
        return made[value]
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](_from_argument(v, made) for v in value)
    if kind == "dict":
        return {_identifier(key): _from_argument(v, made) for key, v in value.items()}
    if kind == "slice":
        return slice(*(_from_argument(v, made) for v in value))
    return _from_plain(kept)


_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is complex:
        return {"complex": str(value)}
    if type(value) is torch.device:
        return {"device": str(value)}
    for name, kind in _NAMED.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    raise Untold(f"a {type(value).__name__} in a graph")


def _from_plain(kept: Any) -> Any:
    if not isinstance(kept, dict):
        return kept
    [(kind, value)] = kept.items()
    if kind in _NAMED:
        found = getattr(torch, value)
        if not isinstance(found, _NAMED[kind]):
            raise ValueError(f"{value} is no {kind}")
        return found
    return {"float": float, "complex": complex, "device": torch.device}[kind](value)


def _expression(dim: Dim | sympy.Basic, symbols: dict[sympy.Symbol, int]) -> Any:
    """A size as JSON: a number, a list of the operation and its operands, or a symbol by its position."""
    if isinstance(dim, (int, sympy.Integer)):
        return int(dim)
    if isinstance(dim, sympy.Symbol) and dim in symbols:
        return ["symbol", symbols[dim]]
    name = type(dim).__name__
    if _EXPRESSIONS.get(name) is not type(dim):
        raise Untold(f"the size {dim}")
    return [name, *(_expression(a, symbols) for a in dim.args)]


def _from_expression(kept: Any, symbols: Sequence[sympy.Symbol]) -> Any:
    if isinstance(kept, int):
        return kept
    if kept[0] == "symbol":
        return symbols[kept[1]]
    return _EXPRESSIONS[kept[0]](*(_from_expression(k, symbols) for k in kept[1:]))


def _identifier(name: str) -> str:
    """The name, if it is an identifier: `torch.fx` writes it into Python source, and runs that. Raises `ValueError`."""
    if not name.isidentifier():
        raise ValueError(f"{name} is no identifier")
    return name


def _of(allowed: Sequence[str], name: str) -> str:
    if name not in allowed:
        raise ValueError(f"{name} is not among {', '.join(allowed)}")
    return name
