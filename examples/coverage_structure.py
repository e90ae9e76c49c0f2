"""What l2l made of a model: its programs, how its stacks of layers lie in segments, blocks and peak memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

import l2l_compile
from coverage_table import ACROSS, SPLIT

Result = dict[str, Any]
Gradients = dict[str, torch.Tensor | None]

NO_BATCH = "it reads and makes no batched value"  # such a segment has nothing to split


def shape_of(model: nn.Module, compiled: nn.Module, gradients: Gradients, growing: Collection[str] = ()) -> Result:
    """Programs, segments, repeats and stacks of a compiled model, and the reasons of what runs whole-batch."""
    programs = l2l_compile.programs(compiled)
    segments = [s for p in programs for s in p.segments]
    held = [names for p in programs for names in parameters_of(p, list(gradients))]
    whole = Counter(s.block.reason for s in segments if not s.block.inner_looped)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}
    found = dict(stacks(model, growing))
    return {
        "programs": len(programs),
        "breaks": sorted({p.break_reason for p in programs if p.break_reason}),
        "segments": len(segments),
        "repeats": max((s.block.repeats for s in segments), default=0),
        "whole": {reason: count for reason, count in whole.items() if reason != NO_BATCH},
        "stacks": {name: granularity(layers, held, gradients, sizes) for name, layers in found.items()},
        "largest": max((largest(layers, held, sizes) for layers in found.values()), default=0.0),
        "layers": sum(map(len, found.values())),
        **depth_of(compiled),
    }


def depth_of(compiled: nn.Module) -> Result:
    """What should not grow with the depth: the number of blocks, and the peak of the last step in bytes."""
    blocks = sum(len(program.blocks) for program in l2l_compile.programs(compiled))
    return {"blocks": blocks, "peak": l2l_compile.stats(compiled).peak_device_bytes}


def parameters_of(program: l2l_compile.Program, names: list[str]) -> Iterator[set[str]]:
    """The parameters of each segment by their names in the model.

    After a graph break, a program names them from the module whose `forward` it is: where that may be several modules
    (each layer is captured for itself, say), the segment is taken for each in turn.
    """
    roots: set[str] | None = None
    for name in {n for s in program.segments for n in s.parameter_names}:
        ends = {full.removesuffix(name) for full in names if f".{full}".endswith(f".{name}")}
        if ends:  # a tied parameter may have a name that `named_parameters` leaves out
            roots = ends if roots is None else roots & ends
    for root in roots or ():
        yield from ({root + name for name in s.parameter_names} for s in program.segments)


def growing_lists(model: nn.Module, deeper: nn.Module) -> set[str]:
    """The lists of modules that are longer in a deeper model of the class, by their `pattern`: their entries are layers."""
    lengths = {name: len(module) for name, module in lists(model)}
    return {pattern(name) for name, module in lists(deeper) if len(module) > lengths.get(name, len(module))}


def lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    yield from ((n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential))


def pattern(name: str) -> str:
    """`stages.*.blocks` of `stages.2.blocks`: where one stage grows with the depth, the others hold layers as well."""
    return re.sub(r"\b\d+\b", "*", name)


def stacks(model: nn.Module, growing: Collection[str] = ()) -> Iterator[tuple[str, dict[str, set[str]]]]:
    """The lists of at least two layers of one class: name, and the names of the parameters of each layer.

    A layer is made of other modules; two plain `Linear`s one after the other are no stack. Of lists in lists, those
    that grow with the depth are taken (the blocks of stages), otherwise the outermost.
    """
    inside: list[str] = []
    for name, module in lists(model):
        if name.startswith(tuple(inside)):
            continue
        layers = {
            f"{name}.{child}": layer
            for child, layer in module.named_children()
            if next(layer.children(), None) is not None and next(layer.parameters(), None) is not None
        }
        grows = pattern(name) in growing
        holds_stages = not grows and any(g.startswith(f"{pattern(name)}.") for g in growing)
        alike = max(Counter(map(type, layers.values())).values(), default=0) > 1
        if grows or (alike and not holds_stages):
            inside.append(f"{name}.")
        if alike and not holds_stages:
            yield name, {n: {f"{n}.{p}" for p, _ in layer.named_parameters()} for n, layer in layers.items()}


def granularity(layers: dict[str, set[str]], held: list[set[str]], gradients: Gradients, sizes: dict[str, int]) -> str:
    """`SPLIT`, `ACROSS`, or what keeps a stack from being streamed layer by layer. `held`: the parameters of each segment."""
    owner = {parameter: layer for layer, parameters in layers.items() for parameter in parameters}
    owners = [{owner[p] for p in names if p in owner} for names in held]
    lost = {owner[p] for p in owner if gradients.get(p) is not None} - set().union(*owners)
    if lost:
        return f"{len(lost)} of {len(layers)} layers are in no segment"
    if largest(layers, held, sizes) > 1:
        return f"a segment holds {max(map(len, owners))} of {len(layers)} layers"
    return ACROSS if max(map(len, owners), default=0) > 1 else SPLIT


def largest(layers: dict[str, set[str]], held: list[set[str]], sizes: dict[str, int]) -> float:
    """The weights of the stack in the segment that holds most of them, where those of the largest layer are 1."""
    weights = {name: sizes[name] for parameters in layers.values() for name in parameters}
    most = max((sum(weights.get(name, 0) for name in names) for names in held), default=0)
    return round(most / max(sum(weights[name] for name in parameters) for parameters in layers.values()), 3)
