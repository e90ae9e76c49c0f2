"""A loss that another rank still computes: a tensor that waits for it when its number is read.

`backward()`, `detach()` and sizes do not wait. Neither does a loss times or over a number, as a loop that accumulates gradients has it: the
result is a late loss too. `item()`, `print`, other arithmetic and whatever else reads the number do wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from l2l_compile.errors import L2LError
from l2l_compile.user_line import warn

_SAID_AFTER = 3  # losses in a row that are read at once

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
_SCALED = (_aten.mul.Tensor, _aten.div.Tensor, _aten.neg.default)
_SHAPES = (_aten.ones_like.default, _aten.zeros_like.default, _aten.empty_like.default, _aten.full_like.default)


class Coming:
    """The number behind a late loss: `fetch` waits for it. `like` has its shape and dtype."""

    def __init__(self, like: torch.Tensor, fetch: Callable[[], torch.Tensor]):
        self.like = like
        self._fetch: Callable[[], torch.Tensor] | None = fetch
        self._found: torch.Tensor | None = None
        self._scaled: list[tuple[Coming, Callable[[torch.Tensor], torch.Tensor]]] = []
        self._failure = ""

    @property
    def is_there(self) -> bool:
        return self._found is not None

    def fill(self, found: torch.Tensor) -> None:
        if self._found is None:
            self._found = found
            for scaled, scale in self._scaled:
                scaled.fill(scale(found))
        self._fetch, self._scaled = None, []

    def fail(self, error: BaseException) -> None:
        """It never comes."""
        self._failure, self._fetch = f"{type(error).__name__}: {error}", None
        for scaled, _ in self._scaled:
            scaled.fail(error)
        self._scaled = []

    def scaled(self, scale: Callable[[torch.Tensor], torch.Tensor]) -> Coming:
        """The number times or over another one, which comes together with this one: a later write into the loss does not change it."""
        made = Coming(scale(self.like), lambda: scale(self.read()))
        self._scaled.append((made, scale))
        return made

    def read(self) -> torch.Tensor:
        """Raises `L2LError` if its step has failed."""
        if self._found is None and self._fetch is not None:
            self.fill(self._fetch())
        if self._found is None:
            raise L2LError(f"the loss of a step that has failed is read: {self._failure}")
        return self._found


class LateLoss(torch.Tensor):
    """The tensor that the caller gets. Its contents are those of `coming`."""

    coming: Coming

    @staticmethod
    def __new__(cls, coming: Coming) -> LateLoss:
        like = coming.like
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.coming = coming
        return made

    def __init__(self, coming: Coming):
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _SAME:
            return LateLoss(args[0].coming)
        if func in _SHAPES and isinstance(args[0], LateLoss):
            return func(args[0].coming.like, *args[1:], **kwargs)
        if func in _SCALED and (scaled := _scaled(func, args)) is not None:
            return LateLoss(scaled)
        made = func(*pytree.tree_map(_number, args), **pytree.tree_map(_number, kwargs))
        return args[0] if func._schema.is_mutable and args and isinstance(args[0], LateLoss) else made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.coming.read().detach().clone().requires_grad_(self.requires_grad))

    def __format__(self, format_spec: str) -> str:
        return format(self.coming.read().detach(), format_spec)

    def numpy(self, *, force: bool = False) -> Any:
        return self.coming.read().numpy(force=force)

    def share_memory_(self) -> torch.Tensor:
        return self.coming.read().share_memory_()

    def tolist(self) -> Any:
        return self.coming.read().tolist()

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.coming.read().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.coming.read().__reduce_ex__(protocol)


def _number(value: Any) -> Any:
    return value.coming.read() if isinstance(value, LateLoss) else value


def _scaled(func: Any, operands: Sequence[Any]) -> Coming | None:
    """The number that an operation makes of one late loss, and of a number beside it; None for an operation that has to wait, or need not."""
    comings = [operand.coming for operand in operands if isinstance(operand, LateLoss)]
    if len(comings) != 1 or comings[0].is_there:
        return None
    (coming,) = comings
    if not all(_is_a_number(operand, coming.like.device) for operand in operands if not isinstance(operand, LateLoss)):
        return None
    kept = [operand.clone() if type(operand) is torch.Tensor else operand for operand in operands]  # the loop may write into it
    return coming.scaled(lambda loss: func(*(loss if isinstance(operand, LateLoss) else operand for operand in kept)))


def _is_a_number(operand: Any, device: torch.device) -> bool:
    """Whether this is a number of Python, or a tensor of one entry that takes no gradient."""
    if not isinstance(operand, torch.Tensor):
        return True
    return type(operand) is torch.Tensor and operand.numel() == 1 and not operand.requires_grad and operand.device == device


class ReadAtOnce:
    """Counts steps whose loss is read before the next step begins: each waits until the last stage has it."""

    def __init__(self) -> None:
        self._in_a_row, self._said = 0, False

    def read(self) -> None:
        """A loss is read early."""
        self._in_a_row += 1
        if self._in_a_row == _SAID_AFTER and not self._said:
            self._said = True
            warn(
                f"backend 'l2l': the loss of a step was read {_SAID_AFTER} times before the next step, and this rank waits each time until the "
                "last stage has computed it, while its own device idles. Read the loss of the step before, or that of every tenth step"
            )

    def next_step(self, was_read: bool) -> None:
        """A step begins. `was_read`: a loss of the one before was read early."""
        if not was_read:
            self._in_a_row = 0
