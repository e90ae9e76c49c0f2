"""Errors of gradients in 16 bits, beside those of `torch.autocast`."""

from __future__ import annotations

from l2l_compile.testing import Pair


def gradient_errors(model, inputs, precision, **options) -> tuple[float, float]:
    """Those of this backend and of `torch.autocast`, against fp32: relative, of all gradients together."""
    return Errors(model, precision, **options).of(model, inputs)


class Errors:
    """Compiles a model once, and measures the errors of its gradients with other weights and inputs."""

    def __init__(self, model, precision, **options):
        self.pair = Pair.of(model, {"micro_batches": 3, "block_compiler": "eager", "precision": precision, **options})

    def of(self, exact, inputs) -> tuple[float, float]:
        """With the weights of `exact`, a model of the same form."""
        for module in (self.pair.streamed, self.pair.eager):
            module.load_state_dict(exact.state_dict())
        together = self.pair.step(**inputs).worst
        return together.difference.relative, together.own / together.difference.norm
