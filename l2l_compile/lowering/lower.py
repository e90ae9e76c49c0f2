"""Lower blocks to callables: trace, turn random draws into operands, compile. A stored lowering is used if there is one.

A lowered block is called with a flat list: weights, values, (for backward) gradients of outputs, random draws.

A `Code` is made once per process for all blocks with equal fingerprints, in any program. Sizes that are symbols in the captured
graph are symbols in the code, which is valid for all sizes for which its guards hold. Sizes of 0 and 1 are always numbers, since many
decisions depend on them. `Lowered` is a code at the sizes of one call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import sympy
import torch
import torch._inductor.config
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from l2l_compile.devices.host import is_host
from l2l_compile.devices.registry import kind_of
from l2l_compile.errors import LoweringError, ReentryError
from l2l_compile.ir.fingerprints import block_fingerprint
from l2l_compile.ir.fx_types import arguments
from l2l_compile.ir.segments import Block
from l2l_compile.ir.values import Bindings, is_float
from l2l_compile.lowering.code_cache import Code, Lowered, Traced, lifetimes, store
from l2l_compile.lowering.faster import compile_ahead, stored_traces, trace_cache
from l2l_compile.lowering.faster.compile_ahead import Begun, CompileProgress
from l2l_compile.lowering.inductor import LOOKUPS, compile_graph, reshape_where_needed
from l2l_compile.lowering.randomness import hoist_draws
from l2l_compile.lowering.sizes import Guards, Sizes
from l2l_compile.lowering.trace import in_place_of_an_accelerator, settings_of_a_trace, trace_backward, trace_forward
from l2l_compile.reentry import COMPILATION, whole
from l2l_compile.torch_internals import gc_pause
from l2l_compile.torch_internals.threads import apart_from_compilation


def _leave_out(module: fx.GraphModule, wanted: Sequence[bool]) -> bool:
    """Keep only the wanted outputs and the operations that they need. Returns whether this removes any computation."""
    graph, before = module.graph, _computations(module.graph)
    end = graph.output_node()
    (returned,) = arguments(end)
    end.args = (tuple(made for made, there in zip(returned, wanted, strict=True) if there),)
    graph.eliminate_dead_code()
    module.recompile()
    return _computations(graph) < before


def _computations(graph: fx.Graph, besides: Sequence[Callable] = ()) -> int:
    return sum(n.op == "call_function" and n.target not in besides and not _only_moves(n.target) for n in graph.nodes)


def _only_moves(target: Callable) -> bool:
    """Whether an operation returns its operand without computing: a view or a copy."""
    if target in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default) or not isinstance(target, torch._ops.OpOverload):
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)


one_at_a_time = apart_from_compilation()  # neither tracing nor Inductor can be used by two threads, nor beside Dynamo


Request = tuple[Block, Bindings, str, tuple[bool, ...]]  # block, sizes, "forward" or "backward", wanted outputs


@dataclass(frozen=True)
class LoweringKey:
    """The key of a lowering.

    exact    the fingerprint of the block, and how it is lowered
    values   the same, with the fingerprint in which gradients do not count
    sizes    the values of its symbolic sizes; `symbols` are the block's own symbols for them
    """

    exact: tuple
    values: tuple
    sizes: tuple[int, ...]
    symbols: tuple[sympy.Symbol, ...]


@dataclass(eq=False)
class Waiting:
    """A trace that waits for its compilation, which may have begun."""

    block: Block
    sizes: Sizes
    traced: Traced
    begun: Begun | None = None


class Lowering:
    """Lowers blocks for a device, and keeps the lowered block for each size."""

    def __init__(self, device: torch.device, block_compiler: str, stands_in: bool = False):
        """`stands_in`: blocks are traced on this device in place of an accelerator that is not here."""
        self.device, self.block_compiler, self.stands_in = device, block_compiler, stands_in
        self._done: dict[tuple, Lowered] = {}
        self._with_floats: dict[tuple, tuple[Code, Lowered, tuple[sympy.Symbol, ...]]] = {}  # of blocks that read floats
        self._ahead: dict[tuple, Waiting | None] = {}
        self._progress = CompileProgress()

    def forward(self, block: Block, bindings: Bindings, again: bool = False, outputs: tuple[bool, ...] | None = None) -> Lowered:
        """The block's forward at these sizes. Raises `LoweringError`.

        `again` leaves out the outputs that an earlier micro-batch has made for all micro-batches; `outputs` is a mask of those
        that are made.
        """
        return self._at(block, bindings, "forward", outputs if outputs is not None else wanted_of(block, again))

    def backward(self, block: Block, bindings: Bindings, gradient_mask: tuple[bool, ...]) -> Lowered:
        """The block's recompute and gradients, for the outputs in `gradient_mask`, at these sizes. Raises `LoweringError`."""
        return self._at(block, bindings, "backward", gradient_mask)

    def tracing_alone(self) -> Lowering:
        """A lowering for blocks whose traces are wanted, and that are not run: nothing is compiled."""
        return Lowering(self.device, "eager", self.stands_in)

    def apart(self) -> AbstractContextManager:
        """Context manager in which blocks are traced and compiled, apart from what the caller is in."""
        return nullcontext()

    @whole(COMPILATION)
    def ahead(self, requests: Iterable[Request]) -> None:
        """Begin to compile blocks that will be requested later. An error is not raised here, but by the later request."""
        if self.block_compiler == "eager" or not is_host(self.device):
            return
        with one_at_a_time, gc_pause.paused_gc():
            for request in requests:
                waiting = self._trace_ahead(*request)
                if waiting is not None:
                    self.begin([waiting])

    def begin(self, traced: Iterable[Waiting]) -> None:
        """Begin to compile what waits for its compilation, where that can be done ahead."""
        if self.block_compiler == "eager" or not is_host(self.device):
            return
        for waiting in filter(self._is_compiled, traced):
            self._progress.expect(1)
            waiting.begun = _begun(waiting.traced.graph)

    def _trace_ahead(self, block: Block, bindings: Bindings, which: str, wanted: tuple[bool, ...]) -> Waiting | None:
        key = self.key(block, bindings, which, wanted)
        if self._find(key, block) is not None or (key.exact, key.sizes) in self._ahead:
            return None
        try:
            waiting = self._known_or_traced(key, block, bindings, which, wanted)
        except LoweringError:
            return None
        self._ahead[key.exact, key.sizes] = waiting
        return waiting

    def known(self, request: Request) -> Lowered | None:
        """The lowered block of an earlier request; None if the request has not been lowered.

        The floats of the request may be others: code is kept for sizes.
        """
        block, bindings, which, wanted = request
        key = (block, which, wanted, *map(bindings.__getitem__, block.sized_by))
        if block.sized_by == block.symbols:
            return self._done.get(key)
        if key not in self._with_floats:
            return None
        code, lowered, symbols = self._with_floats[key]
        numbers = tuple(map(bindings.__getitem__, symbols))
        return code.with_floats(lowered, numbers) if code.guards.hold_for_floats(numbers) else None

    def _at(self, block: Block, bindings: Bindings, which: str, wanted: tuple[bool, ...]) -> Lowered:
        done = self.known((block, bindings, which, wanted))
        if done is None:
            with one_at_a_time:
                done = self._at_first(block, bindings, which, wanted)
            if block.sized_by == block.symbols:
                self._done[block, which, wanted, *map(bindings.__getitem__, block.symbols)] = done
        return done

    @whole(COMPILATION)
    def _at_first(self, block: Block, bindings: Bindings, which: str, wanted: tuple[bool, ...]) -> Lowered:
        """Lower a block at sizes that are requested for the first time."""
        code, sizes = self.code(block, bindings, which, wanted)
        lowered = self.at_sizes(code, sizes, (block, bindings, which, wanted))
        if block.sized_by != block.symbols:
            symbols = self.key(block, bindings, which, wanted).symbols
            self._with_floats[block, which, wanted, *map(bindings.__getitem__, block.sized_by)] = code, lowered, symbols
        return lowered

    def at_sizes(self, code: Code, sizes: tuple[int, ...], request: Request) -> Lowered:
        """Code at the sizes of a request."""
        return code.at(sizes)

    def key(self, block: Block, bindings: Bindings, which: str, wanted: tuple[bool, ...]) -> LoweringKey:
        fingerprint = block_fingerprint(block, {s: bindings[s] for s in block.sized_by if bindings[s] < 2 or block.static})
        how = (
            which,
            wanted,
            self.device,
            self.stands_in,
            self.block_compiler,
            torch._inductor.config.get_hash(),
            *settings_of_a_trace(),
        )
        return LoweringKey(
            (fingerprint.key, how),
            (fingerprint.values, how),
            tuple(bindings[s] for s in fingerprint.symbols),
            fingerprint.symbols,
        )

    def _find(self, key: LoweringKey, block: Block) -> Code | None:
        code = store.find(key.exact, key.sizes)
        if code is None and not any(spec.differentiable for spec in block.outputs):
            code = store.find(key.values, key.sizes)  # evaluation runs the code that training has lowered
        return code

    def code(self, block: Block, bindings: Bindings, which: str, wanted: tuple[bool, ...]) -> tuple[Code, tuple[int, ...]]:
        """Code for a block at these sizes, and the values of its symbolic sizes."""
        key = self.key(block, bindings, which, wanted)
        code = self._find(key, block)
        if code is None:
            code = self._make(key, block, bindings, which, wanted)
            if code.guards.fix_float:
                return code, key.sizes  # of no use for the next value
            store.add(key.exact, code)
            if which == "forward":
                store.add(key.values, code)
        return code, key.sizes

    def _make(self, key: LoweringKey, block: Block, bindings: Bindings, which: str, wanted: tuple[bool, ...]) -> Code:
        try:
            if (key.exact, key.sizes) in self._ahead:
                waiting = self._ahead.pop((key.exact, key.sizes))
            else:
                waiting = self._known_or_traced(key, block, bindings, which, wanted)
            return self.compiled(waiting) if waiting is not None else self._everything(block, bindings, which, wanted)
        except LoweringError as error:
            if not key.symbols:
                raise
            waiting = self._traced(block, Sizes(bindings), which, wanted)
            compiles = not any(map(is_float, key.symbols))  # each value of a float would be compiled
            code = self.compiled(waiting, compiles) if waiting is not None else self._everything(block, bindings, which, wanted)
            sizes = ", ".join(f"{symbol} = {bindings[symbol]}" for symbol in key.symbols)
            warnings.warn(
                f"backend 'l2l' compiles {block.name} anew for every size ({sizes}), since with symbolic sizes: {error}",
                stacklevel=2,
            )
            return replace(code, guards=Guards.exactly(key.sizes))

    def _everything(self, block: Block, bindings: Bindings, which: str, wanted: tuple[bool, ...]) -> Code:
        return self.code(block, bindings, which, (True,) * len(wanted))[0]

    def _known_or_traced(
        self, key: LoweringKey, block: Block, bindings: Bindings, which: str, wanted: tuple[bool, ...]
    ) -> Waiting | None:
        """The graph with symbolic sizes, from disk or traced; None as in `_traced`."""
        sizes = Sizes(bindings, key.symbols)
        name = (
            trace_cache.digest(("trace", key.exact, *kind_of(self.device).identity(self.device)))
            if self.block_compiler == "inductor"
            else None
        )
        if name is None:
            return self._traced(block, sizes, which, wanted)
        known, traced = stored_traces.load(name, sizes)
        if known:
            return Waiting(block, sizes, traced) if traced is not None else None
        waiting = self._traced(block, sizes, which, wanted)
        stored_traces.save(name, waiting.traced if waiting is not None else None, sizes)
        return waiting

    def _traced(self, block: Block, sizes: Sizes, which: str, wanted: tuple[bool, ...]) -> Waiting | None:
        """Trace the graph. None if leaving out the unwanted outputs of forward would remove no computation."""
        with in_place_of_an_accelerator(self.stands_in):
            if which == "backward":
                graph, present = trace_backward(block, sizes, self.device, wanted)
            else:
                graph, present = trace_forward(block, sizes, self.device), wanted
        draws, seeded = hoist_draws(graph)
        if which == "forward" and not all(wanted) and (seeded or not _leave_out(graph, wanted)):
            return None
        (returned,) = arguments(graph.graph.output_node())
        dtypes = tuple(node.meta["val"].dtype for node in returned)
        return Waiting(block, sizes, Traced(graph, draws, seeded, present, dtypes, lifetimes(graph.graph)))

    def compiled(self, waiting: Waiting, compiles: bool = True) -> Code:
        graph = waiting.traced.graph
        if not compiles or not self._is_compiled(waiting):
            reshape_where_needed(graph)
            _LazyGraphModule.force_recompile(graph)  # generates its Python code once, before threads run it
            return Code(waiting.traced, graph, waiting.sizes.guards())
        run = self._inductor(waiting)
        return Code(waiting.traced, run, waiting.sizes.guards())

    def _is_compiled(self, waiting: Waiting) -> bool:
        """Whether Inductor compiles a trace. A trace that is valid for one value of a float that changes is not compiled."""
        graph, guards = waiting.traced.graph, waiting.sizes.guards()
        return self.block_compiler != "eager" and not guards.fix_float and _gains(graph, self.device)

    def _inductor(self, waiting: Waiting) -> Callable:
        try:
            run = waiting.begun.result() if waiting.begun is not None else compile_graph(waiting.traced.graph, self.device)
        except ReentryError:
            raise
        except Exception as error:
            raise LoweringError(
                f"{waiting.block.name} cannot be compiled by Inductor: {type(error).__name__}: {error}. "
                "The option block_compiler='eager' runs it uncompiled"
            ) from error
        self._progress.step()
        return run


def _begun(graph: fx.GraphModule) -> Begun | None:
    """A compilation that has begun; None if it failed: the later request compiles again, and raises the error."""
    try:
        return compile_ahead.begin(graph)
    except ReentryError:
        raise
    except Exception:  # noqa: BLE001 - see above
        return None


def _gains(module: fx.GraphModule, device: torch.device) -> bool:
    """Whether a compiler may make a graph faster: it has two operations that may be fused. A compilation takes seconds."""
    return _computations(module.graph, besides=LOOKUPS if is_host(device) else ()) > 1


def wanted_of(block: Block, again: bool) -> tuple[bool, ...]:
    """The mask of outputs that a micro-batch makes. `again` leaves out outputs that an earlier micro-batch has made for all."""
    return tuple(not (again and spec.computed_once) for spec in block.outputs)
