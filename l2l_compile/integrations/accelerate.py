"""Hugging Face's `Accelerator`.

accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
stream(accelerator, micro_batches=8, update="in_forward")
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate import Accelerator

from l2l_compile.errors import OptionError
from l2l_compile.integrations.loops import StreamedSteps, check_is, compile_in_place, options_for


def stream(accelerator: Accelerator, **options: Any) -> None:
    """Have `accelerator.prepare` compile the model in place. Call it once, before `accelerator.prepare`; the loop stays as it is.

    `options` are options of the backend. The loop provides the optimizer, accumulation (`accelerator.accumulate`) and clipping
    (`accelerator.clip_grad_norm_`). Without the option `precision`, `mixed_precision` of the accelerator decides; autocast and
    GradScaler are not used. Model, optimizer and batches stay on the host. Prepare the model and its optimizer in one call.

    Raises `OptionError` for a bad option, and for an accelerator of several processes.
    """
    check_is(accelerator, Accelerator, "accelerator = Accelerator(); stream(accelerator); accelerator.prepare(model, optimizer)")
    if accelerator.num_processes > 1:
        raise OptionError(
            f"an Accelerator of {accelerator.num_processes} processes does not go with streaming: start one process. (A loop of "
            "your own may wrap the compiled model in DistributedDataParallel)"
        )
    if accelerator._models or isinstance(getattr(accelerator.prepare, "__self__", None), _Prepares):
        raise OptionError("call stream(accelerator) once, before accelerator.prepare(model, optimizer, ...)")
    chosen, update = options_for(options, accelerator.mixed_precision)
    accelerator.device_placement = False
    accelerator.native_amp, accelerator.scaler = False, None
    accelerator.prepare = _Prepares(accelerator, chosen, update).prepare


class _Prepares:
    """Replaces `accelerator.prepare`: also compiles the models in place."""

    def __init__(self, accelerator: Accelerator, options: dict[str, Any], update: str):
        self.accelerator, self.options, self.update = accelerator, options, update
        self._prepare = accelerator.prepare

    @functools.wraps(Accelerator.prepare)
    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        models = [a for a in args if isinstance(a, torch.nn.Module)]
        optimizers = [a for a in args if isinstance(a, torch.optim.Optimizer)]
        if len(models) > 1 or len(optimizers) > 1 or optimizers and not models:
            raise OptionError(
                f"accelerator.prepare got {len(models)} models and {len(optimizers)} optimizers: prepare one model with its optimizer "
                "in one call"
            )
        prepared = self._prepare(*args, **kwargs)
        together = prepared if isinstance(prepared, tuple) else (prepared,)
        for model in (a for a in together if isinstance(a, torch.nn.Module)):
            optimizer = next((a for a in together if isinstance(a, torch.optim.Optimizer)), None)
            if optimizer is None:
                compile_in_place(model, self.options)
            else:
                self._follow(model, optimizer)
        return prepared

    def _follow(self, model: torch.nn.Module, optimizer: Any) -> None:
        accelerator = self.accelerator

        def skipped(was: bool) -> None:
            optimizer._is_overflow = was  # then the scheduler does not step, as with GradScaler

        steps = StreamedSteps(model, optimizer, self.options, self.update, lambda: accelerator.sync_gradients, skipped)
        if steps.clips:
            accelerator.clip_grad_norm_ = steps.clip
            accelerator.clip_grad_value_ = steps.clip_values
