"""Blocks and segments: the pieces that a program is made of."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Protocol

import sympy
import torch
from torch import fx

from l2l_compile.errors import L2LError
from l2l_compile.ir.captured import Input
from l2l_compile.ir.values import Bindings, TensorSpec, float_operand, is_float
from l2l_compile.units import format_bytes


def symbolic_size(expression: str) -> int:
    """A size in a block's graph that depends on symbols (`Block.sizes`). Lowering replaces the call by the number."""
    raise NotImplementedError(expression)


class LoweredBlock(Protocol):
    """A block as ATen operations."""

    @property
    def graph(self) -> fx.GraphModule: ...


class BlockLowering(Protocol):
    """Lowers blocks for given sizes, each once (`lowering/lower.py`)."""

    def forward(self, block: Block, bindings: Bindings) -> LoweredBlock: ...

    def backward(self, block: Block, bindings: Bindings, gradient_mask: tuple[bool, ...], /) -> LoweredBlock: ...


@dataclass(frozen=True)
class BlockFingerprint:
    """The fingerprint of a block, with symbols named in the order in which its operands have them (`ir/fingerprints.py`).

    key      equal for two blocks that are the same function of their operands and sizes, with gradients for the same values
    values   equal for two blocks that compute the same values; gradients do not count
    symbols  the block's own symbols that the symbols in the key stand for, in order
    """

    key: tuple
    values: tuple
    symbols: tuple[sympy.Symbol, ...]


@dataclass(eq=False, repr=False)
class Block:
    """A piece of the captured graph that one or more segments are instances of; lowered once per size.

    module         the torch-level operations; None in a program that was parsed from text
    sizes          the sympy expression behind each `symbolic_size` in the graph
    autocast       dtype of the `torch.autocast` around it; None if it is off
    weights        spec of each weight operand (parameters and buffers)
    values         spec of each value operand
    outputs        spec of each output; the last `len(mutated)` outputs are the new contents of the mutated operands
    mutated        indices (into weights + values) of operands that the block writes into
    inner_looped   whether it runs micro-batch by micro-batch; if False, `reason` says why; None if not decided yet
    summed_whole   indices of invariant float64 operands that the block itself casts to a narrower dtype, and of narrower
                   operands in a float64 model. The rounding of their gradients depends on the order of the sum over the
                   batch, so their gradients are summed over the whole batch at once, as eager does
    repeats        number of segments that are instances of it
    static         whether it is lowered separately for each size (`torch.compile(dynamic=False)`)
    """

    name: str
    module: fx.GraphModule | None
    sizes: dict[str, sympy.Expr]
    autocast: torch.dtype | None
    weights: tuple[TensorSpec, ...]
    values: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    mutated: tuple[int, ...] = ()
    inner_looped: bool | None = None
    summed_whole: tuple[int, ...] = ()
    reason: str | None = None
    repeats: int = 0
    static: bool = False
    fingerprints: dict[tuple, BlockFingerprint] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Block {self.name}, x{self.repeats}, {'inner loop' if self.inner_looped else 'whole batch'}>"

    @property
    def graph(self) -> fx.GraphModule:
        """The torch-level operations, as a graph module of its operands: first the weights, then the values."""
        if self.module is None:
            raise L2LError(f"block '{self.name}' was parsed from text, which does not have its operations")
        return self.module

    @property
    def operands(self) -> tuple[TensorSpec, ...]:
        return self.weights + self.values

    @property
    def is_trained(self) -> bool:
        """Whether one of its weights takes a gradient."""
        return any(spec.differentiable for spec in self.weights)

    def weight_bytes(self, bindings: Bindings) -> int:
        """Bytes of its weights as they cross the link."""
        return sum(spec.bytes(bindings) for spec in self.weights)

    def gradient_bytes(self, bindings: Bindings) -> int:
        """Bytes of the gradients of its weights, each as wide as its weight on the link."""
        return sum(spec.bytes(bindings) for spec in self.weights if spec.differentiable)

    @functools.cached_property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """The symbols that its sizes depend on, in a fixed order. To be read only after the last pass, since it is cached."""
        sizes = [*(d for spec in (*self.operands, *self.outputs) for d in spec.shape), *self.sizes.values()]
        return tuple(sorted({s for d in sizes if not isinstance(d, int) for s in d.free_symbols}, key=str))

    @functools.cached_property
    def sized_by(self) -> tuple[sympy.Symbol, ...]:
        """The symbols that are sizes; the others are floats that the user gives. Not to be read before the last pass."""
        return tuple(symbol for symbol in self.symbols if not is_float(symbol))


def micro_batch_sizes(rows: int, micro_batches: int) -> list[int]:
    """Rows of each micro-batch: as equal as can be, none empty, the larger ones first."""
    count = min(micro_batches, rows)
    return [rows // count + (i < rows % count) for i in range(count)]


def block_bindings(block: Block, bindings: Bindings, batch: sympy.Symbol | None, micro_batches: int) -> list[Bindings]:
    """The sizes of each run of a block in a step with these bindings."""
    if not block.inner_looped:
        return [bindings]
    return [{**bindings, batch: size} for size in micro_batch_sizes(bindings[batch], micro_batches)]


@dataclass(frozen=True)
class Value:
    """A tensor of the captured graph; `version` is the number of segments that have written into it so far."""

    node: fx.Node
    version: int = 0

    def __str__(self) -> str:
        return self.node.name + (f".{self.version}" if self.version else "")


@dataclass(eq=False, repr=False)
class Segment:
    """An instance of a block in a program: a layer, or a unique piece such as embeddings or head.

    weights   the graph inputs that it fetches, in the block's order
    values    the values that it reads, in the block's order
    outputs   the values that it makes, in the block's order; where the block writes into a weight operand, the new
              contents of that weight
    span      its operations, by position in the operation sequence of the captured graph
    floats    symbols of the floats that it reads, in the order of the block's `float_operand`s
    sharded   whether some of its weights are sharded over ranks
    """

    index: int
    name: str
    block: Block
    weights: tuple[Input, ...]
    values: tuple[Value, ...]
    outputs: tuple[Value, ...]
    micro_batches: int = 1
    parameter_bytes: int = 0
    span: range = range(0)
    floats: tuple[sympy.Symbol, ...] = ()
    sharded: bool = False

    def __repr__(self) -> str:
        return f"<Segment {self.name} of {self.block.name}, {format_bytes(self.parameter_bytes)}>"

    def bindings(self, of_program: Bindings) -> Bindings:
        """The values of the block's symbols for this segment, given the values of the program's symbols."""
        if not self.floats:
            return of_program
        return {**of_program, **{float_operand(i): of_program[symbol] for i, symbol in enumerate(self.floats)}}

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return tuple(w.name for w in self.weights if w.kind == "parameter")


@dataclass(frozen=True)
class Uncut:
    """A segment that holds several layers, so that device memory grows with their number, and why it was not cut.

    `layers` is the bytes of its parameters, divided by the bytes of the largest layer's parameters.
    """

    segment: str
    layers: float
    parameter_bytes: int
    why: str
    remedy: str

    def __str__(self) -> str:
        return (
            f"segment '{self.segment}' holds {self.layers:.3g} layers ({format_bytes(self.parameter_bytes)}), and device memory grows with "
            f"their number: it is not cut because {self.why}. Remedy: {self.remedy}"
        )
