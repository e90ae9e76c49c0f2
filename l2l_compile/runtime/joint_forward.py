"""What ranks tell one another before a forward: their collectives, rows, micro-batches, seeds, and whether their inputs are equal."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from l2l_compile.devices.host import is_host
from l2l_compile.errors import L2LError, RankError
from l2l_compile.ir import nodes
from l2l_compile.ir.captured import Captured
from l2l_compile.ir.segments import Segment
from l2l_compile.lanes import Lane
from l2l_compile.options import Options
from l2l_compile.ranks.announced import Announced
from l2l_compile.ranks.announcements import ActionKind, number_of
from l2l_compile.ranks.pipeline_ranks import PipelineRanks
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.runtime.step import Step

_COMPARED = 256  # entries of each input, about, that ranks which share parallel layers compare


Refuse = Callable[[list[list[int]]], None]


@dataclass(frozen=True)
class JointRun:
    """What ranks compare before they run a graph.

    options      those with which training computes, by name (`options_told`)
    stages       the segments of each stage of a pipeline, as text
    collectives  the collectives of the graph, in order: equal on all ranks or, in a pipeline, on those of the same stage
    """

    options: tuple[tuple[str, str], ...]
    stages: tuple[str, ...]
    collectives: tuple[str, ...]

    def announce(
        self,
        ranks: Ranks,
        kind: ActionKind,
        what: str = "",
        train: bool = False,
        told: Sequence[int] = (),
        refuse: Refuse | None = None,
    ) -> list[list[int]]:
        """As `Ranks.announce`, of up to four numbers. `what` is the first thing to compare. Raises `RankError` if anything differs."""
        compared, own, refuse_all = self._compared(ranks, what, refuse)
        return [row[1:] for row in ranks.announce(kind, compared, train, (own, *told), refuse_all, self.options if train else ())]

    def announce_soon(
        self, ranks: Ranks, kind: ActionKind, train: bool, told: Sequence[int], refuse: Refuse | None = None
    ) -> Announced:
        """As `announce`, without a wait: the result has one number more of each rank."""
        compared, own, refuse_all = self._compared(ranks, "", refuse)
        return ranks.announce_soon(kind, compared, train, (own, *told), refuse_all, self.options if train else ())

    def _compared(self, ranks: Ranks, what: str, refuse: Refuse | None) -> tuple[tuple[str, ...], int, Refuse]:
        """What ranks compare, a number of this rank, and what refuses the numbers of all."""
        staged = ranks.pipeline is not None
        compared = tuple(filter(None, (what, *self.stages, *(() if staged else self.collectives))))
        own = number_of("\n".join(self.collectives).encode()) if staged else 0

        def refuse_all(of_ranks: list[list[int]]) -> None:
            if refuse is not None:
                refuse([row[1:] for row in of_ranks])
            _refuse_programs(ranks.same_rows, [row[0] for row in of_ranks])

        return compared, own, refuse_all


_TOLD = ("schedule", "precision", "gradient_wire", "update", "delay", "accumulate", "max_grad_norm", "batch_scope")
_LONGEST = 300  # signs of a schedule of one's own that an error shows


def options_told(options: Options) -> tuple[tuple[str, str], ...]:
    """The options that ranks which train together must have in common, as text: messages, numbers and updates depend on them."""
    values = {name: getattr(options, name) for name in _TOLD}
    if callable(options.accumulate):
        values["accumulate"] = "a function"
    values["optimizer"] = type(options.optimizer).__name__ if options.optimizer is not None else None
    texts = {name: str(value).replace("\n", " / ") for name, value in values.items()}
    return tuple(
        (name, text if len(text) < _LONGEST else f"{text[:_LONGEST]}… ({number_of(text.encode())})")
        for name, text in texts.items()
    )


def _refuse_programs(stages: int, own: Sequence[int]) -> None:
    """Raise `RankError` if ranks of one stage have different collectives. `own` has the hash of those of each rank; 0 for no stages."""
    for rank, hashed in enumerate(own):
        if hashed != own[rank % stages]:
            raise RankError(
                f"ranks {rank % stages} and {rank} run the same stage, and their programs have other collectives: shard the stage on both, "
                "and give both the same options"
            )


def begin_together(ranks: Ranks, step: Step, joint: JointRun, captured: Captured, to_train: bool, is_global: bool) -> None:
    """Begin a forward together with the other ranks, and set the step's rows and seed by those of all.

    Raises `RankError` and, for a rank without rows, `L2LError`.
    """
    ranks.forwards += 1
    rows = step.rows
    count = rows.count if rows.batch is not None else _rows_of(captured, step.given)
    told = (
        count,
        len(rows.sizes),
        step.base_seed(),
        _number_of_inputs(captured, step.given) if _compares_inputs(ranks, to_train) else 0,
    )
    refuse = functools.partial(_refuse_rows, ranks.same_rows, ranks.shares)
    announced = joint.announce(ranks, ActionKind.FORWARD, train=to_train, told=told, refuse=refuse)
    ranks.connect(step.engine.device.torch_device)
    step.seed = announced[0][2]
    same = ranks.same_rows
    each = announced[ranks.world_rank % same :: same]  # ranks with the same rows have the same micro-batches
    first = sum(micro_batches for _, micro_batches, *_ in each[: ranks.world_rank // same])
    of_ranks = tuple(count for count, *_ in announced) if is_global else ()
    step.rows = replace(rows, first=first, of_ranks=of_ranks)


def begin_apart(ranks: PipelineRanks, step: Step, joint: JointRun, captured: Captured) -> None:
    """As `begin_together`, without a wait for the other ranks, which are still in the step before: `ranks.heard` waits, and may raise."""
    ranks.forwards += 1
    count = step.rows.count if step.rows.batch is not None else _rows_of(captured, step.given)
    own = step.base_seed()
    step.seed_of_ranks = ranks.number_of_first(own, step.channel)
    told = (count, len(step.rows.sizes), own, _number_of_inputs(captured, step.given) if ranks.compares_inputs else 0)
    refuse = functools.partial(_refuse_rows, ranks.same_rows, ranks.shares)
    ranks.follow(joint.announce_soon(ranks, ActionKind.FORWARD, True, told, refuse))


def _compares_inputs(ranks: Ranks, to_train: bool) -> bool:
    return ranks.compares_inputs and ranks.same_rows > 1 and (to_train or not ranks.shares_layers)


def _number_of_inputs(captured: Captured, arguments: Sequence) -> int:
    """A hash that differs for another batch: of up to some hundred entries of each input in host memory, and of all numbers."""
    numbers = repr([arguments[i.index] for i in captured.inputs if i.kind == "symbol"]).encode()
    values = (arguments[i.index].detach() for i in captured.inputs if i.kind == "value" and not arguments[i.index].requires_grad)
    seen = (v.flatten()[:: _apart(v.numel())] for v in values if is_host(v.device))
    return number_of(b"".join([numbers, *(v.contiguous().view(torch.uint8).numpy().tobytes() for v in seen)]))


def _apart(entries: int) -> int:
    """How far apart entries are that are compared: no divisor in common with a size, so that they fall into all rows and columns."""
    apart = max(1, entries // _COMPARED)
    while math.gcd(apart, entries) > 1:
        apart += 1
    return apart


def _rows_of(captured: Captured, arguments: Sequence) -> int:
    """Rows of a batch that cannot be split: the size of the first dimension of the first value that has one."""
    values = (arguments[i.index] for i in captured.inputs if i.kind == "value")
    return next((v.shape[0] for v in values if v.dim()), 1)


def _refuse_rows(same: int, shares: str, told: list[list[int]]) -> None:
    """Raise `L2LError` if a rank has no rows, or if ranks that compute with the same rows have different batches.

    `told` has the numbers that each rank announces before a forward: rows, micro-batches, seed, hash of its inputs.
    """
    for rank, (count, parts, _, own) in enumerate(told):
        if count == 0:
            raise L2LError(f"rank {rank} has a batch of no rows: every rank needs one row at least (drop_last=True, or pad)")
        first = rank - rank % same
        if count != told[first][0]:
            raise L2LError(
                f"ranks {first} and {rank} {shares} and have batches of {told[first][0]} and {count} rows: they compute "
                "with the same rows, so give both the same batch"
            )
        if parts != told[first][1]:
            raise L2LError(
                f"ranks {first} and {rank} {shares} and divide the same rows into {told[first][1]} and {parts} micro-batches: give both the same "
                "options"
            )
        if own and told[first][3] and own != told[first][3]:  # 0 without gradients
            raise L2LError(
                f"ranks {first} and {rank} {shares} and have other inputs than each other: they compute with the same rows, "
                "so give both the same batch (a DistributedSampler takes the rank and size of the first dimension of the mesh)"
            )


def collectives_of(graph: fx.Graph, segments: Sequence[Segment]) -> tuple[str, ...]:
    """The collectives of a graph, in order."""
    found = (node for node in graph.nodes if nodes.lane_of(node) == Lane.COMM)
    return tuple(_collective(node, segments) for node in found)


def _collective(node: fx.Node, segments: Sequence[Segment]) -> str:
    index = nodes.segment_of(node)
    return f"{nodes.called(node).name} {node.meta['value'] if index is None else segments[index].name}"
