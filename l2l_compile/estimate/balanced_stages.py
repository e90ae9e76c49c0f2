"""Stages of a pipeline with about equal cost, from the segments of a captured model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from l2l_compile.devices.host import HOST
from l2l_compile.errors import OptionError
from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Block, Segment
from l2l_compile.lowering.costs import kernels_of, typical_rates
from l2l_compile.lowering.lower import Lowering


def ranks_of_names(program: Program, ranks: int, loops: int | None) -> dict[str, int]:
    """The rank of each parameter that the program reads, by name, so that stages have about the same cost.

    Each rank has `loops` stages; None: as many as there are layers for each. Raises `OptionError` for more `loops` than that.
    """
    groups = _groups(program)
    most = most_loops(program, ranks)
    if loops is not None and loops > most:
        raise OptionError(
            f"loops={loops}: the model has {len(groups)} segments that may be apart, at most {most} for each of {ranks} ranks: give an int "
            f"from 1 to {most}"
        )
    seconds = _seconds(program)
    costs = [sum(seconds[segment.block] * segment.micro_batches for segment in group) for group in groups]
    count = ranks * (loops or max(1, len(groups) // ranks))
    places: dict[str, int] = {}
    for stage, span in enumerate(cut(costs, min(count, len(groups)))):
        for group in groups[span.start : span.stop]:
            for segment in group:
                places |= {name: stage % ranks for name in segment.parameter_names if name not in places}
    return places


def most_loops(program: Program, ranks: int) -> int:
    """The most stages that each of `ranks` ranks may have."""
    return max(1, -(-len(_groups(program)) // ranks))


def cut(costs: Sequence[float], count: int) -> list[range]:
    """Cut a sequence into `count` runs, none empty, so that the most costly one costs the least."""
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = [[(float("inf"), 0)] * (len(costs) + 1) for _ in range(count + 1)]
    best[0][0] = (0.0, 0)
    for stage in range(1, count + 1):
        for end in range(stage, len(costs) + 1):
            choices = ((max(best[stage - 1][start][0], total[end] - total[start]), start) for start in range(stage - 1, end))
            best[stage][end] = min(choices)
    ends = [len(costs)]
    for stage in range(count, 0, -1):
        ends.append(best[stage][ends[-1]][1])
    return [range(start, end) for end, start in itertools.pairwise(ends)][::-1]


def _groups(program: Program) -> list[list[Segment]]:
    """The segments with parameters, in order. Those that share a parameter to train are one group, at the place of the first."""
    groups: list[list[Segment]] = []
    group_of: dict[str, list[Segment]] = {}
    for segment in program.segments:
        names = segment.parameter_names
        shared = next((group_of[name] for name in names if name in group_of), None)
        if names and shared is None:
            groups.append([segment])
        elif shared is not None:
            shared.append(segment)
        group_of |= dict.fromkeys(names, shared if shared is not None else (groups[-1] if groups else []))
    return groups


def _seconds(program: Program) -> dict[Block, float]:
    """What the forward of a micro-batch of each block takes on a typical GPU, by a roofline; its backward takes about twice as long."""
    rates, lowering = typical_rates(torch.device("cuda")), Lowering(HOST, "eager", stands_in=True)
    found = {}
    for block in program.blocks:
        code, sizes = lowering.code(block, program.sizes_of(block), "forward", (True,) * len(block.outputs))
        at = dict(zip(code.guards.symbols, sizes, strict=True))
        kernels = kernels_of(code.at(sizes).graph.graph, at, fused=True)
        found[block] = sum(kernel.seconds(rates) for kernel in kernels)
    return found
