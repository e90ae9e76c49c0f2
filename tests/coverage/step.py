"""One training step, and the error between the losses and gradients of two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tiny_models import ROWS

Gradients = dict[str, torch.Tensor | None]
Step = tuple[torch.Tensor, Gradients]  # loss, and the gradient of each parameter

SCATTER = 4  # an error up to this many times the observed rounding counts as rounding


def dtype_of(step: Step) -> torch.dtype:
    """The narrowest dtype of the loss and the gradients: some models keep parameters in float32, such as routers."""
    return min((t.dtype for t in (step[0], *step[1].values()) if t is not None), key=lambda dtype: dtype.itemsize)


def train(model: nn.Module, inputs: dict, seed: int = 0, run: Callable | None = None) -> Step:
    """One training step. `run` is the compiled model; by default the model itself runs."""
    torch.manual_seed(seed)
    outputs = (model if run is None else run)(**inputs)
    loss = getattr(outputs, "loss", None)
    if loss is None:
        loss = sum(map(distance_to_waves, (t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad)))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


class Narrowest(TorchFunctionMode):
    """Records the narrowest dtype that gradients flow through: a model in float64 may have norms that compute in float32."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = [value.dtype for value in tree_leaves(result) if isinstance(value, torch.Tensor) and value.requires_grad]
        self.dtype = min((self.dtype, *made), key=lambda dtype: dtype.itemsize)
        return result


def rows_reversed(value: Any) -> Any:
    """An input with the rows of the batch in reverse order. An input without rows is returned as it is."""
    if isinstance(value, torch.Tensor) and value.dim() and len(value) == ROWS:
        return value.flip(0)
    return value[::-1] if isinstance(value, list) and len(value) == ROWS else value


def distance_to_waves(output: torch.Tensor) -> torch.Tensor:
    """A loss that depends on all entries, also for normalised outputs, whose mean square does not depend on the weights."""
    waves = torch.arange(output.numel(), dtype=output.dtype if output.is_floating_point() else torch.float64).sin()
    return (output - waves.view(output.shape)).abs().square().mean()


def error_of(expected: Step, step: Step, reordered: Step) -> tuple[float, str]:
    """The largest norm-wise error of loss and gradients, and its name; infinite if a gradient is missing or extra.

    If terms cancel (in the gradient of the bias of keys in an attention, or of the last bias before a softmax over choices), no
    digits are left to compare. So a small error is taken relative to the largest gradient. An error is small if it is like the
    rounding of the largest gradient, or of 1 (with which backward begins), or like the error of eager on the same rows
    reversed.
    """
    largest = max((g.norm().item() for g in expected[1].values() if g is not None), default=0.0)
    errors = [(distance(step[0], expected[0]), "loss")]
    for name, gradient in expected[1].items():
        made = step[1][name]
        if (gradient is None) != (made is None):
            errors.append((float("inf"), f"gradient of {name} ({'missing' if made is None else 'extra'})"))
        elif gradient is not None:
            rounding = max((reordered[1][name] - gradient).norm().item(), torch.finfo(gradient.dtype).eps * max(largest, 1))
            is_rounding = (made - gradient).norm() <= SCATTER * rounding
            errors.append((distance(made, gradient, largest if is_rounding else None), f"gradient of {name}"))
    return max(errors)


def distance(made: torch.Tensor, expected: torch.Tensor, scale: float | None = None) -> float:
    """The norm of the error, relative to `scale` or to the norm of `expected`; absolute if that is zero, infinite for NaN."""
    error, scale = (made - expected).norm().item(), expected.norm().item() if scale is None else scale
    error = error / scale if scale else error
    return error if error == error else float("inf")
