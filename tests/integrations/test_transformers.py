"""A Hugging Face Trainer that streams ends where the plain one does."""

from __future__ import annotations

import pytest
import torch
import transformers
from loop_models import (
    ACCUMULATE,
    CLIP,
    RATE,
    ROWS,
    STEPS,
    in_micro_batches,
    language_model,
    largest_difference,
    same_bits,
    sentences,
    updates_come_late,
)

import l2l_compile
from l2l_compile import L2LError, OptionError
from l2l_compile.session import session_of

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[transformers]'")

from l2l_compile.integrations.transformers import stream

OPTIONS = {"micro_batches": 2, "block_compiler": "eager"}
UPDATES = ("at_step", "in_backward", "in_forward")
transformers.logging.set_verbosity_error()


def arguments(folder, **given) -> transformers.TrainingArguments:
    chosen = {
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": ACCUMULATE,
        "max_steps": STEPS,
        "max_grad_norm": CLIP,
        "learning_rate": RATE,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "save_strategy": "steps",
        "save_steps": 10,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **given,
    }
    return transformers.TrainingArguments(str(folder), **chosen)


def trainer_of(folder, model=None, optimizers=(None, None), callbacks=(), **given) -> transformers.Trainer:
    trainer = transformers.Trainer(
        language_model() if model is None else model,
        arguments(folder, **given),
        train_dataset=sentences(),
        eval_dataset=sentences(6, seed=2),
        optimizers=optimizers,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def column(trainer, name) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Trainers that do not stream, by `max_grad_norm`."""
    trained = {}

    def with_clipping(norm):
        if norm not in trained:
            trained[norm] = trainer_of(tmp_path_factory.mktemp("plain"), max_grad_norm=norm, save_strategy="no")
            trained[norm].train()
        return trained[norm]

    return with_clipping


def clip_of(update) -> float:
    return 0.0 if update == "in_backward" else CLIP


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.slow(but="in_backward")
def test_numbers_of_the_plain_loop_and_same_bits_when_resumed(update, plain, tmp_path):
    expected = plain(clip_of(update))
    trainer = trainer_of(tmp_path, max_grad_norm=clip_of(update))
    stream(trainer, update=update, **OPTIONS)
    trainer.train()
    for name in ("loss", "eval_loss", "grad_norm", "learning_rate"):
        assert column(trainer, name) == pytest.approx(column(expected, name), rel=1e-5), name
    assert largest_difference(trainer.model, expected.model) < 1e-5
    if clip_of(update) == CLIP:
        assert max(column(trainer, "grad_norm")) > CLIP, "clipping does something"
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-20")
    assert same_bits(saved, trainer.model)

    resumed = trainer_of(tmp_path, max_grad_norm=clip_of(update))
    stream(resumed, update=update, **OPTIONS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert same_bits(resumed.model, trainer.model)
    assert column(resumed, "loss") == column(trainer, "loss")


def test_fp32_has_the_bits_of_the_plain_loop_with_the_same_sums(tmp_path):
    settings = {"optim": "adamw_torch", "save_strategy": "no"}
    expected = trainer_of(tmp_path, in_micro_batches(language_model()), **settings)
    trainer = trainer_of(tmp_path, **settings)
    stream(trainer, **OPTIONS)
    for each in (expected, trainer):
        each.train()
    for name in ("loss", "eval_loss", "grad_norm"):
        assert column(trainer, name) == pytest.approx(column(expected, name), rel=1e-5), name
    assert same_bits(trainer.model, expected.model)


def test_logs_have_figures_and_the_model_streams(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=2, save_strategy="no")
    stream(trainer, update="in_forward", **OPTIONS)
    trainer.train()
    row = next(row for row in trainer.state.log_history if "loss" in row)
    assert row["peak_device_bytes"] > 0 and row["train_tokens_per_second"] > 0 and row["grad_norm"] > 0
    (training, *_) = l2l_compile.programs(trainer.model)
    layers = [s for s in training.segments if s.block.repeats == 2]
    assert [s.micro_batches for s in layers] == [2, 2]
    assert session_of(trainer.model).options.outputs == "loss", "nobody reads the logits in training"


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=6, eval_steps=2, save_steps=2, load_best_model_at_end=True)
    stream(trainer, update="in_forward", **OPTIONS)
    trainer.train()
    first, *_, last = column(trainer, "eval_loss")
    assert first < last, "sentences at random: training on others makes it no better"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(first, rel=1e-6)


def test_evaluation_and_prediction_stream_without_training(tmp_path):
    plain, trainer = trainer_of(tmp_path / "a"), trainer_of(tmp_path / "b")
    stream(trainer, **OPTIONS)
    expected, found = plain.predict(sentences(6, seed=2)), trainer.predict(sentences(6, seed=2))
    torch.testing.assert_close(torch.tensor(found.predictions), torch.tensor(expected.predictions), rtol=1e-4, atol=1e-5)
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-5)
    assert l2l_compile.programs(trainer.model)


def test_bf16_of_the_arguments_is_the_precision_and_not_autocast(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=2, bf16=True, save_strategy="no")
    stream(trainer, **OPTIONS)
    trainer.train()
    assert session_of(trainer.model).options.precision == "bf16"
    assert all(p.dtype is torch.float32 for p in trainer.model.parameters())
    assert not hasattr(trainer.model, "_original_forward"), "wrapped into autocast"


class Overflowing(transformers.TrainerCallback):
    """Makes the third step overflow, by a loss scale that is too large."""

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == 2:
            scale = session_of(model).server.updates.scale
            scale.value, scale.backoff_factor = 2.0**120, 2.0**-105


@pytest.mark.parametrize("update", ["at_step", "in_forward"])
@pytest.mark.slow(but="in_forward")
def test_an_fp16_overflow_leaves_the_scheduler_and_saves_scale(update, tmp_path):
    settings = {"max_steps": 6, "save_steps": 4, "eval_strategy": "no", "lr_scheduler_type": "linear"}
    trainer = trainer_of(tmp_path, callbacks=[Overflowing()], **settings)
    stream(trainer, precision="fp16", update=update, **OPTIONS)
    trainer.train()
    rates = column(trainer, "learning_rate")
    assert rates[2] == rates[3] and len(set(rates)) == len(rates) - 1
    scale = session_of(trainer.model).server.updates.scale
    assert scale.value == 2.0**15 and scale.good_steps == 3

    resumed = trainer_of(tmp_path, **settings)
    stream(resumed, precision="fp16", update=update, **OPTIONS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    found = session_of(resumed.model).server.updates.scale
    assert (found.value, found.good_steps) == (scale.value, scale.good_steps)
    assert same_bits(resumed.model, trainer.model)


@pytest.mark.parametrize("given, chosen", [({}, "fp16"), ({"precision": "bf16"}, "bf16")], ids=["of the arguments", "of stream"])
def test_fp16_of_the_arguments_is_the_precision_without_a_gpu(given, chosen, tmp_path):
    trainer = trainer_of(tmp_path, max_steps=1, fp16=True, eval_strategy="no", save_strategy="no")
    stream(trainer, **OPTIONS, **given)
    trainer.train()
    assert session_of(trainer.model).options.precision == chosen


class LooksAtGradients(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **_):
        pass


class OnAGPUAlone(torch.optim.SGD):
    def step(self, closure=None):
        raise NotImplementedError("tensors must be on a GPU")


def test_settings_of_another_meaning_are_refused_with_a_remedy(tmp_path):
    with pytest.raises(OptionError, match="max_grad_norm=0.5.*update='in_forward'"):
        stream(trainer_of(tmp_path), update="in_backward", **OPTIONS)
    for given, words in (
        ({"torch_compile_backend": "eager"}, "torch_compile=True.*leave it out"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True.*precision='bf16'"),
    ):
        with pytest.raises(OptionError, match=words):
            stream(trainer_of(tmp_path, **given), **OPTIONS)
    with pytest.raises(OptionError, match="the training loop sets the option 'optimizer'"):
        stream(trainer_of(tmp_path), optimizer=None)
    with pytest.raises(OptionError, match="unknown option 'microbatches'.*Did you mean 'micro_batches'"):
        stream(trainer_of(tmp_path), microbatches=2)
    twice = trainer_of(tmp_path)
    stream(twice, **OPTIONS)
    with pytest.raises(OptionError, match="streams already"):
        stream(twice, **OPTIONS)


def test_readers_of_gradients_are_refused_when_training_starts(tmp_path):
    trainer = trainer_of(tmp_path, callbacks=[LooksAtGradients()])
    stream(trainer, update="in_forward", **OPTIONS)
    with pytest.raises(OptionError, match="in_forward.*LooksAtGradients.*update='at_step'"):
        trainer.train()
    model = language_model()
    model.lm_head.weight.register_hook(lambda gradient: gradient)
    trainer = trainer_of(tmp_path, model)
    stream(trainer, update="in_forward", **OPTIONS)
    with pytest.raises(OptionError, match="gradient hooks of lm_head.weight.*update='at_step'"):
        trainer.train()


@pytest.mark.parametrize("update", ["at_step", "in_forward"])
def test_an_optimizer_for_gpus_alone_is_refused_at_the_start(update, tmp_path):
    model = language_model()
    trainer = trainer_of(tmp_path, model, optimizers=(OnAGPUAlone(model.parameters()), None))
    stream(trainer, update=update, **OPTIONS)
    with pytest.raises(L2LError, match="OnAGPUAlone cannot update parameters on the host.*must be on a GPU.*AdamW"):
        trainer.train()


class SumsOfWeights(transformers.TrainerCallback):
    """Reads the weights behind each step, as averages of a user's own do."""

    def __init__(self):
        self.sums = []

    def on_step_end(self, args, state, control, model, **_):
        self.sums.append(sum(p.detach().double().sum().item() for p in model.parameters()))


def test_callbacks_find_the_weights_of_the_step(tmp_path, monkeypatch):
    updates_come_late(monkeypatch)
    found = []
    for streams in (False, True):
        sums = SumsOfWeights()
        trainer = trainer_of(tmp_path, callbacks=[sums], max_steps=3, eval_strategy="no", save_strategy="no")
        if streams:
            stream(trainer, **OPTIONS, update="in_forward")
        trainer.train()
        found.append(sums.sums)
    assert found[1] == pytest.approx(found[0], rel=1e-8) and len(found[0]) == 3
