"""A training step of a model that is sharded over 1, 2 and 4 ranks, compared with FSDP2 on as many ranks, in the same run.

Each rank is a process of one thread on this machine, with gloo between the ranks; the rows of the batch are divided. If there
are more ranks than cores, seconds do not predict the gain from more machines. Host bytes are the bytes of parameters, gradients
and AdamW's state that a rank holds after a step, divided by the parameters of the model. Bytes over the link, and between
ranks, are for one step.

A second table has the bytes of a rank for larger models and more ranks, as in ZeRO's paper (arXiv 1910.02054, table 1). They are
computed from programs (`shares.py`). For the model that runs, computed and measured bytes are compared.

    python examples/benchmarks/ranks.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import l2l_compile
from measuring import Limit, arguments, device_of, llama, report, token_batch
from shares import share_of

LARGER = ((16, 2048), (32, 4096), (80, 8192))  # layers and width of models whose shares are computed
MANY = (1, 4, 16, 64)
RANKS = (1, 2, 4)
ENGINES = ("l2l", "FSDP2")
STEPS, WARM = 5, 2


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's shards of parameters, gradients and optimizer state."""
    tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values()) if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in (getattr(t, "_local_tensor", t) for t in tensors))


def train(rank: int, ranks: int, engine: str, options) -> dict:
    """Train for some steps as one of several ranks, and measure."""
    torch.set_num_threads(1)
    model = llama(options.layers, options.width, 4 * options.width, options.width // 64, tokens=options.tokens)
    count = sum(p.numel() for p in model.parameters())
    mesh = init_device_mesh("cpu", (ranks,))
    if engine == "l2l":
        l2l_compile.shard(model, mesh)
        step = torch.compile(
            model, backend="l2l", fullgraph=True, options={"micro_batches": 2, "device": str(options.device), "outputs": "loss"}
        )
    else:
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        step = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = token_batch(options.rows // ranks, tokens=options.tokens)
    seconds = []
    for _ in range(WARM + STEPS):
        dist.barrier()
        start = time.perf_counter()
        step(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        bytes_held = held(model, optimizer)
        optimizer.zero_grad()
    found = {"parameters": count, "seconds": sorted(seconds[WARM:])[STEPS // 2], "host": bytes_held / count}
    if engine == "l2l":
        stats = l2l_compile.stats(step)
        found |= {"link": stats.fetched_bytes + stats.pushed_bytes, "between": stats.gathered_bytes + stats.reduced_bytes}
    return found


def program_of(layers: int, width: int, options) -> l2l_compile.Program:
    """The program of a model on the meta device, which takes no memory."""
    with torch.device("meta"):
        model = llama(layers, width, 4 * width, width // 64, tokens=options.tokens)
    ids = token_batch(options.rows, tokens=options.tokens)
    settings = {"micro_batches": 2, "device": str(options.device), "outputs": "loss"}
    (program,) = l2l_compile.explain(model, settings)(input_ids=ids, labels=ids).programs
    return program


def table_of_shares(options) -> None:
    """Print the GiB of a rank, by the size of the model and the number of ranks."""
    print(f"{'layers':>8}{'width':>8}{'ranks':>8}{'host GiB':>10}{'slabs GiB':>11}{'link GiB':>10}{'between GiB':>13}")
    for layers, width in LARGER[: 1 if options.quick else None]:
        program = program_of(layers, width, options)
        for ranks in MANY:
            share = share_of(program, ranks)
            sizes = [size / 2**30 for size in (share.host, share.slabs, share.link, share.between)]
            print(f"{layers:>8}{width:>8}{ranks:>8}{sizes[0]:>10.2f}{sizes[1]:>11.2f}{sizes[2]:>10.2f}{sizes[3]:>13.2f}")


def in_processes(ranks: int, engine: str, options) -> dict:
    """Run `train` on each rank, in processes of their own. Returns the figures of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [f"--{name}={getattr(options, name)}" for name in ("layers", "width", "tokens", "rows", "device")]
        commands = [
            [
                sys.executable,
                __file__,
                *shared,
                f"--engine={engine}",
                f"--ranks={ranks}",
                f"--rank={rank}",
                f"--store={folder}/store",
            ]
            for rank in range(ranks)
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        started = [
            subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) for c in commands
        ]
        ended = [(process.communicate(), process.returncode) for process in started]
    for (_, printed), status in ended:
        if status:
            sys.exit(printed)
    return json.loads(ended[0][0][0].splitlines()[-1])


def main() -> int:
    parser = arguments(__doc__, layers=6, width=512, tokens=64, rows=8)
    parser.add_argument("--engine", choices=ENGINES, help="train with this one as one rank, and print figures as JSON")
    for name in ("ranks", "rank"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--store", type=Path)
    options = parser.parse_args()
    if options.engine:
        store = dist.FileStore(str(options.store), options.ranks)
        dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.ranks)
        print(json.dumps(train(options.rank, options.ranks, options.engine, options)))
        dist.destroy_process_group()
        return 0
    if options.quick:
        options.layers, options.width, options.tokens = 2, 64, 16
    device = device_of(options.device)
    options.device = device
    rows, limits, of_one = [], [], {}
    program = program_of(options.layers, options.width, options)
    for engine in ENGINES:
        for ranks in RANKS:
            found = in_processes(ranks, engine, options)
            of_one.setdefault(engine, found)
            rows.append(
                {
                    "engine": engine,
                    "ranks": ranks,
                    "seconds": found["seconds"],
                    "host bytes a parameter": found["host"],
                    "link MiB": found["link"] / 2**20 if "link" in found else "",
                    "between ranks MiB": found["between"] / 2**20 if "between" in found else "",
                }
            )
            if engine == "l2l":
                share = share_of(program, ranks)
                computed = (share.host / found["parameters"], share.link, share.between)
                measured = (found["host"], found["link"], found["between"])
                worst = max(max(c, m) / min(c, m) for c, m in zip(computed, measured, strict=True) if max(c, m))
                limits.append(Limit(f"{ranks} ranks, computed bytes over measured ones, the worst", worst, 1.02))
            if engine == "l2l" and ranks > 1:
                share = found["host"] * ranks / of_one[engine]["host"]
                limits.append(Limit(f"{ranks} ranks, host bytes over those of one rank, times {ranks}", share, 1.02))
    table_of_shares(options)
    return report(options, device, rows, limits, parameters=of_one["l2l"]["parameters"])


if __name__ == "__main__":
    sys.exit(main())
