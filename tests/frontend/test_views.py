"""Results of a graph that are views: of its inputs, or of its other results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile import L2LError
from models import WIDTH, assert_parity, compilation, pair_of, rows

split_graph = torch._dynamo.graph_break


class Views(nn.Module):
    """Two linear layers and a table; `forward` is that of the case."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.case = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), forward
        self.register_buffer("table", torch.ones(4, WIDTH))

    def forward(self, x):
        return self.case(self, x)


def slice_of_an_input(model, x):
    seen = x[:, :4]
    split_graph()
    seen.mul_(0.5)
    split_graph()
    return model.a(x)


def detached_input(model, x):
    x = model.a(x)
    split_graph()
    seen = x.detach()
    split_graph()
    seen.mul_(0.5)
    split_graph()
    return model.b(x.sin())


def with_a_gradient(model, x):
    x = model.a(x)
    split_graph()
    seen = x[2:].t()
    split_graph()
    seen.mul_(3)
    split_graph()
    return model.b(x)


def written_before(model, x):
    x = model.a(x)
    split_graph()
    seen = x[2:]
    x.mul_(2)
    split_graph()
    seen.mul_(3)
    split_graph()
    return model.b(x)


def slice_of_a_buffer(model, x):
    model.table.mul_(2)
    seen, y = model.table[1:], model.a(x)
    split_graph()
    seen.add_(1)
    split_graph()
    return y + model.table.sum()


def slice_of_a_result(model, x):
    made = model.a(x)
    seen = made[:, 2:]
    split_graph()
    seen.mul_(2)
    split_graph()
    return model.b(made)


def reshaped_and_detached(model, x):
    made = model.a(x)
    flat, constant = made.view(-1), made.detach()
    split_graph()
    flat.mul_(0.5)
    split_graph()
    return model.b(made) + constant


CASES = [
    slice_of_an_input,
    detached_input,
    with_a_gradient,
    written_before,
    slice_of_a_buffer,
    slice_of_a_result,
    reshaped_and_detached,
]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.slow(but=("*-3", "slice_of_an_input-1"))
def test_a_write_behind_a_graph_break_reaches_what_is_viewed(case, micro_batches):
    step = assert_parity(Views(case).double(), rows(6, WIDTH), rows(9, WIDTH), micro_batches=micro_batches)
    assert len(l2l_compile.programs(step)) > 1


@pytest.mark.parametrize("view", [lambda x: x[:, :4], lambda x: x.detach()], ids=["slice", "detach"])
def test_a_write_into_a_view_of_a_value_read_whole_is_refused(view):
    def forward(model, x):
        seen = view(x)
        split_graph()
        seen.mul_(0.5)
        return model.a(x)

    with pytest.raises(L2LError, match="segment 'a' writes in place into 'seen', whose memory 'x' shares"):
        pair_of(Views(forward).double()).run(lambda call, x: call(x).sum().backward(), rows(6, WIDTH))


def several(model, x):
    made = model.a(x)
    return made, made[:, 1:], made.detach(), x[1:], x.mT, model.table[:2], model.a.weight.detach(), model.b.weight[:2]


def test_views_of_each_kind_are_results_with_eagers_gradients():
    assert_parity(Views(several).double(), rows(6, WIDTH).requires_grad_(), rows(7, WIDTH).requires_grad_())


def test_views_share_memory_as_in_eager():
    model = Views(several).double()
    x = rows(6, WIDTH)
    made, part, constant, tail, turned, table, weight, copy = torch.compile(
        model, backend="l2l", options={"micro_batches": 3, "block_compiler": "eager"}
    )(x)
    memory = lambda t: t.untyped_storage().data_ptr()  # noqa: E731
    assert memory(part) == memory(constant) == memory(made)
    assert memory(tail) == memory(turned) == memory(x)
    assert memory(table) == memory(model.table) and memory(weight) == memory(model.a.weight)
    assert memory(copy) != memory(model.b.weight)  # its gradient comes from the program
    assert part.requires_grad and not constant.requires_grad and not tail.requires_grad


def test_no_segment_makes_a_view():
    def forward(model, x):
        return model.a(x), x[1:], model.table.t()

    found = compilation(Views(forward), rows(6, WIDTH, dtype=torch.float32))
    assert [s.name for s in found.segments] == ["a"] and set(found.captured.views) == {1, 2}
    report = l2l_compile.explain(Views(forward), {"micro_batches": 3})(rows(6, WIDTH, dtype=torch.float32))
    assert [o.shape for o in report.outputs] == [(6, WIDTH)]


def test_a_graph_of_views_alone():
    def forward(model, x):
        turned = x.t()[:4]
        split_graph()
        return model.a(turned.t() @ turned @ x)

    square = lambda: rows(WIDTH, WIDTH)  # noqa: E731
    assert_parity(Views(forward).double(), square(), micro_batches=1)


def test_a_view_in_another_dtype_is_a_copy():
    def forward(model, x):
        return model.a(x), x.view(torch.int64), torch.view_as_complex(x.unflatten(1, (-1, 2)))

    assert_parity(Views(forward).double(), rows(6, WIDTH))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_report_follows_views_through_graph_breaks(case):
    report = l2l_compile.explain(Views(case).double(), {"micro_batches": 3})(rows(6, WIDTH))
    assert len(report.programs) > 1 and not report.uncompiled


def test_a_view_of_a_result_that_is_not_made_is_a_shape():
    def forward(model, x):
        made = model.a(x)
        return made.square().mean(), made, made[:, 1:]

    step = torch.compile(
        Views(forward).double(), backend="l2l", options={"micro_batches": 3, "outputs": "loss", "block_compiler": "eager"}
    )
    loss, made, part = step(rows(6, WIDTH))
    loss.backward()
    assert made.is_meta and part.is_meta and part.shape == (6, WIDTH - 1)
