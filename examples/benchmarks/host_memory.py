"""Resident host memory for each additional parameter, by the option `update`, next to the figure of `explain`.

Every figure is the difference of two processes that train models of the same width and different depth, so the
interpreter, PyTorch and all memory that does not depend on depth cancel out. AdamW, bf16. Buffers alone are 16, 16 and 14
bytes; memory of the interpreter and the allocator for a layer is added. With `in_backward`, the limit also includes the
gradients in flight (the ring that `explain` prints), divided by the deeper model's additional parameters.

    python examples/benchmarks/host_memory.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch

import l2l_compile
from measuring import Limit, arguments, device_of, llama, report, token_batch

MODES = {"at_step": 18.0, "in_forward": 18.0, "in_backward": 14.0}  # bytes per parameter; the last limit also gets the ring


def resident_peak() -> int:
    """The largest resident memory of this process since it began, in bytes (Linux)."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))


def train(layers: int, width: int, update: str, device: torch.device, steps: int = 4) -> dict:
    """Train a Llama for some steps, and measure."""
    model = llama(layers, width, 4 * width, width // 64, tokens=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = token_batch(2, tokens=32)
    options = {"precision": "bf16", "optimizer": optimizer, "update": update, "block_compiler": "eager", "device": device}
    compiled = torch.compile(model, backend="l2l", options=options)
    for _ in range(steps):
        compiled(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    l2l_compile.synchronize(compiled)
    peak = resident_peak()
    said = l2l_compile.explain(model, options)(input_ids=ids, labels=ids).host_memory
    return {"parameters": sum(p.numel() for p in model.parameters()), "peak": peak, "said": said.total, "ring": said.ring}


def in_process(layers: int, width: int, update: str, device: torch.device) -> dict:
    """`train` in a process of its own."""
    command = [sys.executable, __file__, "--one", update, "--layers", str(layers), "--width", str(width), "--device", str(device)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = arguments(__doc__, layers=12, width=1024)
    parser.add_argument("--one", choices=MODES, help="train once with this update, and print figures as JSON")
    options = parser.parse_args()
    device = device_of(options.device)
    if options.one:
        print(json.dumps(train(options.layers, options.width, options.one, device)))
        return 0
    if options.quick:
        options.layers, options.width = 6, 256
    rows, limits = [], []
    for update, most in MODES.items():
        shallow, deep = (in_process(n, options.width, update, device) for n in (options.layers // 3, options.layers))
        more = deep["parameters"] - shallow["parameters"]
        measured, said = ((deep[key] - shallow[key]) / more for key in ("peak", "said"))
        rows.append({"update": update, "bytes a parameter": measured, "explain says": said, "peak MiB": deep["peak"] / 2**20})
        ring = deep["ring"] / more if update == "in_backward" else 0.0
        limits.append(Limit(f"{update}, bytes for each parameter more", measured, most + ring))
    return report(options, device, rows, limits, parameters=deep["parameters"])


if __name__ == "__main__":
    sys.exit(main())
