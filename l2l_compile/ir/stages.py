"""The stages of a pipeline: which ranks run each segment, and which values go from rank to rank."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from l2l_compile.ir.segments import Block, Segment, Value


@dataclass(frozen=True)
class Stages:
    """Which ranks run each segment of a program, as one of them sees it.

    rank     this one
    ranks    how many the pipeline has
    runs_on  for each segment, the ranks that run it: one, or for a segment without weights all that read its results
    """

    rank: int
    ranks: int
    runs_on: tuple[tuple[int, ...], ...]

    @classmethod
    def alone(cls, segments: Sequence[Segment]) -> Stages:
        """One rank that runs all segments."""
        return cls(0, 1, ((0,),) * len(segments))

    def runs(self, segment: Segment) -> bool:
        """Whether this rank runs a segment."""
        return self.rank in self.runs_on[segment.index]

    def lines(self, segments: Sequence[Segment]) -> tuple[str, ...]:
        """The same on each rank: a line for each segment, with its ranks, its operations, and what it makes."""
        if self.ranks == 1:
            return ()
        return tuple(
            f"{segment.name} on rank {', '.join(map(str, self.runs_on[segment.index]))}{' trains' * segment.block.is_trained} makes {_made(segment)}"
            f" in operations {digest_of(segment.block)}"
            for segment in segments
        )

    @property
    def of_ranks(self) -> dict[int, list[list[int]]]:
        """The stages of each rank: runs of consecutive segments that it alone runs, by their indices."""
        places = [(ranks[0], index) for index, ranks in enumerate(self.runs_on) if len(ranks) == 1]
        found: dict[int, list[list[int]]] = {}
        for rank, run in itertools.groupby(places, lambda place: place[0]):
            found.setdefault(rank, []).append([index for _, index in run])
        return found

    @property
    def loops(self) -> int:
        """How many stages a rank has at most."""
        return max(map(len, self.of_ranks.values()), default=1)


def _made(segment: Segment) -> str:
    return ", ".join(f"{spec}{', grad' * spec.differentiable}" for spec in segment.block.outputs)


def digest_of(block: Block) -> str:
    """A short text that differs for blocks of other operations or constants, such as those of another mode of training."""
    calls = (node for node in block.graph.graph.nodes if node.op != "placeholder")  # whose names differ between ranks
    text = ";".join(f"{_name(node.target)} {fx.node.map_arg((node.args, node.kwargs), lambda _: '%')}" for node in calls)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


class Borders:
    """Which values cross from rank to rank.

    makers   the ranks that make a value; one that is not in it is an input, which all ranks have
    readers  the ranks that need it in forward
    """

    def __init__(self, stages: Stages, segments: Sequence[Segment], everywhere: Sequence[Value]):
        """`everywhere` are values that every rank needs: losses, and new contents of buffers that every rank has."""
        self.stages = stages
        self.makers = {value: stages.runs_on[segment.index] for segment in segments for value in segment.outputs}
        self.readers: dict[Value, set[int]] = {value: set(range(stages.ranks)) for value in everywhere}
        for segment in segments:
            for value in segment.values:
                self.readers.setdefault(value, set()).update(stages.runs_on[segment.index])

    def is_made_here(self, value: Value) -> bool:
        """Whether this rank makes a value, or has it as an input."""
        return value not in self.makers or self.stages.rank in self.makers[value]

    def sender(self, value: Value) -> int:
        """The rank that sends a value to those that need it."""
        return self.makers[value][0]

    def receivers(self, value: Value) -> list[int]:
        """The ranks that need a value and do not make it."""
        return sorted(self.readers.get(value, set()) - {*self.makers[value]})
