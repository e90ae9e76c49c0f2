"""Batch rules: what they accept is checked in numbers, what they refuse by its reason."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from batch_rule_cases import CASES, Case, I, Input, M, X
from batch_rule_checker import LARGE, SAME, SMALL, check_numbers, proven, states_of, trace
from hypothesis import given, settings
from hypothesis import strategies as st

from l2l_compile.passes.batching.batch_rules import Mixing, Partial, Rows, aliases, analyse, rules

# ---- every rule ------------------------------------------------------------------------------------------------------


def overload(name: str) -> torch._ops.OpOverload | None:
    return rules.overload(name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case) -> None:
    op = overload(case.op)
    if op is None:
        pytest.skip(f"this torch has no aten.{case.op}")
    states = states_of(case.function, case.inputs, op)
    if case.refused:
        reasons = [state.reason for state in states if isinstance(state, Mixing)]
        assert reasons and case.refused in reasons[0], states
    else:
        assert not isinstance(states[0], Mixing) and any(isinstance(state, Rows | Partial) for state in states), states
        if case.numbers:
            check_numbers(case.function, case.inputs, states)


def equal_rows(case: Case, only_first: bool) -> Callable:
    """The call on one row, repeated along the batch: in place of all batched inputs, or of the first alone."""

    def row(given: torch.Tensor, dim: int) -> torch.Tensor:
        sizes = [1 if i == dim else size for i, size in enumerate(given.shape)]
        return (torch.arange(math.prod(sizes)).view(sizes) % 3 / 4 + 0.1).to(given.dtype)

    def function(*tensors):
        batched = [i for i, spec in enumerate(case.inputs) if spec.place() is not None]
        repeated = {
            i: row(tensors[i], case.inputs[i].place().dim).expand(tensors[i].shape).clone(memory_format=torch.contiguous_format)
            for i in (batched[:1] if only_first else batched)
        }
        return case.function(*(repeated.get(i, tensor) for i, tensor in enumerate(tensors)))

    return function


@pytest.mark.parametrize("case", [case for case in CASES if case.numbers and not case.refused], ids=str)
def test_values_alike_along_the_batch(case: Case) -> None:
    if overload(case.op) is None:
        pytest.skip(f"this torch has no aten.{case.op}")
    for only_first in (True, False):
        states = proven(equal_rows(case, only_first), *case.inputs)
    said = all(state.equal_rows for state in states if isinstance(state, Rows))
    assert said or "write_through_view" in case.function.__name__ or "batch_norm" in case.op or "flash_attention" in case.op


def test_every_rule_is_in_the_table() -> None:
    of_rows = {name: rule.rows for name, rule in rules.RULES.items() if rule.rows is not None and overload(name) is not None}
    accepted = {rules.key(case.op) for case in CASES if not case.refused}
    refused = {of_rows[rules.key(case.op)] for case in CASES if case.refused and rules.key(case.op) in of_rows}
    never_accepts = {"reduce_all", "number", "squeeze_all"}
    never_refuses = {"same_dims", "unsqueeze", "permute"}  # rows stand somewhere afterwards
    never_refuses |= {"affine_grid"}  # its input has no other dimension for the batch
    missing = [name for name, apply in of_rows.items() if name not in accepted and apply.__name__ not in never_accepts]
    assert not missing, f"no accepted case for {missing}"
    missing = {apply.__name__ for apply in of_rows.values() if apply not in refused} - never_refuses
    assert not missing, f"no refused case for {missing}"


# ---- whole graphs ----------------------------------------------------------------------------------------------------


def test_a_graph_that_depends_on_the_batch_is_not_proven() -> None:
    def unrolled(x):
        for row in range(x.shape[0] - 5):
            x = x + row
        return x, None

    assert states_of(lambda x, w: (unrolled(x), w), (X("B", 4), X(4))) == [
        Mixing("graph", "the graph depends on the batch size"),
        None,
        None,
    ]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x.sin() if len(x) == SMALL else x.cos(),
        lambda x, w: x - w if len(x) == SMALL else w - x,
        lambda x, w: x.sum([1]) if len(x) == SMALL else x.sum([1, 2]),
        lambda x, w: x.neg() if len(x) == SMALL else x.neg().neg(),
    ],
    ids=["op", "order", "arguments", "length"],
)
def test_graphs_that_differ_are_not_proven(function: Callable) -> None:
    assert states_of(lambda x, w: (function(x, w), w), (X("B", 4, 4), X(4))) == [
        Mixing("graph", "the graph depends on the batch size"),
        None,
    ]


@pytest.mark.parametrize(
    "write",
    [
        lambda w, v: w.add_(1),
        lambda w, v: torch.ops.aten.native_batch_norm(torch.ones(2, 4).double(), None, None, w, v, True, 0.1, 1e-5)[0],
    ],
    ids=["plain", "statistics"],
)
def test_inputs_are_not_proven_where_graphs_differ_and_write(write: Callable) -> None:
    states = states_of(lambda x, w, v: (x.sin() if len(x) == SMALL else x.cos(), write(w, v), w, v), (X("B", 4), X(4), X(4)))
    assert all(isinstance(state, Mixing) for state in states)


def test_a_mixing_value_carries_its_first_cause() -> None:
    states = states_of(lambda x: ((x.amax(0) * x).cumsum(0), x + 1, torch.ones(3)), (X("B", 4),))
    assert states == [Mixing("aten.amax.default", "reduces the batch dimension"), Rows(0), None]


def test_a_constant_computed_from_the_batch_is_seen() -> None:
    assert states_of(lambda x: x * torch.tensor([x.shape[0]]), (X("B"),)) == [
        Mixing("constant", "uses the size of the batch as a number")
    ]
    assert proven(lambda x: x * torch.tensor([1.0, 2.0]).double(), X("B", 2)) == [Rows(0)]


def test_states_that_do_not_fit_the_sizes_are_an_error() -> None:
    graphs = [trace(torch.neg, (X("B", 4),), batch) for batch in (SMALL, LARGE)]
    with pytest.raises(ValueError, match="said to be invariant, but its sizes"):
        analyse(*graphs, SMALL, LARGE, [None])
    with pytest.raises(ValueError, match="said to be batch in dim 1"):
        analyse(*graphs, SMALL, LARGE, [Rows(1)])


@pytest.mark.parametrize("blind", ["", "_storages", "_aliased"])
def test_a_write_into_memory_is_seen_through_every_view_of_it(monkeypatch: pytest.MonkeyPatch, blind: str) -> None:
    """Storages show which values share memory, and so do schemas."""

    def function(x, y):
        base = torch.zeros(x.shape[0], 4, dtype=x.dtype)
        before = base + 1
        view, left = base.view(-1), base.split(2, 1)[0]
        base[:, 1] = y.sum(0)[1]
        still = base * 2
        base.copy_(x.roll(1, 0))
        return before, still, view, left, base, base.t() + 0

    if blind:
        monkeypatch.setattr(aliases, blind, lambda node: [])
    states = states_of(function, (X("B", 4), X(3, 4)))
    assert states[:2] == [Rows(0), Rows(0)]
    assert all(isinstance(state, Mixing) and "roll" in state.op for state in states[2:])


def test_rows_written_in_another_order_are_not_those_of_views() -> None:
    """Two layers one behind the other, written to where every order was right."""

    def function(x, y):
        base = x.new_zeros(2 * x.shape[0], 4)
        view = base.t()
        base.copy_(torch.cat([x, x]))
        return view.t() + y, base + y

    assert all(isinstance(state, Mixing) for state in states_of(function, (X("B", 4), X("2B", 4))))


def test_statistics_that_training_writes_are_not_shared() -> None:
    """Where rows are channels the result is row-wise, but the next micro-batch would find the statistics written."""

    def function(x, mean, var, training):
        copies = mean.clone(), var.clone()
        result = torch.ops.aten.native_batch_norm(x, None, None, *copies, training, 0.1, 1e-5)[0]
        return result, *(copy + 1 for copy in copies)

    specs = X("B", 3, 4), X(3), Input((3,), "positive")
    states = states_of(lambda *tensors: function(*tensors, True), specs)
    assert all(isinstance(state, Mixing) for state in states)
    assert proven(lambda *tensors: function(*tensors, False), *specs) == [Rows(0), None, None]


def by_hand(call: Callable, batch: int) -> torch.fx.Graph:
    """A graph of one input and a shared value `get_attr`, on both of which `call` may do anything."""
    graph = torch.fx.Graph(torch.nn.Module())
    graph.owning_module.register_buffer("shared", SHARED)
    x, shared = graph.placeholder("x"), graph.get_attr("shared")
    made = graph.call_function(call, (shared, 1))
    again = graph.get_attr("shared")
    result = graph.call_function(torch.ops.aten.add.Tensor, (x, again))
    graph.output((result, shared, again))
    x.meta["val"] = result.meta["val"] = torch.empty(batch, 4)
    made.meta["val"] = torch.empty(4)
    shared.meta["val"], again.meta["val"] = SHARED.clone(), SHARED.clone()
    return graph


SHARED = torch.ones(4)


@pytest.mark.parametrize(
    "call, writes",
    [(torch.ops.aten.add.Tensor, False), (torch.ops.aten.add_.Tensor, True), (torch.add, True)],
    ids=["add", "add_", "any function"],
)
def test_a_constant_that_is_written_is_not_shared(call: Callable, writes: bool) -> None:
    """A call without a schema may write into all that it reads; another node may stand for the same constant."""
    graphs = [by_hand(call, batch) for batch in (SMALL, LARGE)]
    states = analyse(*graphs, SMALL, LARGE, [Rows(0)])
    assert [isinstance(state, Mixing) for state in states] == [writes] * 3


def test_values_that_are_written_are_no_longer_alike() -> None:
    """Zeros may be seen as any order of rows; what was written into them stands in one."""

    def function(x, y):
        base = x.new_zeros(2 * x.shape[0], 4)
        view, layers = base.t(), torch.cat([x, x])
        zeros = base + layers
        base.copy_(y)
        return zeros, base + y, view.t() + layers, base + layers

    specs = X("B", 4), X("2B", 4)
    states = states_of(function, specs)
    assert states[:2] == [Rows(0, 1, 2), Rows(0, 2)]
    assert all(isinstance(state, Mixing) for state in states[2:])
    check_numbers(function, specs, states)


def test_frozen_statistics_are_not_written() -> None:
    def twice(x, mean, var):
        norm = torch.nn.functional.batch_norm
        return norm(norm(x, mean, var), mean, var), mean

    assert proven(twice, X("B", 3, 4), X(3), Input((3,), "positive")) == [Rows(0), None]


def test_attention_block() -> None:
    def block(x, mask, w_qkv, w_out, gamma):
        normed = torch.nn.functional.layer_norm(x, (8,), gamma)
        q, k, v = (normed @ w_qkv).view(x.shape[0], 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + mixed.transpose(1, 2).reshape(x.shape[0], 5, 8) @ w_out

    assert proven(block, X("B", 5, 8), X("B", 1, 5, 5), X(8, 24), X(8, 8), X(8)) == [Rows(0)]


def test_mask_of_row_numbers() -> None:
    """How Hugging Face looks a padding mask up: row, head, query and key numbers that broadcast."""

    def mask(padding):
        row, key = torch.arange(padding.shape[0])[:, None, None, None], torch.arange(5)[None, None, None, :]
        query = torch.arange(5)[None, None, :, None]
        return ((key <= query) & padding[row, key]).expand(padding.shape[0], -1, 5, 5)

    assert proven(mask, M("B", 5)) == [Rows(0)]


def test_masks_that_are_the_same_for_every_row() -> None:
    """A mask looked up in what every row shares; one that reads the rows; one that is drawn; one that was written into."""

    def masks(x, padding):
        count, shared = x.shape[0], torch.arange(5).expand(x.shape[0], -1)
        row, key = torch.arange(count)[:, None, None, None], torch.arange(5)[None, None, None, :]
        causal = (shared[row, key] <= torch.arange(5)[None, None, :, None]).expand(count, -1, 5, 5)
        written = torch.zeros(count, 5)
        view = written[:, 1:]
        view += 1
        padded = written.masked_fill(padding, 2.0)
        before = written[:, :1] + 1
        written.masked_fill_(padding, 3.0)
        drawn, ones = torch.rand(count, 5), x.new_ones(count, 2) + 1
        return torch.where(causal, 0.0, -1.0), causal & padding[row, key], drawn, padded, before, written, view, ones

    states = states_of(masks, (X("B", 4), M("B", 5)))
    assert [state.equal_rows for state in states] == [True, False, False, False, False, False, False, True]
    check_numbers(lambda *x: masks(*x)[:2], (X("B", 4), M("B", 5)), states[:2])


# ---- any composition -------------------------------------------------------------------------------------------------

STEPS: dict[str, Callable] = {
    "add": lambda x, y: x + y,
    "times other": lambda x, y: x * y.flip(0),
    "times size": lambda x, y: x * x.shape[0],
    "transpose": lambda x, y: x.transpose(0, 1),
    "transpose back": lambda x, y: x.transpose(-1, -2),
    "flatten": lambda x, y: x.reshape(-1, x.shape[-1]),
    "flatten tail": lambda x, y: x.reshape(x.shape[0], -1),
    "unflatten": lambda x, y: x.reshape(-1, 2, x.shape[-1]),
    "sum": lambda x, y: x.sum(0),
    "mean last": lambda x, y: x.mean(-1, keepdim=True),
    "softmax": lambda x, y: x.softmax(-1),
    "cumsum": lambda x, y: x.cumsum(0),
    "matmul self": lambda x, y: x @ x.transpose(-1, -2),
    "matmul other": lambda x, y: x @ y.transpose(-1, -2),
    "cat": lambda x, y: torch.cat([x, y], -1),
    "repeat": lambda x, y: x.repeat(*[1] * (x.ndim - 1), 2),
    "repeat rows": lambda x, y: x.repeat_interleave(2, 0),
    "tile rows": lambda x, y: x.repeat(2, *[1] * (x.ndim - 1)),
    "unsqueeze": lambda x, y: x.unsqueeze(1),
    "squeeze": lambda x, y: x.squeeze(0),
    "expand": lambda x, y: x.unsqueeze(0).expand(y.shape[0], *x.shape),
    "first": lambda x, y: x[0],
    "last": lambda x, y: x[..., -1:],
    "own row": lambda x, y: x[torch.arange(x.shape[0]), 0],
    "row numbers": lambda x, y: x + torch.arange(x.shape[-1]),
    "write": lambda x, y: x.clone().index_fill_(-1, torch.zeros(1, dtype=torch.long), 2.0),
    "write view": lambda x, y: (z := x.clone(), z.select(0, 0).add_(1))[0],
    "write others": lambda x, y: (z := x.clone(), z.transpose(0, -1).add_(y.mean()))[0],
    "norm": lambda x, y: torch.nn.functional.layer_norm(x, x.shape[-1:]),
}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5),
    st.sampled_from(
        [
            (X("B", 4), X("B", 4)),
            (X("B", 4), X(4)),
            (X(4, "B"), X(4, "B")),
            (X(2, "2B", 4), X("2B", 4)),
            (X("B", 2, 4), X(4)),
            (X(4), X("B", 4)),
        ]
    ),
)
def test_compositions_never_promise_wrong_rows(steps: list[str], specs: tuple[Input, Input]) -> None:
    try:
        states = states_of(all_of(steps), specs)
    except (RuntimeError, IndexError, ValueError):
        return  # the steps do not fit each other
    count = next((i for i, state in enumerate(states) if isinstance(state, Mixing)), len(states))
    check_numbers(all_of(steps[: count - 1]), specs, states[:count])  # the first value is an input, always proven


def all_of(steps: list[str]) -> Callable:
    """A function of two tensors that returns the first of them, and it after each step."""

    def function(x, y):
        values = [x]
        for step in steps:
            values.append(STEPS[step](values[-1], y))
        return values

    return function


# ---- the checker is worth something ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, function, specs",
    [
        ("cumsum.default", lambda x: x.cumsum(0), (X("B", 4),)),
        ("flip.default", lambda x: x.flip(0), (X("B", 4),)),
        ("_softmax.default", lambda x: x.softmax(0), (X("B", 4),)),
        ("native_batch_norm.default", lambda x: aten_batch_norm(x), (X("B", 3, 4),)),
        ("index.Tensor", lambda x, i: x[i * 0], (X("B", 4), I("B"))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_rule_is_caught(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable, specs: tuple[Input, ...]) -> None:
    assert isinstance(states_of(function, specs)[0], Mixing)
    monkeypatch.setitem(rules.RULES, rules.key(name), SAME)
    states = states_of(function, specs)
    assert isinstance(states[0], Rows)
    with pytest.raises(AssertionError, match="not close|not equal"):
        check_numbers(function, specs, states)


def aten_batch_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.batch_norm(x, None, None, training=True)
