"""Replaces a call of `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` over several layers by one call per layer.

    torch.lstm(x, (h, c), weights, ...)    =>    y0 = layer(x, (h[0:1], c[0:1]), weights of layer 0)
                                                 y1 = layer(dropout(y0), (h[1:2], c[1:2]), weights of layer 1)
                                                 ...
                                                 h_n = cat of every layer's h_n, c_n likewise

Each layer may then be a segment of its own. Initial states of zeros are made in each layer, and are not passed to it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from l2l_compile.ir.fx_types import arguments
from l2l_compile.ir.recurrent_operator import KERNELS, layer

KINDS = {kernel: kind for kind, kernel in KERNELS.items()}
Put = Callable[..., Any]  # put(number of the layer or None, function, *args, **kwargs): calls it, or adds the call to a graph


@dataclass(frozen=True)
class _Stack:
    """The arguments of a call over padded sequences; tensors, or the nodes that stand for them."""

    kind: str
    input: Any
    states: Sequence[Any]
    weights: Sequence[Any]
    has_biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @classmethod
    def of(cls, function: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> _Stack | None:
        """The stack of a call; None for other functions and for packed sequences (third argument: no list of weights)."""
        if (
            function not in KINDS
            or kwargs
            or len(args) != 9
            or not isinstance(args[2], (tuple, list))
            or isinstance(args[3], (tuple, list))
        ):
            return None
        kind = KINDS[function]
        return cls(kind, args[0], tuple(args[1]) if kind == "lstm" else (args[1],), tuple(args[2]), *args[3:])

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def write(self, put: Put, state_of: Callable[[Any, int], Any]) -> list[Any]:
        """Make the calls of every layer with `put`. Returns [output, h_n of every layer, and for an LSTM c_n of every layer].

        `state_of(state, number)` is a layer's part of an initial state.
        """
        output = self.input
        finals: list[list[Any]] = [[] for _ in self.states]
        share = len(self.weights) // self.layers
        for number in range(self.layers):
            if number and self.train and self.dropout:
                output = put(number, F.dropout, output, self.dropout, True, False)
            states = [state_of(state, number) for state in self.states]
            weights = list(self.weights[number * share : (number + 1) * share])
            options = (self.has_biases, self.train, self.bidirectional, self.batch_first)
            results = put(number, layer, self.kind, output, states, weights, *options)
            output = put(number, operator.getitem, results, 0)
            for position, final in enumerate(finals):
                final.append(put(number, operator.getitem, results, position + 1))
        return [output, *finals]


def sizes_of_stack(function: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...] | None:
    """The results of a call on fake tensors, layer by layer, without a loop over time steps; None for any other call.

    Unrolled, the call would take Dynamo operations for every time step, and fix the number of steps.
    """
    stack = _Stack.of(function, args, kwargs)
    if stack is None:
        return None
    count = stack.directions
    output, *finals = stack.write(
        lambda number, made, *rest, **named: made(*rest, **named),
        lambda state, number: state[number * count : (number + 1) * count],
    )
    return (output, *(torch.cat(final) for final in finals))


def split_stacks(graph: fx.Graph) -> None:
    """Rewrite every call of `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` in Dynamo's graph, in place."""
    for node in list(graph.nodes):
        stack = _Stack.of(node.target, node.args, node.kwargs) if node.op == "call_function" else None
        if stack is not None:
            _Writer(graph, node, stack).replace()


@dataclass(frozen=True)
class _Writer:
    graph: fx.Graph
    node: fx.Node
    stack: _Stack

    def replace(self) -> None:
        parts = {state: self.parts_of(state) for state in self.stack.states if not _is_zeros(state)}
        output, *finals = self.stack.write(
            self.put, lambda state, number: parts[state][number] if state in parts else self.zeros(state, number)
        )
        for user in list(self.node.users):
            _, picked = arguments(user)
            made = output if picked == 0 else self.joined(finals[picked - 1], user)
            made.meta["example_value"] = user.meta["example_value"]
            user.replace_all_uses_with(made)
            self.graph.erase_node(user)
        self.graph.erase_node(self.node)

    def parts_of(self, state: fx.Node) -> list[fx.Node]:
        """Each layer's part of h_0 or c_0, [layers * directions, batch, hidden].

        The parts are cut before the first layer: cuts inside the layers would make the layers differ.
        """
        count = self.stack.directions
        cuts = [slice(number * count, (number + 1) * count) for number in range(self.stack.layers)]
        return [self.put(None, operator.getitem, state, cut) for cut in cuts] if len(cuts) > 1 else [state]

    def zeros(self, state: fx.Node, number: int) -> fx.Node:
        start = 1 if state.op == "call_method" else 0  # x.new_zeros(sizes), torch.zeros(sizes)
        sizes = arguments(state)[start:]
        _, *inner = sizes[0] if isinstance(sizes[0], (tuple, list)) else sizes
        example = state.meta["example_value"]
        return self.put(number, torch.zeros, (self.stack.directions, *inner), dtype=example.dtype, device=example.device)

    def joined(self, final: list[fx.Node], state: fx.Node) -> fx.Node:
        """The last states of all layers in one tensor, made before its first reader, so that all layers are equal."""
        if len(final) == 1:
            return final[0]
        made = self.put(None, torch.cat, final)
        next(n for n in self.graph.nodes if n in state.users).prepend(made)
        return made

    def put(self, number: int | None, function: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call before the rewritten one, with meta as Dynamo would write it. Each layer is in a module of its own."""
        with self.graph.inserting_before(self.node):
            made = self.graph.call_function(function, args, kwargs)
        examples = fx.node.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        with ExitStack() as modes:
            for mode in (self.stack.input.meta["example_value"].fake_mode, *self.modes()):
                modes.enter_context(mode)
            value = function(*examples[0], **examples[1])
        made.meta = {k: v for k, v in self.node.meta.items() if k in ("nn_module_stack", "stack_trace")} | {
            "example_value": value
        }
        stack = made.meta.get("nn_module_stack")
        if stack and number is not None and self.stack.layers > 1:
            key, (path, kind) = list(stack.items())[-1]
            made.meta["nn_module_stack"] = {**stack, f"{key}.l{number}": (f"{path}.l{number}", kind)}
        return made

    def modes(self) -> tuple[AbstractContextManager, ...]:
        """The modes in which the call was traced, read from its results: other modes may be on during the rewriting."""
        results = [r for r in self.node.meta["example_value"] if isinstance(r, torch.Tensor)]
        short = results[0].dtype.itemsize == 2
        autocast = torch.autocast(results[0].device.type, dtype=results[0].dtype if short else None, enabled=short)
        return torch.set_grad_enabled(any(r.requires_grad for r in results)), autocast


def _is_zeros(state: fx.Node) -> bool:
    """Whether a state is made as zeros and read by recurrent layers alone, so that no other operation writes into it."""
    made = (
        state.op == "call_function" and state.target is torch.zeros or state.op == "call_method" and state.target == "new_zeros"
    )
    return made and len(state.args) > (state.op == "call_method") and all(user.target in KINDS for user in state.users)
