"""Train with a Lightning Trainer, once plain and once streamed: the losses are the same.

A small Llama learns Python's help topics, byte by byte, with accumulation and clipping. Nothing is downloaded. The streamed trainer
differs only in its strategy.

    pip install '.[lightning,transformers]'
    python examples/with_lightning.py                # a quarter of a minute on a CPU
"""

from __future__ import annotations

import argparse
import logging
import pydoc_data.topics as topics
import warnings

import lightning
import torch
import transformers

from l2l_compile.integrations.lightning import StreamingStrategy

BYTES = 256  # a token is a byte: no tokenizer is needed
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", module="lightning")  # its advice on the workers of data loaders


class Language(lightning.LightningModule):
    """Four layers of Llama with random weights, the same each time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=BYTES, use_cache=False))
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def passages(count: int, length: int = 64) -> list[dict[str, torch.Tensor]]:
    """The first passages of Python's help, as tokens with labels."""
    text = "\n".join(topics.topics.values()).encode()
    pieces = torch.tensor(list(text[: count * length])).view(count, length)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def train(steps: int, **strategy: StreamingStrategy) -> list[float]:
    """The loss of each step: the mean of its two batches."""
    module = Language()
    trainer = lightning.Trainer(
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accelerator": "cpu", **strategy},
    )
    trainer.fit(module, torch.utils.data.DataLoader(passages(8 * 2 * steps), batch_size=8))
    if strategy:
        print(f"{int(trainer.callback_metrics['peak_device_bytes']):,} bytes on the device at most")
    return [(first + second) / 2 for first, second in zip(module.losses[::2], module.losses[1::2], strict=True)]


def main(given: list[str] | None = None) -> tuple[list[float], list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args(given).steps
    torch.set_num_threads(1)  # the operations of such a small model are too short for several threads
    plain = train(steps)
    # The default block_compiler, Inductor, takes longer to compile than such a tiny model gains
    streamed = train(steps, strategy=StreamingStrategy(micro_batches=2, update="in_forward", block_compiler="eager"))
    print("step    plain  streamed")
    for step, losses in enumerate(zip(plain, streamed, strict=True), start=1):
        print("{:4}  {:7.4f}  {:8.4f}".format(step, *losses))
    return plain, streamed


if __name__ == "__main__":
    main()
