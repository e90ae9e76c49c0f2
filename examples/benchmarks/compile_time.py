"""What one more layer costs at compilation: blocks are lowered once, so only Dynamo and the passes see the depth.

The first training step (compilation included) with backend "l2l" minus that with backend "eager", which pays for Dynamo
alone, at two depths; the difference of the two over the difference in depth is the cost of a layer. Every measurement
is a process of its own with an empty Inductor cache and one small compilation behind it. Inductor's share, which is
the same at every depth but by far the noisiest (a C++ compiler), is measured within and left out of the slope; the
slope with it is printed as well.

    python examples/benchmarks/compile_time.py
"""
from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from measuring import Limit, arguments, device_of, llama, report, seconds, token_batch, train_step

import l2l_compile

MOST = 20.0  # ms per layer


def main() -> int:
    parser = arguments(__doc__, hidden=256, intermediate=688, heads=4, rows=8, tokens=128, micro_batches=4, repeats=3)
    parser.add_argument("--layers", type=int, nargs=2, default=[12, 48], metavar=("FEW", "MANY"))
    parser.add_argument("--child", default=None, help="measure one backend in this process and print JSON; used by the script itself")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.repeats = [2, 4], 1
    if options.child:
        print(json.dumps(first_step(options.child, options.layers[0], options, device_of(options.device))))
        return 0
    device = device_of(options.device)
    found = {key: [] for key in [(b, n) for n in options.layers for b in ("eager", "l2l")]}
    for _ in range(options.repeats):
        for backend, layers in found:
            found[backend, layers].append(in_fresh_process(backend, layers, options))
    rows = [row(layers, found["eager", layers], found["l2l", layers]) for layers in options.layers]
    few, many = rows
    per_layer = {
        key: (many[key] - few[key]) / (many["layers"] - few["layers"]) * 1000 for key in ("added_s", "added_with_inductor_s")
    }
    print(f"with Inductor: {per_layer['added_with_inductor_s']:.3g} ms per added layer")
    limits = [
        Limit("compilation per added layer", per_layer["added_s"], MOST, "ms"),
        Limit("blocks more at the larger depth", many["blocks"] - few["blocks"], 0),
    ]
    runs = [{"backend": b, "layers": n, "runs": each} for (b, n), each in found.items()]
    return report(options, device, rows, limits, runs=runs, milliseconds_per_layer=per_layer)


def row(layers: int, eager: list[dict], l2l: list[dict]) -> dict:
    """Medians of the repeats at one depth; seconds."""
    eager_s = statistics.median(r["seconds"] for r in eager)
    l2l_s, inductor_s = (statistics.median(r[key] for r in l2l) for key in ("seconds", "inductor_seconds"))
    own_s = statistics.median(r["seconds"] - r["inductor_seconds"] for r in l2l)
    return {
        "layers": layers, "blocks": l2l[0]["blocks"], "eager_s": eager_s, "l2l_s": l2l_s, "inductor_s": inductor_s,
        "added_s": own_s - eager_s, "added_with_inductor_s": l2l_s - eager_s,
    }


def in_fresh_process(backend: str, layers: int, options) -> dict:
    """`first_step` in a process of its own, with an Inductor cache of its own."""
    sizes = ("hidden", "intermediate", "heads", "rows", "tokens", "micro_batches", "device")
    command = [sys.executable, __file__, "--child", backend, "--layers", str(layers), str(layers)]
    command += [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in sizes]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def first_step(backend: str, layers: int, options, device: torch.device) -> dict:
    """Seconds of the first training step, of which in Inductor; blocks of the program (0 for backend "eager")."""
    chosen = {"micro_batches": options.micro_batches, "device": device} if backend == "l2l" else None
    small = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    torch.compile(small, backend=backend, options=chosen)(torch.randn(8, 8)).sum().backward()
    torch.compiler.reset()

    model = llama(layers, options.hidden, options.intermediate, options.heads, tokens=options.tokens)
    compiled = torch.compile(model, backend=backend, options=chosen)
    ids = token_batch(options.rows, options.tokens)
    inductor = time_inductor()
    taken = seconds(lambda: train_step(compiled, ids))
    blocks = sum(len(p.blocks) for p in l2l_compile.programs(compiled)) if backend == "l2l" else 0
    return {"seconds": taken, "inductor_seconds": sum(inductor), "blocks": blocks}


def time_inductor() -> list[float]:
    """From now on, the seconds of every compilation of a block by Inductor."""
    found: list[float] = []
    original = l2l_compile.lower.compile_graph

    def timed(*operands):
        start = time.perf_counter()
        try:
            return original(*operands)
        finally:
            found.append(time.perf_counter() - start)

    l2l_compile.lower.compile_graph = timed
    return found


if __name__ == "__main__":
    sys.exit(main())
