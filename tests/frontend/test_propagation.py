"""What the memory of fake propagation makes again is what PyTorch would have made."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.multiprocessing.reductions import StorageWeakRef

from l2l_compile.frontend.faster import propagation
from l2l_compile.testing import Pair
from models import WIDTH, EncoderDecoder, assert_parity, compiled, rows


class Fakes:
    """A batch of a symbolic number of rows, a weight, and the memory of one frame."""

    def __init__(self):
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        self.memory: dict = {}
        self.weight = self.mode.from_tensor(torch.randn(16, 16, requires_grad=True), static_shapes=True)

    def rows(self) -> FakeTensor:
        symbol = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC])
        if not hasattr(self, "_rows"):
            self._rows = self.mode.from_tensor(torch.randn(6, 4, 16), symbolic_context=symbol)
        with self.mode:
            return self._rows.clone()

    def run(self, operation, *operands, **named):
        """The result, and whether it was made from memory."""
        ran = []

        def run():
            ran.append(True)
            return operation(*operands, **named)

        with self.mode, enable_python_dispatcher():  # as Dynamo runs it
            return propagation.propagate(self.memory, operation, (operands, named), run), not ran


def described(result, operands) -> list:
    """Everything that Dynamo could see of a result."""
    leaves = result if isinstance(result, (tuple, list)) else [result]
    return [type(result)] + [
        (
            propagation._metadata(t), t._version, t.is_leaf, t.grad_fn is not None, type(t),
            [t is o for o in operands],
            [StorageWeakRef(t.untyped_storage()) == StorageWeakRef(o.untyped_storage()) for o in operands],
            str(propagation._storage_bytes(t)),
        )
        for t in leaves
    ]  # fmt: skip


OPERATIONS = {
    "linear": lambda x, w: F.linear(x, w),
    "of two batches": lambda x, w: x + F.gelu(x),
    "view": lambda x, w: x.view(x.shape[0], 4, 4, 4),
    "a view of a view": lambda x, w: x.transpose(0, 1)[1:],
    "a differentiable view": lambda x, w: F.linear(x, w).transpose(1, 2),
    "the operand itself": lambda x, w: x.contiguous(),
    "several views": lambda x, w: x.chunk(2, -1),
    "another dtype": lambda x, w: x.double(),
    "a number": lambda x, w: (x * w.sum()).sum(),
    "detached": lambda x, w: F.linear(x, w).detach(),
    "nothing": lambda x, w: x[:, :0],
    "expanded": lambda x, w: x[:1].expand(3, 4, 16),
    "attention": lambda x, w: F.scaled_dot_product_attention(x, x, F.linear(x, w)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_made_again_as_pytorch_makes_it(name):
    fakes, operation = Fakes(), OPERATIONS[name]
    _, known = fakes.run(operation, fakes.rows(), fakes.weight)
    assert not known
    operands = fakes.rows(), fakes.weight
    guards = len(fakes.env.guards)
    again, known = fakes.run(operation, *operands)
    assert known
    assert len(fakes.env.guards) == guards
    with fakes.mode, enable_python_dispatcher():
        assert described(again, operands) == described(operation(*operands), operands)


def test_two_results_do_not_share_a_storage_or_a_version():
    fakes = Fakes()
    first, second, third = [fakes.run(F.gelu, fakes.rows())[0] for _ in range(3)]
    assert len({StorageWeakRef(t.untyped_storage()) for t in (first, second, third)}) == 3
    with fakes.mode:
        second.add_(1)
    assert [t._version for t in (first, second, third)] == [0, 1, 0]


def test_writing_through_a_view_is_seen_in_its_base():
    fakes = Fakes()
    fakes.run(OPERATIONS["view"], fakes.rows(), fakes.weight)
    base = fakes.rows()
    view, known = fakes.run(OPERATIONS["view"], base, fakes.weight)
    assert known
    before = base._version
    with fakes.mode:
        view.add_(1)
    assert base._version == before + 1


def test_gradients_lead_to_the_operands():
    fakes = Fakes()
    fakes.run(F.linear, fakes.rows(), fakes.weight)
    result, known = fakes.run(F.linear, fakes.rows(), fakes.weight)
    assert known
    with fakes.mode:
        (gradient,) = torch.autograd.grad(result.sum(), fakes.weight)
    assert gradient.shape == fakes.weight.shape


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        (torch.Tensor.add_, (1,)),  # writes into its operand
        (torch.Tensor.unsqueeze_, (0,)),  # changes its operand's sizes
        (lambda x: F.relu(x, inplace=True), ()),
        (lambda x: x.shape[0], ()),  # is no tensor
        (lambda x: x[0].to_sparse(), ()),  # has no storage
        (lambda x: x.new_zeros(4).requires_grad_(), ()),  # a leaf of its own
    ],
)
def test_what_has_effects_is_run_every_time(operation, arguments):
    fakes = Fakes()
    assert [fakes.run(operation, fakes.rows(), *arguments)[1] for _ in range(2)] == [False, False]


@pytest.mark.parametrize(("one", "other"), [((1,), (1.0,)), ((1,), (True,)), ((2,), (3,)), ((torch.float64,), (torch.float16,))])
def test_operands_that_compare_equal_are_told_apart(one, other):
    fakes = Fakes()

    def operation(x, value):
        return x.to(value) if isinstance(value, torch.dtype) else torch.full_like(x, value, dtype=type(value))

    results = [fakes.run(operation, fakes.rows(), *value) for value in (one, other, one)]
    assert [known for _, known in results] == [False, False, True]
    assert results[0][0].dtype == results[2][0].dtype


def test_modes_are_told_apart():
    fakes = Fakes()
    assert fakes.run(F.linear, fakes.rows(), fakes.weight)[0].requires_grad
    with torch.no_grad():
        assert not fakes.run(F.linear, fakes.rows(), fakes.weight)[0].requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert fakes.run(F.linear, fakes.rows(), fakes.weight)[0].dtype == torch.bfloat16
    assert fakes.run(F.linear, fakes.rows(), fakes.weight)[1]


def test_new_symbols_are_not_repeated():
    fakes = Fakes()
    results = [fakes.run(torch.nonzero, fakes.rows()) for _ in range(2)]
    assert not any(known for _, known in results)


def test_all_of_a_model(monkeypatch):
    """Every result that a capture takes from memory is compared with the operation's own."""
    original, made = propagation.propagate, []

    def checked(memory, target, operands, run):
        ran = []
        result = original(memory, target, operands, lambda: (ran.append(True), run())[1])
        if not ran:
            tensors: list = []
            propagation._describe(operands, tensors)
            made.append((described(result, tensors), described(run(), tensors)))
        return result

    monkeypatch.setattr(propagation, "propagate", checked)
    compiled(EncoderDecoder().double(), micro_batches=2)(rows(6, 4, WIDTH))
    assert len(made) > 100
    assert all(again == own for again, own in made)


def test_other_backends_are_left_alone(monkeypatch):
    def refuse(*_):
        raise AssertionError("a frame of another backend")

    monkeypatch.setattr(propagation, "propagate", refuse)
    torch.compile(torch.nn.Linear(4, 4), backend="eager", dynamic=True)(torch.randn(3, 4))


READERS = {
    "arange": lambda table, n: table(torch.arange(n)),
    "arange by keyword": lambda table, n: table(torch.arange(end=n)),
    "slice": lambda table, n: table.weight[:n],
    "new_zeros": lambda table, n: table.weight[0] + table.weight.new_zeros(n, 1),
}


@pytest.mark.parametrize("name", READERS)
def test_a_size_that_a_tensor_holds_is_read_in_every_call(name):
    class UpToTheLongest(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(5, WIDTH)

        def forward(self, lengths, longest):
            return self.table(lengths - 1) + READERS[name](self.table, longest).square().sum(0)

    batches = [torch.tensor(lengths) for lengths in ([1, 3, 2, 1, 2, 3], [5, 1, 4, 2, 1, 1])]
    assert_parity(UpToTheLongest().double(), *((lengths, lengths.max()) for lengths in batches))


def test_a_number_that_the_graph_itself_holds_breaks_no_graph():
    class Constants(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y[:, torch.tensor(2)].unsqueeze(1) + torch.arange(torch.tensor(WIDTH))

    model = Constants(WIDTH, WIDTH).double()
    whole = torch.compile(model, backend="l2l", fullgraph=True, options={"block_compiler": "eager", "device": "cpu"})
    Pair(model, copy.deepcopy(model), whole).step(rows(6, WIDTH)).check()
