"""The node vocabulary of a program. A node is an `fx` call of one of these functions; running it is the executor's.

A value is *whole* (one tensor) or *split* (one tensor per micro-batch). Segments and inputs are named by their index in
`Program.segments` and in the inputs of the captured graph; the text form shows their names.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass

COMPUTE, H2D, D2H, HOST, NONE = "compute", "h2d", "d2h", "host", "none"


@dataclass(frozen=True)
class Operation:
    """A word of the vocabulary: the lane that it runs on, one line on what it does, and what its first operand is an index of.

    names   "segment" (of `Program.segments`), "input" (of the captured graph's inputs), or None: the first operand is a value
    """

    name: str
    lane: str
    does: str
    names: str | None = None


VOCABULARY: dict[Callable, Operation] = {}


def _operation(lane: str):
    def register(function: Callable) -> Callable:
        first = next(iter(inspect.signature(function).parameters))
        names = first if first in ("segment", "input") else None
        VOCABULARY[function] = Operation(function.__name__, lane, function.__doc__, names)
        return function

    return register


def _not_run(name: str):
    raise NotImplementedError(f"'{name}' is a node of a program; the executor runs it")


@_operation(COMPUTE)
def split(x):
    """Cut a whole batched value into micro-batches (views)."""
    _not_run("split")


@_operation(COMPUTE)
def merge(x):
    """Join the micro-batches of a split value into one whole value: rows are put together, parts of a sum are added up."""
    _not_run("merge")


@_operation(H2D)
def fetch_weights(segment, after=None):
    """Copy a segment's parameters and buffers into a weight slab of the device; asynchronous.

    `after` is the update of the segment, where it stands in the same graph.
    """
    _not_run("fetch_weights")


@_operation(COMPUTE)
def forward(segment, weights, values, sent=()):
    """Run the segment on every micro-batch; the outputs, as a tuple of values.

    Outputs whose index is in `sent` go to the host micro-batch by micro-batch, as they are made.
    """
    _not_run("forward")


@_operation(D2H)
def offload(x):
    """Copy a value to the host, asynchronous; the device copy stays until it is released."""
    _not_run("offload")


@_operation(H2D)
def restore(x):
    """Bring a value of the host (an offloaded one, or an input of the program) to the device; asynchronous."""
    _not_run("restore")


@_operation(NONE)
def stash(x):
    """Keep a value on the device for backward."""
    _not_run("stash")


@_operation(COMPUTE)
def backward(segment, weights, values, gradients, brought=()):
    """Recompute the segment and differentiate it on every micro-batch.

    Gradients whose index is in `brought` are on the host, and come to the device micro-batch by micro-batch.

    Gives a tuple: the gradient of each value operand (None where it wants none), then one bundle with the gradients
    of the weights, accumulated over the micro-batches.
    """
    _not_run("backward")


@_operation(COMPUTE)
def accumulate(a, b):
    """The sum of two gradients of one value, in the form of the first."""
    _not_run("accumulate")


@_operation(D2H)
def push_gradients(segment, gradients):
    """Copy a segment's weight gradients to the host, where gradients of shared weights add up; asynchronous."""
    _not_run("push_gradients")


@_operation(HOST)
def update(segment, after=None):
    """Update the parameters of a segment whose gradients are complete; asynchronous.

    In backward, `after` is the push of the segment's gradients; in forward there is none, and the fetch of the segment
    reads the update.
    """
    _not_run("update")


@_operation(D2H)
def write_back(input, contents):
    """Write the new contents of a buffer, or of another input that the model writes into, to the host."""
    _not_run("write_back")


@_operation(NONE)
def release(x):
    """Free a weight slab or the device copy of a value."""
    _not_run("release")


VOCABULARY[operator.getitem] = Operation("getitem", NONE, "Pick one of the results of forward or backward.")


def lane_of(node) -> str:
    """The lane that a program node runs on."""
    return VOCABULARY[node.target].lane if node.op == "call_function" else NONE
