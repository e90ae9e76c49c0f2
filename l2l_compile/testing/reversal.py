"""The rounding of eager itself: the same step with the rows of the batch in reverse order.

With reversed rows, sums over the batch are rounded differently, and nothing else changes. The results are put back into their
original order before anything reads them, so a loss outside of the model sees the rows in the original order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from l2l_compile.testing.leaves import mapped


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

    results  outputs of the same calls with the rows in their original order: they show which dimension of an output has rows
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
        """Reverse the rows of an input. They are in dimension `dim`, or else in the other of the first two (states of RNNs)."""
        dims = [d for d in (self.dim, 1 - self.dim) if d < tensor.dim() and tensor.shape[d] == count]
        if not dims:
            return tensor
        turned.append(_Turned(tensor, dims[0]))
        return turned[-1].made


class _Turned:
    """An input with its rows reversed. `give_back` copies the model's writes to the input."""

    def __init__(self, given: torch.Tensor, dim: int):
        self.given, self.dim, self.made = given, dim, given.flip(dim)
        self._before = self.made.detach().clone()

    def give_back(self) -> None:
        if torch.equal(self.made, self._before):
            return
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.given.requires_grad):
            self.given.copy_(self.made.flip(self.dim))


def _in_order(actual: Any, expected: Any, count: int) -> Any:
    """An output, flipped in the dimension that makes it closest to `expected`, or not flipped if that is closest."""
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        return actual
    turned = [actual, *(actual.flip(d) for d in range(actual.dim()) if actual.shape[d] == count)]
    return min(turned, key=lambda t: _distance(t, expected))


@torch.no_grad()
def _distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (actual != expected).double().mean().item() if not actual.is_floating_point() else (actual - expected).norm().item()
