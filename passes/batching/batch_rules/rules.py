"""How a rule is written and found.

    @rule("_softmax.default", "cumsum.default")          # ATen overloads, the functional ones
    def along(call: Call) -> ResultState: ...

An operation has one entry in `RULES`, with up to three functions. The arguments of a call decide which one gives its result:

    rows      all arguments are rows, row numbers or invariant, and at least one depends on the batch
    sums      an argument is a partial sum                               @rule("neg.default", of=Kind.SUMS)
    orders    an argument holds sorted entries, their order or counts    @rule("histc.default", of=Kind.ORDERS)

A function returns the state of the result (a tuple for several results), or raises `Refused` with one clause. It may assume
that no argument is Mixing. An in-place operation without a function for rows uses the function of its functional twin
(`cumsum_` uses the function of `cumsum`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from l2l_compile.passes.batching.batch_rules.call import Call, agree, aligned
from l2l_compile.passes.batching.batch_rules.states import Kind, ResultState

Apply = Callable[[Call], ResultState]


@dataclass(frozen=True)
class BatchRule:
    """The functions of an operation, and the properties of its function for rows."""

    rows: Apply | None = None
    sums: Apply | None = None
    orders: Apply | None = None
    sizes: tuple[str, ...] = ()  # arguments that are shapes: they may be computed from the size of the batch
    keeps_row_ids: bool = False  # only moves entries, so RowIds stay RowIds
    keeps_equal_entries: bool = False  # entries that are equal along the batch stay equal
    keeps_order: bool = False  # the result for an entry does not depend on its place along the batch
    reads_row_ids: bool = False  # accepts RowIds as an index
    gives_positions: bool = False  # its last result holds positions along `dim`
    writes: tuple[str, ...] = ()  # arguments that are written though the schema does not say so
    leaves_sizes: bool = False  # an in-place op on the view itself that changes only meaningless strides
    writes_if: str = ""  # a bool argument: if it is False, nothing is written, whatever the schema says


RULES: dict[str, BatchRule] = {}  # by name with its library: "aten::mm.default"


def key(name: str) -> str:
    """The key in `RULES` of `"mm.default"`, an operation of ATen, or of `"space::op.kind"`."""
    return name if "::" in name else f"aten::{name}"


def overload(name: str) -> torch._ops.OpOverload | None:
    """The operation of this name; None if this version of torch does not have it."""
    space, _, rest = key(name).partition("::")
    packet, _, kind = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet, None), kind, None)


def rule(*names: str, of: Kind = Kind.ROWS, **understands: Any) -> Callable[[Apply], Apply]:
    """Registers a function for these operations, for arguments of this kind; see `BatchRule` for the other keywords."""

    def register(apply: Apply) -> Apply:
        for name in map(key, names):
            known = RULES.get(name, BatchRule())
            assert getattr(known, of) is None, f"two rules for {of} of {name}"
            changes: dict[str, Any] = {of.value: apply, **understands}
            RULES[name] = replace(known, **changes)
        return apply

    return register


def find_rule(op: object) -> BatchRule:
    """The rule of an operation. Its function for rows may come from its functional twin or, by tag, from the pointwise rule."""
    if not isinstance(op, torch._ops.OpOverload):
        return BatchRule()
    own = RULES.get(f"{op._schema.name}.{op._overloadname}", BatchRule())
    if own.rows is not None:
        return own
    return replace(_inherited(op), sums=own.sums, orders=own.orders)


def _inherited(op: torch._ops.OpOverload) -> BatchRule:
    space, packet = op._schema.name.split("::")
    if space == "aten" and packet.endswith("_") and op._schema.is_mutable:
        twin = f"{packet[:-1]}.{op._overloadname}"
        known = RULES.get(key(twin), BatchRule())
        if known.rows is not None:
            return known
        op = overload(twin) or op
    return POINTWISE if torch.Tag.pointwise in op.tags and _takes_and_gives_tensors(op) else BatchRule()


def broadcast(call: Call) -> ResultState:
    """Entry by entry, with broadcasting: all batched arguments must have their rows in the same place."""
    first = call.small_out[0] if isinstance(call.small_out, (list, tuple)) else call.small_out
    return call.each(agree([aligned(value, first.ndim) for value in call.values()]))


POINTWISE = BatchRule(broadcast, keeps_equal_entries=True, keeps_order=True)


def _takes_and_gives_tensors(op: torch._ops.OpOverload) -> bool:
    """Whether an operation takes no list of tensors and returns only tensors. `equal`, for example, returns a bool."""
    lists = any("Tensor" in str(a.type) and "List" in str(a.type) for a in op._schema.arguments)
    return not lists and all(str(result.type) == "Tensor" for result in op._schema.returns)
