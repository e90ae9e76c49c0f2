"""Is a streamed training step the one of eager? As an assertion, and as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .comparison import Comparison
from .pair import Pair


def compare(
    model: Callable,
    options: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Callable[..., Comparison]:
    """`print(compare(model, options)(*args, **kwargs))` shows one training step streamed beside the same step in eager.

    Compares outputs, loss, every gradient, and the parameters, buffers and inputs that the step writes into. Takes the step on deep
    copies: the model stays as it is.

    model      a module or a function, compiled or not (then its own options hold, unless others are given). Of a function, the
               gradients of its arguments are compared
    options    those of `torch.compile(model, backend="l2l", options=...)`
    dtype      to which model and inputs are converted; None leaves them as they are. With precision="bf16" or "fp16", float32
    tolerance  relative error of each tensor, by its norm. None takes the promise for the dtype (1e-10 in float64, 1e-5 in float32),
               and allows ten times the error that eager itself has with the rows of the batch reversed, if that is more
    loss       from the outputs to a number. None takes the model's own (`loss` of its outputs, or a number in the first place), or else a
               fixed random projection of all outputs

    Raises `L2LError` for a model that draws random numbers, which eager cannot have the same, and for one that cannot be copied.
    """

    def compared(*args: Any, **kwargs: Any) -> Comparison:
        return Pair.of(model, options, dtype=dtype, tolerance=tolerance, loss=loss).step(*args, **kwargs)

    return compared


def assert_equivalent(
    model: Callable,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    **kwargs: Any,
) -> Comparison:
    """Train one step of `model(*args, **kwargs)` streamed and in eager; the `Comparison` if they are the same (see `compare`).

    Raises `AssertionError` otherwise. It names each tensor that differs, worst first, with its segment, its error, the error that is
    allowed, and the error of eager itself with the rows of the batch reversed.
    """
    return compare(model, options, dtype=dtype, tolerance=tolerance, loss=loss)(*args, **kwargs).check()
