"""Which rank of a pipeline gets which parameters: from names of modules, or from the segments of a captured model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from l2l_compile.devices.host import HOST
from l2l_compile.errors import L2LError
from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Block, Segment
from l2l_compile.lowering.costs import kernels_of, typical_rates
from l2l_compile.lowering.lower import Lowering
from l2l_compile.report.explain import explain


def owners_by_names(model: nn.Module, stages: Sequence[Sequence[str]], ranks: int) -> dict[str, int]:
    """The rank of each parameter, by name. `stages` names modules; stage k goes to rank k modulo `ranks`.

    Raises `L2LError` for a name that is no module, and for parameters that no stage, or two ranks, would have.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, int] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, stage in enumerate(stages):
        for module in stage:
            if module not in modules:
                raise L2LError(f"stage {number} names '{module}', which is no module of the model")
            for parameter in modules[module].parameters():
                rank = found.setdefault(id(parameter), number % ranks)
                if rank != number % ranks:
                    raise L2LError(
                        f"'{names[id(parameter)]}' would be on rank {rank} and, for '{module}', on rank {number % ranks}: modules that "
                        "share a parameter go to one rank"
                    )
    for parameter, name in names.items():
        if parameter not in found:
            raise L2LError(f"'{name}' is in no stage: name its module in one")
    return {name: found[parameter] for parameter, name in names.items()}


def owners_by_batch(model: nn.Module, batch: Any, ranks: int, loops: int | None) -> dict[str, int]:
    """The rank of each parameter, by name, so that stages have about the same cost."""
    program = _program_of(model, batch)
    groups = _groups(program)
    seconds = _seconds(program)
    costs = [sum(seconds[segment.block] * segment.micro_batches for segment in group) for group in groups]
    count = ranks * (loops or max(1, len(groups) // ranks))
    places: dict[str, int] = {}
    for stage, span in enumerate(cut(costs, min(count, len(groups)))):
        for group in groups[span.start : span.stop]:
            for segment in group:
                places |= {name: stage % ranks for name in segment.parameter_names if name not in places}
    return _of_parameters(model, places)


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


def _program_of(model: nn.Module, batch: Any) -> Program:
    arguments, named = ((), batch) if isinstance(batch, Mapping) else (batch, {})
    if isinstance(arguments, torch.Tensor):
        arguments = (arguments,)
    report = explain(model, options={"device": "cpu"})(*arguments, **named)
    if len(report.programs) != 1:
        raise L2LError(
            f"the model is captured as {len(report.programs)} programs ({'; '.join(report.graph_breaks)}), and a pipeline needs one: remove "
            "the graph breaks"
        )
    return report.programs[0]


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
    rates, lowering = typical_rates(torch.device("cuda")), Lowering(HOST, "eager")
    found = {}
    for block in program.blocks:
        code, sizes = lowering.code(block, program.sizes_of(block), "forward", (True,) * len(block.outputs))
        at = dict(zip(code.guards.symbols, sizes, strict=True))
        kernels = kernels_of(code.at(sizes).graph.graph, at, fused=True)
        found[block] = sum(kernel.seconds(rates) for kernel in kernels)
    return found


def _of_parameters(model: nn.Module, places: Mapping[str, int]) -> dict[str, int]:
    """The rank of each parameter, from those of the names that segments read. One that nothing reads goes to rank 0."""
    found: dict[int, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in places:
            found.setdefault(id(parameter), places[name])
    return {name: found.get(id(parameter), 0) for name, parameter in model.named_parameters()}
