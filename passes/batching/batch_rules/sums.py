"""Linear operations on a part of a sum. Any other operation needs the sum over the whole batch first."""

from __future__ import annotations

from l2l_compile.passes.batching.batch_rules.call import Call, Refused, TracedValue, Varying, flattened
from l2l_compile.passes.batching.batch_rules.rules import BatchRule, rule
from l2l_compile.passes.batching.batch_rules.states import Kind, Partial, ResultState

NEEDS_ALL = "needs the sum over the whole batch"


def of_sums(call: Call, known: BatchRule) -> ResultState:
    """The state of a call that reads parts of sums, and perhaps values that every micro-batch shares."""
    if not all(isinstance(state, Partial | None) for state in call.states):
        raise Refused(NEEDS_ALL)
    if known.sums is None or not all(result.dtype in call.sum_dtypes for result in flattened(call.small_out)):
        raise Refused(NEEDS_ALL)
    return known.sums(call)


def _only(call: Call, name: str = "self") -> Partial:
    """The state of an argument that is a part of a sum. Refuses the call if another argument depends on the batch."""
    value = call[name]
    others = [item for key, argument in call.arguments.items() if key != name for item in flattened(argument)]
    if not isinstance(value, TracedValue) or not isinstance(value.state, Partial) or any(map(_depends_on_batch, others)):
        raise Refused(NEEDS_ALL)
    return value.state


def _depends_on_batch(item: object) -> bool:
    return isinstance(item, Varying) or isinstance(item, TracedValue) and item.state is not None


@rule(
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
    of=Kind.SUMS,
)
def alone(call: Call) -> ResultState:
    """Moves entries, adds them up, or multiplies them by a number."""
    state = _only(call)
    if call["value"] not in (None, 0):
        raise Refused(NEEDS_ALL)
    return call.each(state)


@rule("zeros_like.default", "ones_like.default", "full_like.default", of=Kind.SUMS)
def filled_like(call: Call) -> ResultState:
    """Reads the shape alone."""
    if call.varying:
        raise Refused(NEEDS_ALL)
    return call.each(None)


@rule("l2l_compile::sum_over_ranks.default", of=Kind.SUMS)
def summed_over_ranks(call: Call) -> ResultState:
    """A sum over the ranks of a parallel layer."""
    return _only(call, "part")


@rule("_to_copy.default", of=Kind.SUMS)
def cast(call: Call) -> ResultState:
    """Casts to another dtype, unless that rounds to whole numbers."""
    if call["self"].small.dtype.is_floating_point and not call.small_out.dtype.is_floating_point:
        raise Refused(NEEDS_ALL)
    return _only(call)


@rule("mul.Tensor", of=Kind.SUMS)
def times(call: Call) -> ResultState:
    """Multiplies by a value that every micro-batch shares."""
    name = "self" if isinstance(call["self"], TracedValue) and call["self"].state is not None else "other"
    return _only(call, name)


@rule("div.Tensor", of=Kind.SUMS)
def divided(call: Call) -> ResultState:
    """Divides by a value that every micro-batch shares. A sum divided by the size of the batch is a mean."""
    if call["self"].state == Partial("sum") and call.batch.multiple_of(call["other"]) is not None:
        return Partial("mean")
    return _only(call)


@rule("add.Tensor", "sub.Tensor", "rsub.Scalar", "add.Scalar", of=Kind.SUMS)
def plus(call: Call) -> ResultState:
    """Adds two sums of one kind, or a mean and a value that every micro-batch shares."""
    if call.varying:
        raise Refused(NEEDS_ALL)
    terms = [term for term in (call["self"], call["other"]) if not _is_zero(term)]
    states = {term.state if isinstance(term, TracedValue) else None for term in terms}
    if states == {Partial("mean"), None}:
        return Partial("mean")
    if len(states) > 1:
        raise Refused(NEEDS_ALL)
    return states.pop()


def _is_zero(term: object) -> bool:
    return not isinstance(term, TracedValue | Varying) and term == 0


@rule("cat.default", "stack.default", of=Kind.SUMS)
def joined(call: Call) -> ResultState:
    """Joins sums of one kind."""
    states = set(call.states)
    if len(states) != 1:
        raise Refused(NEEDS_ALL)
    return states.pop()
