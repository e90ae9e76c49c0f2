"""LoRA with PEFT and the Trainer of transformers, streamed: adapters of a small Llama learn Python's help, byte by byte.

The text is the same as in examples/quickstart.py. The model has random weights, so that nothing is downloaded. For a pretrained
model, give --model a folder or a name of the Hugging Face hub; its tokenizer is then used.

    pip install '.[transformers]'
    python examples/lora.py                         # half a minute on a CPU
    python examples/lora.py --model path/to/model --precision bf16 --micro-batches 8 --block-compiler inductor
"""

from __future__ import annotations

import argparse
import pydoc_data.topics as topics
from pathlib import Path

import peft
import torch
import transformers

import l2l_compile
from l2l_compile.integrations.transformers import stream

BYTES = 256
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name of the hub (default: a random Llama over bytes)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of a passage")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--update", default="in_forward", choices=("at_step", "in_forward"))
    parser.add_argument(
        "--block-compiler", default="eager", choices=("eager", "inductor"), help="inductor pays off beyond a tiny model"
    )
    parser.add_argument("--output", default="runs/lora", help="folder for checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    return parser.parse_args(given)


def build_model(arguments: argparse.Namespace) -> tuple[torch.nn.Module, transformers.PreTrainedTokenizerBase | None]:
    """A model with adapters, and its tokenizer: None for bytes."""
    if arguments.model is not None:
        base = transformers.AutoModelForCausalLM.from_pretrained(arguments.model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
        trained = None
    else:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        base, tokenizer = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=BYTES)), None
        trained = ["embed_tokens", "lm_head"]  # trained too: random, frozen ones would tell adapters nothing
    config = peft.LoraConfig(r=arguments.rank, target_modules=ADAPTED, modules_to_save=trained, task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config), tokenizer


def passages(arguments: argparse.Namespace, tokenizer: transformers.PreTrainedTokenizerBase | None) -> list[dict[str, list[int]]]:
    """Python's help, cut into passages of one length."""
    text = "\n".join(topics.topics.values())
    tokens = list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"]
    starts = range(0, len(tokens) - arguments.length, arguments.length)
    return [{"input_ids": tokens[s : s + arguments.length], "labels": tokens[s : s + arguments.length]} for s in starts]


def main(given: list[str] | None = None) -> transformers.Trainer:
    arguments = parse_arguments(given)
    if arguments.model is None:
        torch.set_num_threads(1)  # the operations of such a small model are too short for several threads
    model, tokenizer = build_model(arguments)
    model.print_trainable_parameters()
    data = passages(arguments, tokenizer)
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            arguments.output,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch,
            learning_rate=arguments.lr,
            max_grad_norm=1.0,
            logging_steps=max(1, arguments.steps // 4),
            save_steps=max(1, arguments.steps // 2),
            eval_strategy="steps",
            eval_steps=max(1, arguments.steps // 2),
            use_cpu=True,  # the model stays on the host; layers run where the option `device` says
            report_to=[],
        ),
        train_dataset=data[16:],
        eval_dataset=data[:16],
    )
    stream(
        trainer,
        micro_batches=arguments.micro_batches,
        precision=arguments.precision,
        update=arguments.update,
        block_compiler=arguments.block_compiler,
    )
    trainer.train(resume_from_checkpoint=True if arguments.resume and any(Path(arguments.output).glob("checkpoint-*")) else None)
    model.save_pretrained(arguments.output)
    print(l2l_compile.stats(model))
    return trainer


if __name__ == "__main__":
    main()
