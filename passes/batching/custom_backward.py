"""The backward of a `torch.autograd.Function` is written by the user, so it is proven apart from the forward.

A derivative that autograd finds is row-wise where the forward is, and its sums over the batch may be taken in parts. A backward that
is written by hand may mix rows (`g / g.norm()`), or give a parameter a gradient that is no sum over the rows (`g.sign()`).
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch import fx

from l2l_compile.errors import LoweringError
from l2l_compile.ir.segments import Block
from l2l_compile.ir.values import Bindings
from l2l_compile.lowering.probes import ProbedFunctions, calls_functions, is_function, probe_gradients, probe_results
from l2l_compile.passes.batching.batch_rules import Mixing, Partial, Rows, ValueState, analyse

_WITHIN = "in the backward of an autograd.Function"


def mixing_functions(
    block: Block,
    hints: Bindings,
    batch: sympy.Symbol,
    primes: tuple[int, int],
    inputs: Sequence[Rows | Mixing | None],
    sum_dtypes: frozenset[torch.dtype],
) -> dict[fx.Node, str]:
    """The calls of functions in a block whose backward is not proven to run micro-batch by micro-batch, and the reason.

    `inputs` are the states of the operands of the block. `primes` are the two sizes of the batch at which it is traced.
    """
    if not calls_functions(block):
        return {}
    small, large = ({**hints, batch: prime} for prime in primes)
    try:
        results = probe_results(block, small), probe_results(block, large)
        if results[0].inner:
            return _refused(block, "a call of an autograd.Function within another graph is not followed")
        stand_ins = [_gradient_of(state) for state in _states(results, primes, inputs, sum_dtypes)]
        pairs = probe_gradients(block, small, stand_ins), probe_gradients(block, large, stand_ins)
    except LoweringError as error:
        return _refused(block, f"{_WITHIN}: {str(error).splitlines()[0]}")
    states = _states(pairs, primes, inputs, sum_dtypes)
    found: dict[fx.Node, str] = {}
    for call, argument, gradient in zip(pairs[0].calls[::2], states[::2], states[1::2], strict=True):
        if (reason := _refusal(argument, gradient)) is not None:
            found.setdefault(call, f"{reason} {_WITHIN}")
    return found


def _refused(block: Block, reason: str) -> dict[fx.Node, str]:
    return {node: reason for node in block.graph.graph.nodes if is_function(node)} or dict.fromkeys(
        block.graph.graph.nodes, reason
    )


def _states(
    probes: tuple[ProbedFunctions, ProbedFunctions],
    primes: tuple[int, int],
    inputs: Sequence[Rows | Mixing | None],
    sum_dtypes: frozenset[torch.dtype],
) -> list[ValueState]:
    return analyse(probes[0].graph, probes[1].graph, *primes, inputs, sum_dtypes)


def _gradient_of(state: ValueState) -> str:
    """The kind of the gradient of a value (see `probe_gradients`)."""
    if state is None:
        return "part"  # each micro-batch has its own, and they are added
    return "whole" if isinstance(state, Partial) else "rows"


def _refusal(argument: ValueState, gradient: ValueState) -> str | None:
    """Why a gradient is not the one that micro-batches give one after another; None if it is."""
    for state in (argument, gradient):
        if isinstance(state, Mixing):
            return f"{state.op} {state.reason}"
    if argument is None:
        return None if gradient == Partial("sum") else "a gradient that is no sum over the rows of the batch"
    if isinstance(argument, Partial):
        return None if gradient is None else "a gradient that differs from row to row, of a sum over the batch"
    is_row_wise = isinstance(argument, Rows) and isinstance(gradient, Rows) and argument.layout == gradient.layout
    return None if is_row_wise else "a gradient that does not hold the rows of the batch as its value does"
