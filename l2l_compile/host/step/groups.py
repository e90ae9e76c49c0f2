"""The hyperparameters and counts of an optimizer whose layers are updated one by one, beside its own `step`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch

from l2l_compile.host.step.torch_step import Hyperparameters, hyperparameters
from l2l_compile.object_copies import copied, same


class Groups:
    """Keeps the counts right that an optimizer has in its param_groups, or under names in its state.

    The optimizer's own `step` finds no gradients of the compiled model, so its changes of the counts are undone. The step of
    every layer counts the same from the same start, so the counts after the layers are put into the groups, once a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._before = Hyperparameters()  # where the layers of a step begin
        self._after: Hyperparameters | None = None  # what they have left so far; None if `commit` has put it into the groups
        self._shown: Hyperparameters | None = None  # what `commit` has put there of this step
        self._snapshots: list[Hyperparameters | None] = []  # one for each running `step`, which may call its base class's `step`

    def counted(self, before: Hyperparameters, after: Hyperparameters) -> None:
        """The step of a layer has turned the hyperparameters `before` into `after`."""
        if self._before is not before:
            self._before, self._after, self._shown = before, None, None
        so_far = self._after or self._shown
        self._after = so_far.joined(after) if so_far is not None else after

    def commit(self) -> None:
        """Put the changes of the layers' steps into the groups and the state."""
        self.put_into(self._optimizer.param_groups, self._optimizer.state)
        self._shown, self._after = self._after or self._shown, None

    def put_into(self, groups: Iterable[MutableMapping[str, Any]], state: MutableMapping[Any, Any]) -> None:
        """As `commit`, into these groups and this state; the changes are kept.

        What an earlier `commit` has put there of this step is left as it is now: code of the user may have changed it.
        """
        if self._after is None:
            return
        start = self._shown or self._before
        for group, before, after in zip(groups, start.groups, self._after.groups, strict=False):
            put(group, before, after)
        put(state, start.named, self._after.named)

    def begin_own_step(self, is_undone: bool = True) -> Hyperparameters:
        """The optimizer's own `step` begins, whose changes are undone, or kept. Returns the hyperparameters now."""
        now = hyperparameters(self._optimizer)
        self._snapshots.append(now if is_undone else None)
        return now

    def end_own_step(self) -> None:
        """The optimizer's own `step` is over: undo its changes, if it found no gradients."""
        before = self._snapshots.pop() if self._snapshots else None
        if before is None:
            return
        now = hyperparameters(self._optimizer)
        for group, own, changed in zip(self._optimizer.param_groups, before.groups, now.groups, strict=True):
            put(group, changed, own)
        put(self._optimizer.state, now.named, before.named)

    def forget_own_steps(self) -> None:
        """Drop the snapshots of own steps that failed, and so were never ended."""
        self._snapshots.clear()


def put(held: MutableMapping[Any, Any], before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
    """Change entries of `held` as they have changed from `before` to `after`. Tensors stay the same objects."""
    for name in before.keys() - after.keys():
        held.pop(name, None)
    for name, value in after.items():
        if name in before and same(before[name], value):
            continue
        mine = held.get(name)
        if (
            isinstance(mine, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and (mine.shape, mine.dtype) == (value.shape, value.dtype)
        ):
            with torch.no_grad():
                mine.copy_(value)
        else:
            held[name] = copied(value)


def names_of_differences(a: Hyperparameters, b: Hyperparameters) -> tuple[list[str], list[str]]:
    """The entries of groups, and the named entries of the state, that differ."""
    in_groups = {
        name for one, other in zip(a.groups, b.groups, strict=True) for name in one.keys() | other.keys()
        if name not in one or name not in other or not same(one[name], other[name])
    }  # fmt: skip
    named = {
        k for k in a.named.keys() | b.named.keys() if k not in a.named or k not in b.named or not same(a.named[k], b.named[k])
    }
    return sorted(in_groups), sorted(map(str, named))
