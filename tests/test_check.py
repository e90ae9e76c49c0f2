"""Option check: what operations say of themselves is compared with what they do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from l2l_compile import CheckError
from models import WIDTH, Layer, Stack, assert_parity, compiled, loss_of, rows


@torch.library.custom_op("l2l_check::centre", mutates_args=(), tags=(torch.Tag.pointwise,))
def centre(x: torch.Tensor) -> torch.Tensor:
    """Takes the mean of the batch away, and says that it is pointwise."""
    return x - x.mean(0, keepdim=True)


@centre.register_fake
def _(x):
    return torch.empty_like(x)


centre.register_autograd(lambda ctx, g: g - g.mean(0, keepdim=True))


@torch.library.custom_op("l2l_check::honest", mutates_args=(), tags=(torch.Tag.pointwise,))
def honest(x: torch.Tensor) -> torch.Tensor:
    """Pointwise forward."""
    return x * 2


@honest.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("l2l_check::spread", mutates_args=(), tags=(torch.Tag.pointwise,))
def spread(x: torch.Tensor) -> torch.Tensor:
    """The gradient of `honest`, if it mixed rows."""
    return 2 * x.mean(0, keepdim=True).expand_as(x).contiguous()


@spread.register_fake
def _(x):
    return torch.empty_like(x)


honest.register_autograd(lambda ctx, g: spread(g))


class Custom(nn.Module):
    def __init__(self, operator, depth=3):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(depth)])
        self.operator = operator

    def forward(self, x):
        for layer in self.layers:
            x = self.operator(layer(x))
        return x


def test_an_operator_that_mixes_rows_and_lies_about_it():
    model, x = Custom(centre).double(), rows(6, WIDTH)
    with pytest.raises(CheckError, match=r"segment 'layers.0'.*l2l_check.centre.default mixes the rows"):
        compiled(model, check=True)(x)
    assert not torch.allclose(
        compiled(Custom(centre).double())(x), Custom(centre).double()(x)
    )  # what it would have done in silence


def test_a_backward_that_mixes_rows():
    step = compiled(Custom(honest).double(), check=True)
    output = step(rows(6, WIDTH))
    with pytest.raises(CheckError, match=r"segment 'layers.2'.*gradients.*l2l_check.spread"):
        loss_of(output).backward()


def test_what_failed_is_compared_again():
    """A caller who catches the error does not train on, unchecked, with the next step."""
    step = compiled(Custom(centre).double(), check=True)
    for _ in range(2):
        with pytest.raises(CheckError, match="l2l_check.centre"):
            step(rows(6, WIDTH))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_size_of_the_gradients_does_not_matter(scale, dtype):
    def step(operator):
        output = compiled(Custom(operator).to(dtype), check=True)(rows(6, WIDTH, dtype=dtype))
        (loss_of(output) * scale).backward()

    step(F.relu)
    with pytest.raises(CheckError, match="l2l_check.spread"):
        step(honest)


class Everything(nn.Module):
    """Sums and means in parts, dropout, a BatchNorm that is whole, a value without rows."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = Stack(3, dropout=0.3), nn.BatchNorm1d(3)

    def forward(self, x, target):
        y = self.norm(self.body(x))
        mean = (y * target.unsqueeze(1)).mean() + y.pow(2).sum() * 0.01
        return {"loss": F.cross_entropy(y, target) + mean, "scores": y}


@pytest.mark.parametrize(
    "options, counts", [({}, (7, 5)), ({"block_compiler": "inductor"}, (6,)), ({"precision": "bf16"}, (7, 5))], ids=str
)
@pytest.mark.slow(only="*inductor*")
def test_what_is_right_passes(options, counts):
    model = Everything()
    step = compiled(model, check=True, **options)
    for count in counts:
        step(rows(count, dtype=torch.float32), torch.randint(3, (count,)))["loss"].backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_check_changes_no_result(threaded):
    assert_parity(Stack(3).double(), rows(6), rows(7), check=True)


def test_every_block_is_compared_once(monkeypatch):
    import l2l_compile.row_check

    seen = []
    compare = l2l_compile.row_check._Pair.compare
    monkeypatch.setattr(
        l2l_compile.row_check._Pair, "compare", lambda self, *a: (seen.append((self.segment.name, self.what)), compare(self, *a))
    )
    step = compiled(Stack(4).double(), check=True)
    for _ in range(2):
        step(rows(6)).sum().backward()
    assert seen == [(n, "outputs") for n in ("embed", "layers.0", "head")] + [
        (n, "gradients") for n in ("head", "layers.3", "embed")
    ]
