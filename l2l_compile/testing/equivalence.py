"""Does a streamed training step equal the step of eager? As an assertion, and as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from l2l_compile.testing.comparison import Comparison
from l2l_compile.testing.pair import Pair


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

    model      a module or a function, compiled or not. For a function, the gradients of its arguments are compared
    options    options of `torch.compile(model, backend="l2l", options=...)`; by default the options of a compiled model
    dtype      the dtype to which model and inputs are converted; None leaves them as they are. With precision="bf16" or "fp16",
               float64 becomes float32
    tolerance  relative error of each tensor, by its norm. None takes the promise for the dtype (1e-10 in float64, 1e-5 in float32),
               and allows ten times the error that eager itself has with the rows of the batch reversed, if that is more
    loss       a function from the outputs to a number. None takes the model's own loss (`loss` of its outputs, or a number in
               the first place), or else a fixed random projection of all outputs

    Raises `L2LError` for a model that draws random numbers, since eager draws different ones, and for a model that cannot be
    copied.
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
    """Train one step of `model(*args, **kwargs)` streamed and in eager. Returns the `Comparison` if they agree (see `compare`).

    Raises `AssertionError` if they differ. The error names each tensor that differs, worst first, with its segment, its error,
    the allowed error, and the error of eager itself with the rows of the batch reversed.
    """
    return compare(model, options, dtype=dtype, tolerance=tolerance, loss=loss)(*args, **kwargs).check()
