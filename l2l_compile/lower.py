"""Lower blocks to callables: trace, make randomness an operand, compile. A lowering is found before it is made.

A lowered block is called with a flat list: weights, values, (for backward) gradients of outputs, random draws.

`Code` is what is made: once a process for blocks of equal form, whatever program they are in, with symbols for the sizes
that are symbols in the captured graph. It is right for all sizes that its guards hold for; sizes of 0 and 1, by which much is
decided, are always numbers. `Lowered` is a code at the sizes of one call.
"""
from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from .errors import LoweringError
from .forms import block_form
from .inductor import compile_graph
from .ir.program import Block
from .ir.values import Bindings, Dim, dim_of, evaluate
from .randomness import Draw, hoist_draws
from .sizes import Guards, Sizes
from .trace import trace_backward, trace_forward
from .widening import storages_of


@dataclass(frozen=True)
class Lowered:
    """A block at one size. `graph` is its ATen graph, `run` what executes it, with flat sequences of tensors.

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


@dataclass(frozen=True, eq=False)
class Code:
    """A lowered block for all sizes that its guards hold for; `graph` and `run` take the symbolic sizes before the tensors.

    taken    the memory that its operations take (see `lifetimes`)
    source   the block's graph, which keeps alive what the form of the block tells by identity
    """

    graph: fx.GraphModule
    run: Callable[..., Sequence[torch.Tensor]]
    draws: tuple[Draw, ...]
    seeded: bool
    present: tuple[bool, ...]
    guards: Guards
    taken: tuple[tuple[Dim, int, int], ...]
    source: fx.GraphModule

    def at(self, sizes: Sequence[int]) -> Lowered:
        """The code at sizes for which its guards hold."""
        bindings = dict(zip(self.guards.symbols, sizes, strict=True))
        run = functools.partial(self.run, *sizes) if self.guards.symbolic else self.run
        draws = tuple(draw.at(bindings) for draw in self.draws)
        return Lowered(self.graph, run, draws, self.seeded, self.present, most_bytes(self.taken, bindings))


def lifetimes(graph: fx.Graph) -> tuple[tuple[Dim, int, int], ...]:
    """Of all memory that an ATen graph's operations take: bytes, the operation that takes it, the last one that reads it."""
    size: dict[int, Dim] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        for storage in storages_of(node):
            if node.op != "placeholder" and storage._cdata not in first:
                first[storage._cdata], size[storage._cdata] = position, dim_of(storage.nbytes())
        for read in (node, *node.all_input_nodes):
            last.update({storage._cdata: position for storage in storages_of(read)})
    return tuple((size[key], position, last[key]) for key, position in first.items())


def most_bytes(taken: Sequence[tuple[Dim, int, int]], bindings: Bindings) -> int:
    """Most bytes that are taken at once, each freed after its last reader."""
    change = [0] * (max((last for _, _, last in taken), default=0) + 2)
    for size, first, last in taken:
        count = evaluate(size, bindings)
        change[first] += count
        change[last + 1] -= count
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


class _Store:
    """The codes of this process by form, the latest used last. At most `size` of them are kept."""

    def __init__(self, size: int):
        self._size = size
        self._codes: OrderedDict[tuple, list[Code]] = OrderedDict()

    def find(self, key: tuple, sizes: Sequence[int]) -> Code | None:
        """A code for a block of this form at these sizes, if there is one."""
        found = next((code for code in self._codes.get(key, ()) if code.guards.hold(sizes)), None)
        if found is not None:
            self._codes.move_to_end(key)
        return found

    def add(self, key: tuple, code: Code) -> None:
        """Keep a code."""
        self._codes.setdefault(key, []).append(code)
        self._codes.move_to_end(key)
        while sum(map(len, self._codes.values())) > self._size:
            self._codes.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._codes.clear()


_store = _Store(1024)
_one_at_a_time = threading.RLock()  # neither tracing nor Inductor can be used by two threads


def forget() -> None:
    """Lower everything anew from now on."""
    _store.clear()


def _surroundings() -> tuple:
    """Settings of PyTorch that a trace depends on."""
    return (
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled(),
    )  # fmt: skip


class Lowering:
    """Lowers blocks for a device, and remembers what they are at each size."""

    def __init__(self, device: torch.device, block_compiler: str):
        self.device, self.block_compiler = device, block_compiler
        self._done: dict[tuple, Lowered] = {}

    def forward(self, block: Block, bindings: Bindings, again: bool = False) -> Lowered:
        """The block's forward at these sizes; `again` leaves out what an earlier micro-batch has made for all. Raises `LoweringError`."""
        return self._at(block, bindings, "forward", tuple(not (again and spec.made_once) for spec in block.outputs))

    def backward(self, block: Block, bindings: Bindings, given: tuple[bool, ...]) -> Lowered:
        """The block's recompute and gradients, for the outputs in `given`, at these sizes. Raises `LoweringError`."""
        return self._at(block, bindings, "backward", given)

    def _at(self, block: Block, bindings: Bindings, which: str, wanted: tuple[bool, ...]) -> Lowered:
        key = (block, which, wanted, *map(bindings.__getitem__, block.symbols))
        done = self._done.get(key)
        if done is None:
            with _one_at_a_time:
                code, sizes = self._code(block, bindings, which, wanted)
                done = self._done[key] = code.at(sizes)
        return done

    def _code(self, block: Block, bindings: Bindings, which: str, wanted: tuple[bool, ...]) -> tuple[Code, tuple[int, ...]]:
        """Code for a block at these sizes, and the values of its symbolic sizes."""
        form = block_form(block, {s: bindings[s] for s in block.symbols if bindings[s] < 2 or block.static})
        how = (which, wanted, self.device, self.block_compiler, _surroundings())
        sizes = tuple(bindings[s] for s in form.symbols)
        code = _store.find((form.key, *how), sizes)
        if code is None and not any(spec.differentiable for spec in block.outputs):
            code = _store.find((form.values, *how), sizes)  # evaluation runs what training has lowered
        if code is None:
            code = self._make(block, bindings, form.symbols, which, wanted)
            _store.add((form.key, *how), code)
            if which == "forward":
                _store.add((form.values, *how), code)
        return code, sizes

    def _make(self, block: Block, bindings: Bindings, symbols: tuple, which: str, wanted: tuple[bool, ...]) -> Code:
        try:
            return self._traced(block, Sizes(bindings, symbols), which, wanted)
        except LoweringError as error:
            if not symbols:
                raise
            code = self._traced(block, Sizes(bindings), which, wanted)
            sizes = ", ".join(f"{symbol} = {bindings[symbol]}" for symbol in symbols)
            warnings.warn(f"backend 'l2l' compiles {block.name} anew for every size ({sizes}), since with symbolic sizes: {error}", stacklevel=2)
            return replace(code, guards=Guards.exactly([bindings[s] for s in symbols]))

    def _traced(self, block: Block, sizes: Sizes, which: str, wanted: tuple[bool, ...]) -> Code:
        if which == "backward":
            graph, present = trace_backward(block, sizes, self.device, wanted)
            return self._compiled(block, graph, sizes, present)
        graph = trace_forward(block, sizes, self.device)
        everything = (True,) * len(wanted)
        if wanted == everything:
            return self._compiled(block, graph, sizes, wanted)
        return self._compiled(block, graph, sizes, wanted, leave_out=True) or self._code(block, sizes.bindings, which, everything)[0]

    def _compiled(self, block: Block, graph: fx.GraphModule, sizes: Sizes, present: tuple[bool, ...], leave_out: bool = False) -> Code | None:
        """The graph as code; `leave_out` first takes the outputs out that are not present: None if that would save nothing."""
        draws, seeded = hoist_draws(graph)
        if leave_out and (seeded or not _leave_out(graph, present)):
            return None
        taken = lifetimes(graph.graph)
        if self.block_compiler == "eager" or not any(n.op == "call_function" for n in graph.graph.nodes):
            _reshape_where_needed(graph)
            run = graph
        else:
            try:
                run = compile_graph(graph, self.device)
            except Exception as error:
                raise LoweringError(
                    f"{block.name} cannot be compiled by Inductor: {type(error).__name__}: {error}. "
                    "The option block_compiler='eager' runs it uncompiled"
                ) from error
        return Code(graph, run, draws, seeded, present, sizes.guards(), taken, block.graph)
