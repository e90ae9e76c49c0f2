"""How a rule is written and found.

    @rule("_softmax.default", "cumsum.default")          # ATen overloads, the functional ones
    def along_one_dim(call: Call) -> State: ...

A rule sees calls with at least one batched argument, or an argument that differs between the two traces. It returns the
state of the result (a tuple for several results), or raises `Refused` with one clause. It may assume that no argument is
Mixing. An in-place op without a rule of its own follows the rule of its functional twin (`cumsum_` that of `cumsum`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .values import Call, State, agree, aligned

aten = torch.ops.aten


@dataclass(frozen=True)
class Rule:
    """A rule, and what it understands beyond plain rows."""

    apply: Callable[[Call], State | tuple[State, ...]]
    sizes: tuple[str, ...] = ()  # arguments that are shapes: they may be computed from the size of the batch
    keeps_row_ids: bool = False  # moves entries and computes none: RowIds stay RowIds
    keeps_equal_entries: bool = False  # entries that are equal along the batch stay equal
    keeps_order: bool = False  # each entry along the batch gets what it would get in any other place
    reads_row_ids: bool = False  # takes RowIds itself, as an index
    writes: tuple[str, ...] = ()  # arguments that are written though the schema does not say so
    leaves_sizes: bool = False  # an in-place op on the view itself that leaves it as it was but for meaningless strides
    writes_if: str = ""  # the bool argument without which nothing is written, whatever the schema says


RULES: dict[torch._ops.OpOverload, Rule] = {}


def overload(name: str) -> torch._ops.OpOverload | None:
    """`"mm.default"` as an op of ATen, `"space::op.kind"` as one of another library; None where this version of torch has no such op."""
    space, _, rest = name.rpartition("::")
    packet, _, kind = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space or "aten"), packet, None), kind, None)


def rule(*names: str, **understands) -> Callable:
    """Registers a function as the rule of these ATen overloads; see `Rule` for the keywords."""

    def register(apply: Callable) -> Callable:
        for name in names:
            op = overload(name)
            if op is not None:
                assert op not in RULES, f"two rules for {op}"
                RULES[op] = Rule(apply, **understands)
        return apply

    return register


def find_rule(op: object) -> Rule | None:
    """The rule of an op: its own, its functional twin's, or the pointwise one by tag."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    if op in RULES:
        return RULES[op]
    packet = op._schema.name.split("::")[1]
    if op.namespace == "aten" and packet.endswith("_") and op._schema.is_mutable:
        twin = overload(f"{packet[:-1]}.{op._overloadname}")
        if twin in RULES:
            return RULES[twin]
        op = twin or op
    if torch.Tag.pointwise in op.tags and _takes_and_gives_tensors(op):
        return POINTWISE
    return None


def broadcast(call: Call) -> State | tuple[State, ...]:
    """Entry by entry, with broadcasting: all batched arguments must have their rows in the same place."""
    several = isinstance(call.small_out, (list, tuple))
    ndim = (call.small_out[0] if several else call.small_out).ndim
    place = agree([aligned(value, ndim) for value in call.values()])
    return (place,) * len(call.small_out) if several else place


POINTWISE = Rule(broadcast, keeps_equal_entries=True, keeps_order=True)


def _takes_and_gives_tensors(op: torch._ops.OpOverload) -> bool:
    """Keeps out `equal` (gives a bool) and anything over lists of tensors."""
    lists = any("Tensor" in str(a.type) and "List" in str(a.type) for a in op._schema.arguments)
    return not lists and all(str(result.type) == "Tensor" for result in op._schema.returns)
