"""The cost of one more layer at the first step: blocks are lowered once, so only Dynamo and the passes depend on the depth.

A model is compiled by `backend="eager"` (Dynamo alone) and by `backend="l2l"`, at two depths. For each backend, the growth of
the first training step from the smaller to the larger depth is divided by the number of added layers. The cost of a layer is
the figure of "l2l" minus the figure of "eager". Two more figures show where the cost comes from. `compiling` is the first step
minus a later step, which does the same work without compilation. `passes` is the time within the backend, the figure with the
least noise.

Every measurement is a process of its own, with an empty Inductor cache, after one small compilation. Seconds are CPU seconds of
one thread, so that waiting for other work on the machine does not count. The time in Inductor is left out: it is the same at
each depth, and noisy (a C++ compiler).

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

import l2l_compile
import l2l_compile.lowering.lower
from measuring import Limit, Work, arguments, device_of, llama, report, token_batch, train_step

BACKENDS = ("eager", "l2l")
MOST = 20.0  # ms per layer


def main() -> int:
    parser = arguments(__doc__, hidden=256, intermediate=688, heads=4, rows=8, tokens=128, micro_batches=4, repeats=3)
    parser.add_argument("--layers", type=int, nargs=2, default=[12, 48], metavar=("FEW", "MANY"))
    parser.add_argument("--block-compiler", choices=("eager", "inductor"), default="inductor")
    parser.add_argument("--child", choices=BACKENDS, help="measure one backend here and print JSON; for the script itself")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.repeats = [2, 4], 1
    device = device_of(options.device)
    if options.child:
        print(json.dumps(compilation(options.child, options.layers[0], options, device)))
        return 0
    found = {(backend, layers): [] for layers in options.layers for backend in BACKENDS}
    for _ in range(options.repeats):
        for backend, layers in found:
            found[backend, layers].append(in_fresh_process(backend, layers, options))
    rows = [row(layers, {backend: found[backend, layers] for backend in BACKENDS}) for layers in options.layers]
    few, many = rows
    added = {key: (many[key] - few[key]) / (many["layers"] - few["layers"]) * 1000 for key in many if key.endswith("_s")}
    print("ms per added layer: " + ", ".join(f"{key.removesuffix('_s')} {figure:.1f}" for key, figure in added.items()))
    limits = [
        Limit("first step per added layer, over eager", added["l2l_first_s"] - added["eager_first_s"], MOST, "ms"),
        Limit("compiling per added layer, over eager", added["l2l_compiling_s"] - added["eager_compiling_s"], MOST, "ms"),
        Limit("blocks more at the larger depth", many["blocks"] - few["blocks"], 0),
    ]
    runs = [{"backend": b, "layers": n, "runs": each} for (b, n), each in found.items()]
    return report(options, device, rows, limits, runs=runs, milliseconds_per_layer=added)


def row(layers: int, found: dict[str, list[dict]]) -> dict:
    """Medians of the repeats at one depth, in CPU seconds."""

    def median(backend: str, *parts: str) -> float:
        return statistics.median(r[parts[0]] - sum(r[p] for p in parts[1:]) for r in found[backend])

    return {
        "layers": layers,
        "blocks": found["l2l"][0]["blocks"],
        **{f"{b}_first_s": median(b, "first", "inductor") for b in BACKENDS},
        **{f"{b}_compiling_s": median(b, "first", "inductor", "later") for b in BACKENDS},
        "passes_s": median("l2l", "passes"),
    }


def in_fresh_process(backend: str, layers: int, options) -> dict:
    """`compilation` in a process of its own, with an Inductor cache of its own."""
    same = ("hidden", "intermediate", "heads", "rows", "tokens", "micro_batches", "device", "block_compiler")
    command = [sys.executable, __file__, "--child", backend, "--layers", str(layers), str(layers)]
    command += [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in same]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compilation(backend: str, layers: int, options, device: torch.device) -> dict:
    """CPU seconds of the first training step, of Inductor within it, and of later steps; blocks of the program."""
    torch.set_num_threads(1)
    chosen = {"micro_batches": options.micro_batches, "device": device, "block_compiler": options.block_compiler}
    how = {"backend": "l2l", "options": chosen} if backend == "l2l" else {"backend": "eager"}
    small = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    torch.compile(small, **how)(torch.randn(8, 8)).sum().backward()
    torch.compiler.reset()

    compiled = torch.compile(llama(layers, options.hidden, options.intermediate, options.heads, tokens=options.tokens), **how)
    ids = token_batch(options.rows, options.tokens)
    inductor, passes = seconds_in(l2l_compile.lowering.lower, "compile_graph"), seconds_in(l2l_compile.backend, "make_runner")
    first, *later = [cpu_seconds(lambda: train_step(compiled, ids)) for _ in range(4)]
    blocks = sum(len(p.blocks) for p in l2l_compile.programs(compiled)) if backend == "l2l" else 0
    later = statistics.median(later)
    return {"first": first, "later": later, "inductor": sum(inductor), "passes": sum(passes), "blocks": blocks}


def cpu_seconds(work: Work) -> float:
    """CPU seconds of this process for some work."""
    start = time.process_time()
    work()
    return time.process_time() - start


def seconds_in(module, function: str) -> list[float]:
    """From now on, the CPU seconds of every call of a module's function."""
    found: list[float] = []
    original = getattr(module, function)

    def timed(*operands):
        start = time.process_time()
        try:
            return original(*operands)
        finally:
            found.append(time.process_time() - start)

    setattr(module, function, timed)
    return found


if __name__ == "__main__":
    sys.exit(main())
