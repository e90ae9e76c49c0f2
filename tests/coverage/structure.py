"""Figures of a compiled model: its programs, whether its stacks are cut into layers, its blocks and peak memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

import l2l_compile
from table import ACROSS, SPLIT

Result = dict[str, Any]
Gradients = dict[str, torch.Tensor | None]

NO_BATCH = "it reads and makes no batched value"  # such a segment has nothing to split


def shape_of(model: nn.Module, compiled: nn.Module, gradients: Gradients, growing: Collection[str] = ()) -> Result:
    """Programs, segments, repeats and stacks of a compiled model, and the reasons for which segments run whole-batch."""
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
    """Figures that should not grow with the depth: the number of blocks, and the device peak of the last step in bytes."""
    blocks = sum(len(program.blocks) for program in l2l_compile.programs(compiled))
    return {"blocks": blocks, "peak": l2l_compile.stats(compiled).peak_device_bytes}


def parameters_of(program: l2l_compile.Program, names: list[str]) -> Iterator[set[str]]:
    """The parameters of each segment by their names in the model.

    After a graph break, a program names parameters relative to the module whose `forward` it captures. If several modules are
    possible (for example, if each layer is captured by itself), the segments are given for each of these modules.
    """
    roots: set[str] | None = None
    for name in {n for s in program.segments for n in s.parameter_names}:
        ends = {full.removesuffix(name) for full in names if f".{full}".endswith(f".{name}")}
        if ends:  # a tied parameter may have a name that `named_parameters` leaves out
            roots = ends if roots is None else roots & ends
    for root in roots or ():
        yield from ({root + name for name in s.parameter_names} for s in program.segments)


def growing_lists(model: nn.Module, deeper: nn.Module) -> set[str]:
    """The `pattern`s of lists of modules that are longer in a deeper model of the class. Entries of such lists are layers."""
    lengths = {name: len(module) for name, module in lists(model)}
    return {pattern(name) for name, module in lists(deeper) if len(module) > lengths.get(name, len(module))}


def lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    yield from ((n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential))


def pattern(name: str) -> str:
    """`stages.2.blocks` -> `stages.*.blocks`: if one stage grows with the depth, the other stages hold layers as well."""
    return re.sub(r"\b\d+\b", "*", name)


def stacks(model: nn.Module, growing: Collection[str] = ()) -> Iterator[tuple[str, dict[str, set[str]]]]:
    """The lists with at least two layers of the same class: name, and the names of the parameters of each layer.

    A layer has child modules: two plain `Linear`s in a row are no stack. Of nested lists, the lists that grow with the depth
    are taken (such as the blocks of stages), or else the outermost list.
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
    """`SPLIT`, `ACROSS`, or why a stack is not streamed layer by layer. `held` gives the parameters of each segment."""
    owner = {parameter: layer for layer, parameters in layers.items() for parameter in parameters}
    owners = [{owner[p] for p in names if p in owner} for names in held]
    lost = {owner[p] for p in owner if gradients.get(p) is not None} - set().union(*owners)
    if lost:
        return f"{len(lost)} of {len(layers)} layers are in no segment"
    if largest(layers, held, sizes) > 1:
        return f"a segment holds {max(map(len, owners))} of {len(layers)} layers"
    return ACROSS if max(map(len, owners), default=0) > 1 else SPLIT


def largest(layers: dict[str, set[str]], held: list[set[str]], sizes: dict[str, int]) -> float:
    """The most weights of a stack in one segment, relative to the weights of the largest layer."""
    weights = {name: sizes[name] for parameters in layers.values() for name in parameters}
    most = max((sum(weights.get(name, 0) for name in names) for names in held), default=0)
    return round(most / max(sum(weights[name] for name in parameters) for parameters in layers.values()), 3)
