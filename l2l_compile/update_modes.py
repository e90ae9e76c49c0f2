"""The values of the option `update`. Code that depends on the option asks what is written here, and no name.

A new mode is an entry here, a class in `host/updates/`, and that class in `host/updates/classes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class UpdatePlace(Enum):
    """Where a program updates a segment: its node `update`."""

    OUTSIDE = "no node: optimizer.step() updates"
    AFTER_PUSH = "in backward, after the push of the segment's gradients"
    BEFORE_FETCH = "in the next forward, before the fetch of the segment's weights"


@dataclass(frozen=True)
class UpdateMode:
    """A value of the option `update`.

    name      the value
    place     where a program updates a segment
    sees_all  whether all gradients of a step are there before its first update: to clip their norm, or to skip the step if one
              of them overflows
    host_work what the host lane does
    left_out  how the training loop leaves a step out after its backward
    """

    name: str
    place: UpdatePlace
    sees_all: bool
    host_work: str
    left_out: str

    @property
    def is_overlapped(self) -> bool:
        """Whether updates run while the device computes. Such a mode needs the option `optimizer`."""
        return self.place is not UpdatePlace.OUTSIDE

    @property
    def keeps_gradients(self) -> bool:
        """Whether updates run while the device computes, and all gradients of the step wait for them on the host."""
        return self.is_overlapped and self.sees_all


MODES = {
    mode.name: mode
    for mode in (
        UpdateMode(
            "at_step",
            place=UpdatePlace.OUTSIDE,
            sees_all=True,
            host_work="takes gradients from the link, for optimizer.step()",
            left_out="To leave a step out, do not call optimizer.step()",
        ),
        UpdateMode(
            "in_backward",
            place=UpdatePlace.AFTER_PUSH,
            sees_all=False,
            host_work="takes gradients from the link, and updates each layer while the device computes the layers before it",
            left_out="A step cannot be left out after its backward, which has made its updates: end it with optimizer.step()",
        ),
        UpdateMode(
            "in_forward",
            place=UpdatePlace.BEFORE_FETCH,
            sees_all=True,
            host_work="takes gradients from the link, and updates the layers after optimizer.step(), while the next forward runs",
            left_out="To leave a step out, call optimizer.zero_grad() after its backward",
        ),
    )
}
