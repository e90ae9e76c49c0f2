"""Whether a block may run micro-batch by micro-batch.

Each block is traced to ATen at two batch sizes, primes that divide no size of the model, and `batch_rules` follows the
rows of the batch through the two graphs. A block is inner-looped only if every output is proven to be row-wise (or the
same for every micro-batch). Otherwise it runs on the whole batch, and `Block.reason` says which operation prevents the
proof. The same traces show which operands a block writes into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from l2l_compile.errors import LoweringError
from l2l_compile.ir.captured import Captured
from l2l_compile.ir.fingerprints import present_fingerprint
from l2l_compile.ir.segments import Block
from l2l_compile.ir.values import Bindings, Dim, TensorSpec, evaluate, is_float, rows_at
from l2l_compile.lowering.faster import trace_cache
from l2l_compile.lowering.probes import probe
from l2l_compile.lowering.trace import failed_in, settings_of_a_trace
from l2l_compile.passes.batching.batch_rules import PARTIAL_SUM_DTYPES, Mixing, Partial, Rows, ValueState, analyse
from l2l_compile.passes.batching.custom_backward import mixing_functions
from l2l_compile.passes.compilation import Compilation

NO_ROWS = "that it reads has no dimension that holds the rows of the batch in order"
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109)


@dataclass(frozen=True)
class Proof:
    """The result for a block: attributes of `Block` of the same names, and in `outputs` each `partial` and `equal_rows`."""

    mutated: tuple[int, ...]
    reason: str | None
    outputs: tuple[tuple[str | None, bool], ...] = ()
    summed_whole: tuple[int, ...] = ()


def prove_block(compilation: Compilation, block: Block) -> None:
    """Decide whether a block runs micro-batch by micro-batch.

    Sets `inner_looped`, `reason`, `mutated` and `summed_whole`, and adds an output for each operand that the block writes into.
    """
    key = _key(compilation, block)
    proof = _known[key] = _known.get(key) or _from_disk(key, lambda: _prove(compilation, block))
    if len(_known) > _MOST:
        del _known[next(iter(_known))]
    block.mutated, block.reason, block.summed_whole = proof.mutated, proof.reason, proof.summed_whole
    block.outputs += tuple(block.operands[i] for i in block.mutated)
    block.inner_looped = block.reason is None
    if block.inner_looped:
        block.outputs = tuple(replace(o, partial=p, equal_rows=a) for o, (p, a) in zip(block.outputs, proof.outputs, strict=True))


_MOST = 1024  # proofs that a process remembers
_known: dict[tuple, Proof] = {}


def forget() -> None:
    """Forget the proofs of this process."""
    _known.clear()


def _key(compilation: Compilation, block: Block) -> tuple:
    """Everything that a proof depends on: the block, the sizes of its traces, where rows are in values, and the options."""
    captured = compilation.captured
    numbers = {symbol: size for symbol, size in captured.hints.items() if symbol is not captured.batch and not is_float(symbol)}
    rows = tuple(
        (str(rows_at(spec.batch, captured.hints)), spec.mixed, spec.partial, spec.equal_rows)
        for spec in (*block.operands, *block.outputs)
    )
    return (
        "proof", present_fingerprint(block, numbers).key, rows, captured.hints.get(captured.batch), captured.why_static,
        not compilation.splits_rows, compilation.is_global,
        tuple(sorted(map(str, partial_sum_dtypes(captured)))), _is_wide(captured), *settings_of_a_trace(),
    )  # fmt: skip


def _from_disk(key: tuple, prove: Callable[[], Proof]) -> Proof:
    """The proof that another process has stored on disk. If there is none, a new proof, which is stored there."""
    name = trace_cache.digest(key)
    for entry, drop in trace_cache.read(name) if name is not None else ():
        try:
            return Proof(
                tuple(entry["mutated"]), entry["reason"], tuple((p, a) for p, a in entry["outputs"]), tuple(entry["summed_whole"])
            )
        except (TypeError, KeyError, ValueError) as error:
            drop(f"{type(error).__name__}: {error}")
    proof = prove()
    if name is not None:
        trace_cache.write(name, asdict(proof))
    return proof


def _prove(compilation: Compilation, block: Block) -> Proof:
    captured = compilation.captured
    batched = captured.batch is not None and any(v.batch for v in (*block.values, *block.outputs))
    odd = [e for e in block.sizes.values() if not _is_multiple(e, captured.batch)]
    if not compilation.splits_rows or not batched or odd:
        return Proof(probe(block, captured.hints)[1], _why_not_tried(compilation, block, odd))
    try:
        small, large, primes, mutated = probes(block, captured.hints, captured.batch)
    except LoweringError as error:
        return Proof(probe(block, captured.hints)[1], _why_not_at_other_sizes(error, captured.hints[captured.batch]))
    outputs = block.outputs + tuple(block.operands[i] for i in mutated)
    states = analyse(small, large, *primes, states_of_operands(block, captured.hints), partial_sum_dtypes(captured))
    reason = _refusal(block, outputs, states, captured.hints) or next(iter(unproven_functions(compilation, block).values()), None)
    if reason is not None:
        return Proof(mutated, reason)
    kinds = tuple((s.how if isinstance(s, Partial) else None, s is not None and s.equal_rows) for s in states)
    summed_whole = _summed_whole(block, small, _is_wide(captured))
    if compilation.is_global and summed_whole:
        return Proof(mutated, "sums gradients of a model in float64 in a narrower dtype, in the order of the rows of all ranks")
    return Proof(mutated, None, kinds, summed_whole)


def unproven_functions(compilation: Compilation, block: Block) -> dict[fx.Node, str]:
    """The calls of `torch.autograd.Function` whose backward may not run micro-batch by micro-batch, and the reason."""
    captured = compilation.captured
    primes = suitable_primes(block, captured.hints, captured.batch)
    inputs = states_of_operands(block, captured.hints)
    return mixing_functions(block, captured.hints, captured.batch, primes, inputs, partial_sum_dtypes(captured))


def probes(block: Block, hints: Bindings, batch: sympy.Symbol) -> tuple[fx.Graph, fx.Graph, tuple[int, int], tuple[int, ...]]:
    """The forward graph of a block at two batch sizes, the sizes, and the operands that it writes into."""
    primes = suitable_primes(block, hints, batch)
    (small, mutated), (large, _) = (probe(block, {**hints, batch: prime}) for prime in primes)
    return small.graph, large.graph, primes, mutated


def states_of_operands(block: Block, bindings: Bindings) -> list[Rows | Mixing | None]:
    """The states of a block's operands before it runs, at the sizes of a trace."""
    return [Mixing("a value", NO_ROWS) if spec.mixed else Rows.of(rows_at(spec.batch, bindings)) for spec in block.operands]


def partial_sum_dtypes(captured: Captured) -> frozenset[torch.dtype]:
    """The dtypes in which a sum may be taken in parts.

    A float64 model excludes float32 and complex64, so that their sums keep eager's order. Under autocast no dtype is allowed:
    every micro-batch would round its part of the gradients to 16 bits, and the parts of a head's gradients are often larger
    than their sum.
    """
    if captured.autocast is not None:
        return frozenset()
    return PARTIAL_SUM_DTYPES - {torch.float32, torch.complex64} if _is_wide(captured) else PARTIAL_SUM_DTYPES


def _is_wide(captured: Captured) -> bool:
    """Whether a model is in float64. Its computations in a narrower dtype must then keep eager's order, to the last bit."""
    return any(captured.specs[i.node].dtype is torch.float64 for i in captured.weights if i.kind == "parameter")


def _is_multiple(size: Any, batch: Any) -> bool:
    """Whether a size does not depend on the batch, or is a multiple of it."""
    return batch is None or batch not in size.free_symbols or batch not in (size / batch).free_symbols


def _why_not_at_other_sizes(error: LoweringError, rows: int) -> str:
    """The reason of a block that cannot be traced with other numbers of rows than `rows`, those of the first batch."""
    operation = failed_in(error)
    if operation is None:
        return f"cannot be traced at another batch size: {str(error).splitlines()[0]}"
    return f"'{operation}' computes with a batch of {rows} rows, but not with every number of rows: it mixes rows"


def _why_not_tried(compilation: Compilation, block: Block, odd: list) -> str:
    captured = compilation.captured
    if not compilation.splits_rows:
        return "micro_batches is 1"
    if captured.batch is None:
        return captured.why_static
    if any(v.mixed for v in block.values):
        return f"a value {NO_ROWS}"
    if odd and any(v.batch for v in (*block.values, *block.outputs)):
        return f"it computes with the size of the batch: {odd[0]}"
    return "it reads and makes no batched value"


def suitable_primes(block: Block, hints: Bindings, batch: Any) -> tuple[int, int]:
    """Two primes that divide no size in the block, so that a multiple of one can only come from the batch."""
    dims = [d for spec in (*block.operands, *block.outputs) for d in spec.shape]
    sizes = {_of_one_row(d, hints, batch) for d in dims}
    suitable = [p for p in _PRIMES if not any(size and size % p == 0 for size in sizes)]
    return (suitable[0], suitable[1]) if len(suitable) >= 2 else (10007, 10009)


def _of_one_row(dim: Dim, hints: Bindings, batch: sympy.Symbol) -> int:
    """A size for a batch of one row; 0 if it has no value then. Such a size is no multiple of the batch: its value is mixed."""
    try:
        return evaluate(dim, {**hints, batch: 1})
    except LoweringError:
        return 0


def _refusal(block: Block, outputs: Sequence[TensorSpec], states: list[ValueState], hints: Bindings) -> str | None:
    """The reason why the block cannot be inner-looped. None if every output is proven, new contents of operands included."""
    for state, spec in zip(states, outputs, strict=True):
        if isinstance(state, Mixing):
            return f"{state.op} {state.reason}"
        if spec.mixed or state != Rows.of(rows_at(spec.batch, hints)) and not isinstance(state, Partial):
            return f"an output {spec} does not hold the rows of the batch in order"
    if any(v.mixed for v in block.values):
        return f"a value {NO_ROWS}"
    return None


def _summed_whole(block: Block, graph: fx.Graph, wide: bool) -> tuple[int, ...]:
    """Indices of the invariant operands whose gradients are summed over the whole batch at once (`Block.summed_whole`).

    These are float64 operands from which narrower invariant values are computed and, in a wide model, float32 operands.
    """
    placeholders = graph.find_nodes(op="placeholder")
    varying = {p for p, spec in zip(placeholders, block.operands, strict=True) if spec.batch is not None}
    for node in graph.nodes:
        if any(a in varying for a in node.all_input_nodes):
            varying.add(node)
    shared = [
        (i, p, spec.dtype)
        for i, (p, spec) in enumerate(zip(placeholders, block.operands, strict=True))
        if spec.differentiable and p not in varying
    ]
    return tuple(
        i
        for i, p, dtype in shared
        if (any(_is_narrow(n) for n in _reached(p, varying)) if dtype is torch.float64 else wide and dtype is torch.float32)
    )


def _reached(start: fx.Node, without: set[fx.Node]) -> set[fx.Node]:
    found, waiting = set(), [start]
    while waiting:
        for user in waiting.pop().users:
            if user not in without and user not in found:
                found.add(user)
                waiting.append(user)
    return found


def _is_narrow(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.dtype is not torch.float64
