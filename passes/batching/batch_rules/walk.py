"""Walks the two traces of a graph in lockstep and carries the states from op to op."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ....ir.batch import Batch
from .memory import States, each, flat, may_write, without_equal_rows
from .orders import concerns, layout, of_orders, why_not_rows, with_range
from .rules import Rule, find_rule
from .sums import of_parts
from .values import (
    PARTS,
    USES_BATCH_AS_NUMBER,
    Call,
    Mixing,
    Partial,
    Refused,
    RowIds,
    State,
    TracedValue,
    Varying,
    batch_of_sizes,
)

ABSENT = object()


def analyse(
    small: fx.Graph,
    large: fx.Graph,
    small_batch: int,
    large_batch: int,
    inputs: Sequence[Batch | None],
    parts: frozenset[torch.dtype] = PARTS,
) -> list[Batch | Partial | Mixing | None]:
    """States of the outputs of an ATen graph, given those of its placeholders.

    `small` and `large` are the same function traced with static shapes at two batch sizes, best two primes that divide
    no other size. A write into a placeholder is seen for the sake of what reads it afterwards in this graph; what the
    written input itself means to the next micro-batch is the caller's to decide. `parts` are the dtypes in which sums over the
    batch may be taken in parts.

    Raises ValueError if an input's state does not fit its sizes.
    """
    if not same_program(small, large):
        return _unproven_outputs(small, inputs)
    return _run(_Walk(small_batch, large_batch, parts), small, large, inputs)


def _run(walk: _Walk, small: fx.Graph, large: fx.Graph, inputs: Sequence[Batch | None]) -> list[Batch | Mixing | None]:
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
    inputs: Sequence[Batch | None],
    parts: frozenset[torch.dtype] = PARTS,
) -> list[State] | None:
    """As `analyse`, for a graph that returns the results of all its steps: each state as if its operands were given.

    A step that mixes rows is run on the whole batch; what reads its result finds the rows where its sizes show them. Sorting
    does so as well, unless all that reads the order can be followed. A step that numbers the rows (RowIds) has to run where its
    result is read. None if the graph is not the same at both sizes.
    """
    if not same_program(small, large):
        return None
    output = next(n for n in small.nodes if n.op == "output")
    for without_orders in (False, True):
        walk = _Walk(small_batch, large_batch, parts)
        walk.given_anew, walk.without_orders = set(pytree.tree_leaves(output.args[0])), without_orders
        states = _run(walk, small, large, inputs)
        if not walk.orders_are_read:
            break
    return states


def states_of_nodes(
    small: fx.Graph,
    large: fx.Graph,
    small_batch: int,
    large_batch: int,
    inputs: Sequence[Batch | None],
    parts: frozenset[torch.dtype] = PARTS,
) -> list[State | tuple[State, ...]]:
    """The state of every node of `small`, in order, for two graphs that are the same program."""
    walk = _Walk(small_batch, large_batch, parts)
    _run(walk, small, large, inputs)
    return [walk.states.of.get(node) for node in small.nodes]


def same_program(one: fx.Graph, other: fx.Graph) -> bool:
    """Whether two graphs are the same ops on the same values; constants and sizes may differ."""
    if len(one.nodes) != len(other.nodes):
        return False
    position = {node: i for graph in (one, other) for i, node in enumerate(graph.nodes)}

    def shape(node: fx.Node) -> tuple:
        leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
        return node.op, _target(node), spec, [position[x] if isinstance(x, fx.Node) else None for x in leaves]

    return all(shape(a) == shape(b) for a, b in zip(one.nodes, other.nodes, strict=True))


def _target(node: fx.Node) -> Any:
    return node.target if node.op == "call_function" else None  # names of placeholders and constants do not count


def _unproven_outputs(graph: fx.Graph, inputs: Sequence[Batch | None]) -> list[Batch | Mixing | None]:
    given = dict(zip((n for n in graph.nodes if n.op == "placeholder"), inputs, strict=True))
    writes = any(may_write(node) for node in graph.nodes)
    unproven = Mixing("graph", "the graph depends on the batch size")
    output = next(n for n in graph.nodes if n.op == "output")
    return [
        given[leaf] if leaf in given and not writes else None if leaf is None else unproven
        for leaf in pytree.tree_leaves(output.args[0])
    ]


class _Walk:
    """States of the values met so far, and which of them share memory."""

    def __init__(self, small_batch: int, large_batch: int, parts: frozenset[torch.dtype]) -> None:
        self.small_batch, self.large_batch, self.parts = small_batch, large_batch, parts
        self.states = States()
        self.given_anew: set[fx.Node] = set()  # results that are taken as given by those who read them
        self.mixed: dict[fx.Node, Mixing] = {}
        self.without_orders = self.orders_are_read = (
            False  # whether sorting mixes rows; whether a refused call reads what is sorted
        )

    # ---- the four kinds of node ------------------------------------------------------------------------------------

    def enter(self, here: fx.Node, there: fx.Node, given: Batch | Mixing | None) -> None:
        values = here.meta.get("val"), there.meta.get("val")
        if not isinstance(values[0], torch.Tensor):
            self.states.add(here, given if _equal(*values) else Mixing(str(here.target), USES_BATCH_AS_NUMBER))
            return
        if isinstance(given, Mixing):
            self.states.add(here, given)
            return
        fitted = self._fit(str(here.target), given, *values)
        if fitted != given:
            sizes = [tuple(v.shape) for v in values]
            raise ValueError(
                f"input {here.target!r} is said to be {given or 'invariant'}, but its sizes in the two "
                f"traces are {sizes[0]} and {sizes[1]}; pass the state that fits, or None if invariant"
            )
        self.states.add(here, given, invariant_source=given is None)

    def constant(self, here: fx.Node, there: fx.Node) -> None:
        one, other = (_attribute(node) for node in (here, there))
        same = one is not ABSENT and (one is other or _equal(one, other))
        self.states.add(
            here, None if same else Mixing("constant", USES_BATCH_AS_NUMBER), ("constant", here.target), invariant_source=True
        )

    def call(self, here: fx.Node, there: fx.Node) -> None:
        if here.target is operator.getitem:
            state = self.states[here.args[0]]
            if isinstance(state, tuple):
                same = here.args[1] == there.args[1]
                state = state[here.args[1]] if same else Mixing("getitem", USES_BATCH_AS_NUMBER)
            self.states.add(here, state)
            self._give_anew(here, there)
            return
        arguments = self._arguments(here, there)
        rule = find_rule(here.target)
        self.states.add(here, self._result(here, there, arguments, rule))
        self.states.write(here, rule)
        self._give_anew(here, there)

    def _give_anew(self, here: fx.Node, there: fx.Node) -> None:
        if here in self.given_anew and isinstance(self.states[here], Mixing):
            self.mixed[here] = self.states[here]
            self.states.of[here] = self._by_sizes(here, there)

    def _by_sizes(self, here: fx.Node, there: fx.Node) -> Batch | Mixing | None:
        """Where the rows of a value stand that has been made from the whole batch."""
        small, large = here.meta.get("val"), there.meta.get("val")
        try:
            return batch_of_sizes(list(zip(small.shape, large.shape, strict=True)), self.small_batch, self.large_batch)
        except Refused as why:
            return Mixing(str(here.target), str(why))

    def leave(self, here: fx.Node, there: fx.Node) -> list[Batch | Mixing | None]:
        states: list[Batch | Mixing | None] = []
        for leaf, other in zip(*(pytree.tree_leaves(node.args[0]) for node in (here, there)), strict=True):
            state: Any = None
            if isinstance(leaf, fx.Node):
                state = self.mixed.get(leaf, self.states[leaf])
                if isinstance(state, RowIds) and not self.given_anew:
                    state = Mixing(str(leaf.target), "numbers the rows of the batch")
                elif concerns(state) and not self.given_anew:
                    state = Mixing(str(leaf.target), why_not_rows(state))
                elif isinstance(state, tuple):
                    state = Mixing(str(leaf.target), "has several results, which are returned as one")
            elif not _equal(leaf, other):
                state = Mixing("output", USES_BATCH_AS_NUMBER)
            states.append(state)
        return states

    # ---- one call --------------------------------------------------------------------------------------------------

    def _arguments(self, here: fx.Node, there: fx.Node) -> dict[str, Any]:
        def argument(a: Any, b: Any) -> Any:
            if isinstance(a, fx.Node):
                if isinstance(a.meta.get("val"), torch.Tensor):
                    return TracedValue(a.meta["val"], b.meta["val"], self.states[a])
                return self.states[a] if isinstance(self.states[a], Mixing) else Mixing(str(a.target), "has no rule")
            if isinstance(a, (list, tuple)):
                return [argument(*pair) for pair in zip(a, b, strict=True)]
            return a if _equal(a, b) else Varying(a, b)

        named = dict(here.kwargs)
        others = dict(there.kwargs)
        schema = here.target._schema.arguments if isinstance(here.target, torch._ops.OpOverload) else ()
        for i, (a, b) in enumerate(zip(here.args, there.args, strict=True)):
            name = schema[i].name if i < len(schema) else f"argument {i}"
            named[name], others[name] = a, b
        defaults = {a.name: a.default_value for a in schema if a.name not in named and a.has_default_value()}
        return defaults | {name: argument(named[name], others[name]) for name in named}

    def _result(self, here: fx.Node, there: fx.Node, arguments: dict[str, Any], rule: Rule | None) -> State | tuple[State, ...]:
        op = str(here.target)
        small, large = here.meta.get("val"), there.meta.get("val")
        leaves = [x for a in arguments.values() for x in (a if isinstance(a, list) else [a])]
        states = [x.state if isinstance(x, TracedValue) else x for x in leaves if isinstance(x, (TracedValue, Mixing))]
        varying = {
            name for name, a in arguments.items() if any(isinstance(x, Varying) for x in (a if isinstance(a, list) else [a]))
        }
        random = torch.Tag.nondeterministic_seeded in getattr(here.target, "tags", ())
        for state in states:
            if isinstance(state, Mixing):
                return each(state, small)
        try:
            if not varying and all(state is None for state in states):
                if not isinstance(here.target, torch._ops.OpOverload):
                    raise Refused("has no rule")
                if random:
                    raise Refused("draws random numbers that every row shares")
                return self._fit_all(op, each(None, small), small, large)
            call = Call(here.target, arguments, small, large, self.small_batch, self.large_batch, self.parts)
            if any(concerns(state) for state in states):
                return self._fit_all(op, _with_equal_rows(of_orders(call, rule), False), small, large)
            if any(isinstance(state, Partial) for state in states):
                return self._fit_all(op, _with_equal_rows(of_parts(call), False), small, large)
            if rule is None:
                raise Refused("has no rule")
            if not varying <= set(rule.sizes):
                raise Refused(USES_BATCH_AS_NUMBER)
            row_ids = any(isinstance(state, RowIds) for state in states)
            if row_ids and not (rule.keeps_row_ids or rule.reads_row_ids):
                raise Refused("computes with the number of a row")
            if row_ids and rule.keeps_row_ids:
                call = replace(call, arguments={n: _as_rows(a) for n, a in arguments.items()})
            result = rule.apply(call)
            if row_ids and rule.keeps_row_ids:
                result = _as_row_ids(result, small)
            if random or not rule.keeps_equal_entries:
                result = without_equal_rows(result, upper_bound=True)
            result = with_range(call, result, rule.keeps_row_ids)
            result = _with_equal_rows(result, not random and _from_equal_rows(states))
            result = self._fit_all(op, result, small, large)
            if random and not isinstance(result, tuple) and result is None:
                raise Refused("draws random numbers that every row shares")
            return result
        except Refused as why:
            self.orders_are_read |= any(concerns(state) for state in states)
            return each(Mixing(op, str(why)), small)

    def _fit_all(self, op: str, state: Any, small: Any, large: Any) -> State | tuple[State, ...]:
        moved = next((s for s in flat(state) if concerns(s)), None)
        if self.without_orders and moved is not None:
            raise Refused(why_not_rows(moved))
        if not isinstance(small, (list, tuple)):
            return self._fit(op, state, small, large)
        if len(small) != len(large):
            raise Refused("gives as many results as the batch has rows")
        states = state if isinstance(state, tuple) else (state,) * len(small)
        return tuple(self._fit(op, *each) for each in zip(states, small, large, strict=True))

    def _fit(self, op: str, state: State, small: Any, large: Any) -> State:
        """The state, if the sizes in both traces bear it out; Mixing if not."""
        if isinstance(state, Mixing):
            return state
        if not isinstance(small, torch.Tensor):
            return state if _equal(small, large) else Mixing(op, USES_BATCH_AS_NUMBER)
        if not all(isinstance(size, int) for size in (*small.shape, *large.shape)):
            return Mixing(op, "has a size that depends on the data")
        if small.ndim != large.ndim or small.dtype != large.dtype:
            return Mixing(op, "gives another kind of value at another size of the batch")
        try:
            seen = batch_of_sizes(list(zip(small.shape, large.shape, strict=True)), self.small_batch, self.large_batch)
        except Refused as why:
            return Mixing(op, str(why))
        expected = Batch(state.dim) if isinstance(state, RowIds) else layout(state)
        if isinstance(expected, Partial):
            expected = None
        same = seen == expected if None in (seen, expected) else (seen.dim, seen.factor) == (expected.dim, expected.factor)
        return state if same else Mixing(op, "does not keep the rows of the batch in one dimension")


def _attribute(node: fx.Node) -> Any:
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name, ABSENT)
    return found


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        real = not any(isinstance(t, torch._subclasses.FakeTensor) for t in (a, b))
        return real and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def _from_equal_rows(read: Sequence[State]) -> bool:
    """Whether rows made from these are alike: a rule says that each is made in the same way, so what it is made from has to be."""
    numbers = any(isinstance(s, RowIds) for s in read)  # with which each row is picked from others
    rows = [s for s in read if s is not None and not isinstance(s, RowIds)]
    return (bool(rows) or not numbers) and all(isinstance(s, Batch) and s.equal_rows for s in rows)


def _with_equal_rows(result: State | tuple[State, ...], equal_rows: bool) -> State | tuple[State, ...]:
    if isinstance(result, tuple):
        return tuple(_with_equal_rows(r, equal_rows) for r in result)
    return replace(result, equal_rows=equal_rows or result.equal_entries) if isinstance(result, Batch) else result


def _as_rows(argument: Any) -> Any:
    if isinstance(argument, list):
        return [_as_rows(item) for item in argument]
    if isinstance(argument, TracedValue) and isinstance(argument.state, RowIds):
        return TracedValue(argument.small, argument.large, Batch(argument.state.dim))
    return argument


def _as_row_ids(result: Any, value: Any) -> State | tuple[State, ...]:
    if isinstance(result, tuple):
        return tuple(_as_row_ids(*pair) for pair in zip(result, value, strict=True))
    if not isinstance(result, Batch) or result.factor != 1 or value.dtype not in (torch.int64, torch.int32):
        raise Refused("computes with the number of a row")
    return RowIds(result.dim)
