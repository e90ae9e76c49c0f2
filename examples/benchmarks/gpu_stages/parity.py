"""Compares the backend with plain PyTorch on the GPU: three steps of tiny models in many settings, and single questions.

In float64 and float32, losses, gradients, parameters and buffers are compared. In 16 bits, the error against float32 is
compared with the error of `torch.autocast`. Overlapped updates leave no gradients, so parameters are compared.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .cases import Case, Context, Report
from .parity_questions import questions
from .settings import Setting, settings
from .training import (
    Batch,
    Compiled,
    adamw,
    device_options,
    distance,
    loss_of,
    moved,
    reference_kernels,
    relative,
    stand_in,
    warm_up,
)
from .zoo import SPECS, Spec, batch, made

STEPS = 3
MOST = {"fp64": 1e-10, "fp32": 1e-4}
MOST_RATIO = 1.5  # the error in 16 bits over autocast's error
_NAMES = {spec.name: spec for spec in SPECS}


def prepare() -> None:
    """Import the models, and the modules for a first step."""
    for spec in SPECS:
        spec.make()
    warm_up()


def cases(context: Context) -> list[Case]:
    """The settings and the questions in turn, so that settings that cover all pairs come early."""
    reference_kernels()
    grid = [
        Case(str(setting), functools.partial(compare, context, setting, index), 60 if context.on_gpu else 180)
        for index, setting in enumerate(settings(list(_NAMES)))
    ]
    asked = questions(context)
    mixed = [case for pair in zip(grid, asked, strict=False) for case in pair]
    return mixed + grid[len(asked) :] + asked[len(grid) :]


def compare(context: Context, setting: Setting, index: int, report: Report, **more: Any) -> None:
    """Compare one setting, with `more` options. Without a GPU, settings run on the threaded device and on the host in turn."""
    spec = _NAMES[setting.model]
    model = made(spec, setting.dtype)
    optimizer = adamw(model)
    device = stand_in(context) if index % 2 == 0 else None
    compiled = Compiled(model, {**device_options(context), **setting.options(optimizer), **more}, device)
    trial = Trial(context, setting, spec, compiled, optimizer)
    if setting.narrow is None:
        value, where = trial.exact()
        report(f"worst difference in {STEPS} steps", value, most=MOST[setting.precision], note=where)
    else:
        value, where = trial.narrow_gradients() if setting.update == "at_step" else trial.narrow_parameters()
        report("error over that of autocast", value, most=MOST_RATIO, note=where)


class Trial:
    """A compiled model and a plain copy on the device, trained from the same weights on the same batches."""

    def __init__(self, context: Context, setting: Setting, spec: Spec, compiled: Compiled, optimizer: torch.optim.Optimizer):
        self.context, self.setting, self.spec, self.compiled, self.optimizer = context, setting, spec, compiled, optimizer
        self.model = compiled.model
        self.before = [p.detach().clone() for p in self.model.parameters()]
        self.plain = copy.deepcopy(self.model).to(context.device)

    def batches(self) -> list[Batch]:
        return [batch(self.spec, seed, self.setting.dtype) for seed in range(STEPS)]

    def step(self, inputs: Batch) -> torch.Tensor:
        """One step of the compiled model's training, without `optimizer.step()`."""
        loss = loss_of(self.compiled(**inputs))
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    # ---- float64 and float32 -----------------------------------------------------------------------------------------

    def exact(self) -> tuple[float, str]:
        """The largest relative difference, and the name of its tensor."""
        found: list[tuple[float, str]] = []
        theirs = adamw(self.plain)
        for number, inputs in enumerate(self.batches(), 1):
            loss = self.step(inputs)
            expected = loss_of(self.plain(**moved(inputs, self.context.device)))
            expected.backward()
            found.append((relative(loss, expected), f"loss of step {number}"))
            if self.setting.update == "at_step":
                found.append(worst_gradient(self.model, self.plain, f"step {number}"))
            self.update()
            theirs.step()
            theirs.zero_grad()
        self.compiled.synchronize()
        found.append((distance(self.moves(self.model), self.moves(self.plain)), f"change of the parameters in {STEPS} steps"))
        for (name, ours), (_, other) in zip(self.model.named_buffers(), self.plain.named_buffers(), strict=True):
            if ours.is_floating_point():
                found.append((relative(ours, other), f"buffer {name}"))
        return worst(found)

    def moves(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """The changes of the parameters since the beginning."""
        return [p.detach().cpu() - b for p, b in zip(model.parameters(), self.before, strict=True)]

    # ---- 16 bits -----------------------------------------------------------------------------------------------------

    def narrow_gradients(self) -> tuple[float, str]:
        """The error of gradients over autocast's error, both against float32, from the same weights in each step."""
        found = expected = 0.0
        for inputs in self.batches():
            self.plain.load_state_dict(self.model.state_dict())
            other = copy.deepcopy(self.plain)
            on_device = moved(inputs, self.context.device)
            loss_of(self.plain(**on_device)).backward()
            self.autocast_backward(other, on_device)
            self.finite_step(inputs)
            exact = gradients(self.plain)
            found += distance(gradients(self.model), exact)
            expected += distance(gradients(other), exact)
            self.update()
            self.plain.zero_grad()
        return found / expected, f"mean error {found / STEPS:.1e}, of autocast {expected / STEPS:.1e}"

    def finite_step(self, inputs: Batch) -> None:
        """Take a step without overflow. The loss scale begins at 65536, and is halved after each overflow."""
        for _ in range(8):
            self.step(inputs)
            if all(bool(g.isfinite().all()) for g in gradients(self.model)):
                return
            self.update()  # skips, and halves the scale
        raise AssertionError("gradients overflow at every loss scale from 65536 to 512")

    def autocast_backward(self, model: torch.nn.Module, inputs: Batch, scale: float = 1024.0) -> None:
        """Gradients as `torch.autocast` gives them, scaled so that none is too small for fp16."""
        (self.autocast_loss(model, inputs) * scale).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(scale)

    def autocast_loss(self, model: torch.nn.Module, inputs: Batch) -> torch.Tensor:
        with torch.autocast(self.context.device.type, dtype=self.setting.narrow):
            return loss_of(model(**inputs))

    def narrow_parameters(self) -> tuple[float, str]:
        """The error of parameters after all steps, over the error of autocast, both against float32."""
        amp = copy.deepcopy(self.plain)
        train = functools.partial(self.train_plain, self.plain, lambda m, i: loss_of(m(**i)).backward())
        train_amp: Callable[[], None] = functools.partial(self.train_plain, amp, self.autocast_backward)
        for inputs in self.batches():
            self.step(inputs)
            self.update()
        self.compiled.synchronize()
        train()
        train_amp()
        exact = self.moves(self.plain)
        found, expected = distance(self.moves(self.model), exact), distance(self.moves(amp), exact)
        skipped = self.compiled.stats.skipped_steps
        return found / expected, f"error {found:.1e}, of autocast {expected:.1e}; {skipped} steps skipped for an overflow"

    def train_plain(self, model: torch.nn.Module, backward: Callable) -> None:
        optimizer = adamw(model)
        for inputs in self.batches():
            backward(model, moved(inputs, self.context.device))
            optimizer.step()
            optimizer.zero_grad()


def worst(found: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The pair with the largest value. NaN counts as infinite."""
    return max(found, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def worst_gradient(model: torch.nn.Module, plain: torch.nn.Module, when: str) -> tuple[float, str]:
    """The largest relative difference of a gradient. Norms count as at least 1e-4 of the largest, for gradients near zero."""
    pairs = list(zip(model.named_parameters(), plain.parameters(), strict=True))
    largest = max(q.grad.norm().item() for _, q in pairs if q.grad is not None)
    found = []
    for (name, p), q in pairs:
        if (p.grad is None) != (q.grad is None):
            return float("inf"), f"gradient of {name} is {'missing' if p.grad is None else 'extra'}"
        if p.grad is not None:
            found.append((relative(p.grad, q.grad, 1e-4 * largest), f"gradient of {name}, {when}"))
    return worst(found)
