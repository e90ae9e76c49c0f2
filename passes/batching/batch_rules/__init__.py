"""Proves that a lowered ATen graph treats the rows of the batch independently.

A graph may be run micro-batch by micro-batch when row `r` of every result depends on row `r` of the batched inputs and
on invariant values, and on nothing else. `analyse` decides that for each output by abstract interpretation. Every value
has one of these states:

    Batch(dim, k)      batched: rows outermost in `dim`, `k` entries a row
    Partial(how)       a sum over rows, of which each micro-batch has a part
    None               invariant: the same for every micro-batch
    Mixing(op, why)    not proven; carries the first op that decided, through everything that reads it
    RowIds(dim)        internal: `arange(B)`, whose only use may be to index the batch dimension
    Order(key), ...    internal: entries that are sorted and put back, see `orders.py`

How a graph is read (`walk.py`): it comes traced twice, at two batch sizes. What differs between the two (a size, a
constant) depends on the batch; a rule has to say that it takes a differing argument as a *shape*, anywhere else it is a
number computed from the batch and mixes. Each op then falls to the first of

    a Mixing argument               -> the same Mixing
    a Partial argument              -> what `sums.py` says, if the op is linear; else Mixing("needs the sum ...")
    nothing batched in its arguments -> invariant (unless it draws random numbers)
    a rule of this package          -> what the rule says, checked against the shapes of both traces
    torch.Tag.pointwise             -> the batched arguments, broadcast, must agree
    anything else                   -> Mixing(op, "has no rule")

What two traces cannot show: a constant that depends on the batch and is equal in both (`min(B, 5)` at 7 and 11).
Where that matters, trace at the micro-batch's own size as well and compare the graphs with `same_program`.

The rules stand one family a file; `rules.py` says how one is written.
"""

from __future__ import annotations

from . import (
    attention,
    convolution,
    factories,
    indexing,
    joins,
    linalg,
    losses,
    matmul,
    normalisation,
    orders,
    pointwise,
    recurrent,
    reductions,
    views,
)
from .values import PARTS, Mixing, Partial, RowIds
from .walk import analyse, regions, same_program, states_of_nodes

__all__ = ["PARTS", "Mixing", "Partial", "RowIds", "analyse", "regions", "same_program", "states_of_nodes"]
