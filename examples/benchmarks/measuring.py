"""Shared by the benchmarks: the model, the clock, and a report as a table and as JSON, with the machine that it ran on."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

Work = Callable[[], None]


def arguments(description: str, **defaults: int) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark; `defaults` become integer options of their own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="auto", help="where layers run: cpu, cuda, cuda:1; auto takes a GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script; its figures prove nothing")
    parser.add_argument("--json", type=Path, default=None, help="where the figures go (default: runs/<name of the script>.json)")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser


def device_of(name: str) -> torch.device:
    """The device behind `--device`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def machine(device: torch.device) -> dict[str, str | int | float]:
    """The conditions of the figures: hardware, versions, date. Memory in GiB."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def llama(layers: int, hidden: int, intermediate: int, heads: int, vocabulary: int = 1024, tokens: int = 128):
    """A Llama of `transformers` with random fp32 weights, on the host, for sequences of `tokens`."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=vocabulary,
            max_position_embeddings=tokens,
            use_cache=False,
        )
    )


def token_batch(rows: int, tokens: int = 128, vocabulary: int = 1024) -> torch.Tensor:
    """Random token ids, int64 [rows, tokens]."""
    return torch.randint(vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(0))


def train_step(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """Forward and backward of a language model; gradients are made anew, as after `optimizer.zero_grad()`."""
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids).loss.backward()


def seconds(work: Work) -> float:
    """Wall-clock seconds of some work, which must leave the device idle."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(works: dict[str, Work], repeats: int) -> dict[str, list[float]]:
    """Seconds of each work, in the order A B A B ..., so that other load on the machine affects all. A warm-up comes first."""
    for work in works.values():
        work()
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            found[name].append(seconds(work))
    return found


@dataclass(frozen=True)
class Limit:
    """A figure and its upper limit."""

    name: str
    figure: float
    most: float
    unit: str = ""

    @property
    def held(self) -> bool:
        return self.figure <= self.most

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.figure:.4g} {self.unit}".rstrip()
            + f" (limit {self.most:g}: {'held' if self.held else 'EXCEEDED'})"
        )


def report(options: argparse.Namespace, device: torch.device, rows: list[dict], limits: list[Limit], **details) -> int:
    """Print a table and the limits, and write them to JSON. Returns the exit status: 1 if a limit is exceeded at full size."""
    name = Path(sys.argv[0]).stem
    described = machine(device)
    print(" | ".join(f"{k} {v}" for k, v in described.items()))
    print_table(rows)
    for limit in limits:
        print(limit)
    path = options.json or Path("runs") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in vars(options).items() if k != "json"}
    verdicts = [{**vars(limit), "held": limit.held} for limit in limits]
    content = {"benchmark": name, "machine": described, "options": settings, "rows": rows, "limits": verdicts, **details}
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")
    print(f"written to {path}")
    return int(not options.quick and not all(limit.held for limit in limits))


def print_table(rows: list[dict]) -> None:
    """Rows with the same keys, as aligned columns."""
    cells = [list(rows[0]), *([_cell(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
