"""Checks in numbers what `analyse` promises of a function's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from l2l_compile.lowering.faster.fast_make_fx import modules_left_alone
from l2l_compile.passes.batching.batch_rules import Mixing, Partial, Rows, analyse, rules

SMALL, LARGE = 7, 11
CUTS = ([2, 2, 2], [2, 4], [1, 5])  # micro-batches of a batch of six rows
SAME = rules.BatchRule(lambda call: next(v.state for v in call.values() if v.state is not None))  # a rule that is often wrong


class Drawn(Protocol):
    """An input that can be made at any size of the batch."""

    def place(self) -> Rows | None:
        """Where its rows stand; None if it is invariant."""

    def draw(self, batch: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """It at this size of the batch; without a generator only its sizes matter."""


def trace(function: Callable, specs: Sequence[Drawn], batch: int, pre_dispatch: bool = False) -> torch.fx.Graph:
    def flat(*tensors):
        return pytree.tree_leaves(function(*tensors))

    with (
        FakeTensorMode(),
        modules_left_alone(),
    ):  # without a table of its own, make_fx may decompose operations: 2.15 writes alias for detach
        return make_fx(flat, decomposition_table={}, pre_dispatch=pre_dispatch)(*(spec.draw(batch) for spec in specs)).graph


def states_of(function: Callable, specs: Sequence[Drawn], calls: Callable | None = None) -> list[Rows | Mixing | None]:
    """What `analyse` says of a function; `calls` is an op that its graph has to hold."""
    keep_whole = calls is not None and composite(calls)
    small, large = (trace(function, specs, batch, keep_whole) for batch in (SMALL, LARGE))
    targets = {node.target for node in small.nodes}
    assert calls is None or calls in targets, f"the case does not call {calls}:\n{small}"
    return analyse(small, large, SMALL, LARGE, [spec.place() for spec in specs])


def rows(value: torch.Tensor, where: Rows, first: int, last: int) -> torch.Tensor:
    opened = value.unflatten(where.dim, (where.outer, -1, where.multiple))
    return opened.narrow(where.dim + 1, first, last - first).flatten(where.dim, where.dim + 2)


def joined(pieces: list[torch.Tensor], where: Rows) -> torch.Tensor:
    opened = [piece.unflatten(where.dim, (where.outer, -1, where.multiple)) for piece in pieces]
    return torch.cat(opened, where.dim + 1).flatten(where.dim, where.dim + 2)


def check_numbers(function: Callable, specs: Sequence[Drawn], states: list[Rows | Mixing | None]) -> None:
    """Fails where the states promise rows, entries or rows that are all alike, that the numbers do not show."""
    generator = torch.Generator().manual_seed(0)
    whole = [spec.draw(6, generator) for spec in specs]

    def run(first: int, last: int) -> list:
        piece = [t if s.place() is None else rows(t, s.place(), first, last) for t, s in zip(whole, specs, strict=True)]
        return pytree.tree_leaves(function(*(t.clone() for t in piece)))

    expected = run(0, 6)
    for sizes in CUTS:
        ends = torch.tensor(sizes).cumsum(0).tolist()
        pieces = [run(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        for i, state in enumerate(states):
            if isinstance(state, Rows):
                assert_same(joined([piece[i] for piece in pieces], state), expected[i])
                if state.equal_entries:
                    assert_same(expected[i].narrow(state.dim, 0, 1).expand_as(expected[i]), expected[i])
                if state.equal_rows:
                    assert_same(joined([rows(expected[i], state, 0, 1)] * 6, state), expected[i])
            elif isinstance(state, Partial):
                shares = [size / 6 if state.how == "mean" else 1 for size in sizes]
                assert_same(sum(share * piece[i] for share, piece in zip(shares, pieces, strict=True)), expected[i])
            elif state is None:
                for piece in pieces:
                    assert_same(piece[i], expected[i])


def assert_same(actual: object, expected: object) -> None:
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    else:
        assert actual == expected, f"{actual} is not equal to {expected}"


def proven(function: Callable, *specs: Drawn) -> list[Rows | Mixing | None]:
    """The states of a function's outputs, once the numbers bear them out."""
    states = states_of(function, specs)
    check_numbers(function, specs, states)
    return states


def composite(op: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
