"""The rounding of eager itself: the same step with the rows of the batch in reverse order.

Reversed, a sum over the batch is rounded otherwise, and nothing else changes. The results are put back into their order before
anything reads them, so that a loss outside of the model sees the rows as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Recorded:
    """A model whose results are kept, one for each call."""

    def __init__(self, call: Callable):
        self.call = call
        self.results: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.results.append(self.call(*args, **kwargs))
        return self.results[-1]


class Reversed:
    """A model that sees the rows of its batch in reverse order.

    results  what the model returned in the same calls for the rows as they are: tells which dimension of a result has the rows
    dim      the dimension of the batch in most inputs: 0, or 1 for inputs that have time first
    """

    def __init__(self, model: Callable, results: Sequence[Any], dim: int):
        self.model, self.dim = model, dim
        self._results = iter(results)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        count = next((t.shape[self.dim] for t in leaves if isinstance(t, torch.Tensor) and t.dim() > self.dim), 0)
        args, kwargs = pytree.tree_unflatten([self._reverse(leaf, count) for leaf in leaves], structure)
        found, structure = pytree.tree_flatten(self.model(*args, **kwargs))
        expected = pytree.tree_leaves(next(self._results))
        return pytree.tree_unflatten([_in_order(a, e, count) for a, e in zip(found, expected, strict=True)], structure)

    def _reverse(self, leaf: Any, count: int) -> Any:
        """Rows are in the dimension of the batch, or else in the other one of the first two (the states of recurrent layers)."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dims = [d for d in (self.dim, 1 - self.dim) if d < leaf.dim() and leaf.shape[d] == count]
        return leaf.flip(dims[0]) if dims else leaf


def _in_order(actual: Any, expected: Any, count: int) -> Any:
    """Turned over in the dimension in which it then is closest to what is expected, if in any."""
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        return actual
    turned = [actual, *(actual.flip(d) for d in range(actual.dim()) if actual.shape[d] == count)]
    return min(turned, key=lambda t: _distance(t, expected))


@torch.no_grad()
def _distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (actual != expected).double().mean().item() if not actual.is_floating_point() else (actual - expected).norm().item()
