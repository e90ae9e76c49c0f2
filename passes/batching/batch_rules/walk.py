"""Walks the two traces of a graph in lockstep and carries the states from operation to operation."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from l2l_compile.passes.batching.batch_rules.aliases import States, may_write
from l2l_compile.passes.batching.batch_rules.call import (
    PARTIAL_SUM_DTYPES,
    USES_BATCH_AS_NUMBER,
    BatchSizes,
    Call,
    Refused,
    TracedValue,
    Varying,
    equal,
)
from l2l_compile.passes.batching.batch_rules.one_call import NO_RULE, fit, state_of
from l2l_compile.passes.batching.batch_rules.rules import BatchRule, find_rule
from l2l_compile.passes.batching.batch_rules.states import Kind, Mixing, ResultState, Rows, ValueState, flat

ABSENT = object()


def analyse(
    small: fx.Graph,
    large: fx.Graph,
    small_batch: int,
    large_batch: int,
    inputs: Sequence[Rows | Mixing | None],
    sum_dtypes: frozenset[torch.dtype] = PARTIAL_SUM_DTYPES,
) -> list[ValueState]:
    """States of the outputs of an ATen graph, given the states of its placeholders.

    `small` and `large` are the same function traced with static shapes at two batch sizes, preferably primes that divide no
    other size. A write into a placeholder changes the states of the values that read it afterwards in this graph. The caller
    decides how the written input affects the next micro-batch. `sum_dtypes` are the dtypes in which sums over the batch may be
    taken in parts.

    Raises ValueError if an input's state does not fit its sizes.
    """
    if not same_program(small, large):
        return _unproven_outputs(small, inputs)
    return _run(_Walk(BatchSizes(small_batch, large_batch), sum_dtypes), small, large, inputs)


def _run(walk: _Walk, small: fx.Graph, large: fx.Graph, inputs: Sequence[Rows | Mixing | None]) -> list[ValueState]:
    remaining = iter(inputs)
    for here, there in zip(small.nodes, large.nodes, strict=True):
        if here.op == "placeholder":
            walk.enter(here, there, next(remaining))
        elif here.op == "get_attr":
            walk.constant(here, there)
        elif here.op == "call_function":
            walk.call(here, there)
        elif here.op == "output":
            return walk.leave(here, there)
    raise ValueError("the graph has no output node")


def regions(
    small: fx.Graph,
    large: fx.Graph,
    small_batch: int,
    large_batch: int,
    inputs: Sequence[Rows | Mixing | None],
    sum_dtypes: frozenset[torch.dtype] = PARTIAL_SUM_DTYPES,
) -> list[ValueState] | None:
    """As `analyse`, for a graph that returns the results of all its steps. Each state is found as if operands were inputs.

    A step that mixes rows runs on the whole batch, and its readers find the rows from the sizes of its result. Sorting also
    counts as such a step, unless every reader of the order can be followed. A step that numbers the rows (RowIds) has to run
    where its result is read. None if the graph is not the same at both sizes.
    """
    if not same_program(small, large):
        return None
    output = next(n for n in small.nodes if n.op == "output")
    results = set(pytree.tree_leaves(output.args[0]))
    walk = _Walk(BatchSizes(small_batch, large_batch), sum_dtypes, operands=results)
    states = _run(walk, small, large, inputs)
    if walk.refused_orders:
        walk = _Walk(BatchSizes(small_batch, large_batch), sum_dtypes, operands=results, follow_orders=False)
        states = _run(walk, small, large, inputs)
    return states


def states_of_nodes(
    small: fx.Graph,
    large: fx.Graph,
    small_batch: int,
    large_batch: int,
    inputs: Sequence[Rows | Mixing | None],
    sum_dtypes: frozenset[torch.dtype] = PARTIAL_SUM_DTYPES,
) -> list[ResultState]:
    """The state of every node of `small`, in order, for two graphs that are the same program."""
    walk = _Walk(BatchSizes(small_batch, large_batch), sum_dtypes)
    _run(walk, small, large, inputs)
    return [walk.states.of.get(node) for node in small.nodes]


def same_program(one: fx.Graph, other: fx.Graph) -> bool:
    """Whether two graphs apply the same operations to the same values; constants and sizes may differ."""
    if len(one.nodes) != len(other.nodes):
        return False
    position = {node: i for graph in (one, other) for i, node in enumerate(graph.nodes)}

    def shape(node: fx.Node) -> tuple:
        leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
        return node.op, _target(node), spec, [position[x] if isinstance(x, fx.Node) else None for x in leaves]

    return all(shape(a) == shape(b) for a, b in zip(one.nodes, other.nodes, strict=True))


def _target(node: fx.Node) -> Any:
    return node.target if node.op == "call_function" else None  # names of placeholders and constants do not count


def _unproven_outputs(graph: fx.Graph, inputs: Sequence[Rows | Mixing | None]) -> list[ValueState]:
    """States of the outputs of a graph that differs between the two batch sizes: all are Mixing.

    An input that is returned keeps its state, unless the graph writes.
    """
    placeholders = (node for node in graph.nodes if node.op == "placeholder")
    known: dict[Any, ValueState] = {None: None}
    if not any(may_write(node) for node in graph.nodes):
        known |= dict(zip(placeholders, inputs, strict=True))
    unproven = Mixing("graph", "the graph depends on the batch size")
    output = next(node for node in graph.nodes if node.op == "output")
    return [known.get(leaf, unproven) for leaf in pytree.tree_leaves(output.args[0])]


class _Walk:
    """States of the values met so far, and which of them share memory.

    operands        results that readers take as if they were inputs: Mixing is replaced by the rows that their sizes show
    follow_orders   whether sorted entries are followed; otherwise sorting mixes rows
    refused_orders  whether a call that reads sorted entries was refused
    """

    def __init__(
        self,
        batch: BatchSizes,
        sum_dtypes: frozenset[torch.dtype],
        operands: set[fx.Node] | None = None,
        follow_orders: bool = True,
    ) -> None:
        self.batch, self.sum_dtypes, self.follow_orders = batch, sum_dtypes, follow_orders
        self.operands = operands or set()
        self.states = States()
        self.mixed: dict[fx.Node, Mixing] = {}
        self.refused_orders = False

    # ---- the four kinds of node ------------------------------------------------------------------------------------

    def enter(self, here: fx.Node, there: fx.Node, state: Rows | Mixing | None) -> None:
        small: Any = here.meta.get("val")
        large: Any = there.meta.get("val")
        if not isinstance(small, torch.Tensor):
            self.states.add(here, state if equal(small, large) else Mixing(str(here.target), USES_BATCH_AS_NUMBER))
            return
        if isinstance(state, Mixing):
            self.states.add(here, state)
            return
        if fit(str(here.target), state, small, large, self.batch) != state:
            raise ValueError(
                f"input {here.target!r} is said to be {state or 'invariant'}, but its sizes in the two "
                f"traces are {tuple(small.shape)} and {tuple(large.shape)}; pass the state that fits, or None if invariant"
            )
        self.states.add(here, state, invariant_source=state is None)

    def constant(self, here: fx.Node, there: fx.Node) -> None:
        one, other = (_attribute(node) for node in (here, there))
        same = one is not ABSENT and (one is other or equal(one, other))
        self.states.add(
            here, None if same else Mixing("constant", USES_BATCH_AS_NUMBER), ("constant", here.target), invariant_source=True
        )

    def call(self, here: fx.Node, there: fx.Node) -> None:
        if here.target is operator.getitem:
            self.states.add(here, self._item(here, there))
        else:
            known = find_rule(here.target)
            self.states.add(here, self._result(here, there, known))
            self.states.write(here, known)
        state = self.states[here]
        if here in self.operands and isinstance(state, Mixing):
            self.mixed[here] = state
            self.states.of[here] = self._by_sizes(here, there)

    def leave(self, here: fx.Node, there: fx.Node) -> list[ValueState]:
        leaves = zip(*(pytree.tree_leaves(node.args[0]) for node in (here, there)), strict=True)
        return [self._output(leaf, other) for leaf, other in leaves]

    def _output(self, leaf: Any, other: Any) -> ValueState:
        if not isinstance(leaf, fx.Node):
            return None if equal(leaf, other) else Mixing("output", USES_BATCH_AS_NUMBER)
        state = self.mixed.get(leaf, self.states[leaf])
        if isinstance(state, tuple):
            return Mixing(str(leaf.target), "has several results, which are returned as one")
        if state is not None and state.why_internal is not None and not self.operands:
            return Mixing(str(leaf.target), state.why_internal)
        return state

    # ---- one call --------------------------------------------------------------------------------------------------

    def _item(self, here: fx.Node, there: fx.Node) -> ResultState:
        """The state of one of several results."""
        index, other_index = (cast("int", node.args[1]) for node in (here, there))
        state = self.states[here.all_input_nodes[0]]
        if not isinstance(state, tuple):
            return state
        return state[index] if index == other_index else Mixing("getitem", USES_BATCH_AS_NUMBER)

    def _result(self, here: fx.Node, there: fx.Node, known: BatchRule) -> ResultState:
        """The state of a call's result: the state of its first Mixing argument, if any, and Mixing if the call is refused."""
        results = here.meta.get("val"), there.meta.get("val")
        call = Call(here.target, self._arguments(here, there), *results, self.batch, self.sum_dtypes)
        if call.mixing is not None:
            return call.each(call.mixing)
        try:
            return state_of(call, known, self.follow_orders)
        except Refused as why:
            self.refused_orders |= call.reads(Kind.ORDERS)
            return call.each(Mixing(str(here.target), str(why)))

    def _by_sizes(self, here: fx.Node, there: fx.Node) -> ValueState:
        """The rows of a value that was made from the whole batch, found from its sizes; Mixing if sizes do not show them."""
        small, large = here.meta["val"], there.meta["val"]
        try:
            return self.batch.rows_in(list(zip(small.shape, large.shape, strict=True)))
        except Refused as why:
            return Mixing(str(here.target), str(why))

    def _arguments(self, here: fx.Node, there: fx.Node) -> dict[str, Any]:
        """The arguments of a call by name, with the defaults of the schema."""
        schema = here.target._schema.arguments if isinstance(here.target, torch._ops.OpOverload) else ()
        names = [argument.name for argument in schema]
        names += [f"argument {i}" for i in range(len(names), len(here.args))]
        small = dict(here.kwargs) | dict(zip(names, here.args, strict=False))
        large = dict(there.kwargs) | dict(zip(names, there.args, strict=False))
        defaults = {a.name: a.default_value for a in schema if a.name not in small and a.has_default_value()}
        return defaults | {name: self._argument(small[name], large[name]) for name in small}

    def _argument(self, small: Any, large: Any) -> Any:
        if isinstance(small, fx.Node):
            return self._value(small, large)
        if isinstance(small, (list, tuple)):
            return [self._argument(*pair) for pair in zip(small, large, strict=True)]
        return small if equal(small, large) else Varying(small, large)

    def _value(self, small: fx.Node, large: fx.Node) -> TracedValue | Mixing:
        state = self.states[small]
        if not isinstance(small.meta.get("val"), torch.Tensor):
            return state if isinstance(state, Mixing) else Mixing(str(small.target), NO_RULE)
        (state,) = flat(state)
        return TracedValue(small.meta["val"], large.meta["val"], state)


def _attribute(node: fx.Node) -> Any:
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name, ABSENT)
    return found
