"""No edge of a program is there for nothing: each operand, deleted, is refused by the rules, and shows when the program runs.

The rules cannot refuse one thing, since it is legal: a segment that is given no gradient by another one. It shows.

It shows as wrong numbers or an error on a device of threads that fills freed memory with NaN.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn

import l2l_compile
from l2l_compile import VerifyError
from l2l_compile.ir import nodes
from l2l_compile.passes.compilation import Compilation
from l2l_compile.passes.pipeline import PIPELINE
from l2l_compile.passes.verify import verify
from l2l_compile.runtime.instructions import edited
from l2l_compile.session import session_of
from models import WIDTH, Shared, Stack, TwoHeads, UNet, compiled, loss_of

FACTS = frozenset().union(*(step.provides for step in PIPELINE))


class Counted(nn.Module):
    """Layers, and a buffer that each step writes into."""

    def __init__(self):
        super().__init__()
        self.stack = Stack(3)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count.add_(1)
        return self.stack(x) * self.count


PROGRAMS = {
    "stack": (lambda: Stack(4), {}),
    "stashes on the device": (lambda: Stack(4), {"stash": "device", "prefetch": 2}),
    "stashes on the disk": (lambda: Stack(5), {"stash": "disk", "disk": tempfile.gettempdir()}),
    "skips": (lambda: nn.Sequential(nn.Linear(5, WIDTH), UNet(4)), {}),
    "shared, several outputs": (lambda: nn.Sequential(Shared(), nn.Linear(WIDTH, 5), TwoHeads()), {}),
    "a buffer, in_backward": (Counted, {"update": "in_backward"}),
    "a buffer, in_forward": (Counted, {"update": "in_forward"}),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Edge:
    """An operand of a node that is a node, by where it stands in the node's arguments."""

    graph: str
    reader: fx.Node
    path: tuple[int, ...]
    operand: fx.Node

    def __str__(self) -> str:
        return f"{self.graph}: {self.reader.name} reads {self.operand.name}"

    @property
    def is_order(self) -> bool:
        """Whether it hands over no value: one of two things on the host is done first, and the host does all in turn."""
        return self.operand in nodes.reads(self.reader, nodes.Done) or self.operand.target is nodes.write_back

    @property
    def is_optional(self) -> bool:
        """Whether the rules allow None in its place: a gradient that one segment gives another may be absent."""
        return self.reader.target is nodes.backward and self.operand in nodes.operands(self.reader).gradients

    def deleted_from(self, arguments: object, path: tuple[int, ...]) -> object:
        """The arguments with None in the place of the operand."""
        if not path:
            return None
        return type(arguments)(
            self.deleted_from(a, path[1:]) if position == path[0] else a for position, a in enumerate(arguments)
        )


def edges(program) -> Iterator[Edge]:
    for name, graph in program.graphs.items():
        for node in graph.nodes:
            yield from (Edge(name, node, path, operand) for path, operand in _operands(node.args))


def _operands(arguments: object, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], fx.Node]]:
    if isinstance(arguments, fx.Node):
        yield path, arguments
    elif isinstance(arguments, (tuple, list)):
        for position, argument in enumerate(arguments):
            yield from _operands(argument, (*path, position))


class Trained:
    """A model that was compiled, and one step of its training from the same parameters again and again."""

    def __init__(self, name: str):
        make, options = PROGRAMS[name]
        self.model = make().double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if "update" in options:
            options = {**options, "optimizer": self.optimizer, "compile_update": False}
        self.x = torch.randn(6, 5, dtype=torch.float64)
        self.before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.step = compiled(self.model, **options)
        self.expected = self.run()
        (self.program,) = l2l_compile.programs(self.step)
        self.options = session_of(self.step).options

    def run(self) -> list[torch.Tensor]:
        """The loss, and parameters, buffers and gradients after two steps: what is put off is done in the second."""
        losses = []
        for _ in range(2):
            loss = loss_of(self.step(self.x))
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        l2l_compile.synchronize(self.step)
        state = [tensor.clone() for tensor in self.model.state_dict().values()]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.begin_anew()
        return [*losses, *state, *gradients]

    def begin_anew(self) -> None:
        session = session_of(self.step)
        session.device.recover()
        if session.stashes_on_disk is not None:
            session.stashes_on_disk.recover()
        session.waiting._all.clear()  # of a program that keeps None
        for _ in range(2):  # the first may raise what has failed
            try:
                l2l_compile.synchronize(self.step)
            except Exception:  # noqa: BLE001 - of a step that is given up
                session.server.updates.forget()
        session.server.updates.forget()
        self.model.load_state_dict(self.before)
        self.model.zero_grad()

    def goes_wrong(self) -> bool:
        try:
            found = self.run()
        except Exception:  # noqa: BLE001 - what is not there ends in any error
            self.begin_anew()
            return True
        return len(found) != len(self.expected) or not all(
            torch.allclose(f, e, rtol=1e-9, atol=1e-12) for f, e in zip(found, self.expected, strict=True)
        )


@pytest.mark.unwatched
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow(but=("stashes on the device", "a buffer, in_backward"))
def test_every_edge_is_needed(threaded, name):
    threaded.delay = 0.0
    trained = Trained(name)
    assert not trained.goes_wrong()
    compilation = Compilation.of(trained.program, trained.options)
    verify(compilation, FACTS)
    found, accepted, harmless = list(edges(trained.program)), [], []
    for edge in found:
        arguments, is_order, is_optional = edge.reader.args, edge.is_order, edge.is_optional
        edge.reader.args = edge.deleted_from(arguments, edge.path)
        edited(edge.reader.graph)
        try:
            verify(compilation, FACTS)
        except VerifyError:
            pass
        except Exception as error:  # noqa: BLE001 - a rule that trips is no rule
            accepted.append(f"{edge} ({type(error).__name__}: {error})")
        else:
            accepted += [] if is_optional else [str(edge)]
        if not is_order and not trained.goes_wrong():
            harmless.append(str(edge))
        edge.reader.args = arguments
        edited(edge.reader.graph)
    verify(compilation, FACTS)
    assert not trained.goes_wrong()
    assert len(found) > 60
    assert not accepted, "\n".join(accepted)
    assert not harmless, "\n".join(harmless)
