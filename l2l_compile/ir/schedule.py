"""The order in which the ranks of a pipeline run their turns: a turn is one micro-batch through one stage, forward or back."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass


class Direction(enum.Enum):
    """What a turn does."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()


@dataclass(frozen=True)
class Action:
    """One turn of a stage."""

    stage: int
    direction: Direction
    turn: int


Order = tuple[Action, ...]


def one_forward_one_back(stages: int, turns: int) -> tuple[Order, ...]:
    """The order of each rank, with one stage a rank: as soon as a turn can go back, one goes back for each that goes forward.

    Rank r has at most `stages` - r turns in flight (PipeDream-Flush, arXiv 2006.09503, section 3.2).
    """
    return tuple(tuple(_order(stage, stages, turns)) for stage in range(stages))


def _order(stage: int, stages: int, turns: int) -> Iterator[Action]:
    ahead = min(stages - 1 - stage, turns)
    for turn in range(turns + ahead):
        if turn < turns:
            yield Action(stage, Direction.FORWARD, turn)
        if turn >= ahead:
            yield Action(stage, Direction.BACKWARD, turn - ahead)
