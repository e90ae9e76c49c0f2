"""Proves that a lowered ATen graph treats the rows of the batch independently.

A graph may be run micro-batch by micro-batch if row `r` of every result depends on row `r` of the batched inputs and on
invariant values, and on nothing else. `analyse` decides that for each output by abstract interpretation. Every value has one
of these states (`states.py`):

    Rows(dim, k)         batched: rows outermost in `dim`, `k` entries a row
    Partial(how)         a sum over rows, of which each micro-batch has a part
    None                 invariant: the same for every micro-batch
    Mixing(op, reason)   not proven; names the first operation that was refused, and passes to everything that reads the value
    RowIds(dim)          internal: `arange(B)`, which may only index the batch dimension
    Order(key), ...      internal: entries that are sorted and put back, see `orders.py`

The graph comes traced at two batch sizes, and `walk.py` reads both traces in lockstep. An argument that differs between
them (a size, a constant) depends on the batch. A rule names the arguments that are *shapes*; a differing argument
anywhere else is a number computed from the batch, and the call mixes rows. The first line that applies gives the state of
a call's result (`one_call.py`):

    a Mixing argument                         the same Mixing
    no argument depends on the batch          invariant, unless the call draws random numbers
    an argument holds sorted entries          its rule for orders; without one, its rule for rows if that keeps the order
    an argument is a partial sum              its rule for sums, which only linear operations have
    a rule for rows                           its result
    torch.Tag.pointwise                       the rows of the batched arguments, which have to agree after broadcasting
    anything else                             Mixing(op, "has no rule")

A result with rows carries three further facts: whether its rows are equal, whether all its entries are equal, and the range of
its entries. Finally, the state is compared with the sizes in both traces. A refusal in any step gives Mixing(op, reason).

Two traces cannot show a constant that depends on the batch and is equal in both (`min(B, 5)` at 7 and 11). Where that
matters, trace at the micro-batch's own size as well and compare the graphs with `same_program`.

The rules are in one file for each family of operations; `rules.py` says how a rule is written.
"""

from __future__ import annotations

from l2l_compile.passes.batching.batch_rules import (
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
    quantized,
    recurrent,
    reductions,
    views,
)
from l2l_compile.passes.batching.batch_rules.call import PARTIAL_SUM_DTYPES
from l2l_compile.passes.batching.batch_rules.states import Mixing, Partial, ResultState, RowIds, Rows, ValueState
from l2l_compile.passes.batching.batch_rules.walk import analyse, regions, same_program, states_of_nodes

__all__ = [
    "PARTIAL_SUM_DTYPES",
    "Mixing",
    "Partial",
    "ResultState",
    "RowIds",
    "Rows",
    "ValueState",
    "analyse",
    "regions",
    "same_program",
    "states_of_nodes",
]
