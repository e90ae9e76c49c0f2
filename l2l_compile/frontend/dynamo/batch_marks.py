"""The adapter to Dynamo's marks of symbolic dimensions: dimension 0 of the user's inputs is the batch.

A dimension is symbolic only if it is marked before Dynamo looks at the tensor, but a backend is called after that. Therefore
`mark_batches` marks dimension 0 of every user input when Dynamo wraps it, and the lengths of `inference_marks.py`, and removes the
marks again. It does so only in frames that are compiled by this backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.variables import builder

from l2l_compile.frontend.dynamo.adapter import source_name, translator_at_work
from l2l_compile.frontend.dynamo.inference_marks import lengths_of, with_one_length
from l2l_compile.torch_internals.patches import is_replaced, replace

_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


_ANY_MARK = (*_MARKS, "_dynamo_dynamic_indices", "_dynamo_static_indices", "_dynamo_unbacked_indices")


def mark_batches(is_ours: Callable[[Any], bool]) -> None:
    """Install a hook: frames whose backend `is_ours` see dimension 0 of tensor inputs (or the one of `trace_again`) as symbolic.

    Parameters, buffers and other tensors of modules stay static. A tensor that the user marked keeps the user's marks.
    """
    original = builder._automatic_dynamic
    if is_replaced(original):
        return

    @functools.wraps(original)
    def automatic_dynamic(e: Any, tx: Any, source: Any, static_shapes: Any, *args: Any, **kwargs: Any) -> Any:
        marks = (
            not static_shapes
            and isinstance(e, torch.Tensor)
            and e.dim() > 0
            and not isinstance(e, torch.nn.Parameter)
            and not any(hasattr(e, mark) for mark in _ANY_MARK)
            and is_ours(innermost_backend(tx.output.compiler_fn))
        )
        if not marks:
            return original(e, tx, source, static_shapes, *args, **kwargs)
        dimension = _batch_dimension(tx, source)
        lengths = lengths_of(e, tx, source)
        dimensions = lengths | ({dimension} if dimension is not None else set())
        if not dimensions:
            return original(e, tx, source, static_shapes, *args, **kwargs)
        torch._dynamo.maybe_mark_dynamic(e, sorted(dimensions))
        try:
            return with_one_length(original(e, tx, source, static_shapes, *args, **kwargs), e, source, lengths - {dimension})
        finally:
            for mark in _MARKS:
                if hasattr(e, mark):
                    delattr(e, mark)

    replace(builder, "_automatic_dynamic", automatic_dynamic)


_CHOICES = "_l2l_batch_dimensions"  # on the backend object of a call: choices of `trace_again` by code object


def _batch_dimension(tx: Any, source: Any) -> int | None:
    return _dimension_in(_choice_for(tx.output), source.name)


def _choice_for(output: Any) -> Any:
    return getattr(innermost_backend(output.compiler_fn), _CHOICES, {}).get(output.root_tx.f_code)


def _dimension_in(choice: Any, name: str) -> int | None:
    return 0 if choice is None or choice.dimensions is None else choice.dimensions.get(name)


def batch_dimension_of(placeholder: torch.fx.Node) -> int | None:
    """The batch dimension of an input of the frame that is being compiled (see `trace_again`); None if it has no rows."""
    return _dimension_in(batch_choice(), source_name(placeholder))


def batch_choice() -> Any:
    """The choice that `trace_again` got for the frame that is being compiled; None if it was not called."""
    tx = translator_at_work()
    return _choice_for(tx.output) if tx is not None else None


def trace_again(choice: Any, reason: str) -> None:
    """Make Dynamo trace the frame that is being compiled again, with the batch in the dimensions `choice.dimensions`.

    Does not return, unless Dynamo is not tracing (the backend was called by hand).
    """
    tx = translator_at_work()
    if tx is None:
        return
    owner = innermost_backend(tx.output.compiler_fn)
    if not hasattr(owner, _CHOICES):
        setattr(owner, _CHOICES, {})
    getattr(owner, _CHOICES)[tx.output.root_tx.f_code] = choice
    tx.speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason=reason)
