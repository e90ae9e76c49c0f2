"""A loss that another rank still computes: what reads it waits, and what scales it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from l2l_compile.errors import L2LError
from l2l_compile.runtime.late_loss import Coming, LateLoss

NUMBER = 3.337
SCALED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "quotient": lambda loss: loss / 3,
    "product": lambda loss: 0.1 * loss,
    "negative": lambda loss: -loss,
    "both": lambda loss: loss * 0.7 / 3,
    "scale": lambda loss: loss * torch.tensor(65536.0),
    "wide": lambda loss: loss / torch.tensor([3.0], dtype=torch.float64),
}


class Late:
    """A late loss, and whether it was waited for."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.number, self.waited = torch.tensor(NUMBER, dtype=dtype), 0
        self.coming = Coming(torch.zeros((), dtype=dtype), self.fetch)
        self.loss = LateLoss(self.coming).requires_grad_()

    def fetch(self) -> torch.Tensor:
        self.waited += 1
        return self.number.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", SCALED.values(), ids=SCALED)
def test_a_scaled_loss_has_the_bits_of_eager_and_no_wait(scale, dtype):
    late, eager = Late(dtype), torch.tensor(NUMBER, dtype=dtype, requires_grad=True)
    expected, found = scale(eager), scale(late.loss)
    expected.backward()
    found.backward()
    kept = found.detach()
    assert not late.waited and type(found) is type(kept) is LateLoss
    assert (kept.shape, kept.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(late.loss.grad, eager.grad) and late.loss.grad.dtype == eager.grad.dtype
    assert kept.tolist() == found.tolist() == expected.tolist() and late.waited == 1


def test_other_arithmetic_waits():
    weight = torch.tensor(2.0, requires_grad=True)
    for read in (lambda loss: loss + 1, lambda loss: loss * torch.ones(2), lambda loss: loss * weight, lambda loss: loss * loss):
        late = Late()
        assert type(read(late.loss)) is torch.Tensor and late.waited == 1


def test_a_loss_that_is_there_is_scaled_at_once():
    late = Late()
    late.coming.fill(late.number)
    assert type(late.loss / 2) is torch.Tensor and not late.waited


def test_later_writes_do_not_change_a_scaled_loss():
    late, scale = Late(), torch.tensor(2.0)
    scaled = late.loss.detach() * scale
    scale.fill_(100.0)
    late.loss.detach().mul_(100.0)
    assert scaled.item() == 2 * late.number.item() and late.waited == 1


def test_a_scaled_loss_of_a_failed_step_says_so():
    late = Late()
    scaled = late.loss / 2
    late.coming.fail(ValueError("no more data"))
    with pytest.raises(L2LError, match="a step that has failed is read: ValueError: no more data"):
        scaled.item()
