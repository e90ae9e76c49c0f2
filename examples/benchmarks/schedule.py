"""The share of a training step in which the device works, in virtual time, with real programs on a machine given as figures.

The model has the shape of Llama-3-8B, in bf16, 64 x 2048 tokens in 16 micro-batches. The time of a step is compared with the
time at work of its compute lane. If weights cross the link more slowly than they are used, the limit is on the time at work of
the link. Nothing is computed; a case takes some 20 s. A simulated figure is no measurement.

    python examples/benchmarks/schedule.py
    python examples/benchmarks/schedule.py --machine rtx4090 --layers 16
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

import l2l_compile
from measuring import Limit, arguments, report

TOKENS = 2048


@dataclass(frozen=True)
class Case:
    """Options of a step, its rows, and the limit for its time over the time at work of its compute lane (None: no limit).

    link  the least share of the step in which the lane to the device has to work
    tf32  whether products in float32 run at half of the rate of bf16, as TF32 does
    """

    name: str
    rows: int
    most: float | None
    options: dict[str, Any] = field(default_factory=dict)
    link: float | None = None
    tf32: bool = False


def cases(rows: int) -> list[Case]:
    """The cases, for a batch of `rows` rows."""
    backward, forward = {"update": "in_backward"}, {"update": "in_forward", "max_grad_norm": 1.0}
    return [
        Case("in_backward", rows, 1.03, backward),
        Case("in_forward, clipped", rows, 1.05, forward),
        Case("in_forward, clipped, delay=1", rows, 1.02, {**forward, "delay": 1}),
        Case("at_step", rows, None, {"update": "at_step"}),
        Case("in_backward, an eighth of the rows", rows // 8, None, backward),  # all updates have to run during a backward
        Case("in_forward, an eighth of the rows", rows // 8, None, forward),  # all updates have to run during a forward
        Case("in_forward, delay=1, an eighth of the rows", rows // 8, 1.10, {**forward, "delay": 1}),
        Case("in_backward, fp32 (TF32)", rows, 1.06, {**backward, "precision": "fp32"}, tf32=True),
        Case("no optimizer, one row", 1, None, {"micro_batches": 1, "optimizer": None}, link=0.95),
    ]


def model_of(layers: int) -> transformers.LlamaForCausalLM:
    """A model with the layers of Llama-3-8B, on the meta device."""
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=4096,
                intermediate_size=14336,
                num_hidden_layers=layers,
                num_attention_heads=32,
                num_key_value_heads=8,
                vocab_size=128256,
                max_position_embeddings=TOKENS,
                use_cache=False,
            )
        )


def simulated(case: Case, layers: int, machine: str) -> l2l_compile.Simulation:
    """A simulated step of a case."""
    model, ids = model_of(layers), torch.zeros(case.rows, TOKENS, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    micro_batches = max(min(16, case.rows), 1)
    options = {"micro_batches": micro_batches, "precision": "bf16", "outputs": "loss", "optimizer": optimizer, **case.options}
    figures = l2l_compile.Machine.load(machine)
    if case.tf32:
        figures = dataclasses.replace(figures, flops={**figures.flops, "float32": figures.flops["bfloat16"] / 2})
    return l2l_compile.simulate(model, figures, options)(input_ids=ids, labels=ids)


def main() -> int:
    parser = arguments(__doc__, layers=32, rows=64)
    parser.add_argument("--machine", default="h200", help="a machine of the package, or the path of a file")
    options = parser.parse_args()
    if options.quick:
        options.layers = 3
    rows, limits = [], []
    for case in cases(options.rows):
        found = simulated(case, options.layers, options.machine)
        compute = found.timeline.busy("compute")
        row = {"case": case.name, "step s": found.seconds, "compute s": compute, "of compute": found.seconds / compute}
        row |= {f"{lane} busy": found.busy(lane) for lane in ("h2d", "d2h", "host", "update", "caller")}
        gap = next(iter(found.gaps("compute")), None)
        rows.append(row | {"longest gap of compute": str(gap)})
        if case.most is not None:
            limits.append(Limit(f"{case.name}: step, of its compute", found.seconds / compute, case.most))
        if case.link is not None:
            limits.append(Limit(f"{case.name}: idle share of the link", 1 - found.busy("h2d"), 1 - case.link))
        torch._dynamo.reset()
    return report(options, torch.device("cpu"), rows, limits, simulated_on=options.machine)


if __name__ == "__main__":
    sys.exit(main())
