"""Tiny models for the tests, and what most tests do with them: compile, compare with eager, look at a compilation."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

import l2l_compile.backend  # noqa: F401  (marks the batches of `_Recorder`)
from l2l_compile.frontend.capture import capture
from l2l_compile.options import Options
from l2l_compile.passes.compilation import Compilation
from l2l_compile.passes.pipeline import PREPARATION, SEGMENTATION, STREAMING, run
from l2l_compile.testing import Comparison, Pair
from l2l_compile.testing.difference import differences
from l2l_compile.testing.observation import state_of
from l2l_compile.testing.tolerances import promise
from l2l_compile.testing.verdicts import EagerError

WIDTH = 8


# ---- models ----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Pre-norm residual MLP. The keywords make layers that differ in one thing."""

    def __init__(self, width=WIDTH, *, hidden=None, eps=1e-5, scale=1.0, activation=F.gelu, dropout=0.0, flip=False, norm=None):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps) if norm is None else norm(width)
        self.up, self.down = nn.Linear(width, hidden or 2 * width), nn.Linear(hidden or 2 * width, width)
        self.drop, self.scale, self.activation, self.flip = nn.Dropout(dropout), scale, activation, flip

    def forward(self, x):
        y = self.drop(self.down(self.activation(self.up(self.norm(x))))) * self.scale
        return y - x if self.flip else x - y


class Stack(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, layers: Sequence[nn.Module] | int = 4, width=WIDTH, **layer):
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.layers = nn.ModuleList(layers if not isinstance(layers, int) else [Layer(width, **layer) for _ in range(layers)])
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Attention(nn.Module):
    """Self- or cross-attention of two heads with four equal projections."""

    def __init__(self, width=WIDTH, dropout=0.0, norm=True):
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.dropout = dropout

    def forward(self, x, memory=None, bias=None):
        y = self.norm(x)
        memory = y if memory is None else memory
        heads = lambda t: t.unflatten(-1, (2, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = heads(self.q(y)), heads(self.k(memory)), heads(self.v(memory))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=self.dropout if self.training else 0.0)
        return x + self.o(y.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.cross, self.mlp = Attention(), Attention(norm=False), Layer()

    def forward(self, x, memory):
        return self.mlp(self.cross(self.own(x), memory))


class EncoderDecoder(nn.Module):
    """Two stacks; every decoder layer reads the encoder's output."""

    def __init__(self, depth=3):
        super().__init__()
        self.encoder = nn.ModuleList([Attention() for _ in range(depth)])
        self.decoder = nn.ModuleList([DecoderLayer() for _ in range(depth)])

    def forward(self, x):
        memory, y = x * 1.5, x.flip(1)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            y = layer(y, memory)
        return y


class BiasOfFirst(nn.Module):
    """As in T5: layer 0 makes the position bias from a table, every layer uses it."""

    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList([Attention() for _ in range(depth)])
        self.layers[0].table = nn.Embedding(16, 2)

    def forward(self, x):
        bias = None
        for layer in self.layers:
            if bias is None:
                place = torch.arange(x.shape[1])
                bias = layer.table(place[None] - place[:, None] + 7).permute(2, 0, 1)[None]
            x = layer(x, bias=bias)
        return x


class Shared(nn.Module):
    """As in ALBERT: one layer's weights, used again and again."""

    def __init__(self, times=4):
        super().__init__()
        self.embed, self.layer, self.times = nn.Linear(5, WIDTH), Layer(), times

    def forward(self, x):
        x = self.embed(x)
        for _ in range(self.times):
            x = self.layer(x)
        return x


class UNet(nn.Module):
    """Layer i of the way up reads what layer -i of the way down made."""

    def __init__(self, depth=5):
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        self.up = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(depth)])

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = torch.relu(layer(x))
            skips.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, skips.pop()], -1)))
        return x


class Funnel(nn.Sequential):
    """No two layers alike."""

    def __init__(self):
        super().__init__(
            nn.Linear(5, 32),
            nn.ReLU(),
            nn.Linear(32, 24),
            nn.Tanh(),
            nn.Linear(24, 40),
            nn.GELU(),
            nn.LayerNorm(40),
            nn.Linear(40, 3),
        )


class TwoHeads(nn.Module):
    """A loss beside logits, a result without gradient and a plain number."""

    def __init__(self, depth=3):
        super().__init__()
        self.body = Stack(depth)

    def forward(self, x):
        logits = self.body(x)
        return {"loss": logits.pow(2).mean(), "logits": logits, "best": logits.argmax(-1), "count": 3}


class Broken(nn.Module):
    """A graph break between two stacks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Stack(3), Stack(3)

    def forward(self, x):
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(torch.cat([y, x[:, :2]], 1))


def functional(x, weights):
    """A stack without modules."""
    for w in weights:
        x = x + torch.tanh(x @ w)
    return x


# ---- compile and compare ---------------------------------------------------------------------------------------------


def rows(count: int, *shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(count, *(shape or (5,)), dtype=dtype)


def compiled(model, *, dynamic=None, **options):
    """`torch.compile` with this backend; `micro_batches=3` and uncompiled blocks unless the options say otherwise."""
    chosen = {"micro_batches": 3, "block_compiler": "eager", **options}
    return torch.compile(model, backend="l2l", dynamic=dynamic, options=chosen)


def loss_of(output) -> torch.Tensor:
    """A scalar that depends on every differentiable tensor of an output, or its own loss if it has one."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    leaves = torch.utils._pytree.tree_leaves(output)
    found = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum((t.double() * (i + 1)).pow(2).mean() for i, t in enumerate(found))


def pair_of(model: nn.Module, *, tolerance: float = 1e-10, dynamic=None, **options) -> Pair:
    """The model itself, compiled, beside an eager copy of it."""
    return Pair(model, copy.deepcopy(model), compiled(model, dynamic=dynamic, **options), tolerance=tolerance, loss=loss_of)


def forward_alone(call, *inputs):
    """A step for `Pair.run` without a backward."""
    return call(*inputs)


def backward_of_loss(call, *inputs):
    """A step for `Pair.run`, with the loss that the model returns."""
    loss = call(*inputs)
    loss.backward()
    return loss


def backward_twice(call, x):
    """A step for `Pair.run`."""
    loss = call(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def assert_parity(model: nn.Module, *batches, tolerance=1e-10, dynamic=None, **options):
    """One step a batch (a tuple or dict of inputs, or a tensor): outputs, gradients and buffers equal eager's.

    Returns the compiled model.
    """
    pair = pair_of(model, tolerance=tolerance, dynamic=dynamic, **options)
    for inputs in batches:
        if isinstance(inputs, dict):
            pair.step(**inputs).check()
        else:
            pair.step(*(inputs if isinstance(inputs, tuple) else (inputs,))).check()
    return pair.compiled


def assert_same_state(model: nn.Module, reference: nn.Module, tolerance: float = 1e-10) -> None:
    """Parameters and buffers, after training that is not that of `training_equivalent`."""
    rule = promise(next(model.parameters()).dtype, torch.float64, tolerance)
    found = differences(state_of(model), state_of(reference), lambda key: ())
    Comparison("ours against theirs", tuple(found), rule, (), lambda: EagerError(why="not measured")).check()


# ---- look at a compilation -------------------------------------------------------------------------------------------


PREPARED = frozenset().union(*(step.provides for step in PREPARATION))


class _Recorder:
    """A backend that runs the passes and leaves the graph as it is."""

    streams_layers = True  # dimension 0 of the inputs becomes the batch symbol
    __name__ = "record"

    def __init__(self, options: Options, passes):
        self.options, self.passes, self.found = options, passes, []

    def __call__(self, gm, example_inputs):
        compilation = Compilation(capture(gm)[0], self.options)
        run(compilation, PREPARATION)
        run(compilation, self.passes, PREPARED)
        self.found.append(compilation)
        return gm.forward


def compilations(model, *inputs, passes=SEGMENTATION + STREAMING, dynamic=None, **options) -> list[Compilation]:
    """What the passes make of a model, one for each captured graph."""
    torch._dynamo.reset()
    recorder = _Recorder(Options.build({"micro_batches": 3, "device": "cpu", **options}), passes)
    torch.compile(model, backend=recorder, dynamic=dynamic)(*inputs)
    return recorder.found


def compilation(model, *inputs, **options) -> Compilation:
    (only,) = compilations(model, *inputs, **options)
    return only


def repeated(found) -> list[list[str]]:
    """Names of the segments of each block that has several, in program order."""
    return [[s.name for s in found.segments if s.block is block] for block in found.blocks if block.repeats > 1]
