"""The rules for the programs of all ranks of a pipeline together. They are checked after the last pass, and for each further backward.

paired    what a rank sends to another one is what that rank receives from it, in the same order: the same values, dtypes and layouts. The
          results of a segment that leave micro-batch by micro-batch for one rank are in one message: parts of two would be mixed
progress  every node runs in the end, although a message waits until both ranks have come to it, and each lane works in order
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from l2l_compile.errors import VerifyError
from l2l_compile.ir import nodes
from l2l_compile.ir.leaving import leaving, passes_on
from l2l_compile.lanes import Lane
from l2l_compile.passes.compilation import Compilation
from l2l_compile.passes.pipeline import STREAMING

_Message = tuple[tuple[str, str, bool], ...]  # name, spec and layout of each value


def verify_stages(compilation: Compilation) -> None:
    """Raise `VerifyError` if the programs of the ranks do not fit one another."""
    if compilation.stages.ranks == 1:
        return
    programs = programs_of_ranks(compilation)
    for title in ("forward", "backward", "step"):
        if there := [graph for made in programs if (graph := getattr(made, title)) is not None]:
            _paired(title, there)
            _progress(title, there)


def programs_of_ranks(compilation: Compilation) -> list[Compilation]:
    """The compilation as each rank of the pipeline makes it; this rank's is the given one."""
    found = []
    owners = compilation.captured.owners
    for rank in range(compilation.stages.ranks):
        made = compilation
        if rank != compilation.stages.rank:
            assert owners is not None
            captured = replace(
                compilation.captured, owners=replace(owners, rank=rank), dropped=dict(compilation.captured.dropped)
            )
            made = replace(compilation, captured=captured, backward=None, step=None)
            for step in (*STREAMING, *compilation.options.passes):
                step.apply(made)
        found.append(made)
    return found


def _paired(title: str, graphs: Sequence[fx.Graph]) -> None:
    for rank, graph in enumerate(graphs):
        _refuse_mixed(title, rank, graph)
    for source, target in itertools.permutations(range(len(graphs)), 2):
        sent, received = list(_sent(graphs[source], target)), list(_received(graphs[target], source))
        for number, (there, here) in enumerate(itertools.zip_longest(sent, received)):
            if there is None or here is None or there[1] != here[1]:
                node, other = (here or there), (there or here)
                raise VerifyError(
                    "paired",
                    node[0].name,
                    f"in {title}: message {number} from rank {source} to rank {target} is {_text(there)}, and rank {target} expects "
                    f"{_text(here)}" + ("" if other is None else f" ('{other[0].name}')"),
                )


def _refuse_mixed(title: str, rank: int, graph: fx.Graph) -> None:
    for messages in leaving(graph.nodes).values():
        to: set[int] = set()
        for message in messages:
            read = nodes.operands(message)
            if any(value.meta["split"] for value in read.values):
                if read.to in to:
                    raise VerifyError(
                        "paired",
                        message.name,
                        f"in {title}: rank {rank} sends results of one segment to rank {read.to} in two messages, whose micro-batches would "
                        "be mixed: send them in one",
                    )
                to.add(read.to)


def _sent(graph: fx.Graph, to: int) -> Iterator[tuple[fx.Node, _Message]]:
    for node in graph.find_nodes(op="call_function", target=nodes.send):
        if nodes.operands(node).to == to:
            yield node, _described(nodes.operands(node).values)


def _received(graph: fx.Graph, source: int) -> Iterator[tuple[fx.Node, _Message]]:
    for node in graph.find_nodes(op="call_function", target=nodes.recv):
        if nodes.operands(node).source == source:
            yield node, _described(picked(node))


def picked(node: fx.Node) -> list[fx.Node]:
    """The values of a message, in order."""
    found = (user for user in node.users if user.target is operator.getitem)
    return sorted(found, key=lambda user: nodes.operands(user).index)


def _described(values: Sequence[fx.Node]) -> _Message:
    return tuple((value.meta["value"], _described_spec(value), value.meta["split"]) for value in values)


def _described_spec(value: fx.Node) -> str:
    spec, turn = value.meta["spec"], value.meta.get("turn")
    return f"{spec}{' of equal rows' * spec.equal_rows}{'' if turn is None else f' of turn {turn}'}"


def _text(message: tuple[fx.Node, _Message] | None) -> str:
    return ", ".join(f"{name}: {spec}" for name, spec, _ in message[1]) if message is not None else "nothing"


class _Rank:
    """The nodes of one rank by lane, and how far each lane is. A node starts when what it reads is done, and its lane is at it."""

    def __init__(self, graph: fx.Graph):
        self.done: set[fx.Node] = {node for node in graph.nodes if node.op in ("placeholder", "output")}
        self.lanes: dict[Lane, list[fx.Node]] = defaultdict(list)
        self._sends: Mapping[fx.Node, list[fx.Node]] = defaultdict(list)
        # A receive stands behind what compute does before it. Compute frees parts as they leave: it stands behind the message before.
        self._behind: dict[fx.Node, list[fx.Node]] = {}
        left: list[fx.Node] = []
        for node in graph.nodes:
            if node.op == "call_function" and (queue := _queue_of(node)) is not None:
                computed = self.lanes[Lane.COMPUTE]
                self._behind[node] = computed[-1:] if node.target is nodes.recv else left if queue is Lane.COMPUTE else []
                self.lanes[queue].append(node)
            if node.target is nodes.send:
                for value in nodes.operands(node).values:
                    self._sends[value].append(node)
                if any(map(passes_on, nodes.operands(node).values)):
                    left = [node]
        self.next = dict.fromkeys(self.lanes, 0)

    def heads(self) -> Iterator[tuple[Lane, fx.Node]]:
        """The next node of each lane that may start."""
        for lane, queue in self.lanes.items():
            if self.next[lane] < len(queue) and self._may_start(node := queue[self.next[lane]]):
                yield lane, node

    def _may_start(self, node: fx.Node) -> bool:
        waits = [*node.all_input_nodes, *self._behind[node]]
        if node.target is nodes.release:
            waits += self._sends[nodes.operands(node).x]
        return all(map(self._is_done, waits))

    def _is_done(self, node: fx.Node) -> bool:
        """Whether a node is done. One that is no work, but a name, is done when what it reads is."""
        if node in self.done:
            return True
        is_done = _queue_of(node) is None and all(map(self._is_done, node.all_input_nodes))
        if is_done:
            self.done.add(node)
        return is_done

    def end(self, lane: Lane, node: fx.Node) -> None:
        self.done.add(node)
        self.next[lane] += 1

    @property
    def waiting(self) -> list[str]:
        return [queue[self.next[lane]].name for lane, queue in self.lanes.items() if self.next[lane] < len(queue)]


def _queue_of(node: fx.Node) -> Lane | None:
    """Where a node waits until it can run: its lane, the compute lane for a release; None if it is no work, but a name."""
    if node.target is nodes.release:
        return Lane.COMPUTE
    lane = nodes.lane_of(node)
    return lane if lane is not Lane.NONE else None


def _progress(title: str, graphs: Sequence[fx.Graph]) -> None:
    ranks = [_Rank(graph) for graph in graphs]
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            for lane, node in list(rank.heads()):
                if node.target is nodes.recv:
                    continue  # ends together with its send
                if node.target is nodes.send and not _meets(ranks, number, node):
                    continue
                rank.end(lane, node)
                moved = True
    stuck = {number: rank.waiting for number, rank in enumerate(ranks) if rank.waiting}
    if stuck:
        number, names = next(iter(stuck.items()))
        text = "; ".join(f"rank {rank} at {', '.join(map(repr, waiting))}" for rank, waiting in stuck.items())
        raise VerifyError("progress", names[0], f"in {title}: the ranks wait for one another, {text}")


def _meets(ranks: Sequence[_Rank], source: int, node: fx.Node) -> bool:
    """Whether the other rank is at the receive of this message, which then ends."""
    other = ranks[nodes.operands(node).to]
    for lane, there in other.heads():
        if there.target is nodes.recv and nodes.operands(there).source == source:
            other.end(lane, there)
            return True
    return False
