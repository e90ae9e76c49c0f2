"""`Compilation`, the object that the passes fill in, and `Pass`, the interface of a pass."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import fx

from l2l_compile.errors import L2LError
from l2l_compile.ir.captured import Captured
from l2l_compile.ir.graph_modules import graph_module
from l2l_compile.ir.program import Program
from l2l_compile.ir.schedule import Schedule, one_forward_one_back, without_flush
from l2l_compile.ir.segments import Block, Segment, Uncut, Value
from l2l_compile.ir.stages import Stages
from l2l_compile.options import Options
from l2l_compile.passes.operation_sequence import OperationSequence


class Fact(enum.StrEnum):
    """A property of the compilation that one pass establishes and later passes rely on."""

    SEQUENCE = "sequence"
    LAYERS = "layers"
    SEGMENTS = "segments"
    BLOCKS = "blocks"
    REGIONS = "regions"
    BATCHING = "batching"
    GRANULARITY = "granularity"
    GRADIENTS = "gradients"
    STAGES_PLACED = "stages_placed"
    PROGRAM = "program"
    TURNS_WRITTEN = "turns_written"
    ACTIVATIONS_KEPT = "activations_kept"
    WEIGHTS_KEPT = "weights_kept"
    STASHES_PLACED = "stashes_placed"
    PREFETCHED = "prefetched"
    ROWS_PLACED = "rows_placed"
    RANKS_PLACED = "ranks_placed"
    RELEASED = "released"
    UPDATES_PLACED = "updates_placed"


@dataclass(frozen=True)
class Gradients:
    """Which outputs of the graph can have a gradient, and the values that forward keeps for backward."""

    differentiable: tuple[bool, ...]
    kept: tuple[Value, ...]


@dataclass(eq=False)
class Compilation:
    """One captured graph on its way to a program. Each pass fills in the attributes that it provides.

    sequence       the operations in order, with the cost of a cut before each               sequence_operations, split_regions
    gradient_mask  which outputs have a gradient in `backward`; () asks for a prediction     differentiate
    layers         ranges of the sequence that are one layer each                            find_blocks
    forced_cuts    cuts between layers that module names ask for                             find_blocks
    segments       instances of blocks, in program order                                     cut_segments
    blocks         the distinct blocks of the segments; inner-looped or not                 cut_segments, prove_row_independence
    fingerprints   the blocks by the fingerprint of their pieces                             cut_segments, split_regions
    uncut          segments that hold several layers                                         granularity
    gradients      which outputs have gradients, and the values that forward keeps           differentiate
    stages         which ranks run each segment                                              place_stages
    forward        program graph                                                             stream and after
    backward       program graph for the outputs in `gradient_mask`; None without gradients  stream and after
    step           program graph of a whole step turn by turn; None with other schedules     write_turns and after
    count_of_turns how many micro-batches `step` has; 0 for those of the option
    """

    captured: Captured
    options: Options
    sequence: OperationSequence = None  # type: ignore[assignment]  # until `sequence_operations`
    gradient_mask: tuple[bool, ...] = ()
    layers: list[range] = field(default_factory=list)
    forced_cuts: set[int] = field(default_factory=set)
    segments: list[Segment] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    fingerprints: dict[tuple, Block] = field(default_factory=dict)
    uncut: tuple[Uncut, ...] = ()
    gradients: Gradients = None  # type: ignore[assignment]  # until `differentiate`
    stages: Stages = None  # type: ignore[assignment]  # until `place_stages`
    forward: fx.Graph = None  # type: ignore[assignment]  # until `stream`
    backward: fx.Graph | None = None
    step: fx.Graph | None = None
    count_of_turns: int = 0

    @property
    def graphs(self) -> Iterator[fx.Graph]:
        """The program graphs that exist."""
        return filter(None, (self.forward, self.backward, self.step))

    @property
    def goes_by_turns(self) -> bool:
        """Whether steps go forward and back turn by turn."""
        return self.options.goes_by_turns and any(self.gradient_mask)

    @property
    def turns(self) -> int:
        """How many micro-batches the graph `step` has."""
        if self.count_of_turns:
            return self.count_of_turns
        batch = self.captured.batch
        rows = self.captured.hints[batch] if batch is not None else 1
        return min(self.options.micro_batches, rows)

    @property
    def schedule(self) -> Schedule:
        """The order of the turns of all ranks. Raises `L2LError` if that of the option is for other ranks or micro-batches."""
        ranks, given = self.stages.ranks, self.options.schedule
        if not isinstance(given, Schedule):
            if self.options.delay and self.options.micro_batches < ranks:
                raise L2LError(
                    f"delay=1 with schedule='1f1b' runs without a flush, which needs as many micro-batches as ranks, and there are "
                    f"{self.options.micro_batches} for {ranks} ranks: set micro_batches to {ranks} at least, or leave out delay=1"
                )
            is_endless = self.options.delay and self.turns >= ranks > 1
            return (without_flush if is_endless else one_forward_one_back)(ranks, self.turns)
        if len(given.orders) != ranks:
            raise L2LError(
                f"the schedule is for {len(given.orders)} ranks, and {ranks} run this model: use one with a line for each of them"
            )
        if given.turns != self.turns:
            raise L2LError(
                f"the schedule is for {given.turns} micro-batches, and this batch has {self.turns}: leave out a smaller last batch "
                "(drop_last=True), or use schedule='1f1b', which fits any number"
            )
        return given

    @classmethod
    def of(cls, program: Program, options: Options) -> Compilation:
        """A compilation of a finished program (parsed from text, or written by hand), on which more passes can run."""
        return cls(
            program.captured,
            options,
            segments=list(program.segments),
            blocks=list(program.blocks),
            stages=program.stages or Stages.alone(program.segments),
            forward=program.forward.graph,
            backward=program.backward.graph if program.backward is not None else None,
            step=program.step.graph if program.step is not None else None,
        )

    def program(self) -> Program:
        """The program in its present state."""
        carried = {value.node for value in self.carried}
        return Program(
            self.captured,
            tuple(self.segments),
            tuple(self.blocks),
            graph_module(self.forward),
            graph_module(self.backward) if self.backward is not None else None,
            self.captured.hints,
            self.uncut,
            tuple(i.index for i in self.captured.inputs if i.node in carried),
            stages=self.stages,
            step=graph_module(self.step) if self.step is not None else None,
            schedule=self.schedule if self.step is not None and self.goes_by_turns else None,
        )

    @property
    def is_global(self) -> bool:
        """Whether the batches of several ranks form one batch (`batch_scope="global"`)."""
        return self.options.batch_scope == "global" and self.captured.shards > 1

    @property
    def splits_rows(self) -> bool:
        """Whether the rows of the batch are divided: into micro-batches, or among ranks."""
        return self.options.micro_batches > 1 or self.is_global

    @property
    def outputs(self) -> tuple[Value | None, ...]:
        """The newest version of each output of the captured graph, then `carried`.

        None for an output that is a number, or that the host makes itself. A returned input has version 0, also if the model writes
        into it: it is the user's own tensor.
        """
        by_host, newest = self.captured.parts.outputs, self._newest()
        outputs = enumerate(self.captured.outputs)
        returned = (None if position in by_host else self._returned(node, newest) for position, node in outputs)
        return (*returned, *self.carried)

    @property
    def kept_outputs(self) -> dict[int, Value]:
        """The outputs that the host makes itself and that the device has too, by position; each value once."""
        outputs, newest = self.captured.outputs, self._newest()
        first = {self._returned(outputs[position], newest): position for position in reversed(self.captured.parts.outputs)}
        return {position: value for value, position in first.items() if value is not None}

    @property
    def keeps_inputs(self) -> bool:
        """Whether inputs may stay on the device from call to call."""
        captured = self.captured
        alone = captured.mesh is None and captured.owners is None
        return not captured.grad_enabled and alone and self.options.device_cache != 0

    def _returned(self, node: fx.Node | None, newest: dict[fx.Node, Value]) -> Value | None:
        if node not in self.captured.specs:
            return None
        return Value(node) if node.op == "placeholder" else newest.get(node, Value(node))

    @property
    def carried(self) -> tuple[Value, ...]:
        """The new contents of written inputs, if they have a gradient: autograd must know how they were made."""
        newest = self._newest()
        return tuple(newest[i.node] for i in self.captured.inputs if i.node in newest and self._carries(i.node))

    def _newest(self) -> dict[fx.Node, Value]:
        return {value.node: value for segment in self.segments for value in segment.outputs}

    def _carries(self, node: fx.Node) -> bool:
        """Whether the new contents of a written tensor have a gradient. For a leaf they do not: autograd recorded no write."""
        return self.captured.specs[node].differentiable and not node.meta["example_value"].is_leaf


class Pass(Protocol):
    """A frozen dataclass with a name, the facts that it requires and provides, and one `apply`. Its options are its fields."""

    name: ClassVar[str]
    requires: ClassVar[frozenset[Fact]] = frozenset()
    provides: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, compilation: Compilation) -> None: ...
