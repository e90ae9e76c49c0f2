"""Run a compiled program as PyTorch calls it: arguments in, outputs out, gradients through autograd."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from l2l_compile.devices.device import Device
from l2l_compile.devices.host import is_host, outside_inference_mode, without_autocast
from l2l_compile.devices.ranges import ranges
from l2l_compile.errors import DeviceError, L2LError
from l2l_compile.frontend.dynamo.wrong_inputs import error_of_dtypes
from l2l_compile.ir import nodes
from l2l_compile.ir.captured import Captured, Part
from l2l_compile.ir.graph import dims_of_memory
from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Segment
from l2l_compile.ir.values import TensorSpec, dim_of, evaluate, is_float
from l2l_compile.lanes import Lane
from l2l_compile.lowering.lower import Lowering
from l2l_compile.memory.address import address, memory_of
from l2l_compile.options import Options
from l2l_compile.ranks.announcements import Kind, number_of
from l2l_compile.ranks.ranks import Ranks
from l2l_compile.ranks.sharded import local, sharded_as
from l2l_compile.reentry import check, whole
from l2l_compile.runtime.executor import Executor
from l2l_compile.runtime.instructions import instructions_of
from l2l_compile.runtime.segment_run import lowerings
from l2l_compile.runtime.slab import slab_bytes
from l2l_compile.runtime.slabs import Slabs
from l2l_compile.runtime.stashes import Stashes, StashQueue
from l2l_compile.runtime.step import BlockCheck, Host, RuntimeValue, Stats, Step
from l2l_compile.torch_internals.autograd import accumulates, graph_is_kept

_COMPARED = 256  # entries of each input, about, that ranks which share parallel layers compare


def _no_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is no view: autograd forbids writes into a view that a Function returns."""
    if not tensor._is_view():
        return tensor
    return tensor.new_empty(0).set_(tensor)  # type: ignore[call-overload]  # PyTorch's stubs lack set_(Tensor)


def _overwrite(argument: torch.Tensor, contents: torch.Tensor) -> None:
    """Write into an argument. A tensor that the user has made under inference mode can be written there alone."""
    with torch.inference_mode() if argument.is_inference() else torch.no_grad():
        argument.copy_(contents)


def _laid_out(tensor: torch.Tensor, dims: tuple[int, ...] | None) -> torch.Tensor:
    """The tensor with its dimensions in this order in memory; None for the order that it has."""
    if dims is None:
        return tensor
    inverse = sorted(range(len(dims)), key=dims.__getitem__)
    return tensor.permute(dims).contiguous().permute(inverse)


def _joined(value: RuntimeValue, spec: TensorSpec) -> torch.Tensor:
    """A value on the host as one tensor, for all micro-batches."""
    return torch.cat(value.tensors, spec.rows.dim) if len(value.tensors) > 1 else value.tensors[0]


class Runner:
    """The callable that Dynamo gets for a graph. One step at a time.

    gradient_mask    which outputs have a gradient in `program.backward`
    differentiable   which outputs can have one
    rebuild          makes the backward graph for another mask of gradients
    started          called with the runner before every forward
    waiting          the stashes of all programs of the session
    check            compares blocks on rows together and apart, if the user asked for it
    """

    def __init__(
        self,
        program: Program,
        options: Options,
        device: Device,
        lowering: Lowering,
        server: Host,
        *,
        gradient_mask: tuple[bool, ...],
        differentiable: tuple[bool, ...],
        rebuild: Callable[[tuple[bool, ...]], fx.GraphModule],
        started: Callable[[Runner], None],
        waiting: StashQueue,
        check: BlockCheck | None = None,
    ):
        self.program, self.options, self.device, self.lowering, self.server = program, options, device, lowering, server
        self.captured: Captured = program.captured
        self.stats = Stats()
        self._backwards: dict[tuple[bool, ...], fx.GraphModule] = {}
        if program.backward is not None:
            self._backwards[gradient_mask] = program.backward
        self._lowered: set[tuple] = set()  # sizes for which compilation has begun
        self._rebuild, self._started, self._waiting, self._check_blocks = rebuild, started, waiting, check
        self._slab_bytes = slab_bytes(program.segments, self.captured.hints)
        self._argument_of = {i.node: i.index for i in self.captured.inputs}
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by index: a parameter, and its slice
        result = nodes.returned(program.forward.graph)
        made = result.outputs
        first = {node: position for position, node in reversed(list(enumerate(made))) if node is not None}
        self._outputs = [*self.captured.outputs, *(self.captured.inputs[index].node for index in program.carried)]
        self._written = [*program.carried, *(nodes.operands(node).input for node in result.writes)]
        self._made = sorted(first.values())  # positions among the outputs, each value once
        self._source = [None if node is None else self._made.index(first[node]) for node in made]
        self._viewed = {view.base for view in self.captured.views.values() if not view.of_argument}
        self._layouts = self._layouts_in_eager()
        self.differentiable = [differentiable[position] for position in self._made]
        parameters = (i for i in self.captured.inputs if i.kind == "parameter")
        self._frozen = [i.index for i in parameters if not i.node.meta["example_value"].requires_grad]

    def _layouts_in_eager(self) -> dict[int, tuple[int, ...]]:
        """The dimensions of outputs in the order of eager's memory (channels_last), by position; blocks make contiguous ones."""
        found = {}
        for position in self._made:
            example = self._outputs[position].meta.get("example_value")
            plain = isinstance(example, FakeTensor) and example.layout is torch.strided and position not in self._viewed
            dims = dims_of_memory(example) if plain else None
            if dims is not None and sorted(dims) != dims:
                found[position] = tuple(dims)
        return found

    @whole("a forward")
    def __call__(self, *arguments: Any) -> list:
        """One forward pass; outputs on the host, joined to autograd where they take a gradient. Raises `ReentryError`."""
        check()
        self._check(arguments)
        if any(self.differentiable) and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            made = _Streamed.apply(self, *arguments)
        else:
            with outside_inference_mode():
                made, _, _ = self.forward(arguments, to_train=False)
        outputs = [
            self._plain(node, arguments) if source is None else made[source]
            for node, source in zip(self._outputs, self._source, strict=True)
        ]
        for index in reversed(self.program.carried):
            arguments[index].copy_(outputs.pop())  # recorded by autograd: gradients of later readers of the argument lead here
        for position, spec in self.captured.dropped.items():
            outputs[position] = torch.empty(spec.sizes(self.captured.bindings(arguments)), dtype=spec.dtype, device="meta")
        if self.captured.views:
            self.captured.fill_views(outputs, arguments, self.captured.bindings(arguments))
        return outputs

    def _plain(self, node: Any, arguments: Sequence) -> Any:
        """An output that no segment makes: an argument as it came, a size, a constant."""
        if not isinstance(node, fx.Node):
            return node
        if node in self._argument_of:
            return arguments[self._argument_of[node]]
        if node.target in self.captured.constants:
            return self.captured.constants[node.target]
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            return evaluate(dim_of(value), self.captured.bindings(arguments))
        return value

    def _part_of(self, arguments: Sequence, index: int, part: Part) -> torch.Tensor:
        """A slice of a parameter; the same tensor in every step, unless the parameter has moved."""
        whole = arguments[part.of]
        view = part.view(whole)
        if index in self._parts:
            before, known = self._parts[index]
            if before is whole and address(known) == address(view):
                return known
        self._parts[index] = (whole, view)
        return view

    def _check(self, arguments: Sequence) -> None:
        for argument, i in zip(arguments, self.captured.inputs, strict=True):
            if isinstance(argument, torch.Tensor) and argument.device.type != "cpu":
                raise DeviceError(f"input '{i.name}' is on {argument.device}; leave the model and its inputs on the host")
        unfrozen = [i for i in self._frozen if arguments[i].requires_grad] if torch.is_grad_enabled() else []
        if unfrozen:  # the guards of PyTorch 2.11 do not check requires_grad
            raise L2LError(
                f"{len(unfrozen)} parameters had requires_grad=False when the model was compiled, and PyTorch {torch.__version__} does not "
                "compile it again for them: they would get no gradient. Call torch._dynamo.reset() after you unfreeze parameters"
            )
        if self.device.assertions_are_final:
            self.captured.check_indices(arguments)

    def forward(self, arguments: Sequence, to_train: bool) -> tuple[list[torch.Tensor], Step, Stashes]:
        """Run the forward graph. Returns the outputs that it makes, on the host, and the step and the stashes for backward.

        `to_train` says whether a backward may follow.
        """
        start = self.device.now()
        self._started(self)
        self.stats = Stats()
        self.device.start_peak()
        captured = self.captured
        pieces = map(local, arguments)
        inputs_seen = [*pieces, *(self._part_of(arguments, i.index, i.part) for i in captured.parts if i.part is not None)]
        kept = {*self._written, *(self.snapshots(arguments) if to_train else ())}
        for index in kept:  # backward recomputes from the values that forward read, before later writes
            inputs_seen[index] = arguments[index].detach().clone()
        step = Step(
            inputs_seen,
            arguments,
            captured.constants,
            captured.bindings(arguments),
            captured.batch,
            self.options.micro_batches,
            self.lowering,
            self.stats,
            self.server,
            check=self._check_blocks,
            world=captured.world,
        )
        if captured.world is not None:
            self._announce_forward(captured.world, step, to_train)
        numbers = [number for symbol, number in step.bindings.items() if not is_float(symbol)]
        if (sizes := (to_train, *numbers, sum(step.rows_of_ranks))) not in self._lowered:
            self._lowered.add(sizes)
            self.lowering.ahead(lowerings(step, self.program, to_train))
        self.server.begin_forward(
            step, [a for a, i in zip(arguments, captured.inputs, strict=True) if i.kind == "parameter"], to_train
        )
        self.program.bindings = step.bindings
        inputs = [RuntimeValue([inputs_seen[i.index]]) for i in captured.inputs if not i.is_weight and i.node in captured.specs]
        try:
            outputs, kept, _ = self._run(self.program.forward.graph, step, inputs, keep=to_train)
        except RuntimeError as error:
            self._check_dtypes(arguments, error)
            raise
        accesses = self.device.accesses
        accesses.read(step.places[0])
        for index, contents in step.writes.items():
            _overwrite(arguments[index], contents)
        stashes = Stashes(self.device, kept)
        if to_train:
            self._waiting.add(stashes)
        for position in self._made:
            accesses.read(outputs[position].place)
        made = [_joined(outputs[position], captured.specs[self._outputs[position]]) for position in self._made]
        made = [t.contiguous() if position in self._viewed else t for position, t in zip(self._made, made, strict=True)]
        kept_memory = {memory_of(t) for value in kept for t in value.tensors}
        made = [t.clone() if memory_of(t) in kept_memory else self.device.handed_over(t) for t in made]
        made = [_no_view(_laid_out(t, self._layouts.get(position))) for position, t in zip(self._made, made, strict=True)]
        self.stats.forward_seconds = self.device.now() - start
        self.stats.peak_device_bytes = self.device.peak_bytes()
        return made, step, stashes

    def _check_dtypes(self, arguments: Sequence, error: RuntimeError) -> None:
        """Raise `InputError` in the place of an error of a forward whose cause is the dtype of an input."""
        named = [(i, arguments[i.index]) for i in self.captured.inputs if isinstance(arguments[i.index], torch.Tensor)]
        values = [(i.name, tensor) for i, tensor in named if i.kind == "value"]
        wrong = error_of_dtypes(error, values, [tensor for i, tensor in named if i.kind == "parameter"])
        if wrong is not None:
            for note in getattr(error, "__notes__", ()):
                wrong.add_note(note)
            wrong.first_useful_frame = inspect.currentframe()  # Dynamo leaves the frames before it out of the traceback
            raise wrong from None

    def backward(
        self, step: Step, stashes: list[RuntimeValue], gradients: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor]:
        """Run the backward graph, given gradients of the outputs of forward. Returns gradients by index of the argument."""
        start = self.device.now()
        self.stats = step.stats  # torch.utils.checkpoint has run another forward since
        mask = [False] * len(self._outputs)
        for position, gradient in zip(self._made, gradients, strict=True):
            mask[position] = gradient is not None
        module = self._backward_for(tuple(mask))
        if step.world is not None:
            step.world.announce(Kind.BACKWARD, collectives_of(module.graph, self.program.segments))
        self.server.begin_backward(step, module.graph, self.program.segments)
        scale = step.scale
        gradients = [g if g is None else g * scale for g in gradients] if scale != 1.0 else gradients
        returned = self._run(module.graph, step, [*stashes, *(RuntimeValue([g]) for g in gradients if g is not None)])
        values = [i.index for i in self.captured.inputs if i.kind == "value"]
        for value in filter(None, returned):
            self.device.accesses.read(value.place)
        found = {
            i: self.device.handed_over(value.tensors[0])
            for i, value in zip(values, returned, strict=True)
            if value is not None and not value.absent
        }
        if scale != 1.0:
            found = {i: g / scale for i, g in found.items()}
        found |= {i: sharded_as(g, step.given[i]) for i, g in self.server.end_backward(step).items()}
        self.stats.backward_seconds += self.device.now() - start
        self.stats.peak_device_bytes = max(self.stats.peak_device_bytes, self.device.peak_bytes())
        return found

    def snapshots(self, arguments: Sequence[torch.Tensor]) -> set[int]:
        """The arguments that are copied for backward, so that somebody may write into them after forward.

        These are the inputs that the model clones, and values in memory that PyTorch did not allocate, such as NumPy's: a write
        into that memory would not be noticed.
        """
        values = [i.index for i in self.captured.inputs if i.kind == "value"]
        return {*self.captured.snapshots, *(index for index in values if _is_of_others(arguments[index]))}

    def _backward_for(self, mask: tuple[bool, ...]) -> fx.GraphModule:
        if mask not in self._backwards:
            self._backwards[mask] = self._rebuild(mask)
        module = self.program.backward = self._backwards[mask]
        return module

    def _announce_forward(self, world: Ranks, step: Step, to_train: bool) -> None:
        """Begin a forward together with the other ranks. Raises `RankError` and, for a rank without rows, `L2LError`."""
        world.forwards += 1
        collectives = collectives_of(self.program.forward.graph, self.program.segments)
        count = step.rows if step.batch is not None else self._rows_of(step.given)
        told = (
            count,
            len(step.sizes),
            step.base_seed(),
            self._number_of_inputs(step.given) if to_train and world.parts > 1 else 0,
        )
        rows = world.announce(Kind.FORWARD, collectives, to_train, told, functools.partial(_refuse_rows, world.parts))
        step.seed = rows[0][2]
        each = rows[world.part :: world.parts]  # ranks that share parallel layers have the same micro-batches
        step.first_micro_batch = sum(micro_batches for _, micro_batches, *_ in each[: world.number // world.parts])
        if self.options.ranks == "global":
            step.rows_of_ranks = tuple(count for count, *_ in rows)

    def _number_of_inputs(self, arguments: Sequence) -> int:
        """A hash that differs for another batch, of up to some hundred entries of each input in host memory."""
        values = (
            arguments[i.index].detach()
            for i in self.captured.inputs
            if i.kind == "value" and not arguments[i.index].requires_grad
        )
        seen = (v.flatten()[:: max(1, v.numel() // _COMPARED)] for v in values if is_host(v.device))
        return number_of(b"".join(v.contiguous().view(torch.uint8).numpy().tobytes() for v in seen))

    def _rows_of(self, arguments: Sequence) -> int:
        """Rows of a batch that cannot be split: the size of the first dimension of the first value that has one."""
        values = (arguments[i.index] for i in self.captured.inputs if i.kind == "value")
        return next((v.shape[0] for v in values if v.dim()), 1)

    def _run(self, graph: fx.Graph, step: Step, inputs: Sequence[RuntimeValue], keep: bool = False) -> Any:
        """Run a graph; with `keep`, its last weights stay in their slabs for the backward of the step."""
        count = min(self.options.prefetch, 2 * len(self.program.segments)) + 1  # a graph has no more fetches
        try:
            with self.device.running(), ranges(self.device), torch.no_grad(), without_autocast(self.device.torch_device):
                self.device.reserve_slabs(count, self._slab_bytes)
                instructions = instructions_of(graph, self.device.launches_first)
                slabs = Slabs(self.device, step, count, instructions.fetches, keep)
                result = Executor(self.device, step, self.program.segments, slabs).run(instructions, inputs)
                if not keep:
                    slabs.end()
                self.device.synchronize()
            return result
        except BaseException as error:
            if step.world is not None:
                step.world.failed(error)
            try:
                self.device.recover()
            except Exception as another:  # noqa: BLE001 - a device that has failed for good fails in each call: the first error says why
                error.add_note(f"the device could not be used after it either: {type(another).__name__}: {another}")
            finally:
                self.server.recover(step)
            raise


def _refuse_rows(parts: int, told: list[list[int]]) -> None:
    """Raise `L2LError` if a rank has no rows, or if ranks that share parallel layers have different batches.

    `told` has the numbers that each rank announces before a forward: rows, micro-batches, seed, hash of its inputs.
    """
    for rank, (count, *_, own) in enumerate(told):
        if count == 0:
            raise L2LError(f"rank {rank} has a batch of no rows: every rank needs one row at least (drop_last=True, or pad)")
        first = rank - rank % parts
        if count != told[first][0]:
            raise L2LError(
                f"ranks {first} and {rank} share parallel layers and have batches of {told[first][0]} and {count} rows: they compute parts "
                "of the same rows, so give both the same batch"
            )
        if own and told[first][3] and own != told[first][3]:  # 0 without gradients
            raise L2LError(
                f"ranks {first} and {rank} share parallel layers and have other inputs than each other: they compute parts of the same rows, "
                "so give both the same batch (a DistributedSampler takes the rank and size of the first dimension of the mesh)"
            )


def collectives_of(graph: fx.Graph, segments: Sequence[Segment]) -> tuple[str, ...]:
    """The collectives of a graph, in order."""
    found = (node for node in graph.nodes if nodes.lane_of(node) == Lane.COMM)
    return tuple(_collective(node, segments) for node in found)


def _collective(node: fx.Node, segments: Sequence[Segment]) -> str:
    index = nodes.segment_of(node)
    return f"{nodes.called(node).name} {node.meta['value'] if index is None else segments[index].name}"


def _is_of_others(value: object) -> bool:
    """Whether a tensor is in memory that PyTorch did not allocate."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not local(value).untyped_storage().resizable()


class _Streamed(torch.autograd.Function):
    """Joins a program to autograd: forward streams, backward streams in reverse."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, *arguments: Any) -> Any:
        outputs, step, stashes = runner.forward(arguments, to_train=True)
        ctx.runner, ctx.step, ctx.stashes = runner, step, stashes
        ctx.set_materialize_grads(False)
        written = {*step.writes, *runner.program.carried, *runner.snapshots(arguments)}
        late = step.pending.parameters if step.pending is not None and runner.options.delay else ()  # versions of them are kept
        tensors = {
            i: a for i, a in enumerate(arguments) if isinstance(a, torch.Tensor) and i not in written and not (late and a in late)
        }
        ctx.versions = {i: a._version for i, a in tensors.items() if not a.is_inference()}
        ctx.save_for_backward(*tensors.values())  # so that a write into one before backward is an error, as in eager
        ctx.mark_non_differentiable(*[o for o, d in zip(outputs, runner.differentiable, strict=True) if not d])
        return tuple(outputs)

    @staticmethod
    @torch.compiler.disable  # a compiled frame may call backward: this is not a part of it
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True: the result would be silently cut off from the model
            raise L2LError(
                "backend 'l2l' computes first derivatives only: backward was called with create_graph=True. "
                "Differentiate the uncompiled model where second derivatives are needed"
            )
        try:
            ctx.saved_tensors  # noqa: B018 - raises when a saved tensor was written into, or when backward has run before
        except RuntimeError as error:
            if ctx.step.pending is not None:
                ctx.step.pending.check()  # the writer may be an update
            inputs = ctx.runner.captured.inputs
            changed = [inputs[i] for i, v in ctx.versions.items() if ctx.step.given[i]._version != v]
            if changed:
                kind = "input" if changed[0].kind == "value" else changed[0].kind
                error.add_note(
                    f"{kind} '{changed[0].name}' was written after the forward, and backend 'l2l' recomputes the forward from it. Write into it "
                    "after backward, or have the model read a copy of it (x.clone())"
                )
            raise
        return _differentiate(ctx, gradients)


@whole("a backward")
def _differentiate(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The backward of a program. Raises `ReentryError`."""
    check()
    count = len(ctx.runner.captured.inputs)
    if all(g is None for g in gradients):
        return (None,) * (1 + count)
    kept = graph_is_kept()
    _choose_gradients(ctx, ctx.step, kept)
    found = ctx.runner.backward(ctx.step, ctx.stashes.take(keep=kept), gradients)
    return None, *(found.get(index) for index in range(count))


def _choose_gradients(node: Any, step: Step, kept: bool) -> None:
    """Set `step.for_optimizer`: whether the current backward is for the optimizer.

    If it is not, and if it is the last backward through its forward, the pending backward is given up. Raises `L2LError`.
    """
    step.for_optimizer = True
    if step.pending is None:
        return
    try:
        step.for_optimizer = accumulates(node, step.given, step.pending.parameters)
    except ValueError as error:
        raise L2LError(
            f"{error}: the option optimizer has all gradients of a backward go to its updates, so that none can be returned or left "
            "out. Use update='at_step'"
        ) from error
    if not (step.for_optimizer or kept):
        step.pending.give_up()
