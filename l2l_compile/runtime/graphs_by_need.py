"""The graphs of a program of which there are several: each is made when it is needed first."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from l2l_compile.runtime.paused_step import StepGraph


class Backwards:
    """The backward graphs of a program, one for each set of outputs that have a gradient.

    mask, first  which outputs have a gradient in the graph that the passes have made, and that graph; None if nothing is trained
    rebuild      makes the graph for another mask
    """

    def __init__(
        self, mask: tuple[bool, ...], first: fx.GraphModule | None, rebuild: Callable[[tuple[bool, ...]], fx.GraphModule]
    ):
        self._made = {} if first is None else {mask: first}
        self._rebuild, self.latest = rebuild, first

    def of(self, mask: tuple[bool, ...]) -> fx.GraphModule:
        if mask not in self._made:
            self._made[mask] = self._rebuild(mask)
        module = self.latest = self._made[mask]
        return module


class Steps:
    """The graphs of whole steps that go forward and back turn by turn, one for each number of micro-batches. One micro-batch needs none.

    mask     which outputs have a gradient in them
    made     the graphs that exist, by their number of micro-batches
    rebuild  makes the graph for another number
    """

    def __init__(self, mask: tuple[bool, ...], made: dict[int, StepGraph], rebuild: Callable[[int], StepGraph]):
        self.mask, self._made, self._rebuild = mask, made, rebuild

    def of(self, turns: int) -> StepGraph:
        """The graph for this many micro-batches, more than one."""
        if turns not in self._made:
            self._made[turns] = self._rebuild(turns)
        return self._made[turns]
