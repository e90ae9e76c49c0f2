"""The operations of the captured graph in order, with the allowed cuts, the cost of each cut, and the uses of weights.

Dynamo's graph is in execution order, so a segment is a range of the sequence. A *cut* before operation `c` costs the
bytes of the values that are made before `c` and read at or after it. A forbidden cut has an infinite cost.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from l2l_compile.ir.captured import Captured, Input
from l2l_compile.ir.fx_types import name_of
from l2l_compile.ir.graph import may_be_size, memory_of, touches, written_operands
from l2l_compile.ir.modules import module_stack
from l2l_compile.ir.values import dim_of, reads_floats

# Regions that may not be cut: the operations inside depend on interpreter state that is not restored after a cut.
_OPEN = re.compile(r"^_?((vmap|grad|jvp)_increment_nesting|enter_\w+|saved_tensors_hooks_disable|functorch_\w*enter\w*)$")
_CLOSE = re.compile(r"^_?((vmap|grad|jvp)_decrement_nesting|exit_\w+|saved_tensors_hooks_enable|functorch_\w*exit\w*)$")

ENTER_AUTOCAST, EXIT_AUTOCAST = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
SET_GRAD = torch._C._set_grad_enabled


@dataclass(frozen=True)
class Mode:
    """Interpreter state with which a segment must start at a point of the sequence: gradient mode and open autocasts."""

    grad: bool
    autocasts: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class Barrier:
    """A range of forbidden cuts, and the reason."""

    cuts: range
    why: str


@dataclass(frozen=True)
class ParameterUse:
    """One read of a parameter: its position, the parameter, and a label. The same use in another layer has the same label."""

    position: int
    weight: Input
    label: int


class OperationSequence:
    """The operations of a captured graph in order; see the module's docstring."""

    def __init__(self, captured: Captured):
        self.captured = captured
        self.weights = {i.node: i for i in captured.weights}
        self.weights |= {node: Input(-1, node, name_of(node), "buffer") for node in captured.specs if node.op == "get_attr"}
        self.nodes = [n for n in captured.graph.nodes if n.op.startswith("call_") and n not in self.weights]
        self.position = {n: i for i, n in enumerate(self.nodes)}
        self.of_model = {*self.weights, *(i.node for i in captured.inputs if i.kind == "state")}
        self.reads = [tuple(n for n in node.all_input_nodes if not makes_number(n)) for node in self.nodes]
        # number of operations before each position, without operations that only compute numbers: layers differ in these
        self.operations_before = [0, *itertools.accumulate(not makes_number(n) for n in self.nodes)]
        stacks = [module_stack(n) for n in self.nodes]
        self.paths = [stack[-1][0] if stack else () for stack in stacks]  # module paths, outermost first; () if unknown
        self.classes = {path: kind for stack in stacks for path, kind in stack}  # class of each module, by path
        self.composed = {path[:end] for path in self.classes for end in range(1, len(path))}  # modules with inner modules
        self.barriers: list[Barrier] = []
        self.modes = self._scan_modes()
        self.uses = self._parameter_uses()
        self.barriers += [*self._numbers_handed_on(), *self._within_writes()]
        self.crossing = self._crossing()

    def __len__(self) -> int:
        return len(self.nodes)

    def weight_bytes(self, weight: Input) -> int:
        """Bytes of a parameter or buffer."""
        return self.captured.specs[weight.node].bytes(self.captured.hints)

    def why_not(self, cut: int) -> str | None:
        """The reason why a cut before an operation is forbidden; None if it is allowed."""
        return next((barrier.why for barrier in self.barriers if cut in barrier.cuts), None)

    def _scan_modes(self) -> list[Mode]:
        """The mode before each operation and at the end. Adds a barrier for each region that may not be cut."""
        mode, modes, opened = Mode(self.captured.grad_enabled), [], []
        for position, node in enumerate(self.nodes):
            modes.append(mode)
            name = getattr(node.target, "__name__", str(node.target))
            if node.target is SET_GRAD:
                mode = Mode(node.args[0], mode.autocasts)
            elif node.target is ENTER_AUTOCAST:
                mode = Mode(mode.grad, (*mode.autocasts, node))
            elif node.target is EXIT_AUTOCAST:
                mode = Mode(mode.grad, tuple(a for a in mode.autocasts if a is not node.args[0]))
            elif _OPEN.match(name):
                opened.append(position)
            elif _CLOSE.match(name) and opened:
                self.barriers.append(
                    Barrier(
                        range(opened.pop() + 1, position + 1), "they are inside of a transform of torch.func (vmap, grad, ...)"
                    )
                )
        return [*modes, mode]

    def _numbers_handed_on(self) -> Iterator[Barrier]:
        """Barriers from a result to its last reader, if it is neither a tensor nor a number that can be computed again."""
        for start, node in enumerate(self.nodes):
            last = self._last_reader(node, start)
            is_value = node in self.captured.specs and not may_be_size(node)
            if last > start and node.target not in (ENTER_AUTOCAST, SET_GRAD) and not is_value and not _is_number(node):
                kind = type(node.meta.get("example_value")).__name__
                yield Barrier(range(start + 1, last + 1), f"'{node.name}', a {kind} and no tensor, is read on both sides")

    def _last_reader(self, node: fx.Node, start: int) -> int:
        return max((self.position.get(u, len(self.nodes) - 1) for u in node.users), default=start)

    def _crossing(self) -> list[float]:
        """For each cut, the bytes of the values that cross it; infinite if the cut is forbidden."""
        change = [0] * (len(self.nodes) + 1)
        blocked = [0] * (len(self.nodes) + 1)
        for start, node in enumerate(self.nodes):
            last = self._last_reader(node, start)
            if (
                last > start
                and node in self.captured.specs
                and not may_be_size(node)
                and node.target not in (ENTER_AUTOCAST, SET_GRAD)
            ):
                change[start + 1] += self._bytes(node)
                change[min(last + 1, len(self.nodes))] -= self._bytes(node)
        for position, node in enumerate(self.nodes):  # new contents of an input are held until the end
            change[position + 1] += sum(self._bytes(o) for o in written_operands(node) if o.op == "placeholder")
        for barrier in self.barriers:
            blocked[barrier.cuts.start] += 1
            blocked[min(barrier.cuts.stop, len(self.nodes))] -= 1
        return [
            math.inf if stop else float(size)
            for size, stop in zip(itertools.accumulate(change), itertools.accumulate(blocked), strict=True)
        ]

    def _bytes(self, node: fx.Node) -> int:
        return self.captured.specs[node].bytes(self.captured.hints)

    def _within_writes(self) -> Iterator[Barrier]:
        """Barriers between two successive operations that touch the same state, if no parameter is used between them."""
        used = [use.position for use in self.uses]
        states = {memory_of(i.node): i.name for i in self.captured.inputs if i.kind == "state"}
        for memory, touching in touches(self.nodes, states).items():
            for before, after in itertools.pairwise(self.position[n] for n in touching):
                if bisect.bisect_right(used, before) == bisect.bisect_left(used, after):
                    yield Barrier(range(before + 1, after + 1), f"'{states[memory]}' is written and read there")

    def _parameter_uses(self) -> list[ParameterUse]:
        inputs = (*self.captured.inputs, *self.captured.derived)
        parameters = {i.node: i for i in inputs if i.kind == "parameter" or i.kind == "state" and _is_parameter(i)}
        labels: dict[tuple, int] = {}
        uses = []
        for position, node in enumerate(self.nodes):
            for slot, argument in enumerate(node.all_input_nodes):
                weight = parameters.get(argument)
                if weight is None:
                    continue
                spec = self.captured.specs[argument]
                key = (str(node.target), slot, spec.shape, spec.dtype)
                uses.append(ParameterUse(position, weight, labels.setdefault(key, len(labels))))
        return uses


def _is_parameter(state: Input) -> bool:
    """Whether a state is a parameter of the model (of a momentum encoder, for example), and so as large as a parameter."""
    return isinstance(state.node.meta["example_value"], torch.nn.Parameter)


def size_expression(node: fx.Node) -> Any:
    """The number or sympy expression that a node holds, if it holds a size or a float of the user's; None for other nodes.

    None as well for a number that is computed from floats: `makes_number`.
    """
    value = node.meta.get("example_value")
    if isinstance(value, torch.SymInt):
        dim = dim_of(value)
        return None if not isinstance(dim, int) and reads_floats(dim) else dim
    if isinstance(value, torch.SymFloat):
        expression = value.node.expr
        if expression.is_number:  # a guard of Dynamo fixes it
            return float(expression)
        return expression if isinstance(expression, sympy.Symbol) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def makes_number(node: fx.Node) -> bool:
    """Whether a node makes a number from numbers alone. Each segment that reads the number computes it itself.

    Floats are computed operation by operation, as Python does: the rounding would differ in a simplified expression.
    """
    if size_expression(node) is not None:
        return True
    value = node.meta.get("example_value")
    return isinstance(value, (torch.SymInt, torch.SymFloat)) and all(map(makes_number, node.all_input_nodes))


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return value is None or isinstance(value, (int, float, bool, torch.SymInt)) or makes_number(node)
