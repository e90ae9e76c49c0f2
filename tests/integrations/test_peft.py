"""LoRA with PEFT, in the Trainer: adapters alone are pushed, trained and saved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers
from loop_models import language_model, largest_difference, same_bits
from test_transformers import OPTIONS, column, trainer_of

import l2l_compile

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[transformers]'")
peft = pytest.importorskip("peft", reason="peft is not installed: pip install '.[transformers]'")

from l2l_compile.integrations.transformers import stream  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about what PEFT calls


def adapted():
    """With adapters that are not zero, so that both of their matrices have gradients."""
    model = language_model()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def adapter_bytes(model) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
@pytest.mark.slow
def test_adapters_train_as_in_the_plain_loop_also_when_resumed(update, tmp_path):
    clip = {"max_grad_norm": 0.0} if update == "in_backward" else {"max_grad_norm": 0.1}
    settings = {"max_steps": 10, "eval_steps": 5, "save_steps": 5, **clip}
    expected, trainer = (
        trainer_of(tmp_path / "plain", adapted(), **settings),
        trainer_of(tmp_path / "streamed", adapted(), **settings),
    )
    frozen = {name: p.clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    stream(trainer, update=update, **OPTIONS)
    for each in (expected, trainer):
        each.train()
    for name in ("loss", "eval_loss", "grad_norm"):
        assert column(trainer, name) == pytest.approx(column(expected, name), rel=1e-5), name
    assert largest_difference(trainer.model, expected.model) < 1e-5
    assert all(torch.equal(dict(trainer.model.named_parameters())[name], before) for name, before in frozen.items())
    assert (tmp_path / "streamed" / "checkpoint-10" / "adapter_model.safetensors").exists()

    resumed = trainer_of(tmp_path / "streamed", adapted(), **settings)
    stream(resumed, update=update, **OPTIONS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "streamed" / "checkpoint-5"))
    assert same_bits(resumed.model, trainer.model)


def test_adapters_alone_are_pushed_and_layers_stream(tmp_path):
    trainer = trainer_of(tmp_path, adapted(), max_steps=1, eval_strategy="no", save_strategy="no")
    stream(trainer, update="in_forward", **OPTIONS)
    trainer.train()
    assert l2l_compile.stats(trainer.model).pushed_bytes == adapter_bytes(trainer.model)
    (program,) = l2l_compile.programs(trainer.model)
    layers = [s for s in program.segments if s.name.endswith(("layers.0", "layers.1"))]
    assert [s.micro_batches for s in layers] == [2, 2]
    assert isinstance(trainer.model.get_base_model(), transformers.LlamaForCausalLM)


@pytest.mark.slow
def test_the_example_learns_and_saves_adapters(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import lora as example

    short = ["--steps", "4", "--length", "16", "--batch", "4", "--output", str(tmp_path)]
    trainer = example.main(short)
    (first, *_, last) = column(trainer, "loss")
    assert last < first and "trainable params" in capsys.readouterr().out
    assert (tmp_path / "adapter_model.safetensors").exists()
    sys.modules.pop("lora")
