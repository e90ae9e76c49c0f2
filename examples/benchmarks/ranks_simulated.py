"""A training step on 1 to 64 devices in virtual time: tokens per second relative to N times one device, and the longest waits.

The model has the shape of Llama-3-8B, in bf16, with AdamW and overlapped updates. Each device has rows of its own, as
many as one device alone. One rank is simulated. The links between devices, and the number of devices on a host, are figures of
the machine. Nothing is computed; a case takes up to two minutes. A simulated figure is no measurement.

    python examples/benchmarks/ranks_simulated.py
    python examples/benchmarks/ranks_simulated.py --machine h100 --rows 8
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import l2l_compile
from measuring import Limit, arguments, report
from schedule import TOKENS, model_of

RANKS = (1, 2, 4, 8, 16, 32, 64)
HELD = 4 * 3  # bytes of a parameter and of AdamW's state in fp32; gradients and copies are counted by the simulation


def simulated(ranks: int, options: argparse.Namespace) -> tuple[l2l_compile.Simulation, int]:
    """A simulated step of rank 0 of `ranks`, and the number of parameters in its shards."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)  # the other ranks do not exist
    try:
        model = l2l_compile.shard(model_of(options.layers), init_device_mesh("cpu", (ranks,)))
        own = sum(p.to_local().numel() for p in model.parameters())
        ids = torch.zeros(options.rows, TOKENS, dtype=torch.long)
        settings = {"micro_batches": min(16, options.rows), "precision": "bf16", "outputs": "loss", "update": options.update}
        settings["optimizer"] = torch.optim.AdamW(model.parameters(), fused=True)
        return l2l_compile.simulate(model, options.machine, settings)(input_ids=ids, labels=ids), own
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def waits_of(found: l2l_compile.Simulation) -> str:
    """The kinds of nodes for which the compute lane waits longest, with seconds."""
    total: Counter[str] = Counter()
    for gap in found.gaps("compute"):
        total[(gap.waited_for.removeprefix("caller: ").split() or ["nothing"])[0]] += gap.seconds
    return ", ".join(f"{kind} {seconds:.3g} s" for kind, seconds in total.most_common(2))


def main() -> int:
    parser = arguments(__doc__, layers=32, rows=64)
    parser.add_argument("--machine", default="h200", help="a machine of the package, or the path of a file")
    parser.add_argument("--update", default="in_backward", choices=("at_step", "in_backward", "in_forward"))
    options = parser.parse_args()
    if options.quick:
        options.layers, options.rows = 3, 2
    rows, rates = [], []
    for ranks in RANKS:
        found, own = simulated(ranks, options)
        rates.append(found.tokens_per_second)
        row = {"devices": ranks, "step s": found.seconds, "tokens/s": found.tokens_per_second}
        row |= {"of ideal": found.tokens_per_second / (ranks * rates[0])}
        row |= {f"{lane} busy": found.busy(lane) for lane in ("compute", "comm", "h2d", "d2h", "host")}
        row |= {"device GiB": found.peak_device_bytes / 2**30, "host GiB": (HELD * own + found.taken_bytes) / 2**30}
        rows.append(row | {"compute waits for": waits_of(found)})
        print(f"{ranks} devices: {found.seconds:.4g} s a step", flush=True)
    limits = [Limit(f"{RANKS[-1]} devices, ideal tokens/s over simulated ones", 1 / rows[-1]["of ideal"], 1.25)]
    return report(options, torch.device("cpu"), rows, limits, simulated_on=options.machine)


if __name__ == "__main__":
    sys.exit(main())
