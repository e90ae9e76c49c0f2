"""A Lightning Trainer that streams ends where the plain one does: in float64 to 1e-10, in fp32 by the same sums to 1e-5."""

from __future__ import annotations

import logging
import runpy
import warnings
from pathlib import Path

import pytest
import torch
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

lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install '.[lightning]'")

import l2l_compile  # noqa: E402
from l2l_compile import OptionError  # noqa: E402
from l2l_compile.integrations.lightning import StreamingCallback, StreamingStrategy  # noqa: E402
from l2l_compile.session import session_of  # noqa: E402

OPTIONS = {"micro_batches": 2, "block_compiler": "eager"}
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")  # those of Lightning about data loaders, and about PyTorch


class Module(lightning.LightningModule):
    def __init__(self, dtype=torch.float64):  # here, and not by precision="64-true" alone: Lightning loads before it converts
        super().__init__()
        self.model, self.losses = language_model().to(dtype), []

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.losses.append(self.model(**batch).loss.item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def loaders():
    return [torch.utils.data.DataLoader(sentences(*of), batch_size=ROWS) for of in ((), (6, 2))]


def trainer_of(folder, **given):
    chosen = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": STEPS // 5,
        "accumulate_grad_batches": ACCUMULATE,
        "gradient_clip_val": CLIP,
        "precision": "64-true",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        "num_sanity_val_steps": 0,
    }
    with warnings.catch_warnings(action="ignore"):
        return lightning.Trainer(**{**chosen, **given})


def fit(folder, module=None, resume=None, **given):
    """Train, and return the module with its trainer."""
    module, trainer = module or Module(), trainer_of(folder, **given)
    trainer.fit(module, *loaders(), ckpt_path=resume)
    return module, trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Modules that were trained without streaming, by the norm that gradients were clipped to."""
    ran = {}

    def with_clipping(clip):
        if clip not in ran:
            ran[clip] = fit(tmp_path_factory.mktemp("plain"), gradient_clip_val=clip)[0]
        return ran[clip]

    return with_clipping


@pytest.mark.parametrize("update", ["at_step", "in_backward", "in_forward"])
@pytest.mark.slow(but="in_forward")
def test_numbers_of_the_plain_loop_and_same_bits_when_resumed(update, plain, tmp_path):
    clip = None if update == "in_backward" else CLIP
    expected = plain(clip)
    saves = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    streaming = {"strategy": StreamingStrategy(**OPTIONS, update=update), "gradient_clip_val": clip}
    module, _ = fit(tmp_path, callbacks=[saves], enable_checkpointing=True, **streaming)
    assert module.losses == pytest.approx(expected.losses, rel=1e-10)
    assert largest_difference(module, expected) < 1e-10
    assert l2l_compile.programs(module.model)

    streaming["strategy"] = StreamingStrategy(**OPTIONS, update=update)
    resumed, _ = fit(tmp_path, resume=tmp_path / "epoch=1.ckpt", **streaming)
    assert same_bits(resumed, module)


@pytest.mark.parametrize("update", ["at_step", "in_forward"])
@pytest.mark.slow(but="at_step")
def test_fp32_is_that_of_the_plain_loop_with_the_same_sums(update, tmp_path):
    plain = Module(torch.float32)
    in_micro_batches(plain.model)
    expected, _ = fit(tmp_path, plain, precision="32-true")
    strategy = StreamingStrategy(**OPTIONS, update=update)
    module, _ = fit(tmp_path, Module(torch.float32), precision="32-true", strategy=strategy)
    assert module.losses == pytest.approx(expected.losses, rel=1e-5)
    assert largest_difference(module, expected) < 1e-5
    assert same_bits(module, expected) or update != "at_step", "the step is the optimizer's own"


def test_a_callback_does_as_the_strategy_and_figures_are_logged(tmp_path, plain):
    module, trainer = fit(tmp_path, callbacks=[StreamingCallback(**OPTIONS, update="in_forward")])
    assert module.losses == pytest.approx(plain(CLIP).losses, rel=1e-10)
    figures = trainer.callback_metrics
    assert figures["peak_device_bytes"] > 0 and figures["gradient_norm"] > 0


def test_validation_streams_without_training(tmp_path):
    module, trainer = Module(), trainer_of(tmp_path, strategy=StreamingStrategy(**OPTIONS))
    trainer.validate(module, loaders()[1], verbose=False)
    assert l2l_compile.programs(module.model)


@pytest.mark.slow
def test_mixed_precision_is_the_precision_and_not_autocast(tmp_path):
    strategy = StreamingStrategy(**OPTIONS, update="in_forward")
    module, _ = fit(tmp_path, Module(torch.float32), precision="bf16-mixed", strategy=strategy, max_epochs=1)
    assert session_of(module.model).options.precision == "bf16"


class LooksAtGradients(lightning.pytorch.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        pass


class TwoModels(Module):
    def __init__(self):
        super().__init__()
        self.other = torch.nn.Linear(2, 2)


@pytest.mark.slow
def test_the_example_prints_the_losses_of_the_plain_loop(capsys):
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "with_lightning.py"))
    plain, streamed = example["main"](["--steps", "3"])
    assert streamed == pytest.approx(plain, rel=1e-5) and len(set(plain)) == 3
    assert "step    plain  streamed" in capsys.readouterr().out


def test_settings_of_another_meaning_are_refused_with_a_remedy(tmp_path):
    for module, options, given, words in (
        (Module(), {"update": "in_backward"}, {}, "gradient_clip_val=0.5.*update='in_forward'"),
        (Module(), {"update": "in_forward"}, {"gradient_clip_algorithm": "value"}, "Use gradient_clip_algorithm='norm'"),
        (Module(), {"update": "in_forward"}, {"callbacks": [LooksAtGradients()]}, "LooksAtGradients.*update='at_step'"),
        (Module(), {}, {"precision": "bf16-true"}, "precision='bf16-true'.*'bf16-mixed'"),
        (TwoModels(), {}, {}, "'model', 'other'.*model='model'"),
    ):
        with pytest.raises(OptionError, match=words):
            fit(tmp_path, module, strategy=StreamingStrategy(**OPTIONS, **options), **given)
    with pytest.raises(OptionError, match="Did you mean 'micro_batches'"):
        StreamingCallback(microbatches=2)


class SumsOfWeights(lightning.Callback):
    """Reads the weights behind each step, as averages of a user's own do."""

    def __init__(self):
        self.sums = []

    def on_train_batch_end(self, trainer, module, *_):
        self.sums.append(sum(p.detach().double().sum().item() for p in module.parameters()))


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
@pytest.mark.slow
def test_readers_of_weights_behind_a_step_find_those_of_the_step(update, tmp_path, monkeypatch):
    found, short = [], {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0, "gradient_clip_val": None}
    updates_come_late(monkeypatch)
    for streams in (False, True):
        streaming = lambda: {"strategy": StreamingStrategy(**OPTIONS, update=update)} if streams else {}  # noqa: B023, E731
        sums, average = SumsOfWeights(), lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.5)
        module, _ = fit(tmp_path, callbacks=[sums], **short, **streaming())
        averaged, _ = fit(tmp_path, callbacks=[average], **short, **streaming())
        found.append((module, sums.sums, averaged))
    (plain, expected, average), (streamed, sums, ours) = found
    assert sums == pytest.approx(expected, rel=1e-10) and len(sums) == 4
    assert largest_difference(streamed, plain) < 1e-10
    assert largest_difference(ours, average) < 1e-10
