"""One accepted and, where there is one, one refused use of every op that has a batch rule."""
from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from l2l_compile.passes.batching.batch_rules import Rows

aten = torch.ops.aten


@dataclass(frozen=True)
class Input:
    """A tensor of these sizes; "B" is the batch, "2B" twice the batch. Without a "B" it is invariant."""

    sizes: tuple[int | str, ...]
    kind: str = "float"  # "float", "int" (0 to 2), "bool", "complex", "positive"
    device: str = "cpu"

    def place(self) -> Rows | None:
        for dim, size in enumerate(self.sizes):
            if isinstance(size, str):
                return Rows(dim, int(size[:-1] or 1))
        return None

    def draw(self, batch: int, generator: torch.Generator | None = None) -> torch.Tensor:
        sizes = [batch * int(s[:-1] or 1) if isinstance(s, str) else s for s in self.sizes]
        if self.kind == "int":
            return torch.randint(3, sizes, device=self.device, generator=generator)
        if self.kind == "bool":
            return torch.randint(2, sizes, device=self.device, generator=generator) > 0
        dtype = {"complex": torch.complex128}.get(self.kind, torch.float32 if self.device == "cuda" else torch.float64)
        drawn = torch.randn(sizes, dtype=dtype, device=self.device, generator=generator)
        return drawn.abs().clamp(0.1, 0.9) if self.kind == "positive" else drawn


def X(*sizes):
    return Input(sizes)


def I(*sizes):  # noqa: E743 - as X and the others
    return Input(sizes, "int")


def M(*sizes):
    return Input(sizes, "bool")


def P(*sizes):
    return Input(sizes, "positive")


def C(*sizes):
    return Input(sizes, "complex")


def G(*sizes):
    return Input(sizes, device="cuda")


@dataclass(frozen=True)
class Case:
    """A use of an op, and the reason it is refused for (part of it), or "" if it is accepted."""

    op: str
    function: Callable
    inputs: tuple[Input, ...]
    refused: str = ""
    numbers: bool = True  # False: random or not initialised, or no kernel here; only the states are looked at

    def __str__(self) -> str:
        return f"{self.op}-{'refused' if self.refused else 'accepted'}"


CASES: list[Case] = []


def ok(op, function, *inputs, numbers=True):
    CASES.append(Case(op, function, inputs, numbers=numbers))


def no(op, function, *inputs, why):
    CASES.append(Case(op, function, inputs, why))


def call(op, *rest, **named):
    """The op, called on the inputs and then on constants."""
    packet, _, kind = op.partition(".")
    function = getattr(getattr(aten, packet), kind)
    return lambda *tensors: function(*tensors, *rest, **named)


def both(op, good, bad, *inputs, why, numbers=True, **named):
    """The op accepted with the constants `good` and refused with `bad`."""
    ok(op, call(op, *good, **named), *inputs, numbers=numbers)
    no(op, call(op, *bad, **named), *inputs, why=why)


# ---- pointwise -------------------------------------------------------------------------------------------------------

MISPLACED = "rows that stand in different dimensions"
ok("add.Tensor", lambda x, y, w: x + y + w, X("B", 4), X("B", 1), X(4))
ok("add.Tensor", lambda x, y: x + y, X("B", 4), X(3, "B", 4))
no("add.Tensor", lambda x, y: x + y, X("B", 1), X("B"), why=MISPLACED)
no("mul.Tensor", lambda x: x * x.shape[0], X("B", 4), why="size of the batch as a number")
no("div.Tensor", lambda x: x / x.shape[0], X("B", 4), why="size of the batch as a number")
no("mul.Tensor", lambda x: x * (2 if x.shape[0] == 7 else 2.5), X("B", 4), why="size of the batch as a number")
ok("where.self", torch.where, M("B", 4), X("B", 4), X(4))
ok("masked_fill.Scalar", lambda x, m: x.masked_fill(m, 1.0), X("B", 4), M("B", 1))
for op, rest in [("_to_copy.default", {"dtype": torch.float32}), ("clone.default", {}), ("lift_fresh_copy.default", {}),
                 ("zeros_like.default", {}), ("ones_like.default", {}), ("alias.default", {}), ("detach.default", {}),
                 ("hardswish.default", {}), ("log_sigmoid_forward.default", {}),
                 ("zero.default", {})]:
    ok(op, call(op, **rest), X("B", 4))
for op, rest in [("empty_like.default", ()), ("rand_like.default", ()), ("randn_like.default", ()),
                 ("randint_like.default", (5,)), ("randint_like.low_dtype", (1, 5)), ("bernoulli.default", ()),
                 ("bernoulli.p", (0.3,)), ("poisson.default", ()), ("native_dropout.default", (0.3, True))]:
    ok(op, call(op, *rest), P("B", 4), numbers=False)
ok("_fused_dropout.default", call("_fused_dropout.default", 0.3), G("B", 4), numbers=False)
for op, rest in [("bernoulli_.float", (0.3,)), ("uniform_.default", ()), ("normal_.default", ()),
                 ("exponential_.default", ()), ("geometric_.default", (0.3,)), ("log_normal_.default", ()),
                 ("cauchy_.default", ()), ("random_.default", ()), ("random_.to", (5,))]:
    ok(op, lambda x, op=op, rest=rest: call(op, *rest)(x.clone()), X("B", 4), numbers=False)
    no(op, lambda x, w, op=op, rest=rest: x + call(op, *rest)(w.clone()), X("B", 4), X(4),
       why="random numbers that every row shares")
ok("bernoulli_.Tensor", lambda x, p: aten.bernoulli_.Tensor(x.clone(), p * 0), X("B", 4), P("B", 4), numbers=False)
no("randn.default", lambda x: x + torch.randn(4), X("B", 4), why="random numbers that every row shares")
ok("full_like.default", lambda x: torch.full_like(x, 3), X("B", 4))
no("full_like.default", lambda x: torch.full_like(x, x.shape[0]), X("B", 4), why="size of the batch as a number")
ok("copy.default", lambda x, y: aten.copy(x, y), X("B", 4), X(4))
ok("fill.Scalar", lambda x: aten.fill.Scalar(x, 2), X("B", 4))
no("fill.Scalar", lambda x: aten.fill.Scalar(x, x.shape[0]), X("B", 4), why="size of the batch as a number")
ok("fill.Tensor", lambda x, w: aten.fill.Tensor(x, w), X("B", 4), X())
ok("_prelu_kernel.default", aten._prelu_kernel, X("B", 4), X(1, 4))
ok("polar.default", torch.polar, P("B", 4), X(4))
ok("floor_divide.default", lambda x, y: x // y, X("B", 4), P("B", 4))
ok("masked_fill.Tensor", lambda x, m, v: x.masked_fill(m, v), X("B", 4), M("B", 4), X())
ok("complex.default", torch.complex, X("B", 4), X(4))
ok("bucketize.Tensor", lambda x, w: torch.bucketize(x, w.sort()[0]), X("B", 4), X(5))
no("bucketize.Tensor", lambda w, x: torch.bucketize(w, x), X(4), X("B"), why="as its 'boundaries'")
ok("searchsorted.Tensor", lambda w, x: torch.searchsorted(w.sort()[0], x), X(5), X("B", 4))
no("searchsorted.Tensor", lambda w, x: torch.searchsorted(w, x), X("B"), X("B", 4), why="as its 'sorted_sequence'")
no("searchsorted.Tensor", lambda w, x: torch.searchsorted(w, x), X(3, 5), X(3, "B"), why="a row for each row")

# ---- views -----------------------------------------------------------------------------------------------------------

ok("view.default", lambda x: x.view(-1, 4), X("B", 3, 4))
ok("view.default", lambda x: x.view(x.shape[0] // 3, 3, 4), X("3B", 4))
ok("view.default", lambda x: x.view(2, x.shape[1] * 3), X(2, "B", 3))
ok("view.default", lambda x: x.view(-1, 4), X(3, "B", 4))
ok("view.default", lambda x: x.view(-1, 6).view(3, -1, 2), X(3, "2B", 3))
no("view.default", lambda x: x.view(3, -1), X("B", 3), why="behind another dimension")
no("view.default", lambda x: x.view(-1) * x.numel(), X("B", 3), why="size of the batch as a number")
no("view.default", lambda x: x.view(0, x.shape[0]), X("B", 0), why="behind another dimension")
no("view.default", lambda x: x.view(x.shape[1], 0), X(0, "B"), why="behind another dimension")
no("view.default", lambda x: x.view(0), X("B", 0), why="does not keep the rows")
ok("_unsafe_view.default", lambda x: aten._unsafe_view(x, [-1, 4]), X("B", 3, 4))
no("_unsafe_view.default", lambda x: aten._unsafe_view(x, [2, -1]), X(3, "B", 4), why="behind another dimension")
ok("_reshape_alias.default", lambda x: aten._reshape_alias(x, [x.shape[0] * 3], [1]), X("B", 3))
no("_reshape_alias.default", lambda x: aten._reshape_alias(x, [2, x.shape[1] * 6], [x.shape[1] * 6, 1]), X(3, "B", 4),
   why="behind another")
ok("view.dtype", lambda x: x.view(torch.int32), X("B", 4))
no("view.dtype", lambda x: x.view(torch.int32), X(4, "B"), why="several rows as one entry")
no("view.dtype", lambda x: x.view(torch.int64), X("B"), why="several rows as one entry")
ok("_conj.default", lambda x: x.conj(), C("B", 4))
ok("_neg_view.default", lambda x: torch._neg_view(x), X("B", 4))
ok("view_as_real.default", torch.view_as_real, C("B", 4))
ok("view_as_complex.default", torch.view_as_complex, X("B", 4, 2))
ok("expand.default", lambda x: x.expand(3, -1, 5), X("B", 1))
ok("expand.default", lambda x, w: x + w.expand(x.shape[0], 4), X("B", 4), X(4))
no("expand.default", lambda x: x[:, None].expand(-1, x.shape[0]), X("B"), why="two dimensions")
ok("unsqueeze.default", lambda x: (x.unsqueeze(0), x.unsqueeze(1), x.unsqueeze(-1)), X("B", 4))
ok("squeeze.dim", lambda x: x.squeeze(0).squeeze(-1).squeeze(1), X(1, "B", 4, 1))
no("squeeze.dim", lambda x: x.squeeze(0), X("B", 4), why="micro-batch of one row")
ok("squeeze.dims", lambda x: x.squeeze((0, 2)), X(1, "B", 1, 4))
no("squeeze.dims", lambda x: x.squeeze((0, 1)), X(1, "B", 1, 4), why="micro-batch of one row")
no("squeeze.default", lambda x: x.squeeze(), X("B", 1, 4), why="micro-batch of one row")
ok("permute.default", lambda x: x.permute(2, 0, 1), X("B", 4, 5))
ok("transpose.int", lambda x: (x.transpose(0, 1), x.transpose(1, 2)), X("B", 4, 5))
ok("t.default", lambda x: x.t(), X("B", 4))
ok("t.default", lambda x: x.t().reshape(-1), X("B", 4))
no("t.default", lambda x: x.t().reshape(-1, 2), X("B", 4), why="behind another dimension")
both("select.int", (1, 2), (0, 0), X("B", 4), why="some rows of the batch")
no("select.int", lambda x: x.select(-2, 0), X("B", 4), why="some rows of the batch")
no("select.int", lambda x: x.select(1, x.shape[0] - 7), X("B", 50), why="size of the batch as a number")
both("unbind.int", (1,), (0,), X("B", 4), why="batch")
both("slice.Tensor", (1, 1, 3), (0, 0, 5), X("B", 4), why="some rows of the batch")
ok("slice.Tensor", lambda x: x[0:, :, 1:3], X("B", 4, 5))
ok("slice.Tensor", lambda x: aten.slice(x, 0, 0, x.shape[0]), X("B", 4))
no("slice.Tensor", lambda x: x[:100], X("B", 4), why="some rows of the batch")
no("slice.Tensor", lambda x: x[-100:], X("B", 4), why="some rows of the batch")
no("slice.Tensor", lambda x: x[1:], X("B", 4), why="some rows of the batch")
no("slice.Tensor", lambda x: x[::2], X("B", 4), why="some rows of the batch")
no("slice.Tensor", lambda x: aten.slice(x, -2, 0, 5), X("B", 4), why="some rows of the batch")
no("slice.Tensor", lambda x, w: x + w[:x.shape[0]], X("B", 4), X(50, 4), why="needs a value")
no("slice.Tensor", lambda x: x[:, :x.shape[0]], X("B", 50), why="size of the batch as a number")
both("split.Tensor", (3, 1), (3, 0), X("B", 4), why="batch")
no("split_with_sizes.default", lambda x: x.split([2, x.shape[0] - 2]), X("B", 4), why="batch")
ok("split_with_sizes.default", lambda x: x.split([1, 3], 1), X("B", 4))
ok("unsafe_split.Tensor", lambda x: x.unsafe_split(2, 1), X("B", 4))
no("unsafe_split.Tensor", lambda x: x.unsafe_split(x.shape[0] - 1), X("B", 4), why="batch")
ok("unsafe_split_with_sizes.default", lambda x: x.unsafe_split_with_sizes([1, 3], 1), X("B", 4))
no("unsafe_split_with_sizes.default", lambda x: x.unsafe_split_with_sizes([2, x.shape[0] - 2]), X("B", 4), why="batch")
both("unfold.default", (1, 2, 1), (0, 2, 1), X("B", 4), why="window over the batch")
both("diagonal.default", (0, 0, 2), (0, 0, 1), X(4, "B", 4), why="diagonal across the batch")
ok("as_strided_.default", lambda x: torch.nn.functional.adaptive_avg_pool1d(x.transpose(1, 2), 1), X("B", 4, 3))
no("as_strided_.default", lambda x: x.clone().as_strided_((x.shape[0], 4), (1, x.shape[0])), X("B", 4), why="in memory anew")
ok("as_strided.default", lambda x: x.as_strided((x.shape[0], 3, 2), (6, 2, 1)), X("B", 6))
ok("as_strided.default", lambda x: x.as_strided((2 * x.shape[0], 2, 2), (3, 1, 1)), X("B", 6))  # windows that overlap
ok("as_strided.default", lambda x: x.as_strided((2, x.shape[0], 1), (3, 6, x.shape[0])), X("B", 1, 6))
ok("as_strided.default", lambda x: x.as_strided((2 * x.shape[1], 3, 2, 2), (3, 6 * x.shape[1], 1, 1)), X(4, "B", 6))  # time first
no("as_strided.default", lambda x: x.as_strided((x.shape[1], 2, 4), (6, 18, 1)), X(4, "B", 6), why="reads other rows")
no("as_strided.default", lambda x: x.as_strided((x.shape[1], 2, 4), (6, 6 * x.shape[1] - 6, 1)), X(4, "B", 6), why="reads other rows")
for rest, stride in (((6,), (1, 1)), ((3,), (3, 1)), ((2, 2), (3, 3, 1))):
    no("as_strided.default", lambda x, rest=rest, stride=stride: x.as_strided((x.shape[0], *rest), stride), X("B", 6), why="reads other rows")
ok("as_strided.default", lambda x: x.as_strided((x.shape[1], 4), (1, x.shape[1])), X(4, "B"))
no("as_strided.default", lambda x: x.as_strided((x.shape[0], 2), (6, 1), 1), X("B", 6), why="takes some rows")
no("as_strided.default", lambda x: x.as_strided((6, 2), (1, 1)), X("B", 6), why="takes some rows")
no("as_strided_.default", lambda x: x.clone().as_strided_((x.shape[0], 4), (4, 1), 0), X("B", 4), why="in memory anew")
ok("slice_scatter.default", lambda x, y: aten.slice_scatter(x, y, 1, 1, 3), X("B", 4), X("B", 2))
no("slice_scatter.default", lambda x, y: aten.slice_scatter(x, y, 0, 1, 3), X("B", 4), X(2, 4), why="some rows")
ok("slice_scatter.default", lambda x, y: aten.slice_scatter(x, y, 0, 1, 3), X(4, "B"), X(2, "B"))
no("slice_scatter.default", lambda x, y: aten.slice_scatter(x, y, -2, 1, 3), X("B", 4), X(2, 4), why="some rows")
no("slice_scatter.default", lambda x, y: aten.slice_scatter(x, torch.cat([y, y]), 1, 1, 3), X("2B", 4), X("B", 2), why=MISPLACED)
ok("select_scatter.default", lambda x, y: aten.select_scatter(x, y, 0, 1), X(4, "B"), X("B"))
no("select_scatter.default", lambda x, y: aten.select_scatter(x, y, 0, 1), X("B", 4), X(4), why="some rows")
ok("select_scatter.default", lambda x, y: aten.select_scatter(x, y, 1, 1), X("B", 4), X("B"))

# ---- joins -----------------------------------------------------------------------------------------------------------

ok("cat.default", lambda x, y: torch.cat([x, y], 1), X("B", 4), X("B", 2))
ok("cat.default", lambda x, y: torch.cat([x, y]), X("B", 4), X("B", 4))
ok("cat.default", lambda x, y: torch.cat([x, y], -2), X("B", 4), X("B", 4))
ok("cat.default", lambda x: [torch.cat([x.new_zeros(0), x], dim) for dim in (0, 1)], X("B", 4))
ok("cat.default", lambda x, y: torch.cat([torch.cat([x, y]), x]).view(3, -1, 4), X("2B", 4), X("2B", 4))
no("cat.default", lambda x, y: torch.cat([x, y]), X("B", 4), X("2B", 4), why=MISPLACED)
no("cat.default", lambda x, w: torch.cat([x, w]), X("B", 4), X(3, 4), why=MISPLACED)
ok("stack.default", lambda x, y: (torch.stack([x, y]), torch.stack([x, y], 1)), X("B", 4), X("B", 4))
ok("stack.default", lambda x: torch.stack([x, x]).reshape(-1), X("B", 4))
ok("stack.default", lambda x: torch.stack([x, x], -1), X("B", 4))
no("stack.default", lambda x, y: torch.stack([torch.cat([x, x]), y]), X("B"), X("2B"), why=MISPLACED)
ok("repeat.default", lambda x: x.repeat(2, 1, 3), X("B", 4))
ok("repeat.default", lambda x, w: w.repeat(x.shape[0], 2), X("B", 4), X(3, 4))
ok("repeat.default", lambda x: x.repeat(2, 1), X("B", 4))
ok("repeat.default", lambda x: torch.cat([x, x]).repeat(3, 1), X("B", 4))
no("repeat.default", lambda x: x.repeat(x.shape[0], 1), X("B", 4), why="repeats the batch")
both("flip.default", ([1],), ([0, 1],), X("B", 4), why="order of the rows")
ok("flip.default", call("flip.default", []), X("B", 4))
no("flip.default", call("flip.default", [-2]), X("B", 4), why="order of the rows")
both("roll.default", ([1], [1]), ([1],), X("B", 4), why="along the batch")
no("roll.default", lambda x: x.roll(x.shape[0], 1), X("B", 4), why="size of the batch as a number")
both("constant_pad_nd.default", ([1, 2], 0.5), ([0, 0, 1, 0], 0.5), X("B", 4), why="pads the batch")
both("constant_pad_nd.default", ([1, 2, 0, 0, 2, 1], 0.5), ([0, 0, 0, 1], 0.5), X(2, "B", 4), why="pads the batch")
both("constant_pad_nd.default", ([2, 1],), ([0, 0, 1, -1],), X(2, "B", 4), why="pads the batch")
no("constant_pad_nd.default", call("constant_pad_nd.default", [-1, 1]), X(2, "B"), why="pads the batch")
no("constant_pad_nd.default", lambda x: aten.constant_pad_nd(x, [x.shape[0], 0]), X("B", 4), why="size of the batch as a number")
for n in (1, 2, 3):
    for kind in ("reflection", "replication"):
        ok(f"{kind}_pad{n}d.default", call(f"{kind}_pad{n}d.default", [1, 1] * n), X("B", 3, *[4] * n))
        no(f"{kind}_pad{n}d.default", call(f"{kind}_pad{n}d.default", [1, 1] * n), X(2, 3, *[4] * (n - 1), "B"), why="pads the batch")
no("replication_pad2d.default", call("replication_pad2d.default", [0, 0, 1, -1]), X(2, "B", 4), why="pads the batch")
for op in ("triu", "tril"):
    no(f"{op}.default", call(f"{op}.default", 0), X(4, "B"), why="triangle across the batch")
    ok(f"{op}.default", call(f"{op}.default", 1), X("B", 4, 4))
    no(f"{op}.default", call(f"{op}.default", 1), X("B", 4), why="triangle across the batch")
ok("diag_embed.default", torch.diag_embed, X("B", 4))
no("diag_embed.default", torch.diag_embed, X(4, "B"), why="batch")
no("diag_embed.default", lambda x: torch.diag_embed(x, 0, 0, 1), X("B", 4), why="no rule for these")

# ---- reductions ------------------------------------------------------------------------------------------------------

REDUCES = "reduces the batch dimension"
for op in ("sum.dim_IntList", "mean.dim", "nansum.default"):
    for over in ([0], [1], [0, 2], [0, 1, 2]):
        ok(op, call(op, over, True), X("B", 4, 3))
        ok(op, call(op, over), X(3, "B", 4))
    ok(op, call(op, [0]), X("2B", 4))
    no(op, lambda x, op=op: call(op, [0])(x.half()), X("B", 4), why=REDUCES)
for op in ("amax.default", "amin.default", "logsumexp.default"):
    both(op, ([1], True), ([0],), X("B", 4), why=REDUCES)
    both(op, ([0, -1],), ([0, 1],), X(3, "B", 4), why=REDUCES)
    ok(op, call(op, [0], True), X(3, "B", 4))
    no(op, call(op, [-2]), X("B", 4), why=REDUCES)
for op in ("var.correction", "std.correction", "var_mean.correction", "std_mean.correction"):
    both(op, ([1],), ([0],), X("B", 4), correction=1, why=REDUCES)
for op in ("prod.dim_int", "any.dim", "all.dim", "max.dim", "min.dim", "argmax.default", "argmin.default", "median.dim",
           "nanmedian.dim", "mode.default"):
    both(op, (1,), (0,), X("B", 4), why=REDUCES)
for op in ("any.dims", "all.dims"):
    both(op, ([1],), ([0],), X("B", 4), why=REDUCES)
no("argmax.default", lambda x: x.argmax(), X("B", 4), why=REDUCES)
ok("aminmax.default", lambda x: aten.aminmax(x, dim=1), X("B", 4))
no("aminmax.default", lambda x: aten.aminmax(x), X("B", 4), why=REDUCES)
both("linalg_vector_norm.default", (2, [1]), (2,), X("B", 4), why=REDUCES)
both("norm.ScalarOpt_dim", (2, [1]), (2, [0]), X("B", 4), why=REDUCES)
both("norm.ScalarOpt_dim_dtype", (2, [1], False), (2, [0], False), X("B", 4), dtype=torch.float64, why=REDUCES)
both("kthvalue.default", (2, 1), (2, 0), X("B", 4), why=REDUCES)
ok("count_nonzero.dim_IntList", call("count_nonzero.dim_IntList", [1]), I("B", 4))
ok("count_nonzero.dim_IntList", call("count_nonzero.dim_IntList", [0]), I("B", 4))
for op in ("sum", "mean", "count_nonzero"):
    ok(f"{op}.default", call(f"{op}.default"), X("B", 4))
for op in ("prod", "any", "all", "max", "min", "median", "nanmedian"):
    no(f"{op}.default", call(f"{op}.default"), X("B", 4), why=REDUCES)
no("norm.Scalar", call("norm.Scalar"), X("B", 4), why=REDUCES)
no("norm.ScalarOpt_dtype", call("norm.ScalarOpt_dtype", 2, dtype=torch.float64), X("B", 4), why=REDUCES)
ok("dot.default", torch.dot, X("B"), X("B"))
ok("vdot.default", torch.vdot, X("2B"), X("2B"))
no("dot.default", lambda x, y: torch.dot(torch.cat([x, x]), y), X("B"), X("2B"), why=MISPLACED)
no("trace.default", torch.trace, X("B", 4), why=REDUCES)
ALONG = "along the batch dimension"
for op, rest in [("_softmax.default", (False,)), ("_log_softmax.default", (False,)), ("cumsum.default", ()),
                 ("cumprod.default", ()), ("logcumsumexp.default", ()), ("sort.default", ()), ("cummax.default", ()),
                 ("cummin.default", ()), ("_safe_softmax.default", ())]:
    both(op, (1, *rest), (0, *rest), X("B", 4), why=ALONG)
ok("sort.stable", call("sort.stable", stable=True, dim=1), X("B", 4))
no("sort.stable", call("sort.stable", stable=True, dim=0), X("B", 4), why=ALONG)
both("topk.default", (2, 1), (2, 0), X("B", 4), why=ALONG)
no("topk.default", lambda x: x.topk(x.shape[0], 1), X("B", 50), why="size of the batch as a number")
both("glu.default", (1,), (0,), X("2B", 4), why=ALONG)
both("_fft_r2c.default", ([1], 0, True), ([0], 0, False), X("B", 4), why=ALONG)
both("_fft_c2c.default", ([1], 0, True), ([0], 0, True), C("B", 4), why=ALONG)
ok("_fft_c2r.default", call("_fft_c2r.default", [1], 0, 6), C("B", 4))
no("_fft_c2r.default", lambda x: aten._fft_c2r(x, [0], 0, 2 * x.shape[0] - 2), C("B", 4), why="as a number")

# ---- parts of sums ---------------------------------------------------------------------------------------------------

for function in (lambda x: -x.sum(0) * 3, lambda x: x.sum(0).view(2, 2).t().unsqueeze(0).expand(5, 2, 2), lambda x: x.mean(0)[1:].sum(),
                 lambda x: torch.stack([x.sum(0), x.pow(2).sum(0)]).flatten(), lambda x: torch.cat([x.mean(0), x.exp().mean(0)]),
                 lambda x: x.sum(0) + x.sin().sum(0) - 0, lambda x: (x.mean(0) + 1) * 2 - x.cos().mean(0), lambda x: x.sum() / x.shape[0],
                 lambda x: x.sum(0).clone(), lambda x: 1 - x.mean(), lambda x: x.sum(0) / (2 * x.shape[0]),
                 lambda x: x.count_nonzero(0).double(), lambda x: x.mean(0).split(2),
                 lambda x: torch.nn.functional.pad(x.sum(0), (1, 2))):
    ok("neg.default", lambda x, f=function: (f(x), x.neg()), X("B", 4))
ok("mul.Tensor", lambda x, w: w * x.sum(0) / w, X("B", 4), X(4))
ok("sub.Tensor", lambda x, w: w - x.mean(0), X("B", 4), X(4))
ok("mm.default", lambda x, y: x.t() @ y, X("B", 4), X("B", 3))
ok("bmm.default", lambda x, y: x.transpose(1, 2) @ y, X(2, "3B", 4), X(2, "3B", 3))
NEEDS = "needs the sum over the whole batch"
for function in (lambda x: x.sum(0) ** 2, lambda x: x.sum(0) + 1, lambda x: x.sum(0) * x.mean(0), lambda x: x.mean(0) + x.sum(0),
                 lambda x: x - x.mean(0), lambda x: 1 / x.sum(0), lambda x: x.mean(0) / x.shape[0], lambda x: x.sum(0).long(),
                 lambda x: torch.cat([x.mean(0), x.sum(0)]), lambda x: x.sum(0) > 0, lambda x: x.sum(0).half(), lambda x: x.sum(0).sum(dtype=torch.half),
                 lambda x: x.sum(0).clamp(min=1), lambda x: x.sum(0) + x.shape[0], lambda x: x.mean(0).sum() * x.shape[0],
                 lambda x: torch.nn.functional.pad(x.sum(0), (1, 2), value=1.0), lambda x: x.mean(0) + x.shape[0], lambda x: x * x.sum(0),
                 lambda x: torch.add(x.sum(0), x.cos().sum(0), alpha=x.shape[0]), lambda x: x.sum(0) / (x.shape[0] + 7),
                 lambda x: x.sum(0) / max(x.shape[0], 8), lambda x: x.sum(0) / (x.shape[0] + 1), lambda x: x.sum(0) / (x.shape[0] - 6)):
    no("neg.default", lambda x, f=function: (f(x), x.neg()), X("B", 4), why=NEEDS)

# ---- losses ----------------------------------------------------------------------------------------------------------

for op, rest in [("mse_loss.default", ()), ("smooth_l1_loss.default", ()), ("huber_loss.default", ()),
                 ("soft_margin_loss.default", ())]:
    for reduction in (0, 1, 2):
        ok(op, call(op, reduction), X("B", 4), X("B", 4))
for reduction in (0, 1, 2):
    ok("binary_cross_entropy.default", call("binary_cross_entropy.default", None, reduction), P("B", 4), P("B", 4))
    ok("binary_cross_entropy_with_logits.default", call("binary_cross_entropy_with_logits.default", None, None, reduction),
       X("B", 4), P("B", 4))
no("mse_loss.default", lambda x, y: aten.mse_loss(x.half(), y.half(), 1), X("B", 4), X("B", 4), why=REDUCES)
no("mse_loss.default", lambda x, y: aten.mse_loss(torch.cat([x, x]), y, 2), X("B", 4), X("2B", 4), why=MISPLACED)
for reduction in (0, 1, 2):
    ok("mse_loss.default", call("mse_loss.default", reduction), X("B", 4), X(4))
    ok("mse_loss.default", call("mse_loss.default", reduction), X("B"), X(4, "B"))
    no("mse_loss.default", call("mse_loss.default", reduction), X("B", 1), X("B"), why=MISPLACED)
    no("mse_loss.default", lambda x, r=reduction: aten.mse_loss(x, torch.zeros(x.shape[0]).double(), r), X("B", 1), why=MISPLACED)
both("nll_loss_forward.default", (None, 0, -100), (None, 1, -100), X("B", 4), I("B"), why=REDUCES)
both("nll_loss2d_forward.default", (None, 0, -100), (None, 1, -100), X("B", 4, 3, 3), I("B", 3, 3), why=REDUCES)
ok("nll_loss2d_forward.default", lambda x, t: aten.nll_loss2d_forward(x[:, :, None], t[:, None], None, 0, -100), X(3, 4, "B"), I(3, "B"))
no("nll_loss2d_forward.default", lambda x, t: aten.nll_loss2d_forward(x[:, :, None], t[:, None], None, 0, -100), X(3, 4, "B"), I(3, 7),
   why="the same place")
no("nll_loss_forward.default", call("nll_loss_forward.default", None, 0, -100), X("B"), I(), why="the same place")
no("nll_loss_forward.default", call("nll_loss_forward.default", None, 0, -100), X(3, "B"), I(3), why="the same place")
no("nll_loss_forward.default", lambda x, t: aten.nll_loss_forward(x, torch.cat([t, t]), None, 0, -100), X("2B", 4), I("B"), why="the same place")

# ---- matmul ----------------------------------------------------------------------------------------------------------

SUMS = "sums over the batch"
EVERY = "every row with every other"
ok("mm.default", lambda x, w: x @ w, X("2B", 4), X(4, 5))
ok("mm.default", lambda w, x: w @ x, X(5, 4), X(4, "B"))
ok("mm.default", lambda x, y: x.t() @ y, X("B", 4), X("B", 5))
no("mm.default", lambda x: x @ x.t(), X("B", 4), why=EVERY)
ok("bmm.default", torch.bmm, X("2B", 3, 4), X("2B", 4, 5))
ok("bmm.default", torch.bmm, X(2, "B", 4), X(2, 4, 5))
ok("bmm.default", torch.bmm, X(2, 3, 4), X(2, 4, "B"))
no("bmm.default", torch.bmm, X(2, "B", 4), X(2, 4, "B"), why=EVERY)
no("bmm.default", lambda x, y: torch.bmm(x, torch.cat([y, y])), X("2B", 3, 4), X("B", 4, 5), why=EVERY)
no("mm.default", lambda x, y: torch.cat([x, x]).t() @ y, X("B", 4), X("2B", 3), why=MISPLACED)
ok("bmm.default", torch.bmm, X(2, 3, "B"), X(2, "B", 4))
for op in ("addmm.default", "_addmm_activation.default"):
    ok(op, call(op), X(5), X("B", 4), X(4, 5))
    no(op, call(op), X(5), X(3, "B"), X("B", 5), why=SUMS)
ok("addmm.default", torch.addmm, X("B", 5), X("B", 4), X(4, 5))
ok("addmm.default", torch.addmm, X("B"), X(3, 4), X(4, "B"))
no("addmm.default", lambda b, x, w: torch.addmm(b, torch.cat([x, x]), w), X("2B", 5), X("B", 4), X(4, 5), why=MISPLACED)
no("addmm.default", lambda x, w, b: torch.addmm(b, x, w, beta=x.shape[0]), X("B", 4), X(4, 5), X(5), why="as a number")
ok("baddbmm.default", torch.baddbmm, X("B", 1, 5), X("B", 3, 4), X("B", 4, 5))
ok("baddbmm.default", torch.baddbmm, X("B", 5), X(2, "B", 4), X(2, 4, 5))
no("baddbmm.default", lambda b, x, w: torch.baddbmm(b, torch.cat([x, x], 1), w), X(2, "2B", 5), X(2, "B", 4), X(2, 4, 5), why=MISPLACED)
no("baddbmm.default", torch.baddbmm, X(5), X(2, 3, "B"), X(2, "B", 5), why=SUMS)
ok("mv.default", torch.mv, X("B", 4), X(4))
no("mv.default", torch.mv, X(4, "B"), X("B"), why=SUMS)
ok("addmv.default", torch.addmv, X("B"), X("B", 4), X(4))
no("addmv.default", lambda b, x, v: torch.addmv(b, torch.cat([x, x]), v), X("2B"), X("B", 4), X(4), why=MISPLACED)
no("addmv.default", torch.addmv, X(4), X(4, "B"), X("B"), why=SUMS)
ok("linear.default", torch.nn.functional.linear, X("B", 3, 4), X(5, 4), X(5))
no("linear.default", torch.nn.functional.linear, X(3, "B"), X(5, "B"), why="as its 'weight'")

# ---- convolution, pooling, resampling --------------------------------------------------------------------------------

CONV = ([1], [0], [1], False, [0], 1)
FIRST = "batch in its first dimension"
ok("convolution.default", lambda x, w, b: aten.convolution(x, w, b, *CONV), X("2B", 3, 6), X(4, 3, 2), X(4))
no("convolution.default", lambda x, w: aten.convolution(x, w, None, *CONV), X(2, 3, 6), X("B", 3, 2), why="as its 'weight'")
no("convolution.default", lambda x, w: aten.convolution(x, w, None, *CONV), X(2, 3, "B"), X(4, 3, 2), why=FIRST)
no("convolution.default", lambda x, w: aten.convolution(x.view(1, -1, 6), w.repeat(x.shape[0], 1, 1), None, *CONV[:-1],
                                                        x.shape[0]), X("B", 3, 6), X(4, 3, 2), why="as a number")
ok("_convolution.default", lambda x, w: aten._convolution(x, w, None, *CONV, False, False, False, False), X("B", 3, 6), X(4, 3, 2))
WORKS = "works along the batch dimension"
for op, n, rest in [
        ("max_pool2d_with_indices.default", 2, ([2, 2],)), ("avg_pool2d.default", 2, ([2, 2],)),
        ("_adaptive_avg_pool2d.default", 2, ([2, 2],)), ("adaptive_max_pool2d.default", 2, ([2, 2],)),
        ("max_pool3d_with_indices.default", 3, ([2, 2, 2],)), ("avg_pool3d.default", 3, ([2, 2, 2],)),
        ("_adaptive_avg_pool3d.default", 3, ([2, 2, 2],)), ("adaptive_max_pool3d.default", 3, ([2, 2, 2],)),
        ("upsample_nearest1d.default", 1, ([6],)), ("_upsample_nearest_exact1d.default", 1, ([6],)),
        ("upsample_linear1d.default", 1, ([6], False)), ("upsample_nearest2d.default", 2, ([6, 6],)),
        ("_upsample_nearest_exact2d.default", 2, ([6, 6],)), ("upsample_bilinear2d.default", 2, ([6, 6], False)),
        ("upsample_bicubic2d.default", 2, ([6, 6], False)), ("_upsample_bilinear2d_aa.default", 2, ([6, 6], False)),
        ("_upsample_bicubic2d_aa.default", 2, ([6, 6], False)), ("upsample_nearest3d.default", 3, ([6, 6, 6],)),
        ("_upsample_nearest_exact3d.default", 3, ([6, 6, 6],)), ("upsample_trilinear3d.default", 3, ([6, 6, 6], False))]:
    ok(op, call(op, *rest), X("B", 3, *[4] * n))
    no(op, call(op, *rest), X(2, 3, *[4] * (n - 1), "B"), why=WORKS)
ok("pixel_shuffle.default", lambda x: aten.pixel_shuffle(x, 2), X("B", 4, 3, 3))
for op, n in [("max_pool2d_with_indices.default", 2), ("avg_pool2d.default", 2), ("max_pool3d_with_indices.default", 3), ("avg_pool3d.default", 3)]:
    no(op, call(op, [3] * n, [1] * n, [1] * n), X(2, 3, "B", *[4] * (n - 1)), why=WORKS)
    ok(op, call(op, [3] * n, [1] * n, [1] * n), X(3, "B", *[4] * n))
no("pixel_shuffle.default", lambda x: aten.pixel_shuffle(x, 2), X(4, "B", 3), why=WORKS)
ok("pixel_unshuffle.default", lambda x: aten.pixel_unshuffle(x, 2), X("B", 3, 4, 4))
no("pixel_unshuffle.default", lambda x: aten.pixel_unshuffle(x, 2), X("B", 4, 4), why=WORKS)
ok("channel_shuffle.default", lambda x: aten.channel_shuffle(x, 2), X("B", 4, 3, 3))
no("channel_shuffle.default", lambda x: aten.channel_shuffle(x, 2), X(4, "2B", 3, 3), why=FIRST)
ok("im2col.default", lambda x: aten.im2col(x, [2, 2], [1, 1], [0, 0], [1, 1]), X("B", 3, 4, 4))
no("im2col.default", lambda x: aten.im2col(x, [2, 2], [1, 1], [0, 0], [1, 1]), X("B", 4, 4), why=FIRST)
ok("col2im.default", lambda x: aten.col2im(x, [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]), X("B", 12, 9))
no("col2im.default", lambda x: aten.col2im(x, [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]), X("4B", 9), why=FIRST)
ok("grid_sampler_2d.default", lambda x, g: aten.grid_sampler_2d(x, g, 0, 0, False), X("B", 3, 4, 4), X("B", 5, 5, 2))
no("grid_sampler_2d.default", lambda x, g: aten.grid_sampler_2d(x, g, 0, 0, False), X(2, "B", 4, 4), X(2, 5, 5, 2), why=MISPLACED)
no("grid_sampler_2d.default", lambda x, g: aten.grid_sampler_2d(x, torch.cat([g, g]), 0, 0, False), X("2B", 3, 4, 4), X("B", 5, 5, 2), why=MISPLACED)
ok("grid_sampler_3d.default", lambda x, g: aten.grid_sampler_3d(x, g, 0, 0, False), X("B", 3, 4, 4, 4), X("B", 5, 5, 5, 3))
ok("affine_grid_generator.default", lambda t: aten.affine_grid_generator(t, [t.shape[0], 1, 4, 4], False), X("B", 2, 3))

# ---- normalisation ---------------------------------------------------------------------------------------------------

ok("native_layer_norm.default", lambda x, w: aten.native_layer_norm(x, [4], w, w, 1e-5), X("B", 3, 4), X(4))
no("native_layer_norm.default", lambda x: aten.native_layer_norm(x, list(x.shape[1:]), None, None, 1e-5), X(3, "B"), why="batch")
ok("_fused_rms_norm.default", lambda x, w: aten._fused_rms_norm(x, [4], w, 1e-5), X("B", 3, 4), X(4))
ok("native_group_norm.default", lambda x, w: aten.native_group_norm(x, w, w, x.shape[0], 4, 3, 2, 1e-5), X("2B", 4, 3), X(4))
no("native_group_norm.default", lambda x: aten.native_group_norm(x, None, None, 2, 4, x.shape[2], 2, 1e-5), X(2, 4, "B"), why="as a number")
NORM = "normalises over the batch; freeze the statistics with .eval() to split it"
for op in ("native_batch_norm.default", "_native_batch_norm_legit.default", "_native_batch_norm_legit_functional.default"):
    ok(op, lambda x, w, b, m, v, op=op: call(op, False, 0.1, 1e-5)(x, w, b, m, v)[0], X("B", 3, 4), X(3), X(3), X(3), P(3))
    no(op, lambda x, w, b, m, v, op=op: call(op, True, 0.1, 1e-5)(x, w, b, m.clone(), v.clone())[0], X("B", 3, 4), X(3), X(3),
       X(3), P(3), why=NORM)
for op in ("cudnn_batch_norm.default", "miopen_batch_norm.default"):
    ok(op, lambda *t, op=op: call(op, False, 0.1, 1e-5)(*t)[0], G("B", 3, 4), G(3), G(3), G(3), G(3), numbers=False)
ok("native_batch_norm.default", lambda x, m, v: [aten.native_batch_norm(t, None, None, m, v, False, 0.1, 1e-5)[0]
                                                 for t in (x, -x)], X("B", 3, 4), X(3), P(3))
ok("_native_batch_norm_legit.no_stats", lambda x: aten._native_batch_norm_legit.no_stats(x.view(1, -1, 4), None, None, True, 0.1,
                                                                                         1e-5)[0], X("B", 3, 4))
no("_native_batch_norm_legit.no_stats", lambda x: aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5)[0],
   X("B", 3, 4), why=NORM)
no("_native_batch_norm_legit.no_stats", lambda x, w: aten._native_batch_norm_legit.no_stats(
    x.view(1, -1, 4), w[:, None].expand(-1, x.shape[0]).reshape(-1), None, True, 0.1, 1e-5)[0], X("B", 3, 4), X(3), why="as its channels")
for op in ("_native_batch_norm_legit_no_training.default", "_batch_norm_no_update.default"):
    ok(op, lambda x, w, b, m, v, op=op: call(op, 0.1, 1e-5)(x, w, b, m, v)[0], X("B", 3, 4), X(3), X(3), X(3), P(3))
for op in ("_batch_norm_with_update.default", "_batch_norm_with_update_functional.default"):
    no(op, lambda x, w, b, m, v, op=op: call(op, 0.1, 1e-5)(x, w, b, m.clone(), v.clone())[0], X("B", 3, 4), X(3), X(3), X(3), P(3), why=NORM)
    ok(op, lambda x, w, b, m, v, op=op: call(op, 0.1, 1e-5)(x.view(1, -1, 4), *(t.repeat(x.shape[0]) for t in (w, b, m, v)))[0],
       X("B", 3, 4), X(3), X(3), X(3), P(3))

# ---- attention -------------------------------------------------------------------------------------------------------

ok("_scaled_dot_product_flash_attention_for_cpu.default",
   lambda q, k, v, m: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=m),
   *[X("B", 2, 8, 8)] * 3, X("B", 1, 8, 8))
ok("_scaled_dot_product_flash_attention_for_cpu.default",
   lambda q, k, v, m: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=m),
   *[X(1, "B", 8, 8)] * 3, X(1, "B", 1, 8))
ok("_scaled_dot_product_flash_attention_for_cpu.default", aten._scaled_dot_product_flash_attention_for_cpu, *[X(2, "2B", 8, 8)] * 3)
no("_scaled_dot_product_flash_attention_for_cpu.default", aten._scaled_dot_product_flash_attention_for_cpu,
   *[X(2, 8, "B", 8)] * 3, why="one row of the batch to another")
no("_scaled_dot_product_flash_attention_for_cpu.default",
   lambda q, k, v, m: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=m),
   *[X("B", 1, 8, 8)] * 3, X(1, "B", 1, 8), why=MISPLACED)
ok("_scaled_dot_product_attention_math.default", lambda q, k, v, m: aten._scaled_dot_product_attention_math(q, k, v, m),
   *[X("B", 2, 8, 8)] * 3, X(8, 8))
no("_scaled_dot_product_attention_math.default", lambda q, k, v: aten._scaled_dot_product_attention_math(q, k, v),
   X("B", 2, 8, 8), X(1, 2, 8, 8), X(1, 2, 8, 8), why="not the row's own")
no("_scaled_dot_product_attention_math.default", lambda q, k, v: aten._scaled_dot_product_attention_math(q, k, v),
   X("B", 2, 8, 8), X(1, 2, "B", 8), X(1, 2, "B", 8), why="not the row's own")
no("_scaled_dot_product_attention_math.default",
   lambda q, k, v: aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, False, None, enable_gqa=True),
   X(1, "2B", 8, 8), X(1, "B", 8, 8), X(1, "B", 8, 8), why="not the row's own")
ok("_scaled_dot_product_attention_math.default", lambda q: aten._scaled_dot_product_attention_math(q, q, q), X(3, 2, "B", 8, 8))
no("_scaled_dot_product_attention_math.default", lambda q: aten._scaled_dot_product_attention_math(q, q, q), X("B", 8),
   why="one row of the batch to another")
no("_scaled_dot_product_attention_math.default", lambda q, m: aten._scaled_dot_product_attention_math(q, q, q, torch.cat([m, m])),
   X("2B", 2, 8, 8), X("B", 1, 8, 8), why=MISPLACED)
no("_scaled_dot_product_attention_math.default", lambda q, m: aten._scaled_dot_product_attention_math(q, q, q, None, 0.5, False, m > 0),
   X("B", 2, 8, 8), X(8, 8), why="dropout mask")
no("_scaled_dot_product_efficient_attention.default",
   lambda q, m: aten._scaled_dot_product_efficient_attention(q, q, q, torch.cat([m, m]), True, 0.1)[:2],
   G("2B", 2, 8, 8), G("B", 2, 8, 8), why=MISPLACED)
ok("_scaled_dot_product_flash_attention.default", lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v)[:2],
   *[G("B", 2, 8, 8)] * 3, numbers=False)
ok("_scaled_dot_product_efficient_attention.default",
   lambda q, k, v, m: aten._scaled_dot_product_efficient_attention(q, k, v, m, True, 0.1)[:2],
   *[G("B", 2, 8, 8)] * 3, G("B", 2, 8, 8), numbers=False)
ok("_scaled_dot_product_efficient_attention.default",
   lambda q, k, v, m: aten._scaled_dot_product_efficient_attention(q, k, v, m, True, 0.1)[:2],
   *[G(1, "B", 8, 8)] * 3, G(1, "B", 8, 8), numbers=False)
ok("_scaled_dot_product_cudnn_attention.default",
   lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[:2], *[G("B", 2, 8, 8)] * 3, numbers=False)
ok("_scaled_dot_product_fused_attention_overrideable.default",
   lambda q, k, v: aten._scaled_dot_product_fused_attention_overrideable(q, k, v)[:2], *[G("B", 2, 8, 8)] * 3, numbers=False)

# ---- indexing --------------------------------------------------------------------------------------------------------

BY_NUMBER = "rows by number"
ok("embedding.default", lambda w, i: torch.nn.functional.embedding(i, w), X(3, 4), I("B", 5))
no("embedding.default", lambda w, i: torch.nn.functional.embedding(i, w), X("B", 4), I(5), why="as its 'weight'")
no("embedding.default", lambda w, i: torch.nn.functional.embedding(i, w, scale_grad_by_freq=True), X(3, 4), I("B", 5), why="scale_grad_by_freq")
ok("index_select.default", lambda x, i: x.index_select(1, i), X("B", 4), I(5))
ok("index_select.default", lambda w, i: w.index_select(1, i), X(5, 4), I("B"))
no("index_select.default", lambda x, i: x.index_select(0, i), X("B", 4), I(5), why=BY_NUMBER)
no("index_select.default", lambda x, i: x.index_select(1, i), X("B", 4), I("B"), why=BY_NUMBER)
no("index_select.default", lambda x, i: x.index_select(-2, i), X("B", 4), I(5), why=BY_NUMBER)
ok("gather.default", lambda x, i: x.gather(1, i), X("B", 4), I("B", 2))
ok("gather.default", lambda w, i: w.gather(0, i), X(4), I("B"))
no("gather.default", lambda x, i: x.gather(0, i), X("B", 4), I("B", 2), why=BY_NUMBER)
no("gather.default", lambda x, i: x.gather(-2, i), X("B", 4), I("B", 2), why=BY_NUMBER)
no("gather.default", lambda x, i: x.gather(1, torch.cat([i, i])), X("2B", 4), I("B", 2), why=BY_NUMBER)
ok("gather.default", lambda w, i: w.gather(-1, i), X(4, 5), I(4, "B"))
no("gather.default", lambda w, i: w.gather(1, i), X(50, 4), I("B", 2), why="an entry for each row")
ok("scatter.src", lambda x, i, s: x.scatter(1, i, s), X("B", 4), I("B", 1), X("B", 1))
ok("scatter_add.default", lambda x, i, s: x.scatter_add(1, i, s), X("B", 4), I("B", 2), X("B", 2))
ok("scatter.reduce", lambda x, i, s: x.scatter(1, i, s, reduce="add"), X("B", 4), I("B", 2), X("B", 2))
ok("scatter_reduce.two", lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), X("B", 4), I("B", 2), X("B", 2))
ok("scatter.value", lambda x, i: x.scatter(1, i, 2.0), X("B", 4), I("B", 2))
ok("scatter.value_reduce", lambda x, i: x.scatter(1, i, 2.0, reduce="multiply"), X("B", 4), I("B", 2))
no("scatter.src", lambda x, i, s: x.scatter(0, i, s), X("B", 4), I("B", 4), X("B", 4), why=BY_NUMBER)
no("scatter.src", lambda x, i, s: x.scatter(-2, i, s), X("B", 4), I("B", 4), X("B", 4), why=BY_NUMBER)
no("scatter.src", lambda x, i, s: x.scatter(1, torch.cat([i, i]), s), X("2B", 4), I("B", 1), X("2B", 1), why=MISPLACED)
no("scatter.src", lambda x, i, s: x.scatter(1, i, torch.cat([s, s])), X("2B", 4), I("2B", 1), X("B", 1), why=MISPLACED)
no("scatter.src", lambda x, i, s: torch.cat([x, x]).scatter(1, i, s), X("B", 4), I("2B", 1), X("2B", 1), why=MISPLACED)
no("scatter.src", lambda x, i, s: x.scatter(1, i, s), X("B", 4), I("B", 1), X(50, 4), why=MISPLACED)
no("scatter.value", lambda x, i: x.scatter(1, i, 1.0), X("B", 4), I(2, 2), why=MISPLACED)
ok("index_add.default", lambda x, i, s: x.index_add(1, i, s), X("B", 4), I(2), X("B", 2))
ok("index_copy.default", lambda x, i, s: x.index_copy(1, i[:1], s), X("B", 4), I(2), X("B", 1))
ok("index_fill.int_Scalar", lambda x, i: x.index_fill(1, i, 2.0), X("B", 4), I(2))
ok("index_fill.int_Tensor", lambda x, i, v: x.index_fill(1, i, v), X("B", 4), I(2), X())
ok("index_reduce.default", lambda x, i, s: aten.index_reduce(x, 1, i, s, "amax"), X("B", 4), I(2), X("B", 2))
no("index_add.default", lambda x, i, s: x.index_add(0, i, s), X("B", 4), I(2), X(2, 4), why=BY_NUMBER)
no("index_add.default", lambda x, i, s: x.index_add(-2, i, s), X("B", 4), I(2), X(2, 4), why=BY_NUMBER)
no("index_add.default", lambda x, i, s: x.index_add(1, i, torch.cat([s, s])), X("2B", 4), I(2), X("B", 2), why=MISPLACED)
no("index_add.default", lambda x, i, s: x.index_add(1, i, s), X(3, 4), I("B"), X(3, "B"), why="as its 'index'")
ok("index.Tensor", lambda x, i: (x[:, i], x[:, :, i]), X("B", 4, 5), I(3))
ok("index.Tensor", lambda x, i, j: x[i, :, :, j], X(4, "B", 5, 6), I(3), I(2, 1))
ok("index.Tensor", lambda w, i: w[i], X(5, 4), I("B", 2))
ok("index.Tensor", lambda w, i, j: w[:, i, j], X(2, 5, 4), I("B", 2), I(2))
ok("index.Tensor", lambda w, i, j: (w[:, i, j], w[:, :, i], w[:, j, j]), X(2, 5, 4), I(2, "B"), I("B"))
ok("index.Tensor", lambda x, i, j: x[:, i, :, j], X("B", 4, 5, 6), I(3), I(3))
ok("index.Tensor", lambda x, i, j: x[:, i, :, j], X(4, 5, "B", 6), I(3), I(2, 1))
ok("index.Tensor", lambda x, i: (x[i], x[:, i], x[i[:2, None], i]), X(4, 5, "B"), I(3))
ok("index.Tensor", lambda w, i: w[i], X(5, 4), I("2B"))
no("index.Tensor", lambda w, i, j: w[torch.cat([i, i]), j], X(5, 4), I("B"), I("2B"), why=MISPLACED)
no("index.Tensor", lambda x, y: x[torch.arange(y.shape[0])], X("2B", 4), X("B"), why="number of a row")
no("index.Tensor", lambda x, i: x[torch.arange(x.shape[0])[i]], X("B", 4), I("B"), why="number of a row")
ok("index.Tensor", lambda x, i: x[torch.arange(x.shape[0]), i], X("B", 4), I("B"))
ok("index.Tensor", lambda x, i: x[torch.arange(x.shape[0])[:, None], i], X("B", 4), I("B", 2))
ok("index.Tensor", lambda x, i: x[torch.arange(x.shape[0]), :, i], X("B", 4, 5), I("B"))
ok("index.Tensor", lambda x, i: x[:, torch.arange(x.shape[1]).view(-1, 1), i], X(2, "B", 5), I(4))
ok("index.Tensor", lambda x, i: x[torch.arange(x.shape[0])[:, None, None, None].expand(-1, 1, 3, 1), i[None, None, None]],
   X("B", 4), I(4))
no("index.Tensor", lambda x, i: x[i], X("B", 4), I("B"), why=BY_NUMBER)
no("index.Tensor", lambda x, i: x[i], X("B", 4), I(3), why=BY_NUMBER)
no("index.Tensor", lambda x, i: x[:, i], X("B", 4), I("B"), why="in every row")
no("index.Tensor", lambda x, w: w[torch.arange(x.shape[0])] + x, X("B", 4), X(50, 4), why="number of a row")
no("index.Tensor", lambda x, i: x[i, torch.arange(x.shape[0])], X("B", 50), I("B"), why="number of a row")
no("index.Tensor", lambda x: x[torch.arange(x.shape[0])[None], torch.arange(x.shape[0])[:, None]], X("B", 50), why="number of a row")
no("index.Tensor", lambda x: x[(torch.arange(x.shape[0]) + 1) % x.shape[0]], X("B", 4), why="number of a row")
ok("_unsafe_index.Tensor", lambda x, i: aten._unsafe_index(x, [None, i]), X("B", 4), I(3))
no("_unsafe_index.Tensor", lambda x, i: aten._unsafe_index(x, [i]), X("B", 4), I(3), why=BY_NUMBER)
for op in ("index_put.default", "_unsafe_index_put.default"):
    ok(op, lambda x, i, v, op=op: call(op)(x, [None, i], v), X("B", 4), I(1), X("B", 1))
    ok(op, lambda x, i, v, op=op: call(op)(x, [torch.arange(x.shape[0]), i], v), X("B", 4), I("B"), X("B"))
    no(op, lambda x, i, v, op=op: call(op)(x, [i], v), X("B", 4), I(2), X(4), why=BY_NUMBER)
    no(op, lambda x, i, v, op=op: call(op)(x, [i], v), X(4), I("B"), X("B"), why="a value that every row shares")
ok("index_put.default", lambda x, m, v: aten.index_put(x, [m], v), X("B", 4), M("B"), X(4))
ok("index_put.default", lambda x, m, v: aten.index_put(x, [None, m], v), X(2, "B", 4), M("B", 4), X())
ok("index_put.default", lambda x, m, v: aten.index_put(x, [m], v), X(2, "B", 4), M(2, "B"), X(4))
ok("index_put.default", lambda x, m, v: aten.index_put(x, [None, m], v), X("B", 4), M(4), X())
ok("index_put.default", lambda x, i, v: aten.index_put(x, [i], v), X(4, "B"), I(1), X("B"))
no("index_put.default", lambda x, i, v: aten.index_put(x, [None, i], torch.cat([v, v])), X("2B", 4), I(1), X("B", 1), why=MISPLACED)
no("index_put.default", lambda x, m, v: aten.index_put(x, [torch.cat([m, m])], v), X("2B", 4), M("B"), X(), why=MISPLACED)
no("index_put.default", lambda x, m, i, v: aten.index_put(x, [m, i], v), X("B", 4), M("B"), I(1), X(), why="as the data says")
no("index_put.default", lambda x, m, v: aten.index_put(x, [m], v), X("B", 4), M("B", 4), X(1), why="as the data says")
no("index_put.default", lambda x, m, v: aten.index_put(x, [m], v), X(4, "B"), M(4), X("B"), why="as the data says")
no("index_put.default", lambda x, i: aten.index_put(x, [None, i], torch.arange(x.shape[0])[:, None]), I("B", 4), I(1), why="number of a row")
no("index_put.default", lambda x, i, v: aten.index_put(torch.arange(x.shape[0])[:, None].expand(-1, 4), [None, i], v), X("B"), I(1), I("B", 1),
   why="number of a row")
no("index_put.default", lambda x, m, v: aten.index_put(x, [m], v), X("B", 4), M("B"), X(1, 4), why="as the data says")
no("index_put.default", lambda x, m: aten.index_put(x, [m], torch.arange(x.shape[0]) * 1.0), X("B"), M("B"), why="number of a row")
ok("_index_put_impl.default", lambda x, i, v: aten._index_put_impl(x, [None, i], v), X("B", 4), I(1), X("B", 1))

# ---- factories -------------------------------------------------------------------------------------------------------

COUNTS = "other than the rows of the batch"
ok("zeros.default", lambda x: x + torch.zeros(x.shape[0], 4), X("B", 4))
ok("ones.default", lambda x: torch.ones(3, x.shape[0] * 2), X("B", 4))
ok("full.default", lambda x: torch.full((x.shape[0], 4), 2.0), X("B", 4))
no("full.default", lambda x: torch.full((x.shape[0], 4), x.shape[0]), X("B", 4), why="as a number")
no("zeros.default", lambda x: torch.zeros(x.shape[0], x.shape[0]), X("B", 4), why="two dimensions")
no("zeros.default", lambda x: torch.zeros(x.shape[0] + 1), X("B", 4), why="no multiple of the batch")
no("zeros.default", lambda x: torch.zeros(x.shape[0] + 7), X("B", 4), why="no multiple of the batch")
no("zeros.default", lambda x: torch.zeros(max(x.shape[0], 8)), X("B", 4), why="no multiple of the batch")
for op, rest in [("rand", ()), ("randn", ())]:
    ok(f"{op}.default", lambda x, op=op: call(f"{op}.default")([x.shape[0], 3]), X("B", 4), numbers=False)
ok("empty.memory_format", lambda x: torch.empty(x.shape[0], 3), X("B", 4), numbers=False)
ok("randint.default", lambda x: torch.randint(5, (x.shape[0], 3)), X("B", 4), numbers=False)
ok("randint.low", lambda x: torch.randint(2, 5, (x.shape[0], 3)), X("B", 4), numbers=False)
no("randint.default", lambda x: torch.randint(x.shape[0], (x.shape[0], 3)), X("B", 4), why="as a number")
ok("new_zeros.default", lambda x: (x.new_zeros(x.shape[0], 3), x.new_zeros(3)), X("B", 4))
ok("new_ones.default", lambda x: x.new_ones(x.shape[0], 3), X("B", 4))
ok("new_full.default", lambda x: x.new_full((x.shape[0], 3), 2.0), X("B", 4))
ok("new_empty.default", lambda x: x.new_empty(x.shape[0], 3), X("B", 4), numbers=False)
ok("empty_strided.default", lambda x: torch.empty_strided((3, x.shape[0]), (x.shape[0], 1)), X("B", 4), numbers=False)
ok("new_empty_strided.default", lambda x: x.new_empty_strided((3, x.shape[0]), (x.shape[0], 1)), X("B", 4), numbers=False)
ok("arange.default", lambda x: x[torch.arange(x.shape[0])], X("B", 4))
ok("arange.start", lambda x: x[torch.arange(0, x.shape[0])], X("B", 4))
ok("arange.start_step", lambda x: x[torch.arange(0, x.shape[0], 1)], X("B", 4))
no("arange.default", lambda x: x + torch.arange(x.shape[0])[:, None], X("B", 4), why="number of a row")
no("arange.default", lambda x: torch.arange(x.shape[0]), X("B", 4), why="numbers the rows")
no("arange.default", lambda x: torch.arange(2 * x.shape[0]), X("B", 4), why=COUNTS)
no("arange.default", lambda x: torch.arange(x.shape[0], dtype=torch.float64), X("B", 4), why="number of a row")
no("_to_copy.default", lambda x: x[torch.arange(x.shape[0]).double().long()], X("B", 4), why="number of a row")
for op, moved in [("_to_copy.default", lambda n: n.int().long()[:, 0]), ("clone.default", lambda n: n.clone()[:, 0]), ("permute.default", lambda n: n.permute(1, 0)[1]),
                  ("transpose.int", lambda n: n.transpose(0, 1)[-1]), ("t.default", lambda n: n.t()), ("slice.Tensor", lambda n: n[:, 1:3]),
                  ("split.Tensor", lambda n: n.split(2, 1)[1]), ("squeeze.dim", lambda n: n[:, :1].squeeze(1)), ("detach.default", lambda n: n.detach()),
                  ("view.default", lambda n: n.clone().view(-1, 2, 2)), ("select.int", lambda n: n.select(-1, 2))]:
    ok(op, lambda x, moved=moved: x[moved(torch.arange(x.shape[0])[:, None].expand(-1, 4))], X("B", 3))
no("arange.start", lambda x: x[torch.arange(1, x.shape[0])], X("B", 4), why=COUNTS)
no("arange.start_step", lambda x: x[torch.arange(0, x.shape[0], 2)], X("B", 4), why=COUNTS)
no("eye.default", lambda x: torch.eye(x.shape[0]), X("B", 4), why="as a number")
no("eye.m", lambda x: torch.eye(x.shape[0], 4), X("B", 4), why="as a number")
no("linspace.default", lambda x: torch.linspace(0, 1, x.shape[0]), X("B", 4), why="as a number")
no("scalar_tensor.default", lambda x: x * aten.scalar_tensor(x.shape[0]), X("B", 4), why="as a number")

# ---- in place, and aliases -------------------------------------------------------------------------------------------


def write_through_view(x, y):
    z = x.clone()
    z[:, 1:3] += y
    return z


def write_rows_into_shared(x, w):
    copy = w.clone()
    view = copy.view(-1)
    view.copy_(x.sum(0))
    return copy


def write_one_row(x):
    z = x.clone()
    z[0].fill_(1)
    return z


def write_before_the_read(x, w):
    w.add_(1)
    return x * w


ok("add_.Tensor", write_through_view, X("B", 4), X("B", 1))
ok("copy_.default", lambda x: torch.zeros(x.shape[0], 4).copy_(x), X("B", 4))
ok("masked_fill_.Scalar", lambda x, m: x.clone().masked_fill_(m, 1.0), X("B", 4), M("B", 1))
ok("cumsum_.default", lambda x: x.clone().cumsum_(1), X("B", 4))
ok("index_put_.default", lambda x, i: x.clone().index_put_([torch.arange(x.shape[0]), i], torch.tensor(2.0).double()), X("B", 4), I("B"))
no("copy_.default", write_rows_into_shared, X("B", 4), X(4), why="needs the sum")
no("fill_.Scalar", write_one_row, X("B", 4), why="some rows of the batch")
no("add_.Tensor", write_before_the_read, X("B", 4), X(4), why="a value that every row shares")
no("unsqueeze_.default", lambda x: x.clone().unsqueeze_(0), X("B", 4), why="shares")
no("unsqueeze_.default", lambda x: x.clone().unsqueeze_(-1), X("B", 4), why="shares")
ok("add_.Tensor", lambda x, w: x + w.clone().add_(1), X("B", 4), X(4))
no("squeeze_.dim", lambda x: x.clone().squeeze_(0), X("B", 4), why="of one row")
no("histc.default", lambda x: torch.histc(x), X("B"), why="has no rule")

# ---- linear algebra --------------------------------------------------------------------------------------------------

ACROSS = "matrix across the batch"


def positive(x):
    """Symmetric and positive definite."""
    return x @ x.mT + 4 * torch.eye(x.shape[-1], dtype=x.dtype)


ok("linalg_solve_triangular.default", lambda a, b: torch.linalg.solve_triangular(positive(a), b, upper=False), X("B", 3, 3), X("B", 3, 2))
ok("linalg_solve_triangular.default", lambda a, b: torch.linalg.solve_triangular(positive(a), b, upper=True), X(3, 3), X(2, "B", 3, 2))
no("linalg_solve_triangular.default", lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), X(3, 3), X(3, "B"), why=ACROSS)
ok("linalg_inv_ex.default", lambda x: torch.linalg.inv(positive(x)), X(2, "B", 3, 3))
ok("linalg_solve_triangular.default", lambda a, b: torch.linalg.solve_triangular(positive(a), b, upper=True), X("B", 3, 3), X(2, "B", 3, 2))
no("linalg_solve_triangular.default", lambda a, b: torch.linalg.solve_triangular(torch.cat([a, a]), b, upper=True), X("B", 3, 3), X("2B", 3, 2),
   why=MISPLACED)
no("linalg_qr.default", torch.linalg.qr, X("B", 3), why=ACROSS)
no("_linalg_solve_ex.default", torch.linalg.solve, X("B", 3, 3), X("B", 3), why=MISPLACED)
ok("linalg_cholesky_ex.default", lambda x: torch.linalg.cholesky(positive(x)), X("B", 3, 3))
ok("linalg_qr.default", lambda x: torch.linalg.qr(x), X("2B", 3, 3))
ok("linalg_lu_factor_ex.default", lambda x: torch.linalg.lu_factor(positive(x)), X("B", 3, 3))
ok("linalg_matrix_exp.default", torch.linalg.matrix_exp, X("B", 3, 3))
ok("_linalg_solve_ex.default", lambda a, b: torch.linalg.solve(positive(a), b), X("B", 3, 3), X("B", 3, 2))
ok("_linalg_det.default", torch.linalg.det, X("B", 3, 3))
ok("_linalg_slogdet.default", torch.linalg.slogdet, X("B", 3, 3))
ok("_linalg_svd.default", lambda x: torch.linalg.svdvals(x), X("B", 3, 3))
ok("_linalg_eigh.default", lambda x: torch.linalg.eigvalsh(positive(x)), X("B", 3, 3))
ok("cholesky_solve.default", lambda b, a: torch.cholesky_solve(b, torch.linalg.cholesky(positive(a))), X("B", 3, 2), X("B", 3, 3))

# ---- recurrent layers --------------------------------------------------------------------------------------------------


def recurrent(kind: str, batch_first: bool, bidirectional: bool = False):
    def function(x, *others):
        states, weights = others[: 1 + (kind == "lstm")], others[1 + (kind == "lstm") :]
        return torch.ops.l2l_compile.recurrent_layer(kind, x, states, weights, False, True, bidirectional, batch_first, None)

    return function


RECURRENT = "l2l_compile::recurrent_layer.default"
ok(RECURRENT, recurrent("lstm", True), X("B", 5, 4), X(1, "B", 3), X(1, "B", 3), X(12, 4), X(12, 3))
ok(RECURRENT, recurrent("gru", False), X(5, "2B", 4), X(1, "2B", 3), X(9, 4), X(9, 3))
ok(RECURRENT, recurrent("rnn_relu", True, True), X("B", 5, 4), X(2, "B", 3), X(3, 4), X(3, 3), X(3, 4), X(3, 3))
no(RECURRENT, recurrent("gru", False), X("B", 5, 4), X(1, 5, 3), X(9, 4), X(9, 3), why="carries a state from row to row")
no(RECURRENT, recurrent("gru", True), X("B", 5, 4), X(1, "B", 3), X(9, 4), X("3B", 3), why="as its 'weights'")
no(RECURRENT, recurrent("gru", True), X(3, 5, "B"), X(1, 3, 3), X(9, 4), X(9, 3), why="sums over the batch")
no(RECURRENT, lambda x, y, h, w, v: recurrent("gru", True)(torch.cat([x, y]), h, w, v), X("B", 5, 4), X("B", 5, 4), X(1, "2B", 3), X(9, 4), X(9, 3),
   why="different dimensions")

# ---- sums over ranks, which take numbers of several processes: tests/ranks/test_tensor_parallel.py -------------------------


def over_ranks(x):
    return torch.ops.l2l_compile.sum_over_ranks(x, "ranks")


ok("l2l_compile::sum_over_ranks.default", over_ranks, X("B", 3), numbers=False)
ok("l2l_compile::sum_over_ranks.default", over_ranks, X(3, "2B"), numbers=False)
ok("l2l_compile::sum_over_ranks.default", lambda x: over_ranks(x.sum(0)), X("B", 3), numbers=False)

# ---- quantized weights, where bitsandbytes is installed ----------------------------------------------------------------

with contextlib.suppress(ImportError):
    import bitsandbytes  # noqa: F401
bnb = torch.ops.bitsandbytes


def four_bits(x, w):
    packed, scales = bnb.quantize_4bit(w.float(), 64, "nf4", torch.uint8)
    return bnb.gemm_4bit(x.float(), packed, list(w.shape), scales, 64, "nf4")


def four_bits_of_one_row(x, w):
    packed, scales = bnb.quantize_4bit(w.float(), 64, "nf4", torch.uint8)
    return bnb.gemv_4bit(x.float(), packed, list(w.shape), scales, torch.linspace(-1, 1, 16), 64)


def scaled_product(x, w):
    a, of_rows, _ = bnb.int8_vectorwise_quant(x.half())
    b, of_columns, _ = bnb.int8_vectorwise_quant(w.half())
    return bnb.int8_scaled_mm(a, b, of_rows, of_columns)


def product_of_integers(x, w):
    return bnb.int8_linear_matmul(x.to(torch.int8), w.to(torch.int8))


def quantized(x, threshold=0.0):
    return bnb.int8_vectorwise_quant(x.half(), threshold)[:2]


def and_back(x):
    return bnb.int8_vectorwise_dequant(*bnb.int8_vectorwise_quant(x.half())[:2])


def dequantized_product(x, w):
    return bnb.int8_mm_dequant(product_of_integers(x, w), x.float().amax(1), w.float().amax(1))


ok("bitsandbytes::gemm_4bit.default", four_bits, X("B", 3, 64), X(8, 64))
ok("bitsandbytes::gemv_4bit.default", four_bits_of_one_row, X("B", 1, 64), X(8, 64), numbers=False)
ok("bitsandbytes::int8_linear_matmul.default", product_of_integers, I("2B", 4), I(8, 4))
no("bitsandbytes::int8_linear_matmul.default", product_of_integers, I(8, 4), I("B", 4), why="reads rows where it needs")
ok("bitsandbytes::int8_scaled_mm.default", scaled_product, X("B", 4), X(8, 4))
no("bitsandbytes::int8_scaled_mm.default", scaled_product, X(8, 4), X("B", 4), why="reads rows where it needs")
ok("bitsandbytes::int8_mm_dequant.default", dequantized_product, I("B", 4), I(8, 4))
ok("bitsandbytes::int8_vectorwise_quant.default", quantized, X("B", 4))
no("bitsandbytes::int8_vectorwise_quant.default", lambda x: quantized(x.T), X("B", 4), why="sums over the batch")
ok("bitsandbytes::int8_vectorwise_dequant.default", and_back, X("B", 4))
no("bitsandbytes::int8_vectorwise_dequant.default", lambda x, s: bnb.int8_vectorwise_dequant(x.to(torch.int8), s.float()), I(4, "B"), X(4),
   why="sums over the batch")

