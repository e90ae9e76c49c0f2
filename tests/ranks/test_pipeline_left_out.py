"""Each send and each receive of each rank, left out: the verifier of the stages refuses the program, and names the message.

No process but this one: the programs of all ranks are made from one capture.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from pipelines import MODELS, Case
from torch import fx, nn

from l2l_compile import VerifyError
from l2l_compile.integrations.owners import owners_by_batch
from l2l_compile.ir import nodes
from l2l_compile.ir.captured import Owners
from l2l_compile.passes import verify_stages
from l2l_compile.passes.compilation import Compilation
from l2l_compile.passes.pipeline import PREPARATION, SEGMENTATION, STREAMING, run
from models import compilation

BEFORE_STREAMING = frozenset().union(*(step.provides for step in PREPARATION + SEGMENTATION))
MESSAGES = {
    ("u_shape", 2): (8, 7),
    ("u_shape", 3): (10, 7),
    ("gated", 3): (8, 8),
    ("llama", 2): (7, 5),
}  # of forward, of backward


class Positional(nn.Module):
    """A model that is called without names, and returns its loss."""

    def __init__(self, model: nn.Module, names: list[str]):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values):
        output = self.model(**dict(zip(self.names, values, strict=True)))
        return output if isinstance(output, torch.Tensor) else output.loss


def cut(name: str, world: int, loops: int | None = None, **options) -> Compilation:
    """The segments of a model whose parameters and buffers are on the ranks that `pipeline` would give them to."""
    torch.manual_seed(0)
    batch = Case(name).batch(0)
    model = Positional(MODELS[name](), list(batch))
    places = owners_by_batch(model, tuple(batch.values()), world, loops).owners
    of_module = {parameter.rpartition(".")[0]: rank for parameter, rank in places.items()}
    found = compilation(model, *batch.values(), passes=SEGMENTATION, outputs="loss", **options)
    inputs = {i.index: i.name.rpartition(".")[0] for i in found.captured.inputs if i.kind in ("parameter", "buffer")}
    owners = Owners(0, world, {index: of_module[module] for index, module in inputs.items() if module in of_module})
    return replace(found, captured=replace(found.captured, owners=owners))


def programs_of_all(found: Compilation) -> list[Compilation]:
    """The compilation of each rank, made anew."""
    first = replace(found, gradient_mask=(), backward=None, step=None)
    run(first, STREAMING, BEFORE_STREAMING)
    return verify_stages.programs_of_ranks(first)


def verify(programs: list[Compilation], without: str = "") -> None:
    """Check the programs of all ranks, if asked without one of the rules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_stages, "programs_of_ranks", lambda compilation: programs)
        if without:
            patch.setattr(verify_stages, f"_{without}", lambda title, graphs: None)
        verify_stages.verify_stages(programs[0])


@dataclass(frozen=True)
class End:
    """Where a message leaves a rank, or comes to one.

    number  of the message among those from the rank `source` to the rank `target`
    """

    node: fx.Node
    source: int
    target: int
    number: int


def ends(graph: fx.Graph, rank: int, kind: Callable) -> list[End]:
    """The sends or the receives of a graph of a rank."""
    found: list[End] = []
    for node in graph.find_nodes(op="call_function", target=kind):
        read = nodes.operands(node)
        source, target = (rank, read.to) if kind is nodes.send else (read.source, rank)
        number = sum((end.source, end.target) == (source, target) for end in found)
        found.append(End(node, source, target, number))
    return found


def leave_out(graph: fx.Graph, node: fx.Node) -> None:
    """Take a send or a receive out of a graph. Who reads what is not received any more finds it there from the beginning."""
    first = next(iter(graph.nodes))
    for pick in list(node.users):
        with graph.inserting_before(first):
            there = graph.placeholder(f"{pick.name}_there")
        there.meta = dict(pick.meta)
        pick.replace_all_uses_with(there)
        graph.erase_node(pick)
    graph.erase_node(node)


def refusal(programs: list[Compilation], without: str = "") -> VerifyError:
    with pytest.raises(VerifyError) as caught:
        verify(programs, without)
    return caught.value


def refused(found: Compilation, title: str, rank: int, kind: Callable) -> int:
    """Leave out each end of a message of one kind on a rank, in turn. Returns how many there are."""
    count = len(ends(getattr(programs_of_all(found)[rank], title), rank, kind))
    for position in range(count):
        programs = programs_of_all(found)
        graph = getattr(programs[rank], title)
        end = ends(graph, rank, kind)[position]
        leave_out(graph, end.node)
        error = refusal(programs)
        assert error.rule == "paired"
        number = end.number if title != "step" else r"\d+"  # of two equal messages one behind the other, the second is missed
        assert re.search(f"in {title}: message {number} from rank {end.source} to rank {end.target} is ", str(error))
        assert refusal(programs, without="paired").rule == "progress"
    return count


@pytest.mark.parametrize(("name", "world"), MESSAGES, ids=str)
def test_each_end_of_a_message_that_is_left_out_is_refused(name, world):
    found = cut(name, world)
    verify(programs_of_all(found))
    for title, expected in zip(("forward", "backward"), MESSAGES[name, world], strict=True):
        for kind in (nodes.send, nodes.recv):
            assert sum(refused(found, title, rank, kind) for rank in range(world)) == expected


@pytest.mark.parametrize(("name", "world"), [("u_shape", 3), ("llama", 2)], ids=str)
def test_each_end_of_a_message_of_a_turn_is_needed(name, world):
    found = cut(name, world, 1, schedule="1f1b", micro_batches=2)
    verify(programs_of_all(found))
    sent, received = (sum(refused(found, "step", rank, kind) for rank in range(world)) for kind in (nodes.send, nodes.recv))
    assert sent == received > 2 * (world - 1) * 2


def copied_behind(node: fx.Node) -> None:
    """A send or a receive once more, behind the first one and its values."""
    place = max((node, *node.users), key=list(node.graph.nodes).index) if node.target is nodes.recv else node
    with node.graph.inserting_after(place):
        again = node.graph.node_copy(node)
    for pick in sorted(node.users, key=lambda user: nodes.operands(user).index, reverse=True):
        with node.graph.inserting_after(again):
            node.graph.node_copy(pick, lambda read: again if read is node else read)


def test_two_messages_of_a_segment_to_a_rank_are_refused():
    programs = programs_of_all(cut("gated", 2))
    sent = ends(programs[0].forward, 0, nodes.send)[0]
    received = next(end for end in ends(programs[1].forward, 1, nodes.recv) if end.number == 0)
    copied_behind(sent.node)
    copied_behind(received.node)
    error = refusal(programs)
    assert error.rule == "paired" and "to rank 1 in two messages" in str(error)
