"""A loop with an Accelerator that streams ends where the plain one does: in float64 to 1e-10, in fp32 by the same sums to 1e-5."""

from __future__ import annotations

import runpy
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
)

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[transformers]'")

from l2l_compile import L2LError, OptionError  # noqa: E402
from l2l_compile.integrations.accelerate import stream  # noqa: E402
from l2l_compile.session import session_of  # noqa: E402

OPTIONS = {"micro_batches": 2, "block_compiler": "eager"}


def forget_accelerators() -> None:
    """Without it, the precision of a process's first Accelerator is that of every later one."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def no_accelerator_of_another_test():
    forget_accelerators()


class Loop:
    """Epochs of 9 batches, two a step: the last step of an epoch has one."""

    def __init__(self, options=None, clip=CLIP, dtype=torch.float32, model=None, **given):
        forget_accelerators()
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, **given)
        if options is not None:
            stream(self.accelerator, **options)
        model, self.clip = (model or language_model()).to(dtype), clip
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        loaders = [torch.utils.data.DataLoader(sentences(*of), batch_size=ROWS) for of in ((), (6, 2))]
        prepared = self.accelerator.prepare(model, optimizer, *loaders, scheduler)
        self.model, self.optimizer, self.loader, self.held_out, self.scheduler = prepared
        self.losses, self.norms = [], []

    def run(self, steps: int, save_at: int | None = None, folder=None, epoch: int = 0, done: int = 0) -> None:
        while done < steps:
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    self.losses.append(loss.item())
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients and self.clip:
                        self.norms.append(self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                done += self.accelerator.sync_gradients
            self.evaluate()
            if done == save_at:
                self.accelerator.save_state(folder)

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.losses += [self.model(**batch).loss.item() for batch in self.held_out]
        self.model.train()


@pytest.fixture(scope="module")
def plain():
    """Loops that do not stream, by the norm that they clip to."""
    ran = {}

    def with_clipping(clip):
        if clip not in ran:
            ran[clip] = Loop(clip=clip, dtype=torch.float64)
            ran[clip].run(STEPS)
        return ran[clip]

    return with_clipping


@pytest.mark.parametrize("update", ["at_step", "in_backward", "in_forward"])
@pytest.mark.slow(but="in_forward")
def test_numbers_of_the_plain_loop_and_same_bits_when_resumed(update, plain, tmp_path):
    clip = None if update == "in_backward" else CLIP
    expected, loop = plain(clip), Loop({**OPTIONS, "update": update}, clip, torch.float64)
    loop.run(STEPS, save_at=10, folder=tmp_path)
    assert loop.losses == pytest.approx(expected.losses, rel=1e-10)
    assert [n.item() for n in loop.norms] == pytest.approx([n.item() for n in expected.norms], rel=1e-10)
    assert largest_difference(loop.model, expected.model) < 1e-10

    resumed = Loop({**OPTIONS, "update": update}, clip, torch.float64)
    resumed.accelerator.load_state(tmp_path)
    resumed.run(STEPS, done=10)
    assert same_bits(resumed.model, loop.model)
    assert resumed.losses == loop.losses[len(loop.losses) // 2 :]


@pytest.mark.parametrize("update", ["at_step", "in_forward"])
@pytest.mark.slow(but="in_forward")
def test_fp32_is_that_of_the_plain_loop_with_the_same_sums(update):
    expected, loop = Loop(model=in_micro_batches(language_model())), Loop({**OPTIONS, "update": update})
    for each in (expected, loop):
        each.run(STEPS)
    assert loop.losses == pytest.approx(expected.losses, rel=1e-5)
    assert [n.item() for n in loop.norms] == pytest.approx([n.item() for n in expected.norms], rel=1e-5)
    assert largest_difference(loop.model, expected.model) < 1e-5
    assert same_bits(loop.model, expected.model) or update != "at_step", "the step is the optimizer's own"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.slow(but="fp32")
def test_mixed_precision_is_the_precision_and_not_autocast(precision):
    given = {} if precision == "fp32" else {"mixed_precision": precision}
    loop = Loop(OPTIONS, **given)
    loop.run(1)
    assert session_of(loop.model).options.precision == precision
    assert not hasattr(loop.model, "_original_forward")


@pytest.mark.slow
def test_the_example_prints_the_losses_of_the_plain_loop(capsys):
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "with_accelerate.py"))
    plain, streamed = example["main"](["--steps", "3"])
    assert streamed == pytest.approx(plain, rel=1e-5) and len(set(plain)) == 3
    assert "step    plain  streamed" in capsys.readouterr().out


def test_settings_of_another_meaning_are_refused_with_a_remedy():
    loop = Loop({**OPTIONS, "update": "in_backward"})
    with pytest.raises(L2LError, match="clipping to 0.5.*update='in_forward'"):
        loop.run(1)
    loop = Loop({**OPTIONS, "update": "in_forward"})
    with pytest.raises(OptionError, match="not by norm_type=1.*update='at_step'"):
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1.0, norm_type=1)
    with pytest.raises(OptionError, match="not by their values.*update='at_step'"):
        loop.accelerator.clip_grad_value_(loop.model.parameters(), 1.0)
    with pytest.raises(OptionError, match="once, before"):
        stream(loop.accelerator)
    accelerator = accelerate.Accelerator(cpu=True)
    stream(accelerator, update="in_forward")
    with pytest.raises(OptionError, match="0 models and 1 optimizers.*in one call"):
        accelerator.prepare(torch.optim.SGD(language_model().parameters(), lr=0.1))
    model = language_model()
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(OptionError, match="gradient hooks of lm_head.weight.*update='at_step'"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
