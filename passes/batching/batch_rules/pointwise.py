"""Operations that work entry by entry but lack `torch.Tag.pointwise`. With this tag, no rule is needed (`rules.broadcast`)."""

from __future__ import annotations

from l2l_compile.passes.batching.batch_rules.call import Call, Refused
from l2l_compile.passes.batching.batch_rules.rules import broadcast, rule
from l2l_compile.passes.batching.batch_rules.states import Rows

# Copies: the same entries in new memory or another dtype.
rule(
    "_to_copy.default", "clone.default", "lift_fresh_copy.default", keeps_row_ids=True, keeps_equal_entries=True, keeps_order=True
)(broadcast)

# Shaped like their argument, whatever they are filled with. Each row draws its own random numbers.
rule(
    "zeros_like.default",
    "ones_like.default",
    "full_like.default",
    "empty_like.default",
    "rand_like.default",
    "randn_like.default",
    "randint_like.default",
    "randint_like.low_dtype",
    "bernoulli.default",
    "bernoulli.p",
    "bernoulli_.float",
    "bernoulli_.Tensor",
    "uniform_.default",
    "normal_.default",
    "exponential_.default",
    "geometric_.default",
    "log_normal_.default",
    "cauchy_.default",
    "random_.default",
    "random_.to",
    "poisson.default",
    "native_dropout.default",
    "_fused_dropout.default",
)(broadcast)

# Writes into a value: the result has the value's rows, and rows that are broadcast into it have to stand in the same place.
rule("copy.default", "fill.Scalar", "fill.Tensor", "zero.default", keeps_order=True)(broadcast)

# Untagged arithmetic.
rule(
    "_prelu_kernel.default",
    "hardswish.default",
    "log_sigmoid_forward.default",
    "polar.default",
    "complex.default",
    "floor_divide.default",
    "masked_fill.Tensor",
    keeps_order=True,
)(broadcast)

# Sums over ranks of a parallel layer: each entry is the sum of the entries in the same place on all ranks.
rule("l2l_compile::sum_over_ranks.default", keeps_order=True)(broadcast)


@rule("bucketize.Tensor")
def bucketize(call: Call) -> Rows:
    """Looks values up in boundaries that every row shares."""
    call.invariant("boundaries")
    return call.batched()[1]


@rule("searchsorted.Tensor")
def searchsorted(call: Call) -> Rows:
    """Looks values up in one sorted sequence that every row shares."""
    call.invariant("sorted_sequence", "sorter")
    if call["sorted_sequence"].ndim != 1:
        raise Refused("searches a table that has a row for each row of the batch")
    return call.batched()[1]
