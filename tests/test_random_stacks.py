"""Random stacks: parity in float64, on the host and on a device apart from it, and programs that keep their rules."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import l2l_compile
from l2l_compile import VerifyError
from l2l_compile.ir import nodes
from l2l_compile.passes.pipeline import PIPELINE
from l2l_compile.passes.verify import verify
from l2l_compile.testing.strict_device import ThreadedDevice
from models import Attention, assert_parity, compilation, rows

FACTS = frozenset().union(*(step.provides for step in PIPELINE))
MODEST = settings(  # an example compiles a model: shrinking would take minutes
    max_examples=16,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
FEW = settings(MODEST, max_examples=8)


@dataclass(frozen=True)
class Kind:
    """What a layer is made of."""

    mixer: str  # "mlp", "gated", "attention"
    norm: str  # "layer", "rms", "none"
    residual: bool
    activation: str
    bias: bool


class RandomLayer(nn.Module):
    def __init__(self, kind: Kind, width: int):
        super().__init__()
        self.kind = kind
        self.norm = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "none": lambda w: nn.Identity()}[kind.norm](width)
        if kind.mixer == "attention":
            self.mix = Attention(width, norm=False)
        else:
            self.up, self.down = nn.Linear(width, 2 * width, kind.bias), nn.Linear(2 * width, width, kind.bias)
            self.gate = nn.Linear(width, 2 * width, kind.bias) if kind.mixer == "gated" else None

    def forward(self, x):
        y = self.norm(x)
        if self.kind.mixer == "attention":
            y = self.mix(y)
        else:
            h = getattr(F, self.kind.activation)(self.up(y))
            y = self.down(h * self.gate(y) if self.gate is not None else h)
        return x + y if self.kind.residual else torch.tanh(y)


class RandomStack(nn.Module):
    """`order` says which layer stands where: a number that comes twice is a layer with shared weights."""

    def __init__(self, kinds, order, width, outputs):
        super().__init__()
        self.embed, self.head = nn.Linear(5, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList([RandomLayer(kind, width) for kind in kinds])
        self.order, self.outputs = order, outputs

    def forward(self, x):
        x, states = self.embed(x), []
        for index in self.order:
            x = self.layers[index](x)
            states.append(x)
        found = {
            "logits": self.head(x),
            "loss": self.head(x).pow(2).mean(),
            "states": tuple(states),
            "best": x.argmax(-1),
            "detached": x.detach() * 2,
        }
        return {name: found[name] for name in self.outputs}


kinds = st.builds(
    Kind,
    mixer=st.sampled_from(["mlp", "gated", "attention"]),
    norm=st.sampled_from(["layer", "rms", "none"]),
    residual=st.booleans(),
    activation=st.sampled_from(["gelu", "silu", "tanh"]),
    bias=st.booleans(),
)


@st.composite
def stacks(draw):
    """A model, two batches and options."""
    used = draw(st.lists(kinds, min_size=1, max_size=2, unique=True))
    depth = draw(st.integers(1, 6))
    pattern = draw(st.sampled_from(["same", "alternate", "halves"]))
    chosen = [used[{"same": 0, "alternate": i % len(used), "halves": i * len(used) // depth}[pattern]] for i in range(depth)]
    order = draw(st.sampled_from([list(range(depth)), [0] * depth, [i // 2 for i in range(depth)]]))
    torch.manual_seed(draw(st.integers(0, 1000)))
    outputs = draw(st.sampled_from([("logits",), ("loss", "logits"), ("logits", "states"), ("best", "logits", "detached")]))
    model = RandomStack(chosen, order, draw(st.sampled_from([4, 6])), outputs).double()
    for index in draw(st.sets(st.integers(-1, depth - 1), max_size=3)):
        (model.embed if index < 0 else model.layers[index]).requires_grad_(False)
    batches = [rows(draw(st.integers(2, 9)), 3, 5) for _ in range(2)]
    options = {
        "micro_batches": draw(st.integers(1, 5)),
        "prefetch": draw(st.integers(0, 3)),
        "stash": draw(st.sampled_from(["host", "device"])),
    }
    return model, batches, options


@MODEST
@given(stacks())
def test_parity(drawn):
    model, batches, options = drawn
    torch._dynamo.reset()
    assert_parity(model, *batches, **options)


@FEW
@given(stacks(), st.integers(0, 1000), st.sampled_from([0.0, 0.001, 0.004]))
@pytest.mark.slow
def test_parity_on_a_device_apart_from_the_host(drawn, seed, delay):
    model, batches, options = drawn
    torch._dynamo.reset()
    with mock.patch.object(l2l_compile.session, "open_device", lambda _: ThreadedDevice(delay, seed)):
        step = assert_parity(model, *batches, **options)
    assert l2l_compile.session.session_of(step).device.ledger.held == 0


@FEW
@given(stacks(), st.data())
def test_programs_are_legal_only_with_each_silent_node(drawn, data):
    model, (x, _), options = drawn
    found = compilation(copy.deepcopy(model), x, **options)
    verify(found, FACTS)
    graph = data.draw(st.sampled_from([g for g in (found.forward, found.backward) if g is not None]))
    silent = [n for n in graph.nodes if n.target in (nodes.release, nodes.push_gradients)]
    graph.erase_node(data.draw(st.sampled_from(silent)))
    with pytest.raises(VerifyError) as caught:
        verify(found, FACTS)
    assert caught.value.rule in ("released_once", "pushed_once")
