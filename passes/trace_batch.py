"""Decide which blocks run micro-batch by micro-batch, by proof.

Each block is traced to ATen at two batch sizes, primes that divide no size of the model, and `batch_rules` follows
the rows of the batch through the two graphs. A block is inner-looped only if every output is proven to be row-wise
(or the same for every micro-batch); otherwise it sees the whole batch, and `Block.reason` names the operation that
decided. The same traces show which operands a block writes into; those become new versions of the value.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ..errors import L2LError, LoweringError
from ..ir.batch import Batch
from ..ir.program import Block, Segment, Value
from ..ir.values import Bindings, evaluate
from ..trace import probe
from .batch_rules import Mixing, analyse
from .compilation import Compilation

_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109)


@dataclass(frozen=True)
class TraceBatch:
    """Provides `batching`: `Block.inner_looped`, `Block.reason`, `Block.mutated` and versions of values."""

    name: str = "trace_batch"
    requires: frozenset[str] = frozenset({"segments", "blocks"})
    provides: frozenset[str] = frozenset({"batching"})

    def apply(self, compilation: Compilation) -> None:
        captured = compilation.captured
        for block in compilation.blocks:
            self._decide(compilation, block)
        rows = captured.hints.get(captured.batch, 1)
        for segment in compilation.segments:
            if segment.block.inner_looped:
                segment.micro_batches = min(compilation.options.micro_batches, rows)
        _version_values(compilation)

    def _decide(self, compilation: Compilation, block: Block) -> None:
        captured = compilation.captured
        batched = captured.batch is not None and any(v.batch for v in block.values)
        odd = [e for e in block.sizes.values() if not _is_multiple(e, captured.batch)]
        if compilation.options.micro_batches == 1 or not batched or odd:
            _, block.mutated = probe(block, captured.hints)
            _extend_outputs(block)
            block.reason = _why_not_tried(compilation, block, odd)
            return
        primes = _suitable_primes(block, captured.hints, captured.batch)
        try:
            small, mutated = probe(block, {**captured.hints, captured.batch: primes[0]})
            large, _ = probe(block, {**captured.hints, captured.batch: primes[1]})
        except LoweringError as error:
            _, block.mutated = probe(block, captured.hints)
            _extend_outputs(block)
            block.reason = f"cannot be traced at another batch size: {str(error).splitlines()[0]}"
            return
        block.mutated = mutated
        _extend_outputs(block)
        block.reason = _refusal(block, analyse(
            small.graph, large.graph, primes[0], primes[1], [None] * len(block.weights) + [v.batch for v in block.values]
        ))
        block.inner_looped = block.reason is None
        if block.inner_looped:
            block.summed_whole = _summed_whole(block, small.graph)


def _is_multiple(size, batch) -> bool:
    """Whether a size does not depend on the batch, or is a multiple of it."""
    return batch is None or batch not in size.free_symbols or batch not in (size / batch).free_symbols


def _why_not_tried(compilation: Compilation, block: Block, odd: list) -> str:
    captured = compilation.captured
    if compilation.options.micro_batches == 1:
        return "micro_batches is 1"
    if captured.batch is None:
        return captured.why_static
    if any(v.mixed for v in block.values):
        return "a value that it reads has no dimension that holds the rows of the batch in order"
    if odd and any(v.batch for v in block.values):
        return f"it computes with the size of the batch: {odd[0]}"
    return "it reads no batched value"


def _extend_outputs(block: Block) -> None:
    block.outputs = block.outputs + tuple(block.operands[i] for i in block.mutated)


def _suitable_primes(block: Block, hints: Bindings, batch) -> list[int]:
    """Primes that divide no size in the block, so that a multiple of one can only come from the batch."""
    sizes = {evaluate(d, {**hints, batch: 1}) for spec in (*block.operands, *block.outputs) for d in spec.shape}
    suitable = [p for p in _PRIMES if not any(size and size % p == 0 for size in sizes)]
    return suitable if len(suitable) >= 2 else [10007, 10009]


def _refusal(block: Block, states: list[Batch | Mixing | None]) -> str | None:
    """Why the block cannot be inner-looped; None if every output is proven."""
    for state, spec in zip(states, block.outputs, strict=True):
        if isinstance(state, Mixing):
            return f"{state.op} {state.reason}"
        if spec.mixed or state != spec.batch:
            return f"an output {spec} does not hold the rows of the batch in order"
    if not any(spec.batch for spec in block.outputs):
        return "it makes no batched value"
    if any(v.mixed for v in block.values):
        return "a value that it reads has no dimension that holds the rows of the batch in order"
    return None


def _summed_whole(block: Block, graph: fx.Graph) -> tuple[int, ...]:
    """The invariant float64 operands from which invariants of a narrower dtype are computed."""
    placeholders = graph.find_nodes(op="placeholder")
    varying = {p for p, spec in zip(placeholders, block.operands, strict=True) if spec.batch is not None}
    for node in graph.nodes:
        if any(a in varying for a in node.all_input_nodes):
            varying.add(node)
    wide = [
        (i, p) for i, (p, spec) in enumerate(zip(placeholders, block.operands, strict=True))
        if spec.differentiable and spec.dtype is torch.float64 and p not in varying
    ]
    return tuple(i for i, p in wide if any(_is_narrow(n) for n in _reached(p, varying)))


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


def _version_values(compilation: Compilation) -> None:
    """A segment that writes into a value makes a new version of it, which later segments read.

    Raises `L2LError` where the write would have to be seen through another value that shares the memory.
    """
    segments = compilation.segments
    current: dict[Value, Value] = {}
    for segment in segments:
        segment.values = tuple(current.get(v, v) for v in segment.values)
        made = []
        for index in segment.block.mutated:
            is_weight = index < len(segment.weights)
            node = segment.weights[index].node if is_weight else segment.values[index - len(segment.weights)].node
            _check_unshared(compilation, segment, node, is_weight)
            new = Value(node, current.get(Value(node), Value(node)).version + 1)
            if not is_weight:
                current[Value(node)] = new
            made.append(new)
        segment.outputs = (*segment.outputs, *made)


def _check_unshared(compilation: Compilation, writer: Segment, written: fx.Node, is_weight: bool) -> None:
    """A write into `written` may be seen later only under its own name, or by other results of the same segment."""
    later = compilation.segments[writer.index + 1 :]
    read_later = {v.node for s in later for v in s.values} | set(compilation.captured.outputs)
    read_later |= {i.node for i in compilation.captured.inputs if i.kind == "value"}  # the user sees them
    shared = [n for n in read_later if n is not written and _storage(n) == _storage(written)]
    for other in (n for n in shared if n not in {v.node for v in writer.outputs}):
        raise L2LError(
            f"segment '{writer.name}' writes in place into '{written.name}', whose memory '{other.name}' shares, which "
            "is read later. Write into a copy (x = x.clone()), or use the operation that is not in place"
        )
    name = next((w.name for w in writer.weights if w.node is written), written.name)
    if is_weight and any(w.node is written for s in compilation.segments if s is not writer for w in s.weights):
        raise L2LError(
            f"segment '{writer.name}' writes into '{name}', which other segments read as well; the order of "
            "such writes cannot be kept. Give every layer a buffer of its own"
        )


def _storage(node) -> int | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
