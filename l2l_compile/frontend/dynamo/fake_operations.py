"""Each operation that Dynamo runs on fake tensors while it traces. An adapter to the private side of Dynamo.

run_node(operation, operands)
    reads a number from a tensor:    break the graph, as Dynamo does for `.item()`
    fails:                           note the operands, so that the error names the input
    has a result that is computed:   that one (the sizes of recurrent stacks)
    else:                            propagate (`faster/propagation.py`), which only saves time
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch._dynamo import utils as dynamo_utils
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from l2l_compile.frontend.dynamo.wrong_inputs import noting_operands
from l2l_compile.frontend.faster import propagation
from l2l_compile.torch_internals.fake_results import directly
from l2l_compile.torch_internals.patches import is_replaced, replace

_MEMORY = "_l2l_propagation"  # an attribute of the frame's ShapeEnv, which owns the symbols


class _ReadsNone(TorchDispatchMode):
    """Raises if an operation reads a number from a tensor, as `torch.arange(n)` and `x[:n]` do: Dynamo then breaks the graph.

    Without this mode, Dynamo would continue with the number that an input of the graph holds now. Constants may be read.
    """

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default and args[0].constant is None:
            raise DataDependentOutputException(operator)
        return operator(*args, **(kwargs or {}))


def _may_be_a_number(operand: Any) -> bool:
    return isinstance(operand, torch.Tensor) and not operand.dim() and not operand.is_floating_point()


def watch_fake_operations(is_ours: Callable[[Any], bool], computed: Callable[..., Any]) -> None:
    """Install a hook: frames whose backend `is_ours` run operations as this file says.

    `computed(function, args, kwargs)` is the result of a function that is not to run; None for all others.
    """
    original = dynamo_utils.run_node
    if is_replaced(original):
        return

    @functools.wraps(original)
    def run_node(tracer: Any, node: Any, args: Any, kwargs: Any, nnmodule: Any) -> Any:
        def run() -> Any:
            return noting_operands(node, lambda: original(tracer, node, args, kwargs, nnmodule))

        if node.op not in ("call_function", "call_method") or not is_ours(getattr(tracer, "compiler_fn", None)):
            return original(tracer, node, args, kwargs, nnmodule)
        if node.target is torch._VF._pad_packed_sequence:  # torch 2.11 raises an error that breaks no graph
            raise DataDependentOutputException(torch.ops.aten._pad_packed_sequence.default)
        if node.target != "item" and any(map(_may_be_a_number, tree_leaves((args, kwargs)))):
            with _ReadsNone():
                return run()
        directly(tracer.fake_mode)
        if node.op == "call_function" and (result := computed(node.target, args, kwargs)) is not None:
            return result
        return propagation.propagate(_kept_results(tracer), node.target, (args, kwargs), run)

    replace(dynamo_utils, "run_node", run_node)


def _kept_results(tracer: Any) -> dict[Hashable, propagation.FakeResult]:
    """The kept results of a frame, dropped once it is captured: they hold symbols in a way that the collector cannot see."""
    attributes = vars(tracer.shape_env)
    if _MEMORY not in attributes:
        attributes[_MEMORY] = {}
        tracer.add_cleanup_hook(lambda: attributes.pop(_MEMORY, None))
    return attributes[_MEMORY]
