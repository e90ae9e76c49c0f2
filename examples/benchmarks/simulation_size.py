"""The cost of a simulation of a large model: seconds and memory for a step of 175 billion parameters, on the meta device.

The model has the size of GPT-3: 96 layers, a hidden size of 12288, 96 heads, 50257 tokens, sequences of 2048 (Brown et al.,
2020, table 2.1). Its layers are Llama layers with as many parameters, since a call of a logger breaks the graph of
transformers' GPT-2.

    python examples/benchmarks/simulation_size.py
"""

from __future__ import annotations

import resource
import sys

import torch
import transformers

import l2l_compile
from measuring import Limit, arguments, report, seconds

MOST_SECONDS, MOST_GB = 60.0, 4.0


def model_of(layers: int) -> transformers.LlamaForCausalLM:
    """The model, on the meta device."""
    sizes = {"num_hidden_layers": layers, "hidden_size": 12288, "intermediate_size": 32768, "num_attention_heads": 96}
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, vocab_size=50257, max_position_embeddings=2048, use_cache=False)
        )


def main() -> int:
    parser = arguments(__doc__, layers=96, rows=16, micro_batches=8)
    parser.add_argument("--machine", default="h200", help="a machine of the package, or the path of a file")
    given = parser.parse_args()
    if given.quick:
        given.layers = 2
    model, found = model_of(given.layers), []
    ids = torch.zeros(given.rows, 2048, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options = {"micro_batches": given.micro_batches, "precision": "bf16", "outputs": "loss"}
    options |= {"update": "in_backward", "optimizer": optimizer}
    taken = seconds(lambda: found.append(l2l_compile.simulate(model, given.machine, options)(input_ids=ids, labels=ids)))
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    (step,) = found
    print(step)
    parameters = sum(p.numel() for p in model.parameters())
    row = {"parameters": parameters, "simulation s": taken, "resident GB": gigabytes, "step s, simulated": step.seconds}
    limits = [
        Limit("seconds of a simulation", taken, MOST_SECONDS, "s"),
        Limit("resident memory at its peak", gigabytes, MOST_GB, "GB"),
    ]
    return report(given, torch.device("cpu"), [row], limits, simulated_on=given.machine)


if __name__ == "__main__":
    sys.exit(main())
