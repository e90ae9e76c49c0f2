"""Hugging Face's `Trainer`, and trainers derived from it, such as TRL's `SFTTrainer`.

trainer = Trainer(model, arguments, train_dataset=..., eval_dataset=...)
stream(trainer, micro_batches=8, precision="bf16", update="in_forward")
trainer.train()
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.training_args import ParallelMode

from l2l_compile.errors import OptionError
from l2l_compile.inspection.programs import stats, synchronize
from l2l_compile.integrations.loops import StreamedSteps, check_is, compile_in_place, options_for, refuse_clipping


def stream(trainer: Trainer, **options: Any) -> None:
    """Have a `Trainer` train, evaluate and predict with its model streamed. Call it once, before `trainer.train()`.

    `options` are options of the backend. The trainer provides the optimizer, accumulation and clipping. Without the option
    `precision`, the trainer's arguments `bf16=True` and `fp16=True` decide; autocast is not used. The model stays on the host,
    or moves back to it, and is compiled in place: its class, signature and checkpoints do not change. Logs of training also
    have `peak_device_bytes` and, for models that take tokens, `train_tokens_per_second`.

    Raises `OptionError` for a bad option, and for trainer arguments that streaming cannot honour. Settings that depend on the
    optimizer are refused when `trainer.train()` starts.
    """
    check_is(trainer, Trainer, "trainer = Trainer(model, arguments, train_dataset=...); stream(trainer)")
    if any(isinstance(callback, _Streaming) for callback in trainer.callback_handler.callbacks):
        raise OptionError("this trainer streams already: call stream(trainer) once")
    arguments = trainer.args
    _refuse_arguments(arguments)
    chosen, update = options_for({"outputs": _outputs(trainer), **options}, arguments.mixed_precision)
    refuse_clipping(update, arguments.max_grad_norm, "max_grad_norm")
    _keep_on_the_host(trainer)
    if arguments.include_num_input_tokens_seen == "no" and getattr(trainer.model, "main_input_name", None) == "input_ids":
        arguments.include_num_input_tokens_seen = "all"
    compile_in_place(trainer.model, chosen)
    trainer.callback_handler.callbacks.insert(0, _Streaming(trainer, chosen, update))


def _refuse_arguments(arguments: TrainingArguments) -> None:
    refused = {
        "torch_compile": "stream(trainer) compiles the model: leave it out",
        "bf16_full_eval": "use precision='bf16' of stream(trainer), which holds in evaluation as well",
        "fp16_full_eval": "use precision='fp16' of stream(trainer), which holds in evaluation as well",
        "fsdp": "one process streams one whole model: leave it out",
        "deepspeed": "one process streams one whole model: leave it out",
    }
    for name, remedy in refused.items():
        if value := getattr(arguments, name, None):
            raise OptionError(f"TrainingArguments({name}={value!r}) does not go with streaming: {remedy}")
    if arguments.parallel_mode == ParallelMode.DISTRIBUTED:
        raise OptionError(
            f"a Trainer of {arguments.world_size} processes does not go with streaming: start one process. (A loop of your own "
            "may wrap the compiled model in DistributedDataParallel)"
        )


def _outputs(trainer: Trainer) -> str:
    """The option `outputs`: "loss" if training reads no output of the model but the loss, else "all"."""
    plain = type(trainer).compute_loss is Trainer.compute_loss
    return "loss" if plain and trainer.compute_loss_func is None and trainer.label_smoother is None else "all"


def _keep_on_the_host(trainer: Trainer) -> None:
    """Keep the model, batches and sums of the loss on the host. The trainer uses neither autocast nor loss scaling."""
    arguments = trainer.args
    arguments.use_cpu, arguments.bf16, arguments.fp16 = True, False, False
    arguments.mixed_precision = "no"
    arguments.dataloader_pin_memory = False
    vars(arguments).pop("_setup_devices", None)  # the cached device, which may have been chosen without use_cpu
    host = arguments.device  # chosen anew
    accumulation = arguments.accelerator_config.gradient_accumulation_kwargs
    if accumulation is not None:
        accumulation.pop("num_steps", None)  # set by the trainer, which would now mistake it for a setting of the user
    trainer.create_accelerator_and_postprocess()
    trainer.model.to(host)


class _Streaming(TrainerCallback):
    """Compiles the model with its optimizer when training begins, follows the steps, and adds figures to the logs."""

    def __init__(self, trainer: Trainer, options: dict[str, Any], update: str):
        self.trainer, self.options, self.update = trainer, options, update
        self._steps: StreamedSteps | None = None
        self._log = trainer.log
        trainer.log = self._log_with_figures

    def _log_with_figures(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs = {**logs, "peak_device_bytes": stats(self.trainer.model).peak_device_bytes}
        self._log(logs, *args, **kwargs)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        self._steps = StreamedSteps(
            trainer.model,
            trainer.optimizer,
            self.options,
            self.update,
            is_last=lambda: trainer.accelerator.sync_gradients,
            skipped=self._step_was_skipped,
            readers=[f"the callback {name}, which has on_pre_optimizer_step," for name, _ in self._with("on_pre_optimizer_step")],
            waits=any(not is_known for _, is_known in self._with("on_optimizer_step", "on_step_end")),
            looks_at_gradients=True,
        )
        if self._steps.clips:
            trainer.accelerator.clip_grad_norm_ = self._steps.clip

    def _with(self, *events: str) -> list[tuple[str, bool]]:
        """Callbacks that handle one of these events: name, and whether transformers defines it (its own read no weights)."""
        callbacks = self.trainer.callback_handler.callbacks
        found = [c for c in callbacks if any(getattr(type(c), e, None) is not getattr(TrainerCallback, e, None) for e in events)]
        return [(type(c).__name__, type(c).__module__.split(".")[0] == "transformers") for c in found]

    def _step_was_skipped(self, skipped: bool) -> None:
        self.trainer.optimizer._is_overflow = skipped  # then the scheduler does not step, as with GradScaler

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._steps is not None:
            self._steps.end()
        synchronize(self.trainer.model)
