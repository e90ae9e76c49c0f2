"""Cases for a planner, drawn at random: a model of `transformers` on the meta device, a machine of the package, and a batch."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

from l2l_compile.command.asked import OPTIMIZERS
from l2l_compile.command.models import Workload, workload
from l2l_compile.command.transformers_models import build, with_adapters
from l2l_compile.simulation.machine import Machine, names

FAMILIES = ("llama", "gpt2", "bert", "mixtral", "t5")
_STATE = 16  # bytes of a trained parameter on the host: weight, gradient, and two moments in fp32
_TINY = 500.0  # times smaller: the memories of a machine for tiny models


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and of its batch.

    hidden  a multiple of 64
    length  tokens of a row
    """

    hidden: int
    layers: int
    vocabulary: int
    rows: int
    length: int


@dataclass(frozen=True)
class Case:
    """A training step whose options are to be planned.

    config   of transformers
    lora     the rank of adapters of a frozen model; None to train all parameters
    clipped  whether the norm of the gradients is clipped
    """

    family: str
    config: dict[str, Any]
    machine: Machine
    rows: int
    length: int
    precision: str
    lora: int | None
    clipped: bool
    optimizer: str

    def workload(self) -> Workload:
        model = build(self.config, self.family)
        if self.lora is not None:
            model = with_adapters(model, self.lora, self.precision, self.family)
        return workload(model, self.rows, self.length)

    def given(self, of: Workload) -> dict[str, Any]:
        """The options that are not decided."""
        clips = {"max_grad_norm": 1.0} if self.clipped else {}
        return {"precision": self.precision, "outputs": "loss", "optimizer": OPTIMIZERS[self.optimizer](of.trained), **clips}

    def __str__(self) -> str:
        training = f"LoRA {self.lora}" if self.lora is not None else "all"
        clipped = ", clipped" if self.clipped else ""
        return f"{self.family}, {self.rows} x {self.length}, {self.precision}, {training}, {self.optimizer}{clipped}"


def drawn(seed: int, count: int, tiny: bool = False) -> list[Case]:
    """Random cases. Families and machines take turns in a random order, so that each occurs. Tiny models go with tiny memories."""
    draw = random.Random(seed)
    families, machines = (draw.sample(known, len(known)) for known in (FAMILIES, names()))
    return [_case(draw, families[i % len(families)], machines[i % len(machines)], tiny) for i in range(count)]


def _case(draw: random.Random, family: str, machine: str, tiny: bool) -> Case:
    sizes = _sizes(draw, tiny)
    experts = draw.choice((4, 8)) if family == "mixtral" else 1
    while not (tiny or 1e8 <= _parameters(family, sizes, experts) <= 8e9):
        sizes = _sizes(draw, tiny)
    on = _machine(draw, machine, _parameters(family, sizes, experts), tiny)
    lora = draw.choice((None, None, None, 8, 16))
    known = [name for name, dtype in _DTYPES.items() if dtype in on.flops and on.flops[dtype] >= 1e11]
    return Case(
        family,
        _CONFIGS[family](sizes) | ({"num_local_experts": experts} if family == "mixtral" else {}),
        on,
        sizes.rows,
        sizes.length,
        draw.choice([*known[:-1], *known[:-1], *known]),  # fp32 is rare
        lora if family != "mixtral" else None,  # PEFT makes no adapters of experts on the meta device
        draw.random() < 0.35,
        draw.choice(("adamw", "adamw", "momentum")),
    )


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _sizes(draw: random.Random, tiny: bool) -> Sizes:
    if tiny:
        return Sizes(draw.choice((64, 128)), draw.choice((2, 3)), 256, draw.choice((4, 6, 8)), draw.choice((16, 32)))
    rows, length = 1, 1
    while not 2048 <= rows * length <= 65536:
        rows, length = draw.choice((2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)), draw.choice((128, 256, 512, 1024, 2048, 4096))
    hidden = draw.choice((512, 768, 1024, 1536, 2048, 3072, 4096, 5120))
    return Sizes(hidden, draw.choice((6, 8, 12, 16, 24)), draw.choice((32000, 50304, 128000)), rows, length)


def _parameters(family: str, sizes: Sizes, experts: int) -> float:
    """Parameters, roughly: attention, a feed-forward network of each expert, and embeddings."""
    layers = 2 * sizes.layers if family == "t5" else sizes.layers  # an encoder and a decoder
    return layers * (4 + 8 * experts) * sizes.hidden**2 + 2 * sizes.vocabulary * sizes.hidden


def _machine(draw: random.Random, name: str, parameters: float, tiny: bool) -> Machine:
    """A machine of the package. Its host has as much memory as that, or more: twice, or what the training of the model takes."""
    machine = Machine.load(name)
    if tiny:
        memories = ("device_memory", "device_reserve", "host_memory", "host_reserve")
        return replace(machine, **{memory: getattr(machine, memory) / _TINY for memory in memories})
    host = machine.host_memory * draw.choice((1, 1, 2))
    return replace(machine, host_memory=host * 2 ** max(0, math.ceil(math.log2(1.2 * _STATE * parameters / host))))


def _heads(sizes: Sizes) -> int:
    return max(2, sizes.hidden // (128 if sizes.hidden >= 1024 else 64))


def _llama(sizes: Sizes) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.hidden * 8 // 3 // 64 * 64,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": _heads(sizes),
        "num_key_value_heads": max(1, _heads(sizes) // 2),
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.length,
    }


def _gpt2(sizes: Sizes) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": sizes.hidden,
        "n_layer": sizes.layers,
        "n_head": _heads(sizes),
        "vocab_size": sizes.vocabulary,
        "n_positions": sizes.length,
    }


def _bert(sizes: Sizes) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": sizes.hidden,
        "intermediate_size": 4 * sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": _heads(sizes),
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.length,
    }


def _mixtral(sizes: Sizes) -> dict[str, Any]:
    return {**_llama(sizes), "model_type": "mixtral", "num_experts_per_tok": 2}


def _t5(sizes: Sizes) -> dict[str, Any]:
    return {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": sizes.hidden,
        "d_ff": 4 * sizes.hidden,
        "d_kv": sizes.hidden // _heads(sizes),
        "num_layers": sizes.layers,
        "num_heads": _heads(sizes),
        "vocab_size": sizes.vocabulary,
        "decoder_start_token_id": 0,
    }


_CONFIGS = {"llama": _llama, "gpt2": _gpt2, "bert": _bert, "mixtral": _mixtral, "t5": _t5}
