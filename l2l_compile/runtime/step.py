"""The state of one step through a program: its arguments, its rows, and the host's record of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from l2l_compile.devices.device import Device, HostWeights
from l2l_compile.disk.stash_store import StashExtent
from l2l_compile.ir.segments import Segment
from l2l_compile.lowering.lower import Lowering
from l2l_compile.lowering.savings import Saving, Savings
from l2l_compile.options import Options
from l2l_compile.races import Place
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.runtime.activation_room import ActivationRoom
from l2l_compile.runtime.in_flight import InFlight
from l2l_compile.runtime.kept_activations import KeptLevels
from l2l_compile.runtime.kept_inputs import KeptInputs
from l2l_compile.runtime.resident_weights import ResidentWeights
from l2l_compile.runtime.rows import StepRows
from l2l_compile.runtime.runtime_value import RuntimeValue
from l2l_compile.runtime.set_apart import BuffersSetApart
from l2l_compile.runtime.stashes import StashQueue
from l2l_compile.runtime.stats import Stats
from l2l_compile.runtime.stored_stashes import StashesOnDisk


class Host(Protocol):
    """The host side, as a running program calls it (`host/server.py`)."""

    def expect_stashes(self, size: int, /) -> None: ...

    def place(self, parameters: Sequence[torch.nn.Parameter], /) -> None: ...

    def begin_forward(
        self, step: Step, parameters: Sequence[torch.nn.Parameter], to_train: bool, resident: Iterable[Segment] = ..., /
    ) -> None: ...

    def load(
        self, step: Step, segment: Segment, weights: Sequence[torch.Tensor], ready: Callable[[Any, int, int], None] = ..., /
    ) -> tuple[HostWeights | None, list[torch.Tensor]]: ...

    def await_updates(self, step: Step, segment: Segment, /) -> None: ...

    def on_wire(self, step: Step, segment: Segment, /) -> list[int]: ...

    def loss_scale(self) -> float: ...

    def check_optimizer_has_all(self, step: Step, /) -> None: ...

    def begin_turns(self, step: Step, /) -> None: ...

    def end_turns(self, step: Step, /) -> None: ...

    def begin_backward(self, step: Step, graph: fx.Graph, segments: Sequence[Segment]) -> None: ...

    def collect(self, step: Step, segment: Segment, gradients: RuntimeValue, /) -> None: ...

    def update(self, step: Step, segment: Segment, pushed: RuntimeValue | None, /) -> None: ...

    def end_backward(self, step: Step) -> dict[int, torch.Tensor]: ...

    def recover(self, step: Step) -> None: ...


class BlockCheck(Protocol):
    """Returns work that compares a block on rows together and apart, or None if there is nothing to compare (`row_check.py`)."""

    def forward(
        self, step: Step, segment: Segment, weights: RuntimeValue, operands: Sequence[RuntimeValue]
    ) -> Callable[[], None] | None: ...

    def backward(
        self,
        step: Step,
        segment: Segment,
        weights: RuntimeValue,
        operands: Sequence[RuntimeValue],
        gradients: Sequence[RuntimeValue],
    ) -> Callable[[], None] | None: ...


class Engine(Protocol):
    """What the programs of one compiled model share (`session.py`).

    waiting  the stashes of all programs
    kept_inputs  inputs that stay on the device from call to call
    resident     weights that stay on the device from call to call
    set_apart    memory for weights that stay from forward to backward
    in_flight    the step whose last turns go back in the next call
    room         how much forwards may keep of what they compute inside of segments
    stashes_on_disk  with stash="disk"
    check    compares blocks on rows together and apart, if the user asked for it
    """

    @property
    def options(self) -> Options: ...

    @property
    def device(self) -> Device: ...

    @property
    def lowering(self) -> Lowering: ...

    @property
    def savings(self) -> Savings: ...

    @property
    def server(self) -> Host: ...

    @property
    def waiting(self) -> StashQueue: ...

    @property
    def kept_inputs(self) -> KeptInputs: ...

    @property
    def resident(self) -> ResidentWeights: ...

    @property
    def set_apart(self) -> BuffersSetApart: ...

    @property
    def in_flight(self) -> InFlight: ...

    @property
    def room(self) -> ActivationRoom: ...

    @property
    def stashes_on_disk(self) -> StashesOnDisk | None: ...

    @property
    def check(self) -> BlockCheck | None: ...

    def begin_forward(self) -> list[Stats]:
        """A forward of a program begins. Returns the list of the figures of its step, for the program to add its own."""

    def begin_backward(self, runs: list[Stats], /) -> None:
        """A backward of a program begins, of the step with this list."""


@dataclass(eq=False)
class HostRecord:
    """What the host side keeps of a step.

    gradient_wire  the format of gradients on the link, as the options name it
    pending        the forward that waits for its backward
    factor         by which gradients are multiplied when they arrive
    for_optimizer  whether gradients of the current backward go to the optimizer
    wants_norms    whether the host asks for the norm of each gradient of a weight; the device may compute it
    scale          the factor on the gradients of the outputs in backward
    returned       gradients for `p.grad` by index of the argument, filled by the host lane; `place` is watched for races
    last_fetches   the fetches of parameters (by their indices) still to come, if their wire is not needed after the last one
    """

    gradient_wire: str | None = None
    pending: Any = None
    for_optimizer: bool = True
    wants_norms: bool = False
    scale: float = 1.0
    factor: float = 1.0
    returned: dict[int, torch.Tensor] = field(default_factory=dict)
    place: Place = field(default_factory=lambda: Place("gradients for p.grad"))
    last_fetches: dict[tuple[int, ...], int] = field(default_factory=dict)


@dataclass(eq=False)
class Step:
    """The state that one forward and its backward share.

    arguments  the values that the program reads: for a parameter that is sharded over ranks, this rank's shard
    given      the arguments as the caller passes them
    stats      figures of this run
    runs       figures of all runs in the same call of the model
    to_train   whether a backward may follow
    world      the ranks that run the program together; None for one
    seed       the number that all random draws derive from; None until something is random
    seed_of_ranks  waits for the number that the first rank has drawn; None if it is known
    channel    which of the channels its messages take
    writes     new contents of buffers and other inputs, by index; `place` is watched for races
    levels     what each segment keeps for its backward, by its index; a segment that keeps nothing is not in it
    savings    the code of each micro-batch of a segment that keeps something, None for one of which it keeps nothing
    sums       sums over the turns of a backward so far, by segment: of gradients, and the tensors that hold them
    pushed     where backward runs inside of forward: the gradients of each segment on the host, until the loss is differentiated
    scale      the factor on the loss that is in these
    elsewhere  the parameters of other ranks of a pipeline
    absent     the gradients that other ranks of a pipeline do not make, by segment and name
    stored     the `store` nodes whose values go to the disk, with their bytes there
    extent     where they go; None behind forward
    replayed   outputs that the host has made itself, by position
    keeps      what stays on the device for the next call, by node and by the index of the input or output, with its bytes
    """

    engine: Engine
    arguments: Sequence
    given: Sequence
    constants: dict[str, torch.Tensor]
    rows: StepRows
    stats: Stats
    runs: list[Stats]
    to_train: bool
    world: Ranks | None = None
    seed: int | None = None
    seed_of_ranks: Callable[[], int] | None = None
    channel: int = 0
    writes: dict[int, torch.Tensor] = field(default_factory=dict)
    place: Place = field(default_factory=lambda: Place("new contents of a buffer"))
    levels: Mapping[int, KeptLevels] = field(default_factory=dict)
    savings: dict[int, list[Saving | None]] = field(default_factory=dict)
    sums: dict[int, tuple[dict[int, torch.Tensor], list[torch.Tensor]]] = field(default_factory=dict)
    pushed: list[tuple[Segment, RuntimeValue]] | None = None
    scale: float = 1.0
    elsewhere: frozenset[torch.Tensor] = frozenset()
    absent: frozenset[tuple[int, str]] = frozenset()
    stored: Mapping[fx.Node, int] = field(default_factory=dict)
    extent: StashExtent | None = None
    replayed: dict[int, torch.Tensor] = field(default_factory=dict)
    keeps: dict[tuple[Callable, int], tuple[RuntimeValue, int]] = field(default_factory=dict)
    host: HostRecord = field(default_factory=HostRecord)

    @property
    def ranks(self) -> Ranks:
        """The ranks among which the parameters are sharded."""
        assert self.world is not None, "one rank has no collectives"
        return self.world

    def base_seed(self) -> int:
        """One number per step from the default generator, drawn only if something in the step is random."""
        if self.seed_of_ranks is not None:
            self.seed, self.seed_of_ranks = self.seed_of_ranks(), None
        if self.seed is None:
            self.seed = int(torch.randint(2**62, ()))
        return self.seed
