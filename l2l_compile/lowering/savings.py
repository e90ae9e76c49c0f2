"""Blocks whose forward saves values for their backward: what a forward may save at given sizes, and the code that does it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from l2l_compile.errors import LoweringError
from l2l_compile.ir.fx_types import arguments
from l2l_compile.ir.segments import Block
from l2l_compile.ir.values import Bindings, evaluate
from l2l_compile.lowering.code_cache import Code, Lowered, Store, Traced, lifetimes
from l2l_compile.lowering.costs import Rates, typical_rates
from l2l_compile.lowering.joint import Joint
from l2l_compile.lowering.lower import Lowering, LoweringKey, Request, Waiting, one_at_a_time
from l2l_compile.lowering.randomness import hoist_draws
from l2l_compile.lowering.saving import Level, SavingChoice
from l2l_compile.lowering.sizes import Guards, Sizes
from l2l_compile.lowering.trace import in_place_of_an_accelerator, trace_joint
from l2l_compile.reentry import COMPILATION, whole

SavingRequest = tuple[Block, Bindings, tuple[bool, ...], int]  # block, sizes, outputs whose gradients arrive, level


@dataclass(frozen=True, eq=False)
class Saving:
    """A block at one size whose forward saves values for its backward.

    forward   (weights, values, draws) -> (outputs, saved values)
    backward  (weights, values, gradients, saved values, draws) -> gradients
    mask      the outputs whose gradients `backward` takes
    count     how many values are saved
    bytes     of what is saved
    """

    forward: Lowered
    backward: Lowered
    mask: tuple[bool, ...]
    count: int
    bytes: int


@dataclass(frozen=True)
class SavingLevel:
    """One of the levels of a block at one size: the bytes that it saves, and the seconds of recompute that need not be."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class BlockSeconds:
    """What a block takes at one size, by an estimate: forward, backward without any recompute, and the recompute if nothing is saved."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0


@dataclass(frozen=True)
class _Choice:
    """The levels of a block, and what forward and backward take, by the estimate of the levels.

    why_none   why the block has no levels; "" if it has some
    """

    levels: tuple[Level, ...]
    seconds: BlockSeconds
    why_none: str


@dataclass(eq=False)
class _JointCode:
    """The joint graph of a block, and the code of the levels that were asked for: forward and backward.

    why_none  why the block can have no levels at any size; "" if it may have some
    choices   by the sizes for which they were made, the rates of the device, and whether operations are fused
    codes     by the values that are saved
    """

    block: Block
    sizes: Sizes
    guards: Guards
    joint: Joint
    why_none: str
    choices: dict[tuple, _Choice] = field(default_factory=dict)
    codes: dict[tuple[fx.Node, ...], tuple[Code, Code]] = field(default_factory=dict)

    def choice(self, sizes: tuple[int, ...], rates: Rates, fuses: bool) -> _Choice:
        """The levels for these sizes."""
        key = (sizes, str(rates), fuses)
        if key not in self.choices:
            at = dict(zip(self.sizes.names, sizes, strict=False))  # no names: sizes are numbers
            choice = SavingChoice(self.joint, at, rates, fuses)
            seconds = BlockSeconds(choice.forward, choice.backward, choice.recompute)
            levels = () if self.why_none else choice.levels()
            self.choices[key] = _Choice(levels, seconds, self.why_none if self.why_none or levels else NOTHING_GAINED)
        return self.choices[key]


NOTHING_GAINED = "it has no value that may be kept and saves time"
_joints: Store[_JointCode] = Store(256)


def cannot_save(block: Block) -> str:
    """The reason why a block's forward saves nothing for its backward; "" if it may."""
    if block.summed_whole:
        return "gradients are summed over the whole batch at once"
    if block.sized_by != block.symbols:
        return "it reads a number that may change from call to call"
    return ""


class Savings:
    """The blocks of one compiled model with forwards that save. Both codes of a level come from one trace.

    fuses  whether the compiler of blocks makes one kernel of neighbouring elementwise operations
    rates  of the device, if they are known

    Levels are made for the first sizes of a block that are asked for here, and hold for other sizes: these need no other code. What
    other models of this process have asked for does not matter.
    """

    def __init__(self, lowering: Lowering, fuses: bool, rates: Rates | None = None):
        self._lowering, self._fuses, self._rates = lowering, fuses, rates or typical_rates(lowering.device)
        self._done: dict[tuple, Saving] = {}
        self._levels: dict[tuple, tuple[SavingLevel, ...]] = {}
        self._first: dict[_JointCode, tuple[int, ...]] = {}  # sizes

    def levels(self, block: Block, bindings: Bindings, gradient_mask: tuple[bool, ...]) -> tuple[SavingLevel, ...]:
        """What a forward of the block may save at these sizes, from little to much; () if it saves nothing."""
        key = (block, gradient_mask, *map(bindings.__getitem__, block.symbols))
        if key not in self._levels:
            self._levels[key] = self._levels_at(block, bindings, gradient_mask)
        return self._levels[key]

    def seconds(self, block: Block, bindings: Bindings, gradient_mask: tuple[bool, ...]) -> BlockSeconds:
        """What the block takes at these sizes, by the estimate of its levels; nothing for a block that cannot save."""
        with one_at_a_time, self._lowering.apart():
            found, sizes = self._known(block, bindings, gradient_mask)
            return self._choice(found, sizes).seconds if found is not None else BlockSeconds()

    def why_none(self, block: Block, bindings: Bindings, gradient_mask: tuple[bool, ...]) -> str:
        """What keeps a forward of the block from saving something at these sizes; "" for nothing."""
        with one_at_a_time, self._lowering.apart():
            found, sizes = self._known(block, bindings, gradient_mask)
            return self._choice(found, sizes).why_none if found is not None else cannot_save(block)

    def saving(self, request: SavingRequest) -> Saving:
        """The block at these sizes with a forward that saves what a level names, or the last one. Raises `LoweringError`."""
        block, bindings, gradient_mask, level = request
        key = (block, gradient_mask, level, *map(bindings.__getitem__, block.symbols))
        if key not in self._done:
            with one_at_a_time, self._lowering.apart():
                self._done[key] = self._saving(block, bindings, gradient_mask, level)
        return self._done[key]

    def ahead(self, requests: Iterable[SavingRequest]) -> bool:
        """Compile what will be requested, all at the same time. Returns whether all could be compiled.

        A block that could not has no levels from now on, with a warning that says why: it is computed again as without them.
        """
        waiting: list[tuple[_JointCode, Level, list[Waiting]]] = []
        with one_at_a_time, self._lowering.apart():
            for block, bindings, gradient_mask, number in requests:
                found, sizes = self._known(block, bindings, gradient_mask)
                levels = self._choice(found, sizes).levels if found is not None else ()
                if found is not None and number < len(levels) and levels[number].saved not in found.codes:
                    waiting.append((found, levels[number], self._cut(found, levels[number])))
            for _, _, both in waiting:
                self._lowering.begin(both)
            done = [self._finish_or_warn(found, level, both) for found, level, both in waiting]
        return all(done)

    def _finish_or_warn(self, found: _JointCode, level: Level, both: list[Waiting]) -> bool:
        try:
            if not found.why_none and level.saved not in found.codes:
                self._finish(found, level, both)
        except LoweringError as error:
            found.why_none = str(error)
            found.choices.clear()
            self._levels.clear()
            warnings.warn(f"backend 'l2l' keeps nothing inside of {found.block.name}, since {error}", stacklevel=2)
        return not found.why_none

    def code(self, request: Request) -> tuple[Code, tuple[int, ...]]:
        """The code of a request to `Lowering.at_sizes`, and the values of its symbolic sizes."""
        block, bindings, which, wanted = request
        which, _, level = which.partition(_AT_LEVEL)
        if not level:
            return self._lowering.code(block, bindings, which, wanted)
        found, sizes = self._known(block, bindings, wanted)
        assert found is not None
        return self._codes(found, self._choice(found, sizes).levels[int(level)])[which == "backward"], sizes

    def _levels_at(self, block: Block, bindings: Bindings, gradient_mask: tuple[bool, ...]) -> tuple[SavingLevel, ...]:
        with one_at_a_time, self._lowering.apart():
            found, sizes = self._known(block, bindings, gradient_mask)
            if found is None:
                return ()
            at, levels = dict(zip(found.guards.symbols, sizes, strict=True)), self._choice(found, sizes).levels
            return tuple(SavingLevel(sum(evaluate(size, at) for size in level.bytes), level.seconds) for level in levels)

    def _saving(self, block: Block, bindings: Bindings, gradient_mask: tuple[bool, ...], level: int) -> Saving:
        found, sizes = self._known(block, bindings, gradient_mask)
        levels = self._choice(found, sizes).levels if found is not None else ()
        assert found is not None and levels, f"{block.name} has no levels"
        level = min(level, len(levels) - 1)
        forward, backward = (
            self._lowering.at_sizes(code, sizes, (block, bindings, f"{which}{_AT_LEVEL}{level}", gradient_mask))
            for which, code in zip(("forward", "backward"), self._codes(found, levels[level]), strict=True)
        )
        at = dict(zip(found.guards.symbols, sizes, strict=True))
        size = sum(evaluate(count, at) for count in levels[level].bytes)
        return Saving(forward, backward, gradient_mask, len(levels[level].saved), size)

    def _choice(self, found: _JointCode, sizes: tuple[int, ...]) -> _Choice:
        return found.choice(self._first.setdefault(found, sizes), self._rates, self._fuses)

    def _known(
        self, block: Block, bindings: Bindings, gradient_mask: tuple[bool, ...]
    ) -> tuple[_JointCode | None, tuple[int, ...]]:
        """The joint graph of a block at these sizes, and the values of its symbolic sizes; None for a block that cannot save."""
        if cannot_save(block):
            return None, ()
        key = self._lowering.key(block, bindings, "joint", gradient_mask)
        found = _joints.find(key.exact, key.sizes)
        if found is None:
            found = self._trace(block, bindings, gradient_mask, key)
            _joints.add(key.exact, found)
        return found, key.sizes

    def _trace(self, block: Block, bindings: Bindings, gradient_mask: tuple[bool, ...], key: LoweringKey) -> _JointCode:
        """With symbols for sizes, or anew for every size if that fails, as `Lowering` does: it warns of it."""
        try:
            return self._traced_with(Sizes(bindings, key.symbols), block, gradient_mask, key)
        except LoweringError:
            if not key.symbols:
                raise
            made = self._traced_with(Sizes(bindings), block, gradient_mask, key)
            return replace(made, guards=Guards.exactly(key.sizes))

    @whole(COMPILATION)
    def _traced_with(self, sizes: Sizes, block: Block, gradient_mask: tuple[bool, ...], key: LoweringKey) -> _JointCode:
        with in_place_of_an_accelerator(self._lowering.stands_in):
            graph, present = trace_joint(block, sizes, self._lowering.device, gradient_mask)
        draws, seeded = hoist_draws(graph)
        symbols, once = len(sizes.symbols), not block.inner_looped
        varying = frozenset(symbols + i for i, spec in enumerate(block.operands) if once or spec.splits)
        joint = Joint(graph, draws, len(block.outputs), sum(gradient_mask), symbols + len(block.operands), varying, present)
        why_none = "an operation in it draws random numbers by itself" if seeded else ""
        return _JointCode(block, sizes, sizes.guards(), joint, why_none)

    def _codes(self, found: _JointCode, level: Level) -> tuple[Code, Code]:
        if level.saved not in found.codes:
            self._finish(found, level, self._cut(found, level))
        return found.codes[level.saved]

    @whole(COMPILATION)
    def _finish(self, found: _JointCode, level: Level, both: Sequence[Waiting]) -> None:
        forward, backward = (replace(self._lowering.compiled(traced), guards=found.guards) for traced in both)
        found.codes[level.saved] = forward, backward

    def _cut(self, found: _JointCode, level: Level) -> list[Waiting]:
        forward, backward = found.joint.cut(level.saved)
        outputs = (True,) * found.joint.outputs
        return [self._traced(found, forward, outputs), self._traced(found, backward, found.joint.present)]

    def _traced(self, found: _JointCode, graph: fx.GraphModule, present: tuple[bool, ...]) -> Waiting:
        (returned,) = arguments(graph.graph.output_node())
        dtypes = tuple(node.meta["val"].dtype for node in returned)
        traced = Traced(graph, found.joint.draws_of(graph), False, present, dtypes, lifetimes(graph.graph))
        return Waiting(found.block, found.sizes, traced)


_AT_LEVEL = " at level "
