"""Seconds of a training step: streamed layers compiled by Inductor against eager with activation checkpointing.

Both recompute every layer in backward and run the same micro-batches; eager runs the whole model once per micro-batch. On the host,
also a step that keeps what memory allows (`keep="auto"`), against `torch.compile(model)`, which keeps all.
On a GPU, the other model is resident: weights, gradients and kept inputs are all on the device, the memory that streaming
saves. There, tokens per second and peak memory are only printed, and no limit is checked.

    python examples/benchmarks/speed.py
"""

from __future__ import annotations

import copy
import statistics
import sys

import torch

import l2l_compile
from measuring import Limit, Work, arguments, device_of, interleaved, llama, report, token_batch, train_step

MOST = 1.0  # seconds with l2l over seconds of eager, on the host
MOST_KEEPING = 0.8  # seconds with l2l that keeps, over seconds of eager, on the host
MOST_COMPILED = 1.05  # seconds with l2l that keeps, over seconds of torch.compile


def eager_step(model: torch.nn.Module, ids: torch.Tensor, micro_batches: int) -> None:
    """One training step on the model's own device, micro-batch by micro-batch; gradients of the mean loss of the batch."""
    model.zero_grad(set_to_none=True)
    for part in ids.to(model.device).chunk(micro_batches):
        (model(input_ids=part, labels=part).loss / micro_batches).backward()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def checkpointed(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """A copy of a model on a device, with activation checkpointing: it keeps only the inputs of layers for backward."""
    twin = copy.deepcopy(model).to(device)
    twin.train()
    twin.gradient_checkpointing_enable({"use_reentrant": False})
    return twin


def peak_bytes(work: Work, device: torch.device) -> int | None:
    """Peak of allocated device memory while some work runs; None on the host, which does not count it."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device)


def largest_difference(model: torch.nn.Module, twin: torch.nn.Module) -> float:
    """Largest difference between the gradients of two models, over the largest gradient: shows that the steps are equal."""
    pairs = [(p.grad, q.grad.to(p.grad.device)) for p, q in zip(model.parameters(), twin.parameters(), strict=True)]
    return float(max((p - q).abs().max() for p, q in pairs) / max(p.abs().max() for p, _ in pairs))


def keeping(model: torch.nn.Module, ids: torch.Tensor, micro_batches: int) -> dict[str, Work]:
    """Steps of a copy of a model that keeps what memory allows, and of one that PyTorch compiles."""
    streams, keeps_all = copy.deepcopy(model), copy.deepcopy(model)
    options = {"micro_batches": micro_batches, "device": "cpu", "keep": "auto"}
    compiled = torch.compile(streams, backend="l2l", options=options)
    whole = torch.compile(keeps_all)
    return {
        "l2l, keep": lambda: train_step(compiled, ids),
        "torch.compile": lambda: eager_step(whole, ids, micro_batches),
    }


def main() -> int:
    parser = arguments(__doc__, layers=8, hidden=512, intermediate=1376, heads=8, rows=16, tokens=128, micro_batches=4, repeats=9)
    options = parser.parse_args()
    if options.quick:
        options.layers, options.hidden, options.intermediate, options.repeats = 2, 128, 344, 3
    device = device_of(options.device)
    model = llama(options.layers, options.hidden, options.intermediate, options.heads, tokens=options.tokens).train()
    ids = token_batch(options.rows, options.tokens)
    rival = checkpointed(model, device)
    rival_name = "resident + checkpointing" if device.type == "cuda" else "eager + checkpointing"
    compiled = torch.compile(model, backend="l2l", options={"micro_batches": options.micro_batches, "device": device})
    works = {
        "l2l": lambda: train_step(compiled, ids),
        rival_name: lambda: eager_step(rival, ids, options.micro_batches),  # noqa: F821 - deleted after its last call
    }
    if device.type == "cpu":
        works |= keeping(model, ids, options.micro_batches)
    found = interleaved(works, options.repeats)
    difference = largest_difference(model, rival)
    medians = {name: statistics.median(times) for name, times in found.items()}
    peaks = dict.fromkeys(works) | {rival_name: peak_bytes(works[rival_name], device)}
    del rival, works[rival_name]  # the memory of the device is measured without it
    works["l2l"]()
    peaks["l2l"] = l2l_compile.stats(compiled).peak_device_bytes
    rows = [
        {
            "step": name,
            "median_s": median,
            "fastest_s": min(found[name]),
            "tokens_per_s": ids.numel() / median,
            "peak_device_bytes": peaks[name] if peaks[name] is not None else "-",
        }
        for name, median in medians.items()
    ]
    ratio = medians["l2l"] / medians[rival_name]
    print(f"l2l over {rival_name}: {ratio:.3f}; largest difference of gradients: {difference:.1e}")
    limits = []
    if device.type == "cpu":
        kept = medians["l2l, keep"]
        limits = [
            Limit("l2l over eager + checkpointing", ratio, MOST),
            Limit("l2l, keep over eager + checkpointing", kept / medians[rival_name], MOST_KEEPING),
            Limit("l2l, keep over torch.compile", kept / medians["torch.compile"], MOST_COMPILED),
        ]
    return report(options, device, rows, limits, ratio=ratio, gradient_difference=difference, seconds=found)


if __name__ == "__main__":
    sys.exit(main())
