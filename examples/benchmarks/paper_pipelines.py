"""Table 1 of PipeDream-2BW (arXiv 2006.09503): samples a second of pipelines without a flush, of several widths and depths, in virtual time.

A group of rows has one model on the same servers, and the paper marks one row in each. Width w is a stage sharded over w ranks: it exchanges as
many bytes as the paper's copies of a stage do. Rows without recomputation are refused: here, a turn computes its activations again.

The paper says neither the size of its layers nor its batch nor its network. Assumed: hidden 1024, 1536 and 1280 for 24, 48 and 192 layers, batches of
512 and 64, 25 Gbit/s between V100 servers and 10 Gbit/s between 1080 Ti servers, whose cards are joined by PCIe.

    python examples/benchmarks/paper_pipelines.py --json runs/pipedream-2bw.json
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM

from l2l_compile.ir.rank_layout import Layout
from l2l_compile.planner.divisions import Devices
from l2l_compile.planner.trials import OptionTrial, Traces, Trials
from l2l_compile.report.explain import explain
from l2l_compile.simulation.machine import Machine
from measuring import arguments, report

LENGTH, VOCABULARY = 128, 30522
HIDDEN = {24: 1024, 48: 1536, 192: 1280}


@dataclass(frozen=True)
class Row:
    """A row of the table: samples a second of the paper, and whether it marks the row as its planner's choice."""

    layers: int
    machine: str
    hosts: int
    batch: int
    width: int
    depth: int
    rows: int  # of a micro-batch
    recomputes: bool
    paper: float
    chosen: bool

    def __str__(self) -> str:
        return f"({self.width}, {self.depth}), b = {self.rows}{', recompute' if self.recomputes else ''}"


TABLE = [
    Row(24, "gtx1080ti", 2, 512, 8, 2, 8, False, 151, True),
    Row(24, "gtx1080ti", 2, 512, 8, 2, 8, True, 141, False),
    Row(24, "v100", 4, 512, 8, 4, 1, False, 42, False),
    Row(24, "v100", 4, 512, 8, 4, 4, True, 111, True),
    Row(24, "v100", 8, 512, 4, 16, 1, True, 59, False),
    Row(48, "v100", 8, 64, 8, 8, 1, True, 69, True),
    Row(48, "v100", 8, 64, 16, 4, 1, True, 25, False),
    Row(48, "v100", 8, 64, 1, 64, 1, True, 15, False),
    Row(192, "v100", 8, 64, 2, 32, 1, True, 18, False),
    Row(192, "v100", 8, 64, 4, 16, 1, True, 21, True),
]


def machine_of(name: str) -> Machine:
    """A card in a server of eight, with as much host memory and bandwidth as a server of that time may have."""
    v100 = replace(Machine.load("v100"), host_memory=7.0e11, host_bandwidth=1.2e11, network=3.1e9, network_latency=3e-5)
    if name == "v100":
        return v100
    return replace(  # NVIDIA GeForce GTX 1080 Ti: 11.3 TFLOP/s in fp32, no tensor cores, 484 GB/s, 11 GB; assumed: as the V100 server otherwise
        v100,
        name="NVIDIA GeForce GTX 1080 Ti",
        flops={"float32": 11.3e12, "float16": 11.3e12, "float64": 0.35e12},
        memory_bandwidth=4.84e11,
        device_memory=11.7e9,
        link=1.0e10,
        link_latency=5.7e-6,
        network=1.2e9,
    )


def bert(layers: int) -> BertForMaskedLM:
    hidden = HIDDEN[layers]
    config = BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        vocab_size=VOCABULARY,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return BertForMaskedLM(config)


def timed(row: Row) -> OptionTrial:
    """A step of a row: 1f1b without a flush."""
    model, machine = bert(row.layers), Devices(row.width * row.depth, row.hosts).of(machine_of(row.machine))
    tokens = torch.zeros(row.batch, LENGTH, dtype=torch.long, device="meta")

    def trace_of(rows: int) -> Any:
        return lambda chosen: explain(model, {**chosen, "device": "cpu"})(input_ids=tokens[:rows], labels=tokens[:rows])

    given = {"precision": "fp16", "outputs": "loss", "optimizer": torch.optim.Adam(model.parameters(), fused=True)}
    trials = Trials(model, Traces(trace_of(row.batch), trace_of(1)), given, machine, row.batch, row.batch, lambda what: None)
    across = row.depth > 1 and row.width > 1  # the copies of a stage on one server, as the paper has them
    layout = Layout(shards=row.width, depth=row.depth, loops=1, across_hosts=across)
    turns = row.batch // (row.width * row.rows)
    keep = 0 if row.recomputes else "auto"
    return trials.of(layout, micro_batches=turns, update="in_forward", delay=1, schedule="1f1b", keep=keep)


def measured(row: Row) -> dict[str, Any]:
    found = timed(row)
    rate = row.batch / found.seconds if found.fits else 0.0
    return {
        "model": f"BERT-{row.layers}",
        "machine": row.machine,
        "row": str(row),
        "paper": row.paper,
        "paper's choice": row.chosen,
        "samples/s": rate,
        "device GB": found.fit.needs[0].bytes / 1e9 if found.fit is not None else None,
        "why not": found.why_not or ("" if found.fits else "does not fit"),
        "compute": found.time.timeline.busy("compute") / found.seconds if found.time is not None else 0.0,
    }


def with_choices(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with the fastest of each group over the others, and whether it is the paper's choice."""
    for _, group in itertools.groupby(rows, key=lambda row: (row["model"], row["machine"])):
        there = list(group)
        most = max(row["samples/s"] for row in there)
        for row in there:
            row["of the fastest"] = row["samples/s"] / most if most else 0.0
    return rows


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=sorted(HIDDEN), help="the models, by their layers")
    options: argparse.Namespace = parser.parse_args()
    rows = []
    for row in TABLE[:2] if options.quick else [row for row in TABLE if row.layers in options.layers]:
        rows.append(measured(row))
        print(rows[-1], flush=True)
    return report(options, torch.device("cpu"), with_choices(rows), [])


if __name__ == "__main__":
    raise SystemExit(main())
