"""Train a byte-level Llama or GPT-2 of a few million parameters with `torch.compile(model, backend="l2l")`.

    python examples/quickstart.py                          # Llama on the help topics that come with Python
    python examples/quickstart.py --model gpt2 --text my_book.txt --steps 1000

The model, its gradients and the optimizer stay in host memory. The device (a GPU if there is one, else the CPU) holds
a few layers at a time, whatever the number of layers. At the end, the script prints a sample of generated text, saves a
folder that `from_pretrained` loads, and prints the report of the compiler.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from tqdm import tqdm

import l2l_compile

VOCABULARY = 256  # a token is a byte: no tokenizer is needed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--text", type=Path, help="file to train on (default: the topics of pydoc_data)")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="where the trained model is saved")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="width, a multiple of 64")
    parser.add_argument("--context", type=int, default=128, help="bytes a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--micro-batches", type=int, default=2, help="slices of the batch that go through a layer in turn")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", help="where the layers run (default: the accelerator if there is one, else cpu)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> transformers.PreTrainedModel:
    """A causal language model with random weights, in fp32 on the host."""
    if args.model == "llama":
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=args.hidden,
            intermediate_size=args.hidden * 11 // 4,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            max_position_embeddings=4 * args.context,
            bos_token_id=None,
            eos_token_id=None,
        )
    else:
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=args.hidden,
            n_layer=args.layers,
            n_head=args.hidden // 64,
            n_positions=4 * args.context,
            bos_token_id=None,
            eos_token_id=None,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,  # a short run does not overfit
        )
    config.use_cache = False  # training needs no cache of keys and values; it would be copied to the host in every step
    return transformers.AutoModelForCausalLM.from_config(config)


def load_text(path: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of the text, in two parts: for training, and held out (the last twentieth)."""
    raw = path.read_bytes() if path else "\n".join(topics.values()).encode()
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    held_out = len(data) // 20
    return data[:-held_out], data[-held_out:]


def sample_batch(data: torch.Tensor, args: argparse.Namespace, generator: torch.Generator | None = None) -> dict:
    """Random pieces of the text, [batch, context]; the model shifts the labels itself."""
    starts = torch.randint(len(data) - args.context, (args.batch,), generator=generator)
    pieces = torch.stack([data[s : s + args.context] for s in starts.tolist()])
    return {"input_ids": pieces, "labels": pieces}


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, data: torch.Tensor, args: argparse.Namespace) -> float:
    """Mean loss, in nats per byte, over eight batches of held-out text, the same batches in every call."""
    generator = torch.Generator().manual_seed(args.seed)
    losses = [model(**sample_batch(data, args, generator)).loss for _ in range(8)]
    return torch.stack(losses).mean().item()


def train(model, compiled, data: torch.Tensor, args: argparse.Namespace) -> tuple[float, float]:
    """The training loop, an ordinary PyTorch loop. Returns the loss of the first step, and the mean of the last ten."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses: list[float] = []
    bar = tqdm(range(args.steps), desc="training (the first step compiles)", unit="step")
    for step in bar:
        start = time.perf_counter()
        for group in optimizer.param_groups:  # twenty steps of warm-up, then a cosine down to a tenth
            group["lr"] = args.lr * min((step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * step / args.steps))
        loss = compiled(**sample_batch(data, args)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        losses.append(loss.item())
        peak = l2l_compile.stats(compiled).peak_device_bytes
        speed = args.batch * args.context / (time.perf_counter() - start)
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s, peak {peak / 2**20:.1f} MiB", refresh=False)
        if step == 0:
            bar.set_description("training")
    return losses[0], statistics.mean(losses[-10:])


def generate(model: transformers.PreTrainedModel, prompt: str, length: int = 200) -> str:
    """A sampled continuation of a prompt, generated by the plain model on the host."""
    tokens = torch.tensor([list(prompt.encode())])
    made = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=length,
        do_sample=True,
        temperature=0.7,
        use_cache=True,
        pad_token_id=0,
    )
    return bytes(made[0].tolist()).decode(errors="replace")


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    transformers.utils.logging.disable_progress_bar()
    text, held_out = load_text(args.text)
    model = build_model(args)
    count = sum(p.numel() for p in model.parameters())
    print(f"{args.model} with {count / 1e6:.1f} M parameters, {len(text):,} bytes of text")

    options = {"micro_batches": args.micro_batches, "stash": "host"}
    if args.device:
        options["device"] = args.device
    compiled = torch.compile(model, backend="l2l", options=options)

    first, last = train(model, compiled, text, args)
    print(f"loss of the first step {first:.3f}, of the last ten {last:.3f}")
    resident = sum(2 * p.numel() * p.element_size() for p in model.parameters())  # without activations and optimizer
    peak = l2l_compile.stats(compiled).peak_device_bytes
    print(f"peak device memory {peak / 2**20:.1f} MiB; weights and gradients alone are {resident / 2**20:.1f} MiB")

    model.eval()
    print(f"held-out loss {held_out_loss(compiled, held_out, args):.3f} (knowing nothing: {math.log(VOCABULARY):.3f})")
    print(f"\n--- a sample ---\n{generate(model, 'The statement ')}\n----------------\n")

    model.save_pretrained(args.out)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(args.out).eval()
    saved, again = (held_out_loss(m, held_out, args) for m in (model, loaded))
    assert saved == again, f"the loaded model has another loss: {again} instead of {saved}"
    print(f"saved to {args.out}; loaded again, its held-out loss is the same: {again:.3f}\n")

    model.train()
    print(l2l_compile.explain(model, options=options)(**sample_batch(text, args)))


if __name__ == "__main__":
    main()
