"""Errors of gradients in 16 bits, beside those of `torch.autocast`."""

from __future__ import annotations

import copy

import torch

from models import compiled


def gradient_errors(model, inputs, precision, **options) -> tuple[float, float]:
    """Those of this backend and of `torch.autocast`, against fp32."""
    return Errors(copy.deepcopy(model), precision, **options).of(model, inputs)


class Errors:
    """Compiles a model once, and measures the errors of its gradients with other weights and inputs."""

    def __init__(self, model, precision, **options):
        self.model, self.narrow = model, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.step = compiled(model, precision=precision, optimizer=self.optimizer, **options)

    def of(self, exact, inputs) -> tuple[float, float]:
        """With the weights of `exact`, a model of the same form."""
        model, autocast = self.model, copy.deepcopy(exact)
        model.load_state_dict(exact.state_dict())
        exact(**inputs).loss.backward()
        with torch.autocast("cpu", self.narrow):
            loss = autocast(**inputs).loss
        loss.backward()
        model.zero_grad()
        self.step(**inputs).loss.backward()
        while not all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()):  # fp16: the scale is halved
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step(**inputs).loss.backward()
        assert all(p.grad is None or p.grad.dtype is torch.float32 for p in model.parameters())
        return gradient_error(model, exact), gradient_error(autocast, exact)


def gradient_error(model, reference) -> float:
    """Relative distance of all gradients together."""
    pairs = [
        (p.grad.double(), q.grad.double())
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
        if q.grad is not None
    ]
    return (sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt().item()
