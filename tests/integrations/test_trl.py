"""TRL's SFTTrainer that streams ends where the plain one does."""

from __future__ import annotations

import warnings

import pytest
import transformers
from loop_models import ACCUMULATE, CLIP, EXAMPLES, RATE, ROWS, STEPS, VOCABULARY, language_model, largest_difference, same_bits
from loop_models import sentences as examples

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[transformers]'")
trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl")
datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install trl")

from l2l_compile.integrations.transformers import stream  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # those of trl and transformers about each other
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # by Dynamo
    pytest.mark.filterwarnings("ignore:backend 'l2l' does not run ChunkedLogProbFunction"),
]
OPTIONS = {"micro_batches": 2, "block_compiler": "eager"}
datasets.disable_progress_bars()
transformers.logging.set_verbosity_error()


def tokenizer():
    from tokenizers import Tokenizer, models

    words = {f"word{number}": number for number in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<end>": VOCABULARY - 1}
    made = Tokenizer(models.WordLevel(words, unk_token="word0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def trainer_of(folder):
    rows = [{name: example[name].tolist() for name in ("input_ids", "labels")} for example in examples(EXAMPLES)]
    with warnings.catch_warnings(action="ignore"):
        arguments = trl.SFTConfig(
            str(folder),
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=ACCUMULATE,
            max_steps=STEPS,
            max_grad_norm=CLIP,
            learning_rate=RATE,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        )
        trainer = trl.SFTTrainer(
            language_model(),
            arguments,
            train_dataset=datasets.Dataset.from_list(rows),
            eval_dataset=datasets.Dataset.from_list(rows[:6]),
            processing_class=tokenizer(),
        )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def column(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.mark.parametrize("update", ["in_forward"])
def test_numbers_of_the_plain_loop_and_same_bits_when_resumed(update, tmp_path):
    expected, trainer = trainer_of(tmp_path / "plain"), trainer_of(tmp_path / "streamed")
    stream(trainer, update=update, **OPTIONS)
    for each in (expected, trainer):
        each.train()
    for name in ("loss", "eval_loss", "grad_norm"):
        assert column(trainer, name) == pytest.approx(column(expected, name), rel=1e-5), name
    assert largest_difference(trainer.model, expected.model) < 1e-5

    resumed = trainer_of(tmp_path / "streamed")
    stream(resumed, update=update, **OPTIONS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "streamed" / "checkpoint-10"))
    assert same_bits(resumed.model, trainer.model)
