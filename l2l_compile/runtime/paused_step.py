"""Steps without a flush: the last turns of a call go back in the next one (PipeDream-2BW, arXiv 2006.09503, section 3.1).

A step is one program for both calls. Its run pauses at the end of the first, with the values of the turns that are in flight, and the
next call goes on with it between turns of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import fx

from l2l_compile.ir.schedule import END, PAUSE, Order
from l2l_compile.ir.step_parts import calls_of, end_waits, losses, pauses, received
from l2l_compile.ranks.announcements import ActionKind
from l2l_compile.runtime.executor import Executor
from l2l_compile.runtime.late_loss import Coming
from l2l_compile.runtime.runtime_value import RuntimeValue
from l2l_compile.runtime.step import Step


@dataclass(frozen=True)
class StepGraph:
    """The graph of a whole step, and the order of the turns of a call: those of the call itself, and those of the one before."""

    module: fx.GraphModule
    order: Order

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @functools.cached_property
    def pauses(self) -> bool:
        """Whether the last turns of a call go back in the next one, on this rank or on another."""
        return pauses(self.graph)

    @functools.cached_property
    def parts(self) -> list[tuple[int, str]]:
        """The parts that a call runs, in order, of its own step (0) and of the one before (-1)."""
        return list(calls_of(self.order, end_waits(self.graph), bool(self.received)))

    @functools.cached_property
    def losses(self) -> dict[int, fx.Node]:
        """The copies of losses to the host, by position among the outputs."""
        return losses(self.graph)

    @functools.cached_property
    def received(self) -> frozenset[int]:
        """The positions of losses that another rank computes."""
        return received(self.graph)


@dataclass(eq=False)
class PausedStep:
    """A step of which the last turns are in flight.

    finish     runs the rest, where no call goes on with it, for a kind of drain
    when_over  is called when its last gradients are on their way to the host
    coming     the losses that the caller has and that another rank computes, by position among the outputs
    outputs    when it is over
    """

    step: Step
    made: StepGraph
    executor: Executor
    finish: Callable[[PausedStep, ActionKind], None]
    when_over: Callable[[Step], None]
    coming: dict[int, Coming] = field(default_factory=dict)
    outputs: Sequence[RuntimeValue] | None = None

    @property
    def is_over(self) -> bool:
        """Whether all of its turns are back. With the last stage, that is so at the end of its own call."""
        return self.outputs is not None

    @property
    def was_read(self) -> bool:
        """Whether the caller has read a loss that comes from another rank."""
        return any(coming.is_there for coming in self.coming.values())

    def run(self, before: PausedStep | None) -> None:
        """Run the turns of a call: its own, and between them those that are in flight of the step before, which is over then."""
        for call, part in self.made.parts:
            if not call:
                self._go(part)
            elif before is not None:
                before._go(part)

    def loss(self, position: int) -> RuntimeValue:
        """A loss on the host. Has lanes wait for it if another rank still computes it."""
        return self.outputs[position] if self.outputs is not None else self.executor.early(self.made.losses[position])

    def run_rest(self) -> None:
        """Run all turns that are in flight."""
        for call, part in self.made.parts:
            if call:
                self._go(part)

    def _go(self, part: str) -> None:
        self.executor.go(part)
        if part == PAUSE:
            self.executor.pause()
        elif part == END:
            self.outputs, _, _ = self.executor.end()
            self.when_over(self.step)

    def drop(self, error: BaseException) -> None:
        """A failure: the rest never runs."""
        for coming in self.coming.values():
            coming.fail(error)
