"""Which rank of a pipeline gets which parameters: from names of modules, or from the segments of a captured model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from l2l_compile.errors import L2LError, OptionError
from l2l_compile.estimate.balanced_stages import ranks_of_names
from l2l_compile.ir.program import Program
from l2l_compile.report.explain import explain


@dataclass(frozen=True)
class StageOwners:
    """How the parameters of a model are divided among ranks.

    owners  the rank of each parameter, by name
    unread  the names of those that the batch of `pipeline` did not read
    """

    owners: dict[str, int]
    unread: frozenset[str] = frozenset()


def owners_by_names(model: nn.Module, stages: Sequence[Sequence[str]], ranks: int) -> dict[str, int]:
    """The rank of each parameter, by name. `stages` names modules and parameters; stage k goes to rank k modulo `ranks`.

    A narrower name wins: with "layers" in one stage and "layers.3" in another, the fourth layer is in the latter.

    Raises `L2LError` for a name that the model does not have, and for parameters that no stage, or two ranks, would have.
    """
    rank_of = _ranks_of_names(model, stages, ranks)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[int, tuple[int, str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if (name := _narrowest(path, rank_of)) is None:
            continue
        rank, first = found.setdefault(id(parameter), (rank_of[name], name))
        if rank != rank_of[name]:
            raise L2LError(
                f"'{names[id(parameter)]}' would be on rank {rank} for '{first}' and on rank {rank_of[name]} for '{name}': modules that share "
                "a parameter go to one rank"
            )
    for identity, name in names.items():
        if identity not in found:
            raise L2LError(f"'{name}' is in no stage: name it in one, or a module that has it")
    return {name: found[identity][0] for identity, name in names.items()}


def _ranks_of_names(model: nn.Module, stages: Sequence[Sequence[str]], ranks: int) -> dict[str, int]:
    known = {name for name, _ in (*model.named_modules(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))}
    rank_of: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for name in stage:
            if name not in known:
                raise L2LError(f"stage {number} names '{name}', which is neither a module of the model nor a parameter")
            if rank_of.setdefault(name, number % ranks) != number % ranks:
                raise L2LError(
                    f"stages name '{name}' for rank {rank_of[name]} and for rank {number % ranks}: name it in one of them"
                )
    return rank_of


def _narrowest(path: str, names: Collection[str]) -> str | None:
    """The longest of the names that is a parameter's own, or that of a module around it; None if there is none."""
    parts = path.split(".")
    around = (".".join(parts[:end]) for end in range(len(parts), -1, -1))
    return next((name for name in around if name in names), None)


def check_loops(loops: int | None) -> None:
    """Raise `OptionError` for a number of stages that no model has."""
    if loops is not None and (isinstance(loops, bool) or not isinstance(loops, int) or loops < 1):
        raise OptionError(
            f"loops={loops!r}: the number of stages on each rank is an int from 1 to the number of layers for each rank"
        )


def owners_by_batch(model: nn.Module, batch: Any, ranks: int, loops: int | None) -> StageOwners:
    """The rank of each parameter, so that stages have about the same cost.

    Raises `OptionError` for more `loops` than there are layers for each rank.
    """
    program = _program_of(model, batch)
    places = ranks_of_names(program, ranks, loops)
    return _of_parameters(model, places)


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


def _of_parameters(model: nn.Module, places: Mapping[str, int]) -> StageOwners:
    """The rank of each parameter, from those of the names that segments read. One that nothing reads goes with the one before it."""
    found: dict[int, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in places:
            found.setdefault(id(parameter), places[name])
    owners, unread, before = dict[str, int](), set[str](), 0
    for name, parameter in model.named_parameters():
        if id(parameter) not in found:
            unread.add(name)
        owners[name] = before = found.get(id(parameter), before)
    return StageOwners(owners, frozenset(unread))
