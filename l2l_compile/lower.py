"""Lower blocks to callables: trace once per block and size, make randomness an operand, compile.

A lowered block is called with a flat list: weights, values, (for backward) gradients of outputs, random draws.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .errors import LoweringError
from .inductor import compile_graph
from .ir.program import Block
from .ir.values import Bindings
from .randomness import Draw, hoist_draws
from .trace import example_inputs, trace_backward, trace_forward
from .widening import storages_of


@dataclass(frozen=True)
class Lowered:
    """A block at one size. `graph` is its ATen graph, `run` what executes it; both take and give flat sequences.

    draws    random draws to append to the operands, in the order of forward's operations
    seeded   whether operations remain that draw from the device's default generator themselves
    present  which outputs (backward: gradients of operands) there are; `run` returns just those
    inside   most bytes that its operations hold at once beside the operands, where each runs by itself
    """

    graph: fx.GraphModule
    run: Callable[..., Sequence[torch.Tensor]]
    draws: tuple[Draw, ...]
    seeded: bool
    present: tuple[bool, ...]
    inside: int = 0

    @property
    def random(self) -> bool:
        return self.seeded or bool(self.draws)


def most_bytes(graph: fx.Graph) -> int:
    """Most bytes that the results of an ATen graph's operations take at once, each freed after its last reader."""
    size: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        for storage in storages_of(node):
            if node.op != "placeholder" and storage._cdata not in first:
                first[storage._cdata], size[storage._cdata] = position, storage.nbytes()
        for read in (node, *node.all_input_nodes):
            last.update({storage._cdata: position for storage in storages_of(read)})
    change = [0] * (len(graph.nodes) + 1)
    for key, position in first.items():
        change[position] += size[key]
        change[last[key] + 1] -= size[key]
    return max(itertools.accumulate(change), default=0)


def _reshape_where_needed(module: fx.GraphModule) -> None:
    """Views copy where kernels lay their results out otherwise than tracing foresaw, unless something writes through them."""
    written = {
        storage._cdata
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        for read in node.all_input_nodes
        for storage in storages_of(read)
    }
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        if not any(storage._cdata in written for storage in storages_of(node)):
            node.target = torch.ops.aten.reshape.default
    module.recompile()


def _leave_out(module: fx.GraphModule, wanted: Sequence[bool]) -> bool:
    """Keep only the wanted outputs and what they are computed from; whether that saves any computation."""
    graph, before = module.graph, _computations(module.graph)
    end = graph.output_node()
    end.args = (tuple(made for made, there in zip(end.args[0], wanted, strict=True) if there),)
    graph.eliminate_dead_code()
    module.recompile()
    return _computations(graph) < before


def _computations(graph: fx.Graph) -> int:
    return sum(n.op == "call_function" and not _only_moves(n.target) for n in graph.nodes)


def _only_moves(target: Callable) -> bool:
    """Whether an operation gives what it reads: a view, a copy."""
    if target in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default) or not isinstance(target, torch._ops.OpOverload):
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)


class Lowering:
    """Lowers blocks for a device, and remembers what it has lowered: by block, sizes and given gradients."""

    def __init__(self, device: torch.device, block_compiler: str):
        self.device, self.block_compiler = device, block_compiler
        self._done: dict[tuple, Lowered] = {}

    def forward(self, block: Block, bindings: Bindings, again: bool = False) -> Lowered:
        """The block's forward at these sizes; `again` leaves out what an earlier micro-batch has made for all. Raises `LoweringError`."""
        wanted = tuple(not (again and spec.made_once) for spec in block.outputs)
        key = (block, all(wanted), None, *map(bindings.__getitem__, block.symbols))
        if key not in self._done:
            graph = trace_forward(block, bindings, self.device)
            self._done[key] = self._compile(block, graph, wanted, leave_out=not all(wanted)) or self.forward(block, bindings)
        return self._done[key]

    def backward(self, block: Block, bindings: Bindings, given: tuple[bool, ...]) -> Lowered:
        """The block's recompute and gradients, for the outputs in `given`, at these sizes. Raises `LoweringError`."""
        key = (block, True, given, *map(bindings.__getitem__, block.symbols))
        if key not in self._done:
            graph, present = trace_backward(block, bindings, self.device, given)
            self._done[key] = self._compile(block, graph, present)
        return self._done[key]

    def _compile(self, block: Block, graph: fx.GraphModule, present: tuple[bool, ...], leave_out: bool = False) -> Lowered | None:
        """The graph as a callable; `leave_out` first takes the outputs out that are not present: None if that would save nothing."""
        examples = example_inputs(graph)
        draws, seeded = hoist_draws(graph)
        if leave_out and (seeded or not _leave_out(graph, present)):
            return None
        inside = most_bytes(graph.graph)
        if self.block_compiler == "eager" or not any(n.op == "call_function" for n in graph.graph.nodes):
            _reshape_where_needed(graph)
            return Lowered(graph, graph, draws, seeded, present, inside)
        examples += [draw.make(torch.Generator(self.device)) for draw in draws]
        try:
            run = compile_graph(graph, examples, self.device)
        except Exception as error:
            raise LoweringError(
                f"{block.name} cannot be compiled by Inductor: {type(error).__name__}: {error}. "
                "The option block_compiler='eager' runs it uncompiled"
            ) from error
        return Lowered(graph, run, draws, seeded, present, inside)

