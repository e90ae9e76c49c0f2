"""What may be done with a part of a sum: only what is linear. Anything else needs the sum over the whole batch first."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .rules import overload
from .values import Call, Partial, Refused, State, TracedValue, Varying, flattened

NEEDS_ALL = "needs the sum over the whole batch"
LINEAR: dict[torch._ops.OpOverload, Callable[[Call], State]] = {}


def linear(*names: str) -> Callable:
    """Registers what ops make of parts of sums: the state of the result, or `Refused`."""

    def register(apply: Callable) -> Callable:
        LINEAR.update({op: apply for op in map(overload, names) if op is not None})
        return apply

    return register


def of_parts(call: Call) -> State | tuple[State, ...]:
    """The state of a call that reads a part of a sum, and maybe values that every micro-batch shares."""
    if not all(isinstance(value.state, Partial | None) for value in call.values()):
        raise Refused(NEEDS_ALL)
    apply = LINEAR.get(call.op)
    if apply is None or not all(result.dtype in call.parts for result in flattened(call.small_out)):
        raise Refused(NEEDS_ALL)
    return apply(call)


def _only(call: Call, name: str = "self") -> Partial:
    """The state of an argument, where nothing else is a part of a sum or depends on the batch."""
    value = call[name]
    others = (item for key, argument in call.arguments.items() if key != name for item in flattened(argument))
    if not isinstance(value, TracedValue) or not isinstance(value.state, Partial):
        raise Refused(NEEDS_ALL)
    if any(isinstance(item, Varying) or (isinstance(item, TracedValue) and item.state is not None) for item in others):
        raise Refused(NEEDS_ALL)
    return value.state


@linear(
    "neg.default",
    "mul.Scalar",
    "div.Scalar",
    "alias.default",
    "detach.default",
    "clone.default",
    "lift_fresh_copy.default",
    "view.default",
    "_unsafe_view.default",
    "expand.default",
    "unsqueeze.default",
    "squeeze.default",
    "squeeze.dim",
    "squeeze.dims",
    "permute.default",
    "transpose.int",
    "t.default",
    "select.int",
    "slice.Tensor",
    "unbind.int",
    "split.Tensor",
    "split_with_sizes.default",
    "diagonal.default",
    "sum.default",
    "sum.dim_IntList",
    "mean.default",
    "mean.dim",
    "cumsum.default",
    "constant_pad_nd.default",
    "flip.default",
)
def alone(call: Call) -> State | tuple[State, ...]:
    """Entries moved, added up, or multiplied by a number."""
    state = _only(call)
    if call["value"] not in (None, 0):
        raise Refused(NEEDS_ALL)
    return (state,) * len(call.small_out) if isinstance(call.small_out, (list, tuple)) else state


@linear("_to_copy.default")
def cast(call: Call) -> State:
    """To another dtype, unless that rounds to whole numbers."""
    if call["self"].small.dtype.is_floating_point and not call.small_out.dtype.is_floating_point:
        raise Refused(NEEDS_ALL)
    return _only(call)


@linear("mul.Tensor")
def times(call: Call) -> State:
    """By what every micro-batch shares."""
    name = "self" if isinstance(call["self"], TracedValue) and call["self"].state is not None else "other"
    return _only(call, name)


@linear("div.Tensor")
def divided(call: Call) -> State:
    """By what every micro-batch shares; a sum by the size of the batch is a mean."""
    by = call["other"]
    if isinstance(by, Varying) and call["self"].state == Partial("sum"):
        times, rest = divmod(by.small, call.small_batch)
        if not rest and times > 0 and by.large == times * call.large_batch:
            return Partial("mean")
    return _only(call)


@linear("add.Tensor", "sub.Tensor", "rsub.Scalar", "add.Scalar")
def plus(call: Call) -> State:
    """Two sums of one kind; a mean and what every micro-batch shares."""
    terms = [call["self"], call["other"]]
    states = {t.state if isinstance(t, TracedValue) else None for t in terms if not _is_zero(t)}
    how = next(s.how for s in states if s is not None)
    if any(isinstance(item, Varying) for argument in call.arguments.values() for item in flattened(argument)):
        raise Refused(NEEDS_ALL)
    if states - {Partial(how)} and (how != "mean" or states - {Partial(how), None}):
        raise Refused(NEEDS_ALL)
    return Partial(how)


def _is_zero(term: object) -> bool:
    return not isinstance(term, TracedValue | Varying) and term == 0


@linear("cat.default", "stack.default")
def joined(call: Call) -> State:
    """Sums of one kind."""
    states = {value.state for value in call.values()}
    if len(states) != 1:
        raise Refused(NEEDS_ALL)
    return states.pop()
