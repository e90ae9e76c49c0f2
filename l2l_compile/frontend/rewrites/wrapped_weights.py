"""Parameters and buffers that are tensor subclasses around other tensors, such as the quantized weights of torchao.

    %w = placeholder    (Int8Tensor)             %w_qdata = inner tensor 'qdata' of w      a weight
                                                 %w_scale = inner tensor 'scale' of w      a weight
         linear(%x, %w)                  =>      %w = wrap(%w_qdata, %w_scale)
                                                      linear(%x, %w)

The inner tensors cross the link as they are. They are wrapped again within the segment that reads the weight, so that the code
of the subclass decides how it is dequantized: on the device, in each micro-batch. `DTensor` has rewrites of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from l2l_compile.errors import L2LError
from l2l_compile.ir.captured import InnerTensor, Input
from l2l_compile.ir.graph import first_operation


def is_wrapper(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a tensor is a subclass around other tensors, which a trace can take apart."""
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


def take_wrappers_apart(graph: fx.Graph, inputs: Sequence[Input], first_index: int) -> tuple[Input, ...]:
    """Make the inner tensors of wrapped weights weights of their own. Returns these, numbered from `first_index` on.

    Raises `L2LError` for a wrapper that is trained, or is no part of the model.
    """
    found: list[Input] = []
    for outer in inputs:
        if is_wrapper(example := outer.node.meta.get("example_value")):
            _check(outer, example)
            found += _inner_inputs(graph, outer, first_index + len(found))
    return tuple(found)


def _check(outer: Input, example: torch.Tensor) -> None:
    kind = type(example).__name__
    if outer.kind not in ("wrapped parameter", "wrapped buffer"):
        raise L2LError(f"input '{outer.name}' is a {kind}, a subclass around other tensors: pass a plain tensor")
    if example.requires_grad:
        raise L2LError(
            f"parameter '{outer.name}' is a {kind}, a subclass around other tensors, and requires a gradient, for which there is no way "
            "over the link. Freeze it with requires_grad_(False), and train adapters (LoRA) beside it"
        )


def _inner_inputs(graph: fx.Graph, outer: Input, first_index: int) -> list[Input]:
    example = outer.node.meta["example_value"]
    kind = outer.kind.removeprefix("wrapped ")
    readers = [reader for reader in outer.node.users if reader.op != "output"]  # an output is the argument itself
    with graph.inserting_before(first_operation(graph)):
        nodes = [_inner_node(graph, outer, path, value) for path, value in _inner_tensors(example)]
    wrapper = _wrapper_of(example)
    for reader in readers:  # each in its own place, so that the wrapper goes from no segment to another
        with graph.inserting_before(reader):
            wrapped = graph.call_function(_wrapping(wrapper), tuple(nodes))
        wrapped.meta = {**reader.meta, "example_value": example}
        reader.replace_input_with(outer.node, wrapped)
    return [
        Input(first_index + number, node, f"{outer.name}.{'.'.join(path)}", kind, inner=InnerTensor(outer.index, path))
        for number, (node, (path, _)) in enumerate(zip(nodes, _inner_tensors(example), strict=True))
    ]


def _inner_node(graph: fx.Graph, outer: Input, path: tuple[str, ...], value: torch.Tensor) -> fx.Node:
    node = graph.call_function(inner_tensor, (outer.node, path))  # Dynamo counts placeholders
    node.meta["example_value"] = value.detach()
    return node


def inner_tensor(outer: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
    """An inner tensor (`ir.captured.InnerTensor`); the captured graph calls this function in its place."""
    return functools.reduce(getattr, path, outer)


def _inner_tensors(outer: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The plain tensors within a wrapper, which may hold further wrappers, each with the names of the attributes that lead to it."""
    names, _ = outer.__tensor_flatten__()
    for name in names:
        value = getattr(outer, name)
        if is_wrapper(value):
            yield from _inner_tensors(value, (*path, name))
        else:
            yield (*path, name), value


@dataclass(frozen=True)
class _Wrapper:
    """All of a wrapper but its plain tensors. `inner` has that of each attribute that is a wrapper itself, else None."""

    kind: type
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    inner: tuple[tuple[str, _Wrapper | None], ...]

    def wrap(self, tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        """A tensor subclass like this one around the tensors, taken in order."""
        within = {name: next(tensors) if wrapper is None else wrapper.wrap(tensors) for name, wrapper in self.inner}
        return self.kind.__tensor_unflatten__(within, self.context, torch.Size(self.shape), self.stride)  # type: ignore[attr-defined]


def _wrapper_of(outer: Any) -> _Wrapper:
    names, context = outer.__tensor_flatten__()
    inner = tuple((name, _wrapper_of(value) if is_wrapper(value := getattr(outer, name)) else None) for name in names)
    return _Wrapper(type(outer), context, tuple(map(int, outer.shape)), tuple(map(int, outer.stride())), inner)


_wrappings: list[tuple[_Wrapper, Callable[..., torch.Tensor]]] = []


def _wrapping(wrapper: _Wrapper) -> Callable[..., torch.Tensor]:
    """The function that wraps tensors like this. Equal wrappers have the same function, so that layers share a block."""
    for known, function in _wrappings:
        if _equal(known, wrapper):
            return function

    def wrap(*tensors: torch.Tensor) -> torch.Tensor:
        return wrapper.wrap(iter(tensors))

    wrap.__name__ = f"wrap_{wrapper.kind.__name__}"
    _wrappings.append((wrapper, wrap))
    return wrap


def _equal(a: _Wrapper, b: _Wrapper) -> bool:
    """Whether wrappers are equal. A context may hold what cannot be compared: then they are not."""
    try:
        return bool(a == b)
    except Exception:  # noqa: BLE001 - of the library's code
        return False
