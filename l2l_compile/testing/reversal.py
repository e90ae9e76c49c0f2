"""The rounding of eager itself: the same step with the rows of the batch in reverse order.

Reversed, a sum over the batch is rounded otherwise, and nothing else changes. The results are put back into their order before
anything reads them, so that a loss outside of the model sees the rows as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .leaves import mapped


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
        leaves = pytree.tree_leaves((args, kwargs))
        count = next((t.shape[self.dim] for t in leaves if isinstance(t, torch.Tensor) and t.dim() > self.dim), 0)
        turned = list[_Turned]()
        args, kwargs = mapped(lambda tensor: self._reverse(tensor, count, turned), (args, kwargs))
        found, structure = pytree.tree_flatten(self.model(*args, **kwargs))
        for one in turned:
            one.give_back()
        expected = pytree.tree_leaves(next(self._results))
        return pytree.tree_unflatten([_in_order(a, e, count) for a, e in zip(found, expected, strict=True)], structure)

    def _reverse(self, tensor: torch.Tensor, count: int, turned: list[_Turned]) -> torch.Tensor:
        """Rows are in the dimension of the batch, or else in the other one of the first two (the states of recurrent layers)."""
        dims = [d for d in (self.dim, 1 - self.dim) if d < tensor.dim() and tensor.shape[d] == count]
        if not dims:
            return tensor
        turned.append(_Turned(tensor, dims[0]))
        return turned[-1].made


class _Turned:
    """An input with its rows reversed. What the model writes into it goes back to the input."""

    def __init__(self, given: torch.Tensor, dim: int):
        self.given, self.dim, self.made = given, dim, given.flip(dim)
        self._before = self.made.detach().clone()

    def give_back(self) -> None:
        if torch.equal(self.made, self._before):
            return
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.given.requires_grad):
            self.given.copy_(self.made.flip(self.dim))


def _in_order(actual: Any, expected: Any, count: int) -> Any:
    """Turned over in the dimension in which it then is closest to what is expected, if in any."""
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        return actual
    turned = [actual, *(actual.flip(d) for d in range(actual.dim()) if actual.shape[d] == count)]
    return min(turned, key=lambda t: _distance(t, expected))


@torch.no_grad()
def _distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (actual != expected).double().mean().item() if not actual.is_floating_point() else (actual - expected).norm().item()
