"""A captured graph: Dynamo's graph with its inputs by kind, described for the passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch
from torch import fx

from l2l_compile.ir.replay import PartResults
from l2l_compile.ir.values import Bindings, Dim, TensorSpec, evaluate, float_operand, is_float
from l2l_compile.ranks.shard_spec import ShardSpec

LOSS_TERM = "loss_term"  # in the meta of a node with the rows' contributions to a loss: never rounded to 16 bits


@dataclass(frozen=True)
class ParameterSlice:
    """A contiguous slice of a parameter: `start` and `shape` in entries, `of` is the index of its parameter's input."""

    of: int
    start: int
    shape: tuple[int, ...]

    def view(self, whole: torch.Tensor) -> torch.Tensor:
        """The slice of the parameter, or of a tensor with its shape: a detached view in the same memory."""
        return whole.detach().view(-1)[self.start : self.start + torch.Size(self.shape).numel()].view(self.shape)


@dataclass(frozen=True)
class InnerTensor:
    """A plain tensor within a tensor subclass: `of` is the index of the subclass's input, `path` the attributes that lead to it."""

    of: int
    path: tuple[str, ...]

    def view(self, whole: torch.Tensor) -> torch.Tensor:
        """The inner tensor, detached, in the same memory."""
        return functools.reduce(getattr, self.path, whole).detach()


@dataclass(frozen=True)
class Input:
    """An input of the captured graph, a slice of one, or an inner tensor of one.

    kind    "parameter", "buffer", "state" (a tensor of the model that goes from segment to segment as a value, see
            `frontend/rewrites/writes.py`), "value" or "symbol"; "wrapped parameter" or "wrapped buffer" for a tensor subclass of
            the model whose inner tensors are weights
    index   its position among the arguments of a call; slices and inner tensors are numbered after the arguments
    slice   the slice of a parameter that it is; None for all others
    inner   the inner tensor that it is; None for all others
    shard_spec  how it is sharded over ranks; None if every rank has all of it
    """

    index: int
    node: fx.Node
    name: str
    kind: str
    slice: ParameterSlice | None = None
    inner: InnerTensor | None = None
    shard_spec: ShardSpec | None = None

    @property
    def is_weight(self) -> bool:
        return self.kind in ("parameter", "buffer")

    @property
    def owner(self) -> int:
        """The index of the argument that this input is, or is taken from."""
        return self.index if self.taken is None else self.taken.of

    @property
    def taken(self) -> ParameterSlice | InnerTensor | None:
        """What is taken from an argument to make this input; None for an argument itself."""
        return self.slice or self.inner


@dataclass(frozen=True)
class View:
    """A result in the memory of an argument or of another result.

    base         the index of the argument, or the position of the other result
    of_argument  whether it is in the memory of an argument
    shape, stride, start  in entries; `start` counts from the first entry of the base
    differentiable  whether the result requires a gradient
    """

    base: int
    of_argument: bool
    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    start: Dim
    differentiable: bool

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The symbols in its sizes."""
        dims = (*self.shape, *self.stride, self.start)
        return {symbol for dim in dims if isinstance(dim, sympy.Expr) for symbol in dim.free_symbols}

    def of(self, base: torch.Tensor, bindings: Bindings) -> torch.Tensor:
        """The view of a tensor, for these sizes."""
        if base.requires_grad and not self.differentiable:
            base = base.detach()
        shape, stride = ([evaluate(dim, bindings) for dim in dims] for dims in (self.shape, self.stride))
        return base.as_strided(shape, stride, base.storage_offset() + evaluate(self.start, bindings))


@dataclass(frozen=True)
class Mesh:
    """The ranks that run a program together.

    shards    how many ranks the parameters are sharded over; 1 for ranks that share parallel layers alone
    replicas  how many times the mesh has the whole model
    sharded   whether `shard` has sharded a model over it
    text      the mesh as text
    """

    shards: int
    replicas: int = 1
    sharded: bool = True
    text: str = ""


@dataclass(frozen=True)
class Owners:
    """The ranks of a pipeline, and which of them has each parameter and buffer.

    rank    this rank
    ranks   how many there are
    of      the rank of each input of the captured graph that one rank alone has, by its index
    unread  the indices of those that the batch of `pipeline` did not read
    """

    rank: int
    ranks: int
    of: Mapping[int, int]
    unread: frozenset[int] = frozenset()

    def of_input(self, i: Input) -> int | None:
        """The rank that has an input; None for one that all ranks have."""
        return self.of.get(i.owner)

    def has(self, i: Input) -> bool:
        """Whether this rank has an input."""
        return self.of_input(i) in (None, self.rank)


@dataclass
class Captured:
    """Dynamo's graph, ready for the passes.

    inputs       the placeholders that are arguments, in the order in which the compiled function is called
    derived      slices of parameters and inner tensors of subclasses that are weights of their own, numbered after the inputs
    specs        a `TensorSpec` per node that holds a tensor
    batch        the symbol of the batch size; None where the graph is not polymorphic in it
    why_static   why the graph has no batch symbol; "" where it has one
    hints        the values that the symbols had at capture
    symbol_at    where a call's value of each symbol is: (input index, dimension), or (input index, None) for a number: an int,
                 or a float in a tensor without dimensions
    grad_enabled whether gradients were enabled when the graph was captured
    autocast     the dtype of the `torch.autocast` that was on at capture; None if it was off
    break_reason why Dynamo ended the graph early, if it did
    lookups      specs of weights for blocks that only look up rows in them, where they differ from `specs`
    dropped      outputs that are not computed, by position: the graph has None in their place
    parts        outputs and writes that the host makes itself; the graph has the outputs that it needs for them behind the model's
    views        outputs that are views of an argument or of another output, by position: the graph has None in their place too
    indices      the check of the indices in the arguments of a call; None if there is none
    fixed_sizes  whether each size has a program of its own (`torch.compile(dynamic=False)`)
    mesh         the ranks that run the program together; None for one rank
    owners       the ranks of the pipeline whose stages the segments are; None without one
    snapshots    indices of the buffers and values that the graph clones: somebody may write into them between forward and backward
    parallel_layer  text that names a parameter of a tensor parallel layer; "" if there is none
    stored       indices of the parameters that were on disk at capture, also those that were read in place
    in_place     indices of the parameters that were read in place, from the user's own files, at capture
    """

    graph: fx.Graph
    module: torch.nn.Module
    inputs: tuple[Input, ...]
    specs: dict[fx.Node, TensorSpec]
    batch: sympy.Symbol | None
    why_static: str
    hints: Bindings
    symbol_at: dict[sympy.Symbol, tuple[int, int | None]]
    grad_enabled: bool
    autocast: torch.dtype | None
    break_reason: str | None = None
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    lookups: dict[fx.Node, TensorSpec] = field(default_factory=dict)
    dropped: dict[int, TensorSpec] = field(default_factory=dict)
    views: dict[int, View] = field(default_factory=dict)
    parts: PartResults = field(default_factory=PartResults)
    derived: tuple[Input, ...] = ()
    indices: Callable[[Sequence, Bindings], None] | None = None
    fixed_sizes: bool = False
    mesh: Mesh | None = None
    owners: Owners | None = None
    parallel_layer: str = ""
    snapshots: frozenset[int] = frozenset()
    stored: frozenset[int] = frozenset()
    in_place: frozenset[int] = frozenset()

    @property
    def shards(self) -> int:
        """The number of ranks that the parameters are sharded over."""
        return self.mesh.shards if self.mesh is not None else 1

    @property
    def weights(self) -> tuple[Input, ...]:
        """The parameters and buffers, also those that are derived from an input."""
        return tuple(i for i in (*self.inputs, *self.derived) if i.is_weight)

    @property
    def outputs(self) -> tuple:
        """The results of the graph: nodes and constants."""
        (returned,) = self.graph.output_node().args
        return tuple(cast(Sequence, returned))

    def fill_views(self, outputs: list, arguments: Sequence, bindings: Bindings) -> None:
        """Put the outputs that are views into `outputs`, in place. The other outputs must be there already."""
        for position, view in self.views.items():
            outputs[position] = view.of((arguments if view.of_argument else outputs)[view.base], bindings)

    def check_indices(self, arguments: Sequence) -> None:
        """Raises `IndexRangeError` if an argument leads to an index out of range. Checks only indices known before a step."""
        if self.indices is not None:
            self.indices(arguments, self.bindings(arguments))

    def bindings(self, arguments: Any) -> dict[sympy.Symbol, Any]:
        """The values of the symbols in a call with these arguments (tensors and ints)."""
        return with_float_operands(
            {
                symbol: _number(arguments[index], symbol) if dim is None else int(arguments[index].shape[dim])
                for symbol, (index, dim) in self.symbol_at.items()
            }
        )


def with_float_operands(bindings: Bindings) -> dict[sympy.Symbol, Any]:
    """The values of symbols, and examples of values for the floats that blocks read (`Segment.bindings` has their values)."""
    floats = [value for symbol, value in bindings.items() if is_float(symbol)]
    return {**bindings, **{float_operand(i): value for i, value in enumerate(floats)}}


def _number(argument: Any, symbol: sympy.Symbol) -> int | float:
    return float(argument) if is_float(symbol) else int(argument)
