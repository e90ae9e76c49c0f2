"""The node vocabulary of a program. A node is an `fx` call of one of the functions declared here; the executor runs it.

The declaration is all that the rest of the project knows of a node. The signature gives names and types of the operands, and
`@operation` gives the lane and the kind of the result. These determine how a node is printed and parsed, where its operands
have to be, whether its result is released, and which operands the executor's handler gets.

A value is *whole* (one tensor) or *split* (one tensor per micro-batch). Segments and inputs are named by their index in
`Program.segments` and in the inputs of the captured graph; the text form shows their names.
"""

from __future__ import annotations

import enum
import inspect
import operator
import typing
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from l2l_compile.ir.schedule import PAUSE
from l2l_compile.lanes import Lane


class SegmentIndex:
    """An operand: a segment, by its index in `Program.segments`."""


class InputIndex:
    """An operand: an input of the captured graph, by its index."""


class OnDevice:
    """An operand: a value on the device."""


class OnHost:
    """An operand: a value on the host."""


class StoredOnDisk:
    """An operand: a value on the disk."""


class Done:
    """An operand: a node without a value, which must be done before this node starts."""


class Results:
    """An operand: a node with several results."""


_KINDS: tuple[type, ...] = (SegmentIndex, InputIndex, OnDevice, OnHost, StoredOnDisk, Done, Results, int, str)


class Result(enum.Enum):
    """The kind of result that a node stands for."""

    DEVICE = "a value in memory of the device, or a weight slab: it has to be released"
    HOST = "a value on the host"
    DISK = "a value on the disk"
    SEVERAL = "a tuple of values, of which `getitem` picks one"
    KEPT = "the value that it reads, which stays on the device for backward, or for the next call"
    TAKEN = "its operand, in the same memory: whoever releases the result releases the operand"
    DONE = "no value: others may wait until it is done"
    NOTHING = "no value"


class Carries(enum.Enum):
    """What of its segment a node moves: over the link, or between ranks."""

    WEIGHTS = "parameters and buffers"
    GRADIENTS = "gradients of the trained parameters"


@dataclass(frozen=True)
class Operand:
    """One operand of an operation: its name, its kind (a class of `_KINDS`), whether it may be None, and its default.

    `several` says whether it is a tuple. `nullable` then holds for the members of the tuple.
    """

    name: str
    kind: type
    nullable: bool
    default: Any = inspect.Parameter.empty
    several: bool = False

    @property
    def optional(self) -> bool:
        return self.default is not inspect.Parameter.empty


@dataclass(frozen=True)
class Operation:
    """A word of the vocabulary: a function with its operands, its lane, the kind of its result, and what of its segment it moves."""

    function: Callable
    lane: Lane
    result: Result
    carries: Carries | None
    operands: tuple[Operand, ...]
    arguments: Callable[..., Any] = field(repr=False)  # a named tuple of the operands

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def description(self) -> str:
        """The first line of the function's docstring."""
        return (self.function.__doc__ or "").split("\n")[0]

    @property
    def names_segment(self) -> bool:
        return bool(self.operands) and self.operands[0].kind is SegmentIndex

    @property
    def is_collective(self) -> bool:
        """Whether all ranks must run it."""
        return self.lane is Lane.COMM

    @property
    def runs_segment(self) -> bool:
        """Whether it is the inner loop of a segment, forward or backward."""
        return self.names_segment and self.result is Result.SEVERAL

    def of_kind(self, kind: type) -> Iterator[str]:
        """Names of the operands of a kind."""
        return (operand.name for operand in self.operands if operand.kind is kind)


VOCABULARY: dict[Callable, Operation] = {}


def operation(lane: Lane, result: Result, carries: Carries | None = None) -> Callable[[Callable], Callable]:
    """Declare a node. Text, parser, estimate of device memory and reports know of it by its declaration.

    Raises `TypeError` for an operand whose annotation has none of the kinds above.
    """

    def declare(function: Callable) -> Callable:
        annotations = typing.get_type_hints(function)
        operands = tuple(
            Operand(
                name,
                _kind(function, name, annotations.get(name)),
                _is_nullable(annotations.get(name)),
                parameter.default,
                typing.get_origin(annotations.get(name)) is tuple,
            )
            for name, parameter in inspect.signature(function).parameters.items()
        )
        defaults = [operand.default for operand in operands if operand.optional]
        names = [operand.name for operand in operands]
        arguments = namedtuple(function.__name__, names, defaults=defaults)  # type: ignore[misc]  # not known to a type checker
        VOCABULARY[function] = Operation(function, lane, result, carries, operands, arguments)
        return function

    return declare


def _kind(function: Callable, name: str, annotation: Any) -> type:
    """The kind of operand in an annotation such as `tuple[OnDevice | None, ...]`."""
    if annotation in _KINDS:
        return annotation
    for inner in typing.get_args(annotation):
        if inner in _KINDS or typing.get_args(inner):
            return _kind(function, name, inner)
    raise TypeError(f"operand '{name}' of node '{function.__name__}' is annotated with no kind of operand, but {annotation}")


def _is_nullable(annotation: Any) -> bool:
    """Whether an annotation allows None, such as `tuple[OnDevice | None, ...]`."""
    return annotation is type(None) or any(map(_is_nullable, typing.get_args(annotation)))


def _not_run(name: str) -> typing.NoReturn:
    raise NotImplementedError(f"'{name}' is a node of a program; the executor runs it")


# ---- the vocabulary ----------------------------------------------------------------------------------------------------


@operation(Lane.COMPUTE, Result.DEVICE)
def split(x: OnDevice) -> typing.NoReturn:
    """Cut a whole batched value into micro-batches (views)."""
    _not_run("split")


@operation(Lane.COMPUTE, Result.DEVICE)
def merge(x: OnDevice) -> typing.NoReturn:
    """Join the micro-batches of a split value into one whole value: rows are concatenated, partial sums are added up."""
    _not_run("merge")


@operation(Lane.H2D, Result.DEVICE, Carries.WEIGHTS)
def fetch_weights(segment: SegmentIndex, after: Done | None = None) -> typing.NoReturn:
    """Copy a segment's parameters and buffers into a weight slab of the device; asynchronous.

    Large weights that the segment's operations do not read are left out: backward of a lookup does not need the table. `after`
    is the update of the segment, if it is in the same graph.
    """
    _not_run("fetch_weights")


@operation(Lane.H2D, Result.DEVICE, Carries.WEIGHTS)
def fetch_resident(segment: SegmentIndex, after: Done | None = None) -> typing.NoReturn:
    """As `fetch_weights`, into memory of their own, where the weights stay until the backward of their segment."""
    _not_run("fetch_resident")


@operation(Lane.COMM, Result.TAKEN, Carries.WEIGHTS)
def all_gather_weights(segment: SegmentIndex, slab: OnDevice) -> typing.NoReturn:
    """Complete a slab in place with the shards of all ranks; the fetch has copied this rank's shards; asynchronous."""
    _not_run("all_gather_weights")


@operation(Lane.COMPUTE, Result.SEVERAL)
def forward(
    segment: SegmentIndex,
    weights: OnDevice | None,
    values: tuple[OnDevice, ...],
    streamed_outputs: tuple[int, ...] = (),
    turn: int | None = None,
    wanted: tuple[int, ...] = (),
) -> typing.NoReturn:
    """Run the segment on every micro-batch, or with `turn` on that one. The result is a tuple of its outputs.

    Outputs whose index is in `streamed_outputs` are copied to the host micro-batch by micro-batch, as they are made. With `wanted`, only
    the outputs with these indices are made: operands that these do not depend on may be `blank`, and weights are left out.
    """
    _not_run("forward")


@operation(Lane.D2H, Result.HOST)
def offload(x: OnDevice) -> typing.NoReturn:
    """Copy a value to the host; asynchronous. The device copy stays until it is released."""
    _not_run("offload")


@operation(Lane.DISK_WRITE, Result.DISK)
def store(x: OnHost) -> typing.NoReturn:
    """Write a value of the host to the disk, and free its memory there; asynchronous. One below 1 MiB stays in memory."""
    _not_run("store")


@operation(Lane.DISK_READ, Result.HOST)
def load(x: StoredOnDisk) -> typing.NoReturn:
    """Read a stored value into memory of the host; asynchronous. The one node that reads the result frees it."""
    _not_run("load")


@operation(Lane.H2D, Result.DEVICE)
def restore(x: OnHost, turn: int | None = None) -> typing.NoReturn:
    """Copy a value of the host (an offloaded value, or an input of the program) to the device; asynchronous.

    With `turn`, only that micro-batch of a whole input is copied.
    """
    _not_run("restore")


@operation(Lane.COMPUTE, Result.DEVICE)
def join(parts: tuple[OnDevice, ...]) -> typing.NoReturn:
    """The micro-batches of a value, made in turns, as one split value (the same memory)."""
    _not_run("join")


@operation(Lane.COMPUTE, Result.DEVICE)
def blank() -> typing.NoReturn:
    """A value whose contents do not matter: the nodes that read it depend on its sizes alone."""
    _not_run("blank")


@operation(Lane.NONE, Result.NOTHING)
def begin(turn: str) -> typing.NoReturn:
    """A turn of the schedule begins, such as '0F3'. The call ends at 'pause'; what stands behind it runs in the next call, from '0B2@-1' on."""
    _not_run("begin")


@operation(Lane.H2D, Result.DEVICE)
def recall(x: OnHost) -> typing.NoReturn:
    """Take an input of the program that an earlier call has kept on the device, else copy it there; asynchronous."""
    _not_run("recall")


@operation(Lane.NONE, Result.KEPT)
def keep_input(x: OnDevice, input: InputIndex) -> typing.NoReturn:
    """Keep the contents of an input on the device, as they are after this call, for the next call with it."""
    _not_run("keep_input")


@operation(Lane.NONE, Result.KEPT)
def keep_output(x: OnDevice, output: int) -> typing.NoReturn:
    """Keep the output at this position, which the host makes itself, on the device too: for a call that takes it as an input."""
    _not_run("keep_output")


@operation(Lane.NONE, Result.KEPT)
def stash(x: OnDevice) -> typing.NoReturn:
    """Keep a value on the device for backward."""
    _not_run("stash")


@operation(Lane.NONE, Result.KEPT)
def keep_weights(segment: SegmentIndex, weights: OnDevice) -> typing.NoReturn:
    """Keep the weights of a segment on the device for its backward."""
    _not_run("keep_weights")


@operation(Lane.NONE, Result.KEPT)
def keep_activations(segment: SegmentIndex, results: Results) -> typing.NoReturn:
    """Keep on the device what forward has saved inside of a segment for its backward."""
    _not_run("keep_activations")


@operation(Lane.D2H, Result.HOST)
def offload_activations(segment: SegmentIndex, results: Results) -> typing.NoReturn:
    """Copy what forward has saved inside of a segment for its backward to the host, micro-batch by micro-batch; asynchronous.

    A copy begins while forward computes the next micro-batch. It is on the device until the copy is done.
    """
    _not_run("offload_activations")


@operation(Lane.H2D, Result.DEVICE)
def restore_activations(segment: SegmentIndex, x: OnHost) -> typing.NoReturn:
    """Copy the first micro-batches of what `offload_activations` has sent back to the device; asynchronous.

    Backward brings the next ones while it computes those before them, and frees each behind its micro-batch.
    """
    _not_run("restore_activations")


@operation(Lane.COMPUTE, Result.SEVERAL)
def backward(
    segment: SegmentIndex,
    weights: OnDevice | None,
    values: tuple[OnDevice, ...],
    gradients: tuple[OnDevice | None, ...],
    streamed_gradients: tuple[OnHost | None, ...] = (),
    activations: OnDevice | None = None,
    restored_activations: OnDevice | None = None,
    turn: int | None = None,
) -> typing.NoReturn:
    """Recompute the segment, but for what forward has kept, and differentiate it on every micro-batch, or with `turn` on that one.

    The turns of a segment come in order. Sums over micro-batches are results of the last one.

    What forward has kept is in `activations` for some micro-batches, and in `restored_activations` for others.

    `gradients` has the gradient of each of the segment's outputs, None where there is none. A gradient that is on the host, and
    is copied to the device micro-batch by micro-batch, is at its position in `streamed_gradients`; `gradients` has None there.

    The result is a tuple: the gradient of each value operand (None where it needs none), then one bundle with the gradients
    of the weights, accumulated over the micro-batches.
    """
    _not_run("backward")


@operation(Lane.COMPUTE, Result.DEVICE)
def accumulate(a: OnDevice, b: OnDevice) -> typing.NoReturn:
    """The sum of two gradients of one value, whole or split as the first one is."""
    _not_run("accumulate")


@operation(Lane.COMM, Result.DEVICE)
def all_gather_rows(x: OnDevice) -> typing.NoReturn:
    """Gather the rows of a whole batched value from all ranks, in the order of the ranks; asynchronous."""
    _not_run("all_gather_rows")


@operation(Lane.SEND, Result.DONE)
def send(values: tuple[OnDevice, ...], to: int) -> typing.NoReturn:
    """Send values that a segment has made to another rank of the pipeline; asynchronous.

    Split values go micro-batch by micro-batch, as they are made, and then the whole ones.
    """
    _not_run("send")


@operation(Lane.RECV, Result.SEVERAL)
def recv(source: int) -> typing.NoReturn:
    """The values that a rank of the pipeline sends at this place of the program, as a tuple; asynchronous.

    A segment that reads them begins with its first micro-batch when that is there.
    """
    _not_run("recv")


@operation(Lane.COMPUTE, Result.DEVICE)
def local_rows(x: OnDevice) -> typing.NoReturn:
    """This rank's rows of a value that has the rows of all ranks."""
    _not_run("local_rows")


@operation(Lane.COMM, Result.DEVICE)
def all_reduce(x: OnDevice) -> typing.NoReturn:
    """Add up a value of which each rank has a part, over all ranks; the same bits on each; asynchronous."""
    _not_run("all_reduce")


@operation(Lane.COMPUTE, Result.DEVICE)
def mask_to_first_rank(x: OnDevice) -> typing.NoReturn:
    """This rank's term of a sum over ranks: a value that is equal on all ranks, on the first rank; zeros on the other ranks."""
    _not_run("mask_to_first_rank")


@operation(Lane.COMPUTE, Result.DEVICE)
def local_shard(segment: SegmentIndex, gradients: OnDevice) -> typing.NoReturn:
    """This rank's shards of weight gradients that are equal on all ranks, because the segment ran on all rows."""
    _not_run("local_shard")


@operation(Lane.COMM, Result.DEVICE, Carries.GRADIENTS)
def reduce_scatter_gradients(segment: SegmentIndex, gradients: OnDevice) -> typing.NoReturn:
    """This rank's shards of the mean over all ranks (batch_scope='global': sum) of a segment's weight gradients; asynchronous."""
    _not_run("reduce_scatter_gradients")


@operation(Lane.D2H, Result.DONE, Carries.GRADIENTS)
def push_gradients(segment: SegmentIndex, gradients: OnDevice) -> typing.NoReturn:
    """Copy a segment's weight gradients to the host, where gradients of shared weights are added up; asynchronous."""
    _not_run("push_gradients")


@operation(Lane.HOST, Result.DONE)
def update(segment: SegmentIndex, after: Done | None = None) -> typing.NoReturn:
    """Update the parameters of a segment whose gradients are complete; asynchronous.

    In backward, `after` is the push of the segment's gradients. In forward, there is no `after`, and the fetch of the segment
    has the update as its operand.
    """
    _not_run("update")


@operation(Lane.D2H, Result.DONE)
def write_back(input: InputIndex, contents: OnDevice) -> typing.NoReturn:
    """Write the new contents of a buffer, or of another input that the model writes into, to the host."""
    _not_run("write_back")


@operation(Lane.NONE, Result.NOTHING)
def release(x: OnDevice) -> typing.NoReturn:
    """Free a weight slab or the device copy of a value."""
    _not_run("release")


def getitem(results: Results, index: int) -> typing.NoReturn:
    """Pick one of the results of forward or backward."""
    _not_run("getitem")


operation(Lane.NONE, Result.DEVICE)(getitem)
VOCABULARY[operator.getitem] = VOCABULARY.pop(getitem)


KEEPS = (keep_input, keep_output)  # a value that these read is released by them, or by a later call


# ---- questions about a node ---------------------------------------------------------------------------------------------


def operation_of(node: fx.Node) -> Operation | None:
    """The word of the vocabulary that a node calls; None for placeholders, the output, and nodes outside of the vocabulary."""
    return VOCABULARY.get(node.target) if callable(node.target) else None


def called(node: fx.Node) -> Operation:
    """The word of the vocabulary that a node calls, which must exist."""
    word = operation_of(node)
    assert word is not None, f"'{node.name}' is no node of the vocabulary"
    return word


def operands(node: fx.Node) -> Any:
    """The operands of a node, by name: `operands(node).segment`."""
    return called(node).arguments(*node.args)


def set_operands(node: fx.Node, **changes: Any) -> None:
    """Replace operands of a node, by name."""
    node.args = tuple(operands(node)._replace(**changes))


def lane_of(node: fx.Node) -> Lane:
    """The lane that a program node runs on."""
    return word.lane if (word := operation_of(node)) is not None else Lane.NONE


def carries(node: fx.Node) -> Carries | None:
    """What of its segment a node moves; None for nothing."""
    return word.carries if (word := operation_of(node)) is not None else None


def runs_segment(node: fx.Node) -> bool:
    """Whether a node is the inner loop of a segment, forward or backward."""
    return (word := operation_of(node)) is not None and word.runs_segment


def segment_of(node: fx.Node) -> int | None:
    """The index of the segment that a node names; None if it names none."""
    word = operation_of(node)
    return operands(node).segment if word is not None and word.names_segment else None


def on_host(node: fx.Node) -> bool:
    """Whether a node stands for a value on the host."""
    word = operation_of(node)
    return node.meta.get("host", False) or (word is not None and word.result is Result.HOST)


def on_disk(node: fx.Node) -> bool:
    """Whether a node stands for a value on the disk."""
    return node.meta.get("disk", False) or result_of(node) is Result.DISK


def place_of(node: fx.Node) -> str:
    """Where the value of a node is: on the "host", the "disk" or the "device"."""
    return "host" if on_host(node) else "disk" if on_disk(node) else "device"


def result_of(node: fx.Node) -> Result | None:
    """The kind of a node's result; None for a node that is no word of the vocabulary."""
    word = operation_of(node)
    return word.result if word is not None else None


def holds_device_memory(node: fx.Node) -> bool:
    """Whether a node stands for memory of the device that must be released."""
    if on_host(node) or on_disk(node) or node.op == "output":
        return False
    if any(result_of(user) is Result.TAKEN for user in node.users):
        return False
    return node.op == "placeholder" or result_of(node) in (Result.DEVICE, Result.TAKEN)


def is_kept(node: fx.Node) -> bool:
    """Whether a value stays on the device for backward: the graph that makes it does not release it."""
    return any(result_of(user) is Result.KEPT for user in node.users)


def reads(node: fx.Node, kind: type) -> list[fx.Node]:
    """The nodes that a node reads as operands of this kind."""
    word = operation_of(node)
    if word is None:
        return []
    found: list[fx.Node] = []
    for name in word.of_kind(kind):
        fx.node.map_arg(getattr(operands(node), name), found.append)
    return found


def missing_operands(node: fx.Node) -> list[str]:
    """The names of the operands that are None although a node is required."""
    read = operands(node)
    wanted = [o for o in called(node).operands if o.kind in (OnDevice, OnHost, StoredOnDisk, Done, Results) and not o.nullable]
    return [o.name for o in wanted if any(leaf is None for leaf in pytree.tree_leaves([getattr(read, o.name)]))]


def arriving_gradients(node: fx.Node) -> tuple[fx.Node | None, ...]:
    """The gradient of each output that a `backward` node gets, on device or host; None where there is none."""
    read = operands(node)
    streamed = read.streamed_gradients or (None,) * len(read.gradients)
    return tuple(a if a is not None else b for a, b in zip(read.gradients, streamed, strict=True))


def fetches_weights(node: fx.Node) -> bool:
    """Whether a node copies weights to the device."""
    return node.target in (fetch_weights, fetch_resident)


def fetches(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a graph that copy weights to the device, in order."""
    return filter(fetches_weights, graph.nodes)


def pause_of(graph: fx.Graph) -> fx.Node | None:
    """Where a call of a step ends whose last turns run in the next call; None for a graph that one call runs."""
    return next((n for n in graph.find_nodes(op="call_function", target=begin) if operands(n).turn == PAUSE), None)


def keeps_of_segment(node: fx.Node) -> bool:
    """Whether a node stands for what forward keeps of a segment for its backward, beside values: in either graph."""
    return node.meta.get("kind") in KEPT_OF_SEGMENT or node.target in _KEEP_OF_SEGMENT


KEPT_OF_SEGMENT = ("activations", "weights")  # kinds of placeholders of backward
_KEEP_OF_SEGMENT = (keep_weights, keep_activations, offload_activations, restore_activations)


class ForwardResult(typing.NamedTuple):
    """The results of a forward graph.

    outputs  a node on the host for each output of the captured graph; None for an output that no segment makes
    stashes  the values that it keeps for backward, in the order in which backward takes them
    writes   the `write_back` nodes
    """

    outputs: tuple[fx.Node | None, ...]
    stashes: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]


def returned(forward_graph: fx.Graph) -> ForwardResult:
    """The results of a forward graph, by name."""
    (result,) = forward_graph.output_node().args
    return ForwardResult(*typing.cast(tuple, result))
