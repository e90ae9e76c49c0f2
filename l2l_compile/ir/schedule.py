"""The order in which the ranks of a pipeline run their turns: a turn is one micro-batch through one stage, forward or back.

A schedule is text as well, a line a rank, in the words of `torch.distributed.pipelining`, so that its files of comma-separated values
load:

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

`0F3` is micro-batch 3 forward through stage 0, and `0B3` is the same back. `0B3@-1` goes back for the call before, whose micro-batches are
in flight when this call begins: a schedule with such turns never empties the pipeline (PipeDream-2BW, arXiv 2006.09503, section 3.1).
"""

from __future__ import annotations

import csv
import enum
import functools
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from l2l_compile.errors import ScheduleError


class Direction(enum.Enum):
    """What a turn does: F goes forward, B goes back."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One turn of a stage: of this call, or with a negative `call` of one before."""

    stage: int
    direction: Direction
    turn: int
    call: int = 0

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action of a text such as "0F3". Raises `ValueError` for any other text."""
        found = _ACTION.fullmatch(text)
        if found is None or found["kind"] not in _DIRECTIONS or found["turn"] is None:
            raise ValueError(f"{text!r} is no turn such as 0F3 (stage 0, forward, micro-batch 3) or 0B3@-1")
        return cls(int(found["stage"]), _DIRECTIONS[found["kind"]], int(found["turn"]), int(found["call"] or 0))

    def __str__(self) -> str:
        return f"{self.stage}{self.direction.value}{self.turn}" + (f"@{self.call}" if self.call else "")


Order = tuple[Action, ...]
PAUSE, END = "pause", "end"  # parts of a step beside its turns: what a call leaves to the next one is between them

_ACTION = re.compile(r"(?P<stage>\d+)(?P<kind>[A-Z_]+)(?P<turn>\d+)?(?:@(?P<call>-\d+))?", re.ASCII)
_DIRECTIONS = {direction.value: direction for direction in Direction}
_IMPLIED = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")  # the program has them where data flows
_PARTS = {"I": "the gradients of inputs alone", "W": "the gradients of weights alone"}


@dataclass(frozen=True)
class Schedule:
    """The order of the turns of each rank of a pipeline, with one stage a rank. Messages follow from it.

    Raises `ScheduleError`, with the rank, the turn and the rule, for an order that cannot run:

    stage     a rank runs the turns of its own stage, one stage a rank
    turn      each micro-batch goes forward once, for this call, and then back once; they go back in order
    version   a micro-batch goes back in its own call or in the next one: one that waits longer would read a third version of the weights
    progress  no turn waits for a turn that waits for it
    """

    orders: tuple[Order, ...]

    def __post_init__(self) -> None:
        for rank, order in enumerate(self.orders):
            _check_order(rank, order)
        if len({len(order) for order in self.orders}) > 1:
            few = min(range(len(self.orders)), key=lambda rank: len(self.orders[rank]))
            raise ScheduleError("turn", few, None, f"has {len(self.orders[few])} turns, and other ranks have more")
        _check_progress(self)

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, order)) for order in self.orders)

    @property
    def turns(self) -> int:
        """How many micro-batches a call has."""
        return len(self.orders[0]) // 2

    @property
    def flushes(self) -> bool:
        """Whether all micro-batches of a call are back at its end."""
        return not any(action.call for order in self.orders for action in order)

    def apart(self, rank: int) -> tuple[Order, Order]:
        """The turns of one call on a rank: those in the call itself, and those in the next one."""
        order = self.orders[rank]
        return tuple(a for a in order if not a.call), tuple(a for a in order if a.call)

    def in_flight(self, rank: int) -> int:
        """How many micro-batches are forward and not yet back on a rank at once, at most: what it keeps for backward."""
        left = sum(action.call < 0 for action in self.orders[rank])
        most = left
        for action in self.orders[rank]:
            left += 1 if action.direction is Direction.FORWARD else -1
            most = max(most, left)
        return most

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule of a text. Raises `ScheduleError` as the class, and for what cannot be read."""
        rows = [row for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)]
        if not rows:
            raise ScheduleError("text", 0, None, "is empty: one line a rank is needed, such as 0F0,0B0")
        return cls(tuple(tuple(_parsed(rank, row)) for rank, row in enumerate(rows)))

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """The schedule in a file."""
        return cls.parse(Path(path).read_text())


def _parsed(rank: int, row: Sequence[str]) -> Iterator[Action]:
    for cell in filter(None, map(str.strip, row)):
        found = _ACTION.fullmatch(cell)
        if found is not None and found["kind"] in _IMPLIED:
            continue
        if found is not None and found["kind"] in _PARTS:
            raise ScheduleError(
                "text",
                rank,
                cell,
                f"computes {_PARTS[found['kind']]}, and l2l_compile goes back in one piece: replace both parts by B",
            )
        try:
            yield Action.parse(cell)
        except ValueError as error:
            raise ScheduleError("text", rank, None, str(error)) from None


def _check_order(rank: int, order: Order) -> None:
    if not order:
        raise ScheduleError("turn", rank, None, "has no turns")
    there: set[tuple[Direction, int]] = set()
    for action in order:
        _check_action(rank, action, there)
        there.add((action.direction, action.turn))
    for turn, direction in itertools.product(range(max(turn for _, turn in there) + 1), Direction):
        if (direction, turn) not in there:
            raise ScheduleError("turn", rank, Action(rank, direction, turn), "is missing")
    back = [action for action in order if action.direction is Direction.BACKWARD]
    of_call = [action for action in back if not action.call] + [action for action in back if action.call]
    for actions in ([action for action in order if action.direction is Direction.FORWARD], of_call):
        for wanted, action in enumerate(actions):
            if action.turn != wanted:
                raise ScheduleError("turn", rank, action, "is out of order: sums over micro-batches are added up in their order")


def _check_action(rank: int, action: Action, there: set[tuple[Direction, int]]) -> None:
    """`there` are the turns before this one."""
    is_forward = action.direction is Direction.FORWARD
    if action.stage != rank:
        raise ScheduleError("stage", rank, action, "is of another stage: each rank runs one stage, that of its own number")
    if action.call < -1 or is_forward and action.call:
        why = "a micro-batch goes forward in its own call" if is_forward else "it would read a third version of the weights"
        raise ScheduleError("version", rank, action, f"belongs to call {action.call}, and {why}")
    if (action.direction, action.turn) in there:
        raise ScheduleError("turn", rank, action, "comes twice")
    if not is_forward and not action.call and (Direction.FORWARD, action.turn) not in there:
        raise ScheduleError("turn", rank, action, "goes back before it has gone forward")


def _check_progress(schedule: Schedule) -> None:
    """Run three calls, and what is left in flight, with messages that take no time."""
    calls, ranks = 3, range(len(schedule.orders))
    for rank, (order, behind) in enumerate(itertools.pairwise(schedule.orders)):
        late = {action.turn for action in behind if action.call}
        for action in order:
            if action.direction is Direction.BACKWARD and not action.call and action.turn in late:
                raise ScheduleError(
                    "progress", rank, action, f"waits for rank {rank + 1}, which goes back with it in the next call"
                )
    left = [list(_of_calls(order, calls)) for order in schedule.orders]
    done: set[tuple[int, Direction, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while left[rank] and _needed(*left[rank][0], len(schedule.orders)) <= done:
                action, call = left[rank].pop(0)
                done.add((action.stage, action.direction, action.turn, call))
                moved = True
    for rank in ranks:
        if left[rank]:
            waits = ", ".join(f"rank {other} at {left[other][0][0]}" for other in ranks if left[other])
            raise ScheduleError("progress", rank, left[rank][0][0], f"never runs: the ranks wait for one another, {waits}")


def _of_calls(order: Order, calls: int) -> Iterator[tuple[Action, int]]:
    """The turns of some calls in a row, each with the number of the call that it belongs to, and in the end those that are in flight."""
    for call in range(calls + 1):
        for action in order:
            if 0 <= call + action.call < calls:
                yield action, call + action.call


def _needed(action: Action, call: int, stages: int) -> set[tuple[int, Direction, int, int]]:
    """The turns of other stages that one needs: of the stage before forward, of the stage behind back."""
    step = -1 if action.direction is Direction.FORWARD else 1
    other = action.stage + step
    return {(other, action.direction, action.turn, call)} if 0 <= other < stages else set()


@functools.cache
def one_forward_one_back(stages: int, turns: int) -> Schedule:
    """With one stage a rank: as soon as a turn can go back, one goes back for each that goes forward, until all are back.

    Rank r has at most `stages` - r turns in flight (PipeDream-Flush, arXiv 2006.09503, section 3.2).
    """
    return Schedule(tuple(tuple(_order(stage, min(stages - 1 - stage, turns), turns)) for stage in range(stages)))


def _order(stage: int, ahead: int, turns: int) -> Iterator[Action]:
    for turn in range(turns + ahead):
        if turn < turns:
            yield Action(stage, Direction.FORWARD, turn)
        if turn >= ahead:
            yield Action(stage, Direction.BACKWARD, turn - ahead)


@functools.cache
def without_flush(stages: int, turns: int) -> Schedule:
    """As `one_forward_one_back`, and the turns that would be in flight at the end go back in the next call (PipeDream-2BW).

    There are at least as many turns as stages.
    """
    return Schedule(tuple(tuple(_unflushed(stage, stages - 1 - stage, turns)) for stage in range(stages)))


def _unflushed(stage: int, ahead: int, turns: int) -> Iterator[Action]:
    for turn in range(turns):
        yield Action(stage, Direction.FORWARD, turn)
        if turn < ahead:
            yield Action(stage, Direction.BACKWARD, turns - ahead + turn, -1)
        else:
            yield Action(stage, Direction.BACKWARD, turn - ahead)
