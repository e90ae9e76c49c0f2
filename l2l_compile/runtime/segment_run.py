"""The inner loop: every micro-batch of the batch through one segment, forward or backward."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import fx

from l2l_compile.devices.device import Device
from l2l_compile.errors import L2LError
from l2l_compile.ir import nodes
from l2l_compile.ir.precision import gradient_dtype
from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Block, Segment
from l2l_compile.ir.values import Bindings, TensorSpec
from l2l_compile.lowering.code_cache import Lowered
from l2l_compile.lowering.lower import Request, wanted_of
from l2l_compile.lowering.randomness import derived_seed
from l2l_compile.lowering.savings import Saving, SavingRequest
from l2l_compile.runtime.kept_activations import KeptLevels, KeptPart
from l2l_compile.runtime.rows import StepRows
from l2l_compile.runtime.runtime_value import RuntimeValue
from l2l_compile.runtime.step import Step


def lowerings(step: Step, program: Program, to_train: bool) -> Iterator[Request]:
    """The lowerings that a step through a program needs, each once, in the order in which they run: forward first."""
    seen: set[tuple] = set()
    for graph in (program.forward.graph, program.backward.graph if to_train and program.backward is not None else None):
        for node in filter(nodes.runs_segment, graph.nodes if graph is not None else ()):
            for number, request in enumerate(requests(step, node, program.segments)):
                if part_of(step, nodes.operands(node).segment, number) is not None:
                    continue
                block, bindings, which, wanted = request
                key = block, which, wanted, bindings.get(step.rows.batch)
                if key not in seen:
                    seen.add(key)
                    yield request


def part_of(step: Step, segment: int, micro_batch: int) -> KeptPart | None:
    """What a segment keeps of a micro-batch for its backward."""
    levels = step.levels.get(segment)
    return levels.parts[micro_batch] if levels is not None else None


def kept_on_host(step: Step, segment: int) -> list[int]:
    """The micro-batches of a segment of which something is kept on the host."""
    levels = step.levels.get(segment)
    return [n for n, part in enumerate(levels.parts) if part is not None and part.on_host] if levels is not None else []


def savings_of(levels: Mapping[int, KeptLevels], rows: StepRows, program: Program) -> Iterator[SavingRequest]:
    """The savings that segments with these levels need, each once."""
    seen: set[tuple] = set()
    for index, kept in levels.items():
        segment = program.segments[index]
        for part, bindings in zip(kept.parts, rows.bindings_of(segment), strict=True):
            if part is None:
                continue
            key = segment.block, kept.mask, part.level, bindings.get(rows.batch)
            if key not in seen:
                seen.add(key)
                yield segment.block, bindings, kept.mask, part.level


def usable_savings(step: Step, segment: int, gradient_mask: tuple[bool, ...]) -> list[Saving | None]:
    """The code of each micro-batch of a segment for a backward with these gradients; [] if it was saved for other ones, or nothing was."""
    found = step.savings.get(segment, [])
    return found if all(saving is None or saving.mask == gradient_mask for saving in found) else []


def requests(step: Step, node: fx.Node, segments: Sequence[Segment]) -> Iterator[Request]:
    """The lowerings that a node which runs a segment needs, one a micro-batch, if every gradient arrives that may arrive."""
    segment = segments[nodes.operands(node).segment]
    block = segment.block
    read = nodes.operands(node)
    for number, bindings in enumerate(step.rows.bindings_of(segment)):
        if read.turn not in (None, number):
            continue
        if node.target is nodes.forward:
            wanted = tuple(i in read.wanted for i in range(len(block.outputs))) if read.wanted else None
            yield block, bindings, "forward", wanted or wanted_of(block, again=number > 0)
        else:
            yield block, bindings, "backward", tuple(gradient is not None for gradient in nodes.arriving_gradients(node))


def run_forward(
    step: Step,
    device: Device,
    segment: Segment,
    weights: RuntimeValue,
    operands: Sequence[RuntimeValue],
    results: Sequence[RuntimeValue],
    turn: int | None = None,
    wanted: Sequence[int] = (),
) -> list[Callable[[], None]]:
    """Work for the compute lane, one for each micro-batch (or for that of `turn`), that runs a segment forward and adds to `results`.

    Lowers in this call, on the caller's thread. With `wanted`, only the results with these indices are made.
    """
    return _Forward(step, device, segment, weights, operands, results, turn, wanted).inner_loop()


def run_backward(
    step: Step,
    device: Device,
    segment: Segment,
    weights: RuntimeValue,
    operands: Sequence[RuntimeValue],
    gradients: Sequence[RuntimeValue],
    kept: Sequence[RuntimeValue],
    results: Sequence[RuntimeValue],
    passing: frozenset[int] = frozenset(),
    turn: int | None = None,
) -> list[Callable[[], None]]:
    """Work, one for each micro-batch, that recomputes and differentiates a segment. `kept` is what forward has kept: what it has left on
    the device, and what comes back from the host. `passing` are results whose parts are freed as they leave for other ranks.

    Marks at once which results exist; the last micro-batch fills them. The first piece of work may read the arriving
    gradients of the first two micro-batches.
    """
    return _Backward(step, device, segment, weights, operands, gradients, kept, results, passing, turn).inner_loop()


class _Run(ABC):
    """One segment of a step, forward or backward: its code for each micro-batch, its operands, its seeds.

    count    how many micro-batches the segment has
    lowered  the code of those that run now, by their numbers: of all, or of one turn
    """

    which: ClassVar[str]

    def __init__(
        self,
        step: Step,
        device: Device,
        segment: Segment,
        weights: RuntimeValue,
        operands: Sequence[RuntimeValue],
        turn: int | None = None,
    ):
        self.step, self.device, self.segment, self.block, self.turn = step, device, segment, segment.block, turn
        self.weights, self.operands = weights, operands
        sizes = step.rows.bindings_of(segment)
        self.count, numbers = len(sizes), range(len(sizes)) if turn is None else [turn]
        self.lowered = {number: self.lower(number, sizes[number]) for number in numbers}
        self._check_fetched()
        self.seeds = self._seeds()

    def inner_loop(self) -> list[Callable[[], None]]:
        """Work for each micro-batch, in order."""
        return [functools.partial(self.micro_batch, number) for number in self.lowered]

    @property
    def first(self) -> Lowered:
        """The code of the first micro-batch that runs now."""
        return next(iter(self.lowered.values()))

    @abstractmethod
    def micro_batch(self, number: int) -> None:
        """Run a micro-batch (compute lane)."""

    def lower(self, number: int, bindings: Bindings) -> Lowered:
        """The code of a micro-batch at these sizes."""
        try:
            return self._lower(number, bindings)
        except Exception as error:
            error.add_note(f"while lowering {self.which} of segment '{self.segment.name}'")
            raise

    @abstractmethod
    def _lower(self, number: int, bindings: Bindings) -> Lowered: ...

    def _check_fetched(self) -> None:
        """Raise `L2LError` if the code reads a weight that was not fetched because no known code read it."""
        unfetched = self.weights.unfetched
        if unfetched and not all(unfetched <= code.unread(len(self.block.weights)) for code in self.lowered.values()):
            names = ", ".join(self.segment.weights[i].name for i in sorted(unfetched))
            raise L2LError(
                f"{self.which} of segment '{self.segment.name}' reads a weight that was not fetched for it ({names}). This is a bug of "
                "l2l_compile: please report it with the model"
            )

    def _seeds(self) -> dict[int, int]:
        """A seed for each micro-batch; none where nothing is random."""
        if not any(code.random for code in self.lowered.values()):
            return {}
        base = self.step.base_seed()
        first = self.step.rows.first if self.block.inner_looped else 0
        return {number: derived_seed(base, self.segment.index, first + number) for number in self.lowered}

    def arguments(self, number: int) -> list[torch.Tensor]:
        """Weights, and the operands of a micro-batch."""
        return [*self.weights.tensors, *(micro_batch_of(o.tensors, number) for o in self.operands)]

    def call(self, code: Lowered, number: int, arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run code with the random draws of a micro-batch."""
        self.device.begins_micro_batch(number)
        self.device.use_workspace(code.workspace_bytes)
        try:
            if not code.random:
                return code.run(*arguments)
            seed = self.seeds[number]
            draws = [d.make(self.device.generator(derived_seed(seed, d.number))) for d in code.draws]
            with self.device.seeded(seed) if code.seeded else nullcontext():
                return code.run(*arguments, *draws)
        except Exception as error:
            read = ", ".join(f"{value} ({str(t.dtype).removeprefix('torch.')})" for value, t in self._named(arguments))
            error.add_note(f"in segment '{self.segment.name}', {self.which} of micro-batch {number + 1}, which reads {read}")
            raise

    def _named(self, arguments: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights and values that the segment reads, by name."""
        names = [*(weight.name for weight in self.segment.weights), *map(str, self.segment.values)]
        return zip(names, arguments, strict=False)


class _Forward(_Run):
    """Outputs of a segment, micro-batch by micro-batch."""

    which = "forward"

    def __init__(
        self,
        step: Step,
        device: Device,
        segment: Segment,
        weights: RuntimeValue,
        operands: Sequence[RuntimeValue],
        results: Sequence[RuntimeValue],
        turn: int | None,
        wanted: Sequence[int],
    ):
        self.levels, self.wanted = step.levels.get(segment.index), frozenset(wanted)
        self.savings: list[Saving | None] = []
        super().__init__(step, device, segment, weights, operands, turn)
        *self.results, self.kept, self.sent = results
        is_checked = step.engine.check is not None and turn is None and not wanted
        self.compare = step.engine.check.forward(step, segment, weights, operands) if is_checked and step.engine.check else None
        for result in (*self.results, self.kept):
            result.tensors = []
        if self.levels is not None:
            step.savings[segment.index] = self.savings

    def _lower(self, number: int, bindings: Bindings) -> Lowered:
        engine, part = self.step.engine, part_of(self.step, self.segment.index, number)
        if self.wanted:
            outputs = tuple(i in self.wanted for i in range(len(self.block.outputs)))
            return engine.lowering.forward(self.block, bindings, outputs=outputs)
        if self.levels is None or part is None:
            self.savings.append(None)
            return engine.lowering.forward(self.block, bindings, number > 0)
        saving = engine.savings.saving((self.block, bindings, self.levels.mask, part.level))
        self.savings.append(saving)
        return saving.forward

    def micro_batch(self, number: int) -> None:
        if self.compare and number == 0:
            self.compare()
        code = self.lowered[number]
        made = self.call(code, number, self.arguments(number))
        if self.levels is not None and self.savings[number] is not None:
            made = self._keep(made, number)
        outputs = zip(self.results, self.block.outputs, code.present, strict=True)
        filled = [(result, spec) for result, spec, present in outputs if present]
        for (result, spec), tensor in zip(filled, made, strict=True):
            self._add(result, spec, tensor, number)

    def _keep(self, made: Sequence[torch.Tensor], number: int) -> Sequence[torch.Tensor]:
        """Keep what code has saved for backward. Returns the other results."""
        count, part = len(self.block.outputs), part_of(self.step, self.segment.index, number)
        saved = [tensor.contiguous() for tensor in made[count:]]
        if part is not None and part.on_host:
            self.sent.results[number].tensors = saved
        else:
            self.kept.tensors += saved
        self.device.hold(saved)
        return made[:count]

    def _add(self, result: RuntimeValue, spec: TensorSpec, tensor: torch.Tensor, number: int) -> None:
        """Add a micro-batch's part to an output. If it is computed once, the first micro-batch's part counts for all."""
        if number == 0 or not spec.computed_once:
            if not tensor.is_contiguous():  # Inductor copies the strides of the other operand of a `cat` with an empty tensor
                tensor = tensor.contiguous()
            parts = self.step.rows.replicate(tensor, spec) if spec.equal_rows else [tensor]
            result.tensors += parts
            self.device.hold(parts)


class _Backward(_Run):
    """Gradients of a segment's operands: of a split value one a micro-batch, of any other operand the sum.

    gradient_mask  for each output, whether its gradient arrives
    present        for each operand, whether it has a gradient
    parts          gradients of a split operand, one a micro-batch, by the operand's index
    sums           the sum of the gradients of any other operand, by its index
    gathered       parts and sums, which stay on the device until the results are made
    """

    which = "backward"

    def __init__(
        self,
        step: Step,
        device: Device,
        segment: Segment,
        weights: RuntimeValue,
        operands: Sequence[RuntimeValue],
        gradients: Sequence[RuntimeValue],
        kept: Sequence[RuntimeValue],
        results: Sequence[RuntimeValue],
        passing: frozenset[int],
        turn: int | None,
    ):
        if turn is not None:
            passing = frozenset(range(len(segment.values)))  # the gradients of a turn are results as they are
        self.passing = frozenset(len(segment.block.weights) + index for index in passing)  # by operand
        self.gradient_mask = tuple(not g.absent for g in gradients)
        self.kept, self.restored = kept
        self.savings = usable_savings(step, segment.index, self.gradient_mask)
        super().__init__(step, device, segment, weights, operands, turn)
        block = self.block
        self.arriving = [(g, spec) for g, spec in zip(gradients, block.outputs, strict=True) if not g.absent]
        self.present = self.first.present
        *self.of_values, self.bundle = results
        self._mark_absent()
        self.whole = self._lower_whole()
        is_checked = step.engine.check is not None and turn is None
        self.compare = (
            step.engine.check.backward(step, segment, weights, operands, gradients) if is_checked and step.engine.check else None
        )
        self.per_micro_batch = self._parts_of_values()
        self.sums, self.gathered = step.sums.pop(segment.index, ({}, []))
        if turn is not None and turn < self.count - 1:
            step.sums[segment.index] = self.sums, self.gathered

    def _lower(self, number: int, bindings: Bindings) -> Lowered:
        if (saving := self._saving(number)) is not None:
            return saving.backward
        return self.step.engine.lowering.backward(self.block, bindings, self.gradient_mask)

    def _mark_absent(self) -> None:
        """Mark the results that will not exist as absent: the program runs without them."""
        of_weights, of_values = self.present[: len(self.block.weights)], self.present[len(self.block.weights) :]
        for result, exists in zip(self.of_values, of_values, strict=True):
            result.absent = not exists
        self.bundle.absent = not any(of_weights)

    def _parts_of_values(self) -> dict[int, list[torch.Tensor]]:
        """Lists for the gradients of split values, by the index of their operands: results that fill micro-batch by micro-batch."""
        first = len(self.block.weights)
        found: dict[int, list[torch.Tensor]] = {}
        for index, (result, spec) in enumerate(zip(self.of_values, self.block.values, strict=True), first):
            if not result.absent and _split(self.block, spec):
                result.tensors = found[index] = []
        return found

    def _lower_whole(self) -> Lowered | None:
        """Code for all micro-batches at once, where a sum over the batch must have the same order as in eager."""
        if not self.block.summed_whole or self.count == 1 or self.first.random:
            return None
        return self.lower(0, self.segment.bindings(self.step.rows.bindings))

    def micro_batch(self, number: int) -> None:
        if self.compare and number == 0:
            self.compare()
        arriving = [gradient_of(self.step, self.block, g.tensors, number, spec) for g, spec in self.arriving]
        operands = [*self.arguments(number), *arriving, *self._saved(number)]
        self._gather(self.call(self.lowered[number], number, operands))  # and let go of what it made
        if number == self.count - 1:
            self._finish()

    def _saving(self, number: int) -> Saving | None:
        """The code of a micro-batch, if forward has saved something in it."""
        return self.savings[number] if self.savings else None

    def _saved(self, number: int) -> Sequence[torch.Tensor]:
        """What forward has saved in a micro-batch."""
        if (saving := self._saving(number)) is None:
            return ()
        on_host = set(kept_on_host(self.step, self.segment.index))
        if number in on_host:
            return self.restored.tensors[number]
        first = sum(s.count for n, s in enumerate(self.savings[:number]) if s is not None and n not in on_host)
        return self.kept.tensors[first : first + saving.count]

    def _indices_and_specs(self) -> Iterator[tuple[int, TensorSpec]]:
        """The operands that have a gradient, in the order in which code gives them."""
        return ((i, spec) for i, (spec, exists) in enumerate(zip(self.block.operands, self.present, strict=True)) if exists)

    def _gather(self, made: Sequence[torch.Tensor]) -> None:
        """Keep each gradient of a micro-batch as a part, or add it to its sum."""
        before = len(self.gathered)
        leaving: list[torch.Tensor] = []
        for (index, spec), gradient in zip(self._indices_and_specs(), made, strict=True):
            if _split(self.block, spec):
                self.per_micro_batch[index].append(gradient)
                (leaving if index in self.passing else self.gathered).append(gradient)
            elif index in self.sums:
                self.sums[index].add_(gradient)
            else:
                self.sums[index] = gradient if self.count == 1 else _as_sum(gradient)
                self.gathered.append(self.sums[index])
        self.device.hold([*self.gathered[before:], *leaving])

    def _finish(self) -> None:
        """After the last micro-batch: fill the results, and free the parts and sums."""
        self._sum_whole()
        first = len(self.block.weights)
        for index, (result, spec) in enumerate(zip(self.of_values, self.block.values, strict=True), first):
            if not result.absent:
                result.tensors = self.per_micro_batch.get(index) or [self.sums[index].to(spec.gradient_dtype)]
                if index not in self.passing:
                    self.device.hold(result.tensors)
        if not self.bundle.absent:
            self.bundle.tensors = [self.sums.get(i) for i in range(len(self.block.weights))]
            if not self.segment.sharded:  # else the reduction over the ranks does this, after the last sum
                self._finish_bundle()
            self.device.hold([gradient for gradient in self.bundle.tensors if gradient is not None])
        self.device.free(self.gathered)

    def _sum_whole(self) -> None:
        """Replace sums whose rounding depends on the order by sums over the whole batch at once."""
        if self.whole is None:
            return
        read = [*zip(self.operands, self.block.values, strict=True), *self.arriving]
        arguments = [*self.weights.tensors, *(joined(value.tensors, spec) for value, spec in read)]
        made = self.call(self.whole, 0, arguments)
        for (index, _), gradient in zip(self._indices_and_specs(), made, strict=True):
            if index in self.block.summed_whole:
                self.sums[index] = gradient

    def _finish_bundle(self) -> None:
        bundle = zip(self.block.weights, self.bundle.tensors, strict=True)
        self.bundle.tensors = [for_the_link(self.step, spec, gradient) for spec, gradient in bundle]
        if self.step.host.wants_norms and self.device.takes_norms:
            self.bundle.tensors.append(norms(self.bundle.tensors))


def for_the_link(step: Step, spec: TensorSpec, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of a weight in the dtype in which it crosses the link."""
    return gradient if gradient is None else gradient.to(gradient_dtype(spec, step.host.gradient_wire))


def norms(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The norm of each gradient that is not None, summed in float32 at least; a float64 tensor on the device."""
    there = [g for g in gradients if g is not None]
    wide = [torch.promote_types(g.dtype, torch.float32) for g in there]
    return torch.stack([torch.linalg.vector_norm(g, dtype=dtype).double() for g, dtype in zip(there, wide, strict=True)])


def _split(block: Block, spec: TensorSpec) -> bool:
    return block.inner_looped is True and spec.splits


def micro_batch_of(tensors: Sequence[torch.Tensor], micro_batch: int) -> torch.Tensor:
    """A value for one micro-batch: its own part, or the one tensor that all micro-batches share."""
    return tensors[micro_batch] if len(tensors) > 1 else tensors[0]


def joined(tensors: Sequence[torch.Tensor], spec: TensorSpec) -> torch.Tensor:
    """A value for all micro-batches at once."""
    return torch.cat(list(tensors), spec.rows.dim) if len(tensors) > 1 else tensors[0]


def gradient_of(step: Step, block: Block, tensors: Sequence[torch.Tensor], micro_batch: int, spec: TensorSpec) -> torch.Tensor:
    """A gradient for one micro-batch.

    The gradient of a partial sum counts in every micro-batch, times its weight. The gradient of a value that all micro-batches
    share counts in the first one, and is zero in the others.
    """
    if block.inner_looped and spec.partial is not None:
        return tensors[0] * step.rows.partial_weight(micro_batch, spec.partial)
    if _split(block, spec):
        return micro_batch_of(tensors, micro_batch)
    if micro_batch == 0:
        return tensors[0]
    return torch.zeros_like(tensors[0])


def _as_sum(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient to which further ones are added: gradients of 16 bits are summed in 32 bits."""
    return gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient
