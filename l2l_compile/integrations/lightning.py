"""Lightning's `Trainer`: a strategy, and a callback for trainers that run on the host, as one device.

trainer = Trainer(strategy=StreamingStrategy(micro_batches=8, update="in_forward"), precision="bf16-mixed")
trainer = Trainer(accelerator="cpu", callbacks=[StreamingCallback(micro_batches=8, update="in_forward")])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from l2l_compile.errors import OptionError
from l2l_compile.inspection.programs import stats, synchronize
from l2l_compile.integrations.loops import StreamedSteps, compile_in_place, options_for, refuse_clipping
from l2l_compile.update_modes import MODES

_PRECISIONS = {"32-true": "no", "64-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}


class StreamingCallback(Callback):
    """Streams the model in a LightningModule, whose trainer runs on the host (`accelerator="cpu"`).

    `model` is the name of the attribute of the LightningModule that holds the model, or "" for the LightningModule itself (then
    call `self(...)` in `training_step`). The default is the only attribute that holds parameters. `options` are options of the
    backend. The trainer provides the optimizer, `accumulate_grad_batches` and `gradient_clip_val`. Its `precision="bf16-mixed"`
    and `"16-mixed"` become the option `precision`; autocast is not used. Each step logs `peak_device_bytes` and
    `gradient_norm`.

    The constructor raises `OptionError` for a bad option. Trainer settings that streaming cannot honour raise it at the start.
    """

    def __init__(self, model: str | None = None, **options: Any):
        options_for(options, "no")
        self._name, self._given = model, options
        self._steps: StreamedSteps | None = None
        self._compiled: torch.nn.Module | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        _refuse_places(trainer)
        if not isinstance(strategy.precision_plugin, _HostPrecision):
            strategy.precision_plugin = _HostPrecision(strategy.precision_plugin)
        self._precision: _HostPrecision = strategy.precision_plugin
        self._options, self._update = options_for(self._given, self._precision.of_the_loop)
        self._compiled = _model_in(pl_module, self._name)
        if trainer.state.fn != TrainerFn.FITTING:
            compile_in_place(self._compiled, self._options)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._compiled is not None
        refuse_clipping(self._update, trainer.gradient_clip_val, "gradient_clip_val")
        behind = MODES[self._update].is_overlapped
        if len(trainer.optimizers) != 1:
            raise OptionError(
                f"streaming supports one optimizer, and configure_optimizers returned {len(trainer.optimizers)}: return one"
            )
        if behind and not pl_module.automatic_optimization:
            raise OptionError(f"update={self._update!r} does not go with manual optimization. Use update='at_step'")
        if (
            behind
            and trainer.gradient_clip_val
            and str(trainer.gradient_clip_algorithm or "norm").split(".")[-1].lower() != "norm"
        ):
            raise OptionError(
                f"update={self._update!r} clips by the norm of the gradients, not by their values. Use "
                "gradient_clip_algorithm='norm', or update='at_step'"
            )
        self._steps = StreamedSteps(
            self._compiled,
            trainer.optimizers[0],
            self._options,
            self._update,
            is_last=lambda: self._precision.in_last_backward,
            readers=_readers_of_gradients(trainer, pl_module),
            waits=_may_read_weights(trainer, pl_module),
        )
        self._precision.clip = self._steps.clip if self._steps.clips else None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._precision.stepped:
            self._precision.stepped = False
            found = stats(self._compiled)
            figures = {"peak_device_bytes": found.peak_device_bytes, "gradient_norm": found.gradient_norm}
            pl_module.log_dict({name: float(value) for name, value in figures.items() if value is not None})

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._steps is not None:
            self._steps.end()
            self._steps = None
        if self._compiled is not None:
            synchronize(self._compiled)


class StreamingStrategy(SingleDeviceStrategy):
    """As `StreamingCallback`, for `Trainer(strategy=...)`. It also keeps the trainer on the host if there is a GPU."""

    strategy_name = "l2l"

    def __init__(self, model: str | None = None, **options: Any):
        super().__init__(device="cpu")
        self._streaming = StreamingCallback(model, **options)

    def setup_environment(self) -> None:
        self.accelerator = CPUAccelerator()  # replaces the accelerator that `accelerator="auto"` has chosen
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        if not any(isinstance(callback, StreamingCallback) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, self._streaming)
        self._streaming.setup(trainer, self.lightning_module, str(trainer.state.stage))
        super().setup(trainer)


class _HostPrecision(Precision):
    """Replaces the trainer's precision plugin: no autocast, and backward runs before `optimizer.step()`, which gets no closure.

    in_last_backward  whether the closure of `optimizer.step()` runs, which includes the last backward of a step
    stepped           whether a step has ended
    clip              replaces clipping of `p.grad`, for values of `update` with which no gradients arrive there
    """

    def __init__(self, original: Precision):
        super().__init__()
        name = str(original.precision)
        if name not in _PRECISIONS:
            raise OptionError(
                f"Trainer(precision={name!r}) does not go with streaming: use {', '.join(map(repr, _PRECISIONS))}, or the option 'precision'"
            )
        self.of_the_loop = _PRECISIONS[name]
        self._original = original if name == "64-true" else Precision()  # the float64 plugin converts model and batches
        self.precision = original.precision
        self.in_last_backward = self.stepped = False
        self.clip: Callable[..., torch.Tensor] | None = None

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return self._original.convert_module(module)

    def convert_input(self, data: Any) -> Any:
        return self._original.convert_input(data)

    def forward_context(self) -> Any:
        return self._original.forward_context()

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        self.in_last_backward = True
        try:
            result = closure()
        finally:
            self.in_last_backward = False
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            return result  # training_step returned None: skip the step, as the 16-bit plugins do
        optimizer.step(**kwargs)
        self.stepped = True
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        if self.clip is not None:
            self.clip(None, clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)


def _refuse_places(trainer: Trainer) -> None:
    if trainer.strategy.root_device.type != "cpu":
        raise OptionError(
            f"the trainer is on {trainer.strategy.root_device}, and a streamed model stays on the host: use Trainer(accelerator='cpu'), "
            "or StreamingStrategy. Layers run where the option 'device' says"
        )
    if trainer.world_size > 1:
        raise OptionError(f"a Trainer of {trainer.world_size} processes does not go with streaming: use devices=1")


def _model_in(module: LightningModule, name: str | None) -> torch.nn.Module:
    if name is not None:
        return module.get_submodule(name)
    found = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    if len(found) != 1 or any(True for _ in module.parameters(recurse=False)):
        listed = ", ".join(map(repr, found)) or "none"
        raise OptionError(
            f"attributes of {type(module).__name__} that hold parameters: {listed}. Name the one with the model, such as "
            f"model={(found or ['model'])[0]!r}, or model='' for the LightningModule itself, whose training_step calls self(...)"
        )
    return module.get_submodule(found[0])


def _readers_of_gradients(trainer: Trainer, module: LightningModule) -> list[str]:
    found = _with_hooks(trainer, module, ("on_before_optimizer_step", "on_after_backward"))
    return [f"{type(part).__name__}, which has {hook}," for part, hook in found]


def _may_read_weights(trainer: Trainer, module: LightningModule) -> bool:
    """Whether a hook after `optimizer.step()` may read weights. Of Lightning's own callbacks, only averages of weights do."""
    found = _with_hooks(trainer, module, ("optimizer_step", "on_train_batch_end", "on_before_zero_grad"))
    return any(isinstance(part, _AVERAGES) or not _is_of_lightning(part) for part, _ in found)


def _with_hooks(trainer: Trainer, module: LightningModule, hooks: Sequence[str]) -> list[tuple[Any, str]]:
    """The module and callbacks that override one of these hooks, each with the name of the hook."""
    parts = [(module, LightningModule), *((callback, Callback) for callback in trainer.callbacks)]
    return [
        (part, hook) for part, base in parts for hook in hooks if getattr(type(part), hook, None) is not getattr(base, hook, None)
    ]


def _is_of_lightning(part: Any) -> bool:
    return isinstance(part, StreamingCallback) or type(part).__module__.split(".")[0] in ("lightning", "pytorch_lightning")


_AVERAGES = tuple(
    kind for name in ("WeightAveraging", "StochasticWeightAveraging") if (kind := getattr(callbacks, name, None)) is not None
)
