"""Traces of a block for analysis alone: they never run.

A probe shows the forward graph, the operands that the block writes into, the values that its operations make, and the gradients
that the backward of a `torch.autograd.Function` makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._C import _functorch as functorch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from l2l_compile.devices.host import HOST
from l2l_compile.ir.segments import Block
from l2l_compile.ir.values import Bindings
from l2l_compile.lowering.sizes import Sizes
from l2l_compile.lowering.trace import BlockInterpreter, in_compute_dtypes, interpret, recording, traced


def probe(block: Block, bindings: Bindings) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """The forward graph at these sizes, for analysis only, and the indices of the operands that it writes into.

    The graph's outputs are the outputs of the block, then the new contents of the operands that it writes into. The graph
    writes into copies of these operands; a block with such operands is traced a second time, with copies.
    """
    module, mutated = _probe(block, bindings, ())
    return _probe(block, bindings, mutated) if mutated else (module, mutated)


def _probe(block: Block, bindings: Bindings, copied: Sequence[int]) -> tuple[fx.GraphModule, tuple[int, ...]]:
    mutated: list[int] = []

    def forward(bindings: Any, operands: Any) -> Any:
        with recording(block):
            own = [o.clone() if i in copied else o for i, o in enumerate(in_compute_dtypes(block, operands))]
            with _Writes() as writes:
                outputs = interpret(block, own, BlockInterpreter(block, bindings, HOST))
            mutated[:] = [i for i, o in enumerate(own) if o.untyped_storage()._cdata in writes.storages]
            return tuple(outputs + [own[i] for i in mutated])

    module = traced(block, forward, block.operands, Sizes(bindings), HOST, "forward")
    return module, tuple(mutated)


@dataclass
class ProbedValues:
    """The values that the operations of a block make.

    graph     an ATen graph that returns every tensor
    made_by   for each of these tensors, the node of `Block.graph` that makes it
    writers   the nodes that write into the result of an earlier node, or into an operand
    hidden    whether there are other values, which exist only within a transform of `torch.func`
    """

    graph: fx.Graph
    made_by: list[fx.Node]
    writers: set[fx.Node]
    hidden: bool


def probe_values(block: Block, bindings: Bindings) -> ProbedValues:
    """The forward graph at these sizes, for analysis only, with every intermediate tensor as an output."""
    made_by: list[fx.Node] = []
    hidden: list[torch.Tensor] = []
    interpreter = _Recorder(block, bindings, HOST)

    def forward(_: Any, operands: Any) -> Any:
        with recording(block):
            interpret(block, [o.clone() for o in in_compute_dtypes(block, operands)], interpreter)
            made = {node: value for node, value in interpreter.env.items() if node.op.startswith("call_")}
            tensors = [(n, leaf) for n, value in made.items() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            hidden[:] = [leaf for _, leaf in tensors if functorch.is_functorch_wrapped_tensor(leaf)]
            shown = [(n, leaf) for n, leaf in tensors if not functorch.is_functorch_wrapped_tensor(leaf)]
            made_by[:] = [node for node, _ in shown]
            return tuple(tensor for _, tensor in shown)

    module = traced(block, forward, block.operands, Sizes(bindings), HOST, "forward")
    return ProbedValues(module.graph, made_by, interpreter.writers, bool(hidden))


class _Writes(TorchDispatchMode):
    """Collects the storages that operators write into, according to their schemas."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                argument_value = kwargs.get(argument.name, args[index] if index < len(args) else None)
                for tensor in argument_value if isinstance(argument_value, (tuple, list)) else [argument_value]:
                    self.storages |= _memory_of(tensor)
        return func(*args, **kwargs)


def _memory_of(value: object) -> set[int]:
    """The identity of a tensor's memory, also if `torch.func` has wrapped the tensor; empty for a value without memory."""
    while isinstance(value, torch.Tensor) and functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    return {value.untyped_storage()._cdata} if isinstance(value, torch.Tensor) and value.layout is torch.strided else set()


class _Recorder(BlockInterpreter):
    """Notes the nodes that write into memory that existed before them."""

    def __init__(self, block: Block, bindings: Bindings, device: torch.device):
        super().__init__(block, bindings, device)
        self.writers: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        there = set().union(*map(_memory_of, tree_leaves(list(self.env.values()))))
        with _Writes() as writes:
            result = super().run_node(n)
        if writes.storages & there:
            self.writers.add(n)
        return result


def is_function(node: fx.Node) -> bool:
    """Whether a node calls a `torch.autograd.Function`."""
    return node.target is torch.ops.higher_order.autograd_function_apply


def calls_functions(block: Block) -> bool:
    """Whether a block, or a graph within it, calls a `torch.autograd.Function`."""
    modules = [module for module in block.graph.modules() if isinstance(module, fx.GraphModule)]
    return any(is_function(node) for module in modules for node in module.graph.nodes)


@dataclass
class ProbedFunctions:
    """The calls of `torch.autograd.Function` in a block.

    graph   an ATen graph that returns tensors of these calls
    calls   for each of these tensors, the node of `Block.graph` that makes the call
    inner   whether there are other calls, in graphs within the block
    """

    graph: fx.Graph
    calls: list[fx.Node]
    inner: bool


def probe_results(block: Block, bindings: Bindings) -> ProbedFunctions:
    """The forward graph at these sizes, with the tensors that the calls return as outputs."""
    return _probe_functions(block, bindings, None)


def probe_gradients(block: Block, bindings: Bindings, stand_ins: Sequence[str]) -> ProbedFunctions:
    """The forward graph and the backward of each call. The outputs alternate: an argument of a call, and its gradient.

    `stand_ins` tells what the gradient of each tensor of `probe_results` is: "rows" (one for each row), "part" (the part of
    a sum that a micro-batch has) or "whole" (the same for every micro-batch).
    """
    return _probe_functions(block, bindings, stand_ins)


def _probe_functions(block: Block, bindings: Bindings, stand_ins: Sequence[str] | None) -> ProbedFunctions:
    interpreter = _Functions(block, bindings, stand_ins)

    def forward(_: Any, operands: Any) -> Any:
        with recording(block):
            own = [o.clone() for o in in_compute_dtypes(block, operands)]
            interpreter.batched = next((o for o, spec in zip(own, block.operands, strict=True) if spec.batch is not None), None)
            interpret(block, own, interpreter)
            return tuple(tensor for _, tensor in interpreter.found)

    module = traced(block, forward, block.operands, Sizes(bindings), HOST, "forward")
    inner = [m for m in block.graph.modules() if isinstance(m, fx.GraphModule) and m is not block.graph]
    hidden = any(functorch.is_functorch_wrapped_tensor(tensor) for _, tensor in interpreter.found)
    nested = any(is_function(node) for m in inner for node in m.graph.nodes)
    return ProbedFunctions(module.graph, [node for node, _ in interpreter.found], hidden or nested)


class _Functions(BlockInterpreter):
    """Notes the tensors of calls of `torch.autograd.Function`: results, or arguments with their gradients.

    batched  an operand with rows
    """

    batched: torch.Tensor | None

    def __init__(self, block: Block, bindings: Bindings, stand_ins: Sequence[str] | None):
        super().__init__(block, bindings, HOST)
        self.found: list[tuple[fx.Node, torch.Tensor]] = []
        self._stand_ins = None if stand_ins is None else iter(stand_ins)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if is_function(n) and self._stand_ins is None:
            self.found += [(n, tensor) for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        elif is_function(n):
            arguments, _ = self.fetch_args_kwargs_from_env(n)
            self.found += [(n, tensor) for tensor in self._backward(*arguments)]
        return result

    def _backward(self, forward: fx.GraphModule, backward: fx.GraphModule, *arguments: Any) -> list[torch.Tensor]:
        """Each argument of a call that has a gradient, and the gradient."""
        results, saved = fx.Interpreter(forward).run(*arguments)
        gradients = [self._gradient_of(result) for result in tree_leaves(results)]
        made = fx.Interpreter(backward).run(*gradients, *saved)
        pairs = zip(arguments, made if isinstance(made, (tuple, list)) else (made,), strict=True)
        return [tensor for pair in pairs if all(isinstance(each, torch.Tensor) for each in pair) for tensor in pair]

    def _gradient_of(self, result: Any) -> Any:
        """A stand-in for the gradient of a result."""
        if not isinstance(result, torch.Tensor):
            return None
        assert self._stand_ins is not None and self.batched is not None
        kind = next(self._stand_ins)
        if not result.dtype.is_floating_point and not result.dtype.is_complex:
            return torch.zeros_like(result)
        if kind == "rows":
            return torch.rand_like(result)
        return torch.ones_like(result) * (self.batched.to(result.dtype).sum() if kind == "part" else 1)
