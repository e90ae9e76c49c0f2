"""QLoRA: a frozen base in 4 bits (NF4 of bitsandbytes) with LoRA adapters, streamed from the host.

A small Llama over bytes learns Python's help. It has random weights, so that nothing is downloaded. For a pretrained model, give
--model a folder or a name of the Hugging Face hub; its tokenizer is then used. PEFT's `prepare_model_for_kbit_training` is not needed:
l2l recomputes each layer without activation checkpointing.

    pip install '.[transformers,quantized]'
    python examples/qlora.py                        # a minute on a CPU
    python examples/qlora.py --trainer              # the same with the Trainer of transformers
    python examples/qlora.py --model path/to/model --precision bf16 --micro-batches 8 --block-compiler inductor
"""

from __future__ import annotations

import argparse
import pydoc_data.topics as topics

import bitsandbytes
import peft
import torch
import transformers

import l2l_compile
from l2l_compile.integrations.transformers import stream

BYTES = 256
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name of the hub (default: a random Llama over bytes)")
    parser.add_argument("--trainer", action="store_true", help="train with the Trainer of transformers")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of a passage")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--block-compiler", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--output", default="runs/qlora", help="folder for the adapters")
    return parser.parse_args(given)


def in_four_bits(model: torch.nn.Module) -> torch.nn.Module:
    """Replace the linear layers of a model by NF4 ones, but for its head, as `BitsAndBytesConfig` does."""
    for name, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear and layer is not model.get_output_embeddings():
            made = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4")
            made.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            model.set_submodule(name, made.to("cpu"))
    return model


def build_model(arguments: argparse.Namespace) -> tuple[torch.nn.Module, transformers.PreTrainedTokenizerBase | None]:
    """A model in 4 bits with adapters, and its tokenizer: None for bytes."""
    if arguments.model is not None:
        chosen = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=COMPUTE[arguments.precision],
        )
        base = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.model, quantization_config=chosen, dtype=COMPUTE[arguments.precision], device_map={"": "cpu"}
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
        trained = None
    else:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        base = in_four_bits(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=BYTES)))
        tokenizer, trained = None, ["embed_tokens", "lm_head"]  # trained too: random, frozen ones would tell adapters nothing
    config = peft.LoraConfig(r=arguments.rank, target_modules=ADAPTED, modules_to_save=trained, task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config), tokenizer


def passages(arguments: argparse.Namespace, tokenizer: transformers.PreTrainedTokenizerBase | None) -> torch.Tensor:
    """Python's help, cut into passages of one length: [passages, length]."""
    text = "\n".join(topics.topics.values())
    tokens = torch.tensor(list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"])
    return tokens[: len(tokens) // arguments.length * arguments.length].view(-1, arguments.length)


def train(model: torch.nn.Module, data: torch.Tensor, arguments: argparse.Namespace) -> list[float]:
    """A plain loop. Returns the losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=arguments.lr)
    options = {"micro_batches": arguments.micro_batches, "precision": arguments.precision, "outputs": "loss"}
    options |= {"block_compiler": arguments.block_compiler, "optimizer": optimizer, "update": "in_forward", "max_grad_norm": 1.0}
    compiled = torch.compile(model, backend="l2l", options=options)
    losses = []
    for step in range(arguments.steps):
        rows = data[torch.randint(len(data), (arguments.batch,))]
        loss = compiled(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == arguments.steps - 1:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    l2l_compile.synchronize(compiled)  # the last update runs behind the loop
    print(l2l_compile.stats(compiled))
    return losses


def train_with_trainer(model: torch.nn.Module, data: torch.Tensor, arguments: argparse.Namespace) -> list[float]:
    """The Trainer of transformers. Returns the losses that it logs."""
    chosen = transformers.TrainingArguments(
        arguments.output,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=max(1, arguments.steps // 4),
        save_strategy="no",
        use_cpu=True,  # the model stays on the host; layers run where the option `device` says
        report_to=[],
    )
    rows = [{"input_ids": row, "labels": row} for row in data]
    trainer = transformers.Trainer(model, chosen, train_dataset=rows)
    stream(
        trainer,
        micro_batches=arguments.micro_batches,
        precision=arguments.precision,
        update="in_forward",
        block_compiler=arguments.block_compiler,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(given: list[str] | None = None) -> list[float]:
    arguments = parse_arguments(given)
    if arguments.model is None:
        torch.set_num_threads(1)  # the operations of such a small model are too short for several threads
    model, tokenizer = build_model(arguments)
    model.print_trainable_parameters()
    data = passages(arguments, tokenizer)
    losses = (train_with_trainer if arguments.trainer else train)(model, data, arguments)
    model.save_pretrained(arguments.output)
    return losses


if __name__ == "__main__":
    main()
