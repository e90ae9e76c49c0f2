"""The time of a first step: with empty caches, in the next process, and at the next lengths of text.

A Llama is compiled by `torch.compile(model)` and by `backend="l2l"`, and makes one training step at each length of `--tokens`.
The first length is compiled as a constant. At the second length, the model is compiled again, with a symbol for the length.
Further lengths need no compilation. Each backend runs in a process of its own, with an empty cache of its own (Inductor's,
which also holds our traces and proofs). Then it runs in a second process with the filled cache. Seconds are wall-clock seconds
of a step, on all processors, one backend after the other.

    python examples/benchmarks/starts.py
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile

import torch

import l2l_compile  # noqa: F401 - registers the backend
from measuring import Limit, arguments, device_of, llama, report, seconds, token_batch, train_step

BACKENDS = ("inductor", "l2l")
COLD, WARM, SECOND = 0.5, 1.0, 1.0  # limits: share of torch.compile's first step; seconds beyond it at a second length


def main() -> int:
    parser = arguments(__doc__, layers=12, hidden=256, intermediate=512, heads=4, rows=8, micro_batches=2, repeats=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 96, 112, 104], help="lengths, one step at each")
    parser.add_argument("--child", choices=BACKENDS, help="measure one backend here and print JSON; for the script itself")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.hidden, options.intermediate, options.repeats, options.tokens = 1, 32, 64, 1, [16, 24, 20]
    device = device_of(options.device)
    if options.child:
        print(json.dumps(steps(options.child, options, device)))
        return 0
    found = {(backend, start): [] for backend in BACKENDS for start in ("cold", "warm")}
    for _ in range(options.repeats):
        for backend in BACKENDS:
            with tempfile.TemporaryDirectory() as cache:
                for start in ("cold", "warm"):
                    found[backend, start].append(in_fresh_process(backend, options, cache))
    median = {key: [statistics.median(at) for at in zip(*runs, strict=True)] for key, runs in found.items()}
    rows = [
        {"backend": backend, "start": start, **{f"{tokens} tokens, s": s for tokens, s in zip(options.tokens, each, strict=True)}}
        for (backend, start), each in median.items()
    ]
    first = {
        start: ratio([r[0] for r in found["l2l", start]], [r[0] for r in found["inductor", start]]) for start in ("cold", "warm")
    }
    beyond = statistics.median(a[1] - b[1] for a, b in zip(found["l2l", "cold"], found["inductor", "cold"], strict=True))
    limits = [
        Limit("first step, cold, of torch.compile's", first["cold"], COLD),
        Limit("first step, warm, of torch.compile's", first["warm"], WARM),
        Limit("second length, cold, beyond torch.compile's", beyond, SECOND, "s"),
        Limit("later lengths, of the second one", max(median["l2l", "cold"][2:]) / median["l2l", "cold"][1], 0.1),
    ]
    runs = [{"backend": backend, "start": start, "runs": each} for (backend, start), each in found.items()]
    return report(options, device, rows, limits, runs=runs)


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median ratio of pairs that were measured one after the other."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def in_fresh_process(backend: str, options, cache: str) -> list[float]:
    """`steps` in a process of its own, with the cache in a folder."""
    same = ("layers", "hidden", "intermediate", "heads", "rows", "micro_batches", "device")
    command = [sys.executable, __file__, "--child", backend, "--tokens", *map(str, options.tokens)]
    command += [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in same]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def steps(backend: str, options, device: torch.device) -> list[float]:
    """Seconds of one training step at each length, in order."""
    model = llama(options.layers, options.hidden, options.intermediate, options.heads, tokens=max(options.tokens))
    if backend == "l2l":
        compiled = torch.compile(model, backend="l2l", options={"micro_batches": options.micro_batches, "device": device})
    else:
        compiled = torch.compile(model.to(device))
    batches = [token_batch(options.rows, tokens).to("cpu" if backend == "l2l" else device) for tokens in options.tokens]

    def step(ids: torch.Tensor) -> None:
        train_step(compiled, ids)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return [seconds(functools.partial(step, ids)) for ids in batches]


if __name__ == "__main__":
    sys.exit(main())
