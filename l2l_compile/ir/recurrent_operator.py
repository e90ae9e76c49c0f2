"""One layer of an LSTM, GRU or RNN as one operator, which runs PyTorch's own kernels.

    recurrent_layer(kind, input, states, weights, ...)            -> [output, h_n] or [output, h_n, c_n]
    recurrent_layer_backward(arrived, needed, gradients, ...)       -> gradients of the needed operands

PyTorch's `lstm`, `gru`, `rnn_tanh` and `rnn_relu` are composite. A trace on the host unrolls time, about fifteen operations per
time step. Inductor takes minutes to compile these, and cuDNN's kernels are lost. With these operators, a traced graph is as
small as the layer. The backward operator runs the layer again with autograd inside. A streamed backward recomputes the layer
anyway, and the recomputed forward operator is then dead code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from l2l_compile.torch_internals.autograd import recording_gradients

KERNELS: dict[str, Callable] = {"lstm": torch.lstm, "gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu}
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}

_LAYER = (
    "str kind, Tensor input, Tensor[] states, Tensor[] weights, bool has_biases, bool train, bool bidirectional, "
    "bool batch_first, ScalarType? autocast"
)
_LIBRARY = torch.library.Library("l2l_compile", "FRAGMENT")
_LIBRARY.define(f"recurrent_layer({_LAYER}) -> Tensor[]")
_LIBRARY.define(f"recurrent_layer_backward(int[] arrived, bool[] needed, Tensor[] gradients, {_LAYER}) -> Tensor[]")


def layer(
    kind: str,
    input: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Run one layer, in both directions if `bidirectional`. Returns (output, h_n), for an LSTM (output, h_n, c_n).

    input    [time, batch, features], or [batch, time, features] with `batch_first`
    states   h_0, for an LSTM also c_0: [directions, batch, hidden]
    weights  w_ih, w_hh, b_ih and b_hh (with `has_biases`), w_hr (with a projection), for each direction

    Under autocast, the kernels cast as in PyTorch, and the results have 16 bits, as cuDNN's results do.
    """
    device = input.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    options = (has_biases, train, bidirectional, batch_first, autocast)
    return _Layer.apply(kind, len(states), options, input, *states, *weights)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, count: int, options: tuple, input: torch.Tensor, *others: torch.Tensor) -> tuple:
        ctx.kind, ctx.count, ctx.options = kind, count, options
        ctx.save_for_backward(input, *others)
        ctx.set_materialize_grads(False)
        return tuple(torch.ops.l2l_compile.recurrent_layer(kind, input, others[:count], others[count:], *options))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple:
        input, *others = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[3:])
        arrived = [i for i, g in enumerate(gradients) if g is not None]
        made = torch.ops.l2l_compile.recurrent_layer_backward(
            arrived,
            needed,
            [gradients[i] for i in arrived],
            ctx.kind,
            input,
            others[: ctx.count],
            others[ctx.count :],
            *ctx.options,
        )
        remaining = iter(made)
        return None, None, None, *(next(remaining) if wanted else None for wanted in needed)


class _Operands(NamedTuple):
    """The operands of a layer, in the order of `_LAYER`."""

    kind: str
    input: torch.Tensor
    states: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]
    has_biases: bool
    train: bool
    bidirectional: bool
    batch_first: bool
    autocast: torch.dtype | None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.input, *self.states, *self.weights)

    @property
    def width(self) -> torch.dtype:
        """The dtype of the results."""
        return self.input.dtype if self.autocast is None or self.input.dtype is torch.float64 else self.autocast

    def run(self) -> Sequence[torch.Tensor]:
        """PyTorch's own function for a single layer, without dropout."""
        states = [state.contiguous() for state in self.states]  # cuDNN requires contiguous states
        hidden = tuple(states) if self.kind == "lstm" else states[0]
        options = (self.has_biases, 1, 0.0, self.train, self.bidirectional, self.batch_first)
        with torch.autocast(self.input.device.type, dtype=self.autocast, enabled=self.autocast is not None, cache_enabled=False):
            return KERNELS[self.kind](self.input, hidden, list(self.weights), *options)


def _forward(*operands: Any) -> list[torch.Tensor]:
    layer = _Operands(*operands)
    with torch.no_grad():
        results = layer.run()
    return [r.to(layer.width, copy=True, memory_format=torch.contiguous_format) for r in results]


def _backward(
    arrived: Sequence[int], needed: Sequence[bool], gradients: Sequence[torch.Tensor], *operands: Any
) -> list[torch.Tensor]:
    """Run the layer again and differentiate it. cuDNN differentiates in training mode only."""
    layer = _Operands(*operands)
    with recording_gradients():
        leaves = [o.detach().requires_grad_(wanted) for o, wanted in zip(layer.tensors, needed, strict=True)]
        count = 1 + len(layer.states)
        results = layer._replace(input=leaves[0], states=leaves[1:count], weights=leaves[count:], train=True).run()
        roots = [results[i] for i in arrived]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        seeds = [g.to(root.dtype) for g, root in zip(gradients, roots, strict=True)]
        made = torch.autograd.grad(roots, wanted, seeds, allow_unused=True, materialize_grads=True)
    return [g.to(leaf.dtype, copy=True, memory_format=torch.contiguous_format) for g, leaf in zip(made, wanted, strict=True)]


def _forward_sizes(*operands: Any) -> list[torch.Tensor]:
    layer = _Operands(*operands)
    directions, recurrent = 2 if layer.bidirectional else 1, layer.weights[1]
    batch = layer.input.shape[0 if layer.batch_first else 1]
    hidden, handed_on = recurrent.shape[0] // _GATES[layer.kind], recurrent.shape[1]
    shapes = [(*layer.input.shape[:2], directions * handed_on), (directions, batch, handed_on), (directions, batch, hidden)]
    return [layer.input.new_empty(shape, dtype=layer.width) for shape in shapes[: 1 + len(layer.states)]]


def _backward_sizes(_: Any, needed: Sequence[bool], __: Any, *operands: Any) -> list[torch.Tensor]:
    return [o.new_empty(o.shape) for o, wanted in zip(_Operands(*operands).tensors, needed, strict=True) if wanted]


_LIBRARY.impl("recurrent_layer", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("recurrent_layer_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("l2l_compile::recurrent_layer", _forward_sizes, lib=_LIBRARY)
torch.library.register_fake("l2l_compile::recurrent_layer_backward", _backward_sizes, lib=_LIBRARY)
