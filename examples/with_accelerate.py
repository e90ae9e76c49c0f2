"""Train in a loop of Accelerate, once plain and once streamed: the losses are the same.

A small Llama learns Python's help topics, byte by byte, with accumulation, clipping and a schedule of learning rates. Nothing is
downloaded. The streamed loop has one more line.

    pip install '.[transformers]'
    python examples/with_accelerate.py               # a quarter of a minute on a CPU
"""

from __future__ import annotations

import argparse
import pydoc_data.topics as topics

import accelerate
import torch
import transformers

import l2l_compile
from l2l_compile.integrations.accelerate import stream

BYTES = 256  # a token is a byte: no tokenizer is needed


def build_model() -> transformers.LlamaForCausalLM:
    """Four layers with random weights, the same in every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=BYTES, use_cache=False))


def passages(count: int, length: int = 64) -> list[dict[str, torch.Tensor]]:
    """The first passages of Python's help, as tokens with labels."""
    text = "\n".join(topics.topics.values()).encode()
    pieces = torch.tensor(list(text[: count * length])).view(count, length)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def train(steps: int, streamed: bool) -> list[float]:
    """The loss of each step: the mean of its two batches."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    if streamed:
        # The default block_compiler, Inductor, takes longer to compile than such a tiny model gains
        stream(accelerator, micro_batches=2, update="in_forward", block_compiler="eager")
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    loader = torch.utils.data.DataLoader(passages(8 * 2 * steps), batch_size=8)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    if streamed:
        print(f"{l2l_compile.stats(model).peak_device_bytes:,} bytes on the device at most")
    return [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2], strict=True)]


def main(given: list[str] | None = None) -> tuple[list[float], list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args(given).steps
    torch.set_num_threads(1)  # the operations of such a small model are too short for several threads
    plain, streamed = train(steps, streamed=False), train(steps, streamed=True)
    print("step    plain  streamed")
    for step, losses in enumerate(zip(plain, streamed, strict=True), start=1):
        print("{:4}  {:7.4f}  {:8.4f}".format(step, *losses))
    return plain, streamed


if __name__ == "__main__":
    main()
