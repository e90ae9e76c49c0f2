"""Floats that change from call to call, as Inductor gets them: tensors of one number, computed before the graph runs.

    (x, t) -> x * (1 - t)        =>        (x, number) -> x * number        with number = tensor(1 - t) in every call

Inductor compiles a number into its code, and passes symbolic floats to its kernels on the host as whole numbers. A number in a
tensor is an operand like any other. PyTorch's rules for the dtype of a result differ between numbers and tensors, so each
rewritten operation computes in the dtype that it had with a number.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Unfit(Exception):
    """A graph that uses a float in a way that has no form with tensors, for example as a size."""


@dataclass(frozen=True)
class Numbers:
    """The numbers that a rewritten graph reads, in place of the floats that the original graph reads.

    floats    positions of the floats among the operands of the original graph
    compute   from all numbers among these operands, the numbers that the rewritten graph reads
    kinds     for each of these, the dtype and the device of its tensor
    """

    floats: frozenset[int]
    compute: Callable[..., Sequence[int | float]]
    kinds: tuple[tuple[torch.dtype, torch.device], ...]

    def operands(self, given: Sequence) -> list:
        """The operands of the rewritten graph: those of the original graph without floats, then the tensors of numbers."""
        numbers = self.compute(*(each for each in given if not isinstance(each, torch.Tensor)))
        kept = [each for index, each in enumerate(given) if index not in self.floats]
        return [*kept, *map(_tensor, numbers, self.kinds)]


def _tensor(number: int | float, kind: tuple[torch.dtype, torch.device]) -> torch.Tensor:
    """A tensor without dimensions. A kernel makes it on its device: the host does not wait for a copy."""
    dtype, device = kind
    return torch.full((), number, dtype=dtype, device=device)


def reads_floats(graph: fx.Graph) -> bool:
    """Whether an operand of an ATen graph is a symbolic float."""
    return any(isinstance(node.meta["val"], torch.SymFloat) for node in graph.find_nodes(op="placeholder"))


def take_numbers(graph: fx.Graph, device: torch.device) -> Numbers:
    """Rewrite an ATen graph, in place, so that it reads tensors where it reads floats. All nodes need `meta["val"]`.

    Raises `Unfit`; the graph is then of no use.
    """
    operands = graph.find_nodes(op="placeholder")
    floats = [index for index, node in enumerate(operands) if isinstance(node.meta["val"], torch.SymFloat)]
    numbers = _computed_from(graph, [operands[index] for index in floats])
    rewriter = _Rewriter(graph, numbers, device, last_operand=operands[-1])
    for node in list(graph.nodes):
        if node not in numbers and any(read in numbers for read in node.all_input_nodes):
            rewriter.rewrite(node)
    compute = _computation(operands, [node for node, *_ in rewriter.tensors])
    for node in reversed(numbers):
        graph.erase_node(node)
    return Numbers(frozenset(floats), compute, tuple((dtype, place) for _, dtype, place in rewriter.tensors))


def _computed_from(graph: fx.Graph, floats: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """The floats, and the numbers that are computed from them, in order."""
    found: dict[fx.Node, None] = dict.fromkeys(floats)
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), _NUMBERS) and any(read in found for read in node.all_input_nodes):
            found[node] = None
    return found


def _computation(operands: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> Callable[..., Sequence[int | float]]:
    """A function from the numbers among the operands to the wanted numbers, operation by operation as Python computes them."""
    graph = fx.Graph()
    made = {node: graph.placeholder(node.name) for node in operands if isinstance(node.meta["val"], _NUMBERS)}

    def copy(node: fx.Node) -> fx.Node:
        if node not in made:
            if isinstance(node.meta.get("val"), torch.Tensor):
                raise Unfit("a number is computed from a tensor")
            for read in node.all_input_nodes:
                copy(read)
            made[node] = graph.node_copy(node, made.__getitem__)
        return made[node]

    graph.output(tuple(map(copy, wanted)))
    return fx.GraphModule({}, graph)


class _Rewriter:
    """Gives operations tensors in place of numbers. `tensors` has the numbers that are needed, with dtype and device.

    A number is rounded once, to the dtype that an operation computes in: Inductor leaves out a rounding in its graphs.
    """

    def __init__(self, graph: fx.Graph, numbers: dict[fx.Node, None], device: torch.device, last_operand: fx.Node):
        self.graph, self.numbers, self.device, self.last = graph, numbers, device, last_operand
        self.tensors: dict[tuple[fx.Node, torch.dtype, torch.device], fx.Node] = {}

    def rewrite(self, node: fx.Node) -> None:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            raise Unfit(f"{node.op} {node.target} reads a float")
        target, is_write = node.target, node.target._schema.is_mutable
        if is_write:
            target = _without_write(target)
        form = _FORMS.get(target)
        call: Callable
        if form is not None:
            dtypes = _Dtypes.of(node)
            self._read_tensors(node, dtypes.result if form in _FILLS else dtypes.computed_in, self.device)
            call = _bound(form, dtypes)
        else:
            self._read_tensors(node, None, torch.device("cpu"))
            call = _opaque(target, self._named(node, target))
        node.target = _writing(call) if is_write else call

    def _read_tensors(self, node: fx.Node, dtype: torch.dtype | None, place: torch.device) -> None:
        """Replace the numbers that a node reads by tensors; without a dtype, by float64 and int64 tensors."""
        tensor = lambda read: self._tensor(read, dtype, place) if read in self.numbers else read  # noqa: E731
        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), tensor)

    def _tensor(self, number: fx.Node, dtype: torch.dtype | None, place: torch.device) -> fx.Node:
        value = number.meta["val"]
        if isinstance(value, torch.SymBool):
            raise Unfit("a condition on a float is an operand")
        dtype = dtype or (torch.int64 if isinstance(value, torch.SymInt) else torch.float64)
        if (number, dtype, place) not in self.tensors:
            with self.graph.inserting_after(self.last):
                self.last = self.tensors[number, dtype, place] = self.graph.placeholder(f"number_{len(self.tensors)}")
            self.last.meta["val"] = _tensor(1, (dtype, place))  # only its dtype and device count
        return self.tensors[number, dtype, place]

    def _named(self, node: fx.Node, target: torch._ops.OpOverload) -> frozenset[str]:
        """The names of the operands of an operation that are tensors of numbers now."""
        made = set(self.tensors.values())
        names = [argument.name for argument in target._schema.arguments]
        named = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        found = frozenset(name for name, value in named.items() if isinstance(value, fx.Node) and value in made)
        if made & set(node.all_input_nodes) - {named[name] for name in found}:
            raise Unfit(f"{target} reads a float in a list")
        return found


def _without_write(operation: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """`aten.mul_.Tensor` -> `aten.mul.Tensor`."""
    packet = getattr(aten, operation.overloadpacket.__name__.removesuffix("_"), None)
    found = getattr(packet, operation._overloadname, None)
    if found is None or found is operation:
        raise Unfit(f"{operation} writes, and computes with a float")
    return found


def _writing(call: Callable) -> Callable:
    """A function that writes the result of a call into the first operand of the call."""

    def write(written: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return written.copy_(call(written, *args, **kwargs))

    return write


def _bound(form: Callable, dtypes: _Dtypes) -> Callable:
    def operation(*args: Any, **kwargs: Any) -> torch.Tensor:
        return form(dtypes, *args, **kwargs)

    return operation


@dataclass(frozen=True)
class _Dtypes:
    """The dtype of a result, and the dtype in which an operation computes it: at least float32, as PyTorch's kernels do."""

    result: torch.dtype
    computed_in: torch.dtype

    @classmethod
    def of(cls, node: fx.Node) -> _Dtypes:
        result = node.meta["val"].dtype
        operands = [read.meta["val"] for read in node.all_input_nodes]
        tensors = [value for value in operands if isinstance(value, torch.Tensor) and value.dtype is not torch.bool]
        inside = functools.reduce(lambda dtype, t: torch.result_type(t, torch.empty((), dtype=dtype)), tensors, result)
        if result is torch.bool and tensors:  # a comparison with a number
            inside = torch.result_type(tensors[0], 1.0)
        return cls(result, torch.float32 if inside in (torch.float16, torch.bfloat16) else inside)


def _pointwise(function: Callable) -> Callable:
    """A form that calls a function of tensors, all in the dtype that PyTorch computes in."""

    def form(dtypes: _Dtypes, *args: Any, **kwargs: Any) -> torch.Tensor:
        def wide(value: Any) -> Any:
            return value.to(dtypes.computed_in) if isinstance(value, torch.Tensor) and value.dtype is not torch.bool else value

        made = function(*map(wide, args), **{key: wide(value) for key, value in kwargs.items()})
        return made.to(dtypes.result)

    return form


def _add(a: Any, b: Any, alpha: Any = 1) -> torch.Tensor:
    return a + b * alpha


def _subtract(a: Any, b: Any, alpha: Any = 1) -> torch.Tensor:
    return a - b * alpha


def _subtract_from(a: Any, b: Any, alpha: Any = 1) -> torch.Tensor:
    return b - a * alpha


def _leaky_relu(x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, x * slope)


def _leaky_relu_backward(gradient: torch.Tensor, x: torch.Tensor, slope: torch.Tensor, _: bool) -> torch.Tensor:
    return torch.where(x > 0, gradient, gradient * slope)


def _where_not(x: torch.Tensor, mask: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, number, x)


def _full(dtypes: _Dtypes, size: Sequence[int], number: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return aten.fill.Tensor(torch.empty(size, dtype=dtypes.result, device=kwargs.get("device")), number)


def _full_like(dtypes: _Dtypes, x: torch.Tensor, number: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return aten.fill.Tensor(torch.empty_like(x, dtype=dtypes.result), number)


def _scalar_tensor(dtypes: _Dtypes, number: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return number.clone()


_FORMS: dict[torch._ops.OpOverload, Callable] = {
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _pointwise(operator.mul)),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _pointwise(operator.truediv)),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _pointwise(_add)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _pointwise(_subtract)),
    aten.rsub.Scalar: _pointwise(_subtract_from),
    **dict.fromkeys((aten.pow.Tensor_Scalar, aten.pow.Scalar), _pointwise(torch.pow)),
    aten.clamp.default: _pointwise(torch.clamp),
    aten.clamp_min.default: _pointwise(torch.maximum),
    aten.clamp_max.default: _pointwise(torch.minimum),
    aten.leaky_relu.default: _pointwise(_leaky_relu),
    aten.leaky_relu_backward.default: _pointwise(_leaky_relu_backward),
    **dict.fromkeys((aten.gt.Scalar, aten.gt.Tensor), _pointwise(operator.gt)),
    **dict.fromkeys((aten.ge.Scalar, aten.ge.Tensor), _pointwise(operator.ge)),
    **dict.fromkeys((aten.lt.Scalar, aten.lt.Tensor), _pointwise(operator.lt)),
    **dict.fromkeys((aten.le.Scalar, aten.le.Tensor), _pointwise(operator.le)),
    **dict.fromkeys((aten.eq.Scalar, aten.eq.Tensor), _pointwise(operator.eq)),
    **dict.fromkeys((aten.ne.Scalar, aten.ne.Tensor), _pointwise(operator.ne)),
    aten.masked_fill.Scalar: _pointwise(_where_not),
    **dict.fromkeys((aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar), _pointwise(torch.where)),
    aten.full.default: _full,
    aten.full_like.default: _full_like,
    aten.scalar_tensor.default: _scalar_tensor,
}
_FILLS = (_full, _full_like, _scalar_tensor)
_LIBRARY = torch.library.Library("l2l_compile", "FRAGMENT")


@functools.cache
def _opaque(operation: torch._ops.OpOverload, numbers: frozenset[str]) -> torch._ops.OpOverload:
    """An operator with PyTorch's own kernel of `operation` that reads these operands from tensors on the host.

    A compiler does not look into it.
    """
    schema = operation._schema
    if any(result.alias_info is not None for result in schema.returns):
        raise Unfit(f"{operation} returns a view, and reads a float")
    name = "_".join((operation.name().replace("aten::", "").replace(".", "_").replace("::", "_"), "at", *sorted(numbers)))
    _LIBRARY.define(f"{name}{_signature(schema, numbers)}")

    def call(number: Callable[[torch.Tensor], int | float], args: Sequence, kwargs: dict) -> Any:
        given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
        given |= {name: number(given[name]) for name in numbers}
        positional = [given.pop(a.name) for a in schema.arguments if not a.kwarg_only and a.name in given]
        return operation(*positional, **given)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return call(torch.Tensor.item, args, kwargs)

    def sizes(*args: Any, **kwargs: Any) -> Any:
        return call(lambda _: 0.5, args, kwargs)  # sizes and dtypes of results do not depend on it

    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"l2l_compile::{name}", sizes, lib=_LIBRARY)
    return getattr(torch.ops.l2l_compile, name).default


def _signature(schema: torch._C.FunctionSchema, numbers: frozenset[str]) -> str:
    """The signature of an operator, with tensors in the place of these numbers."""
    parts = []
    for argument in schema.arguments:
        if argument.kwarg_only and "*" not in parts:
            parts.append("*")
        if argument.name in numbers:
            parts.append(f"Tensor {argument.name}")
            continue
        parts.append(_declaration(schema, argument.name))
    results = str(schema).split(" -> ")[-1]
    return f"({', '.join(parts)}) -> {results}"


def _declaration(schema: torch._C.FunctionSchema, name: str) -> str:
    """The text of one operand in a schema, such as `ScalarType? dtype=None`."""
    inside = str(schema).split("(", 1)[1].rsplit(") -> ", 1)[0]
    depth, parts = 0, [""]
    for letter in inside:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return next(part.strip() for part in parts if part.split("=")[0].split()[-1:] == [name])
