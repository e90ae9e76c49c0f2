"""Which sizes besides the batch are symbolic from the first trace on, in calls without gradient: lengths of prompts and of caches.

The sizes of such calls change often: texts to evaluate have many lengths, and a generated text grows by one token a call. A call
with gradient has few lengths, since users pad them, and for these constants give better code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.source import AttrSource, ChainedSource
from torch._dynamo.variables import builder
from torch.fx.experimental.symbolic_shapes import DimDynamic

from l2l_compile.torch_internals.patches import is_replaced, replace


def sizes_are_fixed() -> bool:
    """Whether the frame is compiled with `dynamic=False`, so that each size has a program of its own."""
    return torch._dynamo.config.assume_static_by_default and not torch._dynamo.config.automatic_dynamic_shapes


def lengths_of(tensor: torch.Tensor, tx: Any, source: Any) -> set[int]:
    """The dimensions of an input that may be lengths, if the frame that is being compiled was called without gradient.

    tokens, masks, positions (integers, booleans)    all dimensions
    floats [batch, length, features]                 all but the features
    floats [batch, heads, length, features]          the length, if an object holds them: a cache. An argument may be images

    A size that the input also had in a call with gradient is left out: the layers are compiled for this size already.
    """
    if sizes_are_fixed() or source.guard_source.is_unspecialized_nn_module():
        return set()
    trained = _sizes_with_gradient(tx)
    if not _runs_without_gradient(tx):
        trained[source.name] = tuple(tensor.shape)
        return set()
    known = trained.get(source.name, ())
    return {dim for dim in _may_be_lengths(tensor, source) if tuple(tensor.shape[dim : dim + 1]) != known[dim : dim + 1]}


def with_one_length(context: Any, tensor: torch.Tensor, source: Any, lengths: set[int]) -> Any:
    """How Dynamo makes the sizes of an input symbolic: caches of equal length have one symbol, so that layers have one block.

    When their lengths part, PyTorch compiles again, with a symbol each.
    """
    for dim in lengths if _is_cache(tensor, source) else ():
        if context.dynamic_sizes[dim] is DimDynamic.DYNAMIC:
            context.dynamic_sizes[dim] = DimDynamic.DUCK
    return context


def _is_cache(tensor: torch.Tensor, source: Any) -> bool:
    return tensor.is_floating_point() and tensor.dim() == 4 and _is_held_by_an_argument(source)


class _Sizes(dict):
    """Of calls in this process: a copy of a compiled model has not seen any, and code objects cannot be pickled."""

    def __reduce__(self) -> tuple:
        return _Sizes, ()


_SIZES = "_l2l_sizes_with_gradient"  # on the backend object of a call: the last shape of each input, by code object and name


def _sizes_with_gradient(tx: Any) -> dict[str, tuple[int, ...]]:
    owner = innermost_backend(tx.output.compiler_fn)
    if not hasattr(owner, _SIZES):
        setattr(owner, _SIZES, _Sizes())
    return getattr(owner, _SIZES).setdefault(tx.output.root_tx.f_code, {})


def _may_be_lengths(tensor: torch.Tensor, source: Any) -> range | tuple[int, ...]:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return range(tensor.dim())
    if tensor.dim() == 3:
        return (0, 1)
    return (2,) if _is_cache(tensor, source) else ()


def mark_integers(is_ours: Callable[[Any], bool]) -> None:
    """Install a hook: integers that an argument holds, such as the length of a cache, are symbolic in the same frames."""
    original = builder.VariableBuilder.wrap_symint
    if is_replaced(original):
        return

    @functools.wraps(original)
    def wrap_symint(self: Any, value: Any, dynamism: Any = None, *args: Any, **kwargs: Any) -> Any:
        if (
            dynamism is None
            and is_ours(innermost_backend(self.tx.output.compiler_fn))
            and not sizes_are_fixed()
            and _runs_without_gradient(self.tx)
            and _is_held_by_an_argument(self.source)
        ):
            dynamism = DimDynamic.DYNAMIC
        return original(self, value, dynamism, *args, **kwargs)

    replace(builder.VariableBuilder, "wrap_symint", wrap_symint)


def _runs_without_gradient(tx: Any) -> bool:
    """Whether gradients were disabled when the frame was called.

    The mode of this moment may be that of a region of the frame: Dynamo looks at an input when the frame first reads it.
    """
    return not tx.output.tracing_context.global_context.global_state["grad_enabled"][1]


def _is_held_by_an_argument(source: Any) -> bool:
    """Whether a value is reached through an attribute of an argument that is no module."""
    if not source.guard_source.is_local() or source.guard_source.is_unspecialized_nn_module():
        return False
    while isinstance(source, ChainedSource):
        if isinstance(source, AttrSource) and source.member != "_base":  # of a view
            return True
        source = source.base
    return False
