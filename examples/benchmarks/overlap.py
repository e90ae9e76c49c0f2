"""Step time with an optimizer that is slow on purpose, against the time of the device and of the host alone.

The optimizer sleeps after each update, so it needs time but no processor. The benchmark shows which updates the program waits
for. With `in_backward`, updates run during the backward; with `in_forward`, they run during the next forward. Without overlap,
a step takes the sum of both times.

    python examples/benchmarks/overlap.py
"""

from __future__ import annotations

import copy
import statistics
import sys
import time

import torch

import l2l_compile
from measuring import Limit, arguments, device_of, interleaved, llama, report, token_batch

LOADS = (0.2, 0.5)  # host time as a share of the device's
NEAR = 1.15  # limit for a step over the larger of both times, if the updates take less time than their half of the step


class SlowAdamW(torch.optim.AdamW):
    """Sleeps `pace` seconds for each entry that it updates."""

    pace = 0.0

    def step(self, closure=None):
        loss = super().step(closure)
        time.sleep(self.pace * sum(p.numel() for g in self.param_groups for p in g["params"] if p.grad is not None))
        return loss


class Training:
    """A model, its optimizer, and one step of its training."""

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor, update: str, device: torch.device, pace: float):
        self.model, self.ids = copy.deepcopy(model), ids
        self.optimizer = SlowAdamW(self.model.parameters(), lr=1e-4)
        self.optimizer.pace = pace
        self.options = {
            "optimizer": self.optimizer,
            "update": update,
            "compile_update": False,
            "block_compiler": "eager",
            "micro_batches": 2,
            "device": device,
        }
        self.compiled = torch.compile(self.model, backend="l2l", options=self.options)

    def device_alone(self) -> None:
        """Forward and backward (at_step)."""
        self.compiled(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """A whole step, except for updates that only the next step waits for."""
        self.compiled(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> int:
    parser = arguments(__doc__, layers=10, width=256, rows=16, repeats=5)
    options = parser.parse_args()
    if options.quick:
        options.layers, options.rows, options.repeats = 4, 4, 2
    device = device_of(options.device)
    ids = token_batch(options.rows)
    model = llama(options.layers, options.width, 4 * options.width, options.width // 64)
    parameters = sum(p.numel() for p in model.parameters())

    alone = Training(model, ids, "at_step", device, 0.0)
    times = {
        name: statistics.median(t)
        for name, t in interleaved({"device": alone.device_alone, "step": alone.step}, options.repeats).items()
    }
    own = times["step"] - times["device"]  # seconds of AdamW itself
    stats = l2l_compile.stats(alone.compiled)
    forward = stats.forward_seconds / stats.seconds
    del alone
    torch._dynamo.reset()

    rows, limits = [], []
    for load in LOADS:
        pace = max(load * times["device"] - own, 0.0) / parameters
        modes = {update: Training(model, ids, update, device, pace) for update in ("at_step", "in_backward", "in_forward")}
        works = {"device": modes["at_step"].device_alone, **{update: training.step for update, training in modes.items()}}
        found = {name: statistics.median(seconds) for name, seconds in interleaved(works, options.repeats).items()}
        host = found["at_step"] - found["device"]
        for update in ("in_backward", "in_forward"):
            behind = forward if update == "in_forward" else 1 - forward
            ratio = found[update] / max(found["device"], host)
            rows.append(
                {
                    "update": update,
                    "device s": found["device"],
                    "host s": host,
                    "at_step s": found["at_step"],
                    "step s": found[update],
                    "of the larger": ratio,
                    "of the sum": found[update] / found["at_step"],
                }
            )
            if host < behind * found["device"]:
                limits.append(Limit(f"{update}, host {load:g} of device: step, of the larger", ratio, NEAR))
        del modes, works
        torch._dynamo.reset()
    return report(options, device, rows, limits, forward_share=round(forward, 2))


if __name__ == "__main__":
    sys.exit(main())
