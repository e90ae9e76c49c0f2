"""Evaluation under `torch.inference_mode()`, whenever it comes, changes no number of training and stops nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import l2l_compile
from models import Stack, compiled

UPDATES = {
    "at_step": {"update": "at_step"},
    "in_backward": {"update": "in_backward"},
    "in_forward": {"update": "in_forward"},
    "delayed": {"update": "in_forward", "delay": 1},
}
MODES = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "inference_mode with gradients": lambda: _both(torch.inference_mode(), torch.enable_grad()),
}


class _both:
    """Two contexts, one within the other."""

    def __init__(self, outer, inner):
        self.outer, self.inner = outer, inner

    def __enter__(self):
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error):
        self.inner.__exit__(*error)
        self.outer.__exit__(*error)


def batch(number: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(number))


def trained(evaluation, at: tuple[int, ...], device: str = "cpu", **options) -> tuple[dict, list[float]]:
    """The parameters after four steps, and the losses of evaluations before the steps `at`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = compiled(model, optimizer=optimizer, device=device, **options)
    losses = []
    for number in range(4):
        if number in at:
            with evaluation():
                losses.append(float(step(batch(100 + number)).pow(2).mean()))
                step(batch(100 + number)[:4])  # other micro-batches
        step(batch(number)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(model.state_dict()), losses


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("update", "precision"),
    [(update, p) for update in UPDATES for p in ("fp32", "bf16", "fp16") if (update, p) != ("in_backward", "fp16")],
)
@pytest.mark.parametrize("device", ["cpu", "threaded"])
@pytest.mark.slow(but=("cpu-*-bf16-inference_mode", "threaded-delayed-fp32-inference_mode", "cpu-at_step-fp16-no_grad"))
def test_evaluation_first_or_between_changes_no_number(device, update, precision, mode, request):
    if device == "threaded":
        request.getfixturevalue("threaded")
    options = {**UPDATES[update], "precision": precision, "block_compiler": "eager"}
    with_evaluation = trained(MODES[mode], (0, 2), **options)
    reference = trained(torch.no_grad, (2,), **options)
    for name, value in reference[0].items():
        assert torch.equal(with_evaluation[0][name], value), name
    assert with_evaluation[1][1:] == reference[1]


def test_compiled_code_of_an_evaluation_trains():
    options = {**UPDATES["in_backward"], "precision": "bf16"}
    first, reference = (trained(torch.inference_mode, at, **options)[0] for at in ((0, 2), ()))
    assert all(torch.equal(first[name], value) for name, value in reference.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_made_under_inference_mode_is_evaluated(precision):
    with torch.inference_mode():
        model = Stack(3)
        step = compiled(model, precision=precision, block_compiler="eager")
        found = [step(batch(number)) for number in range(2)]
        model.head.bias += 1.0
        found.append(step(batch(0)))
    torch.testing.assert_close(found[2], found[0] + 1.0, rtol=0, atol=1e-5 if precision == "fp32" else 0.02)


class WithStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.body = nn.BatchNorm1d(5), Stack(2)

    def forward(self, x):
        return self.body(self.seen(x))


def test_a_buffer_made_under_inference_mode_is_written_there():
    model = WithStatistics()
    step = compiled(model, block_compiler="eager")
    with torch.inference_mode():
        for name, buffer in list(model.seen.named_buffers()):
            setattr(model.seen, name, buffer.clone())
        eager = copy.deepcopy(model)
        for number in range(2):
            step(batch(number))
            eager(batch(number))
        torch.testing.assert_close(model.state_dict(), eager.state_dict())


def test_saving_and_loading_in_inference_mode_changes_no_number():
    def run(context) -> dict:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Stack(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = compiled(model, optimizer=optimizer, precision="bf16", block_compiler="eager", **UPDATES["delayed"])
        for number in range(6):
            if number == 3:
                with context():
                    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                    l2l_compile.synchronize(step)
                    model.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
            step(batch(number)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return copy.deepcopy(model.state_dict())

    found, reference = run(torch.inference_mode), run(torch.no_grad)
    assert all(torch.equal(found[name], value) for name, value in reference.items())
