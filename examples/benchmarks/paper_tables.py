"""The tables of the L2L paper (arXiv 2002.05645, section 4) in virtual time, on a V100 of 16 GB, beside the paper's figures.

The model of tables 2 to 5 is BERT-large of transformers with a classifier, at a length of 512; that of table 6 is GPT-2 in the shape of Turing-NLG.
Their weights are on the meta device. All figures are simulated. `tests/papers/test_l2l_tables.py` writes them into docs/papers.md.

    python examples/benchmarks/paper_tables.py        # about five minutes
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

import l2l_compile
from measuring import Limit, arguments, report

MACHINE, LENGTH, ROWS = "v100", 512, 64
NEVER_OVERLAPPING = {"prefetch": 0, "stash": "device"}


@dataclass(frozen=True)
class Row:
    """A row of a table: the paper's GB of device memory, ours may be at most as much."""

    table: str
    case: str
    layers: int
    micro_batches: int
    paper_gb: float | None
    options: dict[str, Any]


CMP = {"precision": "fp16"}
TABLES = [
    Row("2", "fp32, 64 × 1", 24, 1, 9.45, {}),
    Row("2", "CMP, 64 × 1", 24, 1, 4.96, CMP),
    *(Row("3", f"CMP, 64 × {u}", 24, u, gb, CMP) for u, gb in ((1, 3.69), (2, 3.89), (4, 4.27))),
    *(
        Row("5", f"stash on the GPU, {n} layers", n, 1, gb, {**CMP, "stash": "device"})
        for n, gb in ((24, 5.22), (48, 6.76), (96, 9.83))
    ),
    *(Row("5", f"stash on the host, {n} layers", n, 1, 3.69, CMP) for n in (24, 96, 384)),
]
RATIOS = [Row("4", f"CMP, 64 × {u}, no overlap", 24, u, None, {**CMP, **NEVER_OVERLAPPING}) for u in (1, 2, 4)]


def bert(layers: int) -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096, max_position_embeddings=LENGTH
    )
    with torch.device("meta"):
        return BertForSequenceClassification(config).train()


def simulated(row: Row) -> l2l_compile.Simulation:
    """A step of the row's model, with AdamW on the host."""
    torch._dynamo.reset()
    model, rows = bert(row.layers), ROWS * row.micro_batches
    ids = torch.zeros(rows, LENGTH, dtype=torch.long)
    options = {
        "micro_batches": row.micro_batches, "update": "in_forward", "optimizer": torch.optim.AdamW(model.parameters()), **row.options
    }  # fmt: skip
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(rows, dtype=torch.long)}
    return l2l_compile.simulate(model, MACHINE, options)(**batch)


def by_equation_1(found: l2l_compile.Simulation, layers: int) -> tuple[float, float]:
    """C and X of a step of one micro-batch: a quarter of the work of a layer, and its transfer, in seconds."""
    of_layers = [span for span in found.timeline.spans if ".layer." in span.label]
    compute = sum(span.seconds for span in of_layers if span.lane == "compute")
    fetches = [span.seconds for span in of_layers if span.lane == "h2d" and span.label.startswith("fetch_weights")]
    return compute / (4 * layers), sum(fetches) / len(fetches)


def main() -> int:
    given = arguments(__doc__).parse_args()
    rows, limits = [], []
    for row in TABLES[:1] if given.quick else TABLES:
        found = simulated(row)
        rate = ROWS * row.micro_batches / found.seconds
        rows.append(
            {"table": row.table, "case": row.case, "paper GB": row.paper_gb, "bytes": found.peak_device_bytes, "samples/s": rate}
        )
        limits.append(Limit(f"table {row.table}, {row.case}", found.peak_device_bytes / 1e9, row.paper_gb, "GB"))
        print(rows[-1], flush=True)
    steps = [simulated(row) for row in RATIOS[: 1 if given.quick else 3]]
    c, x = by_equation_1(steps[0], RATIOS[0].layers)
    for row, found in zip(RATIOS, steps, strict=False):
        ratio = row.micro_batches * steps[0].seconds / found.seconds
        expected = row.micro_batches * (4 * c + 2 * x) / (4 * row.micro_batches * c + 2 * x)
        rows.append({"table": row.table, "case": row.case, "ratio": ratio, "equation 6": expected, "X / C": x / c})
        limits.append(Limit(f"table {row.table}, {row.case}: off equation 6", 100 * abs(ratio / expected - 1), 5.0, "%"))
        print(rows[-1], flush=True)
    return report(given, torch.device("cpu"), rows, limits)


if __name__ == "__main__":
    sys.exit(main())
