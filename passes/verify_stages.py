"""The rules for the programs of all ranks of a pipeline together. They are checked after the last pass, and for each further backward.

paired    what a rank sends to another one is what that rank receives from it, in the same order: the same values, dtypes and layouts. The
          results of a segment that leave micro-batch by micro-batch for one rank are in one message: parts of two would be mixed. What is
          sent before the pause of a step without a flush is asked for before it
progress  every node runs in the end, although a message waits until both ranks have come to it, and each lane works in order. Without a
          flush, so do those of several calls in a row
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from l2l_compile.errors import VerifyError
from l2l_compile.ir import nodes
from l2l_compile.ir.leaving import leaving, passes_on, picked
from l2l_compile.ir.schedule import END, PAUSE, Action
from l2l_compile.ir.step_parts import Run, calls_in_a_row, in_parts, pauses
from l2l_compile.lanes import Lane
from l2l_compile.passes.compilation import Compilation
from l2l_compile.passes.pipeline import STREAMING

_Message = tuple[tuple[str, str, bool], ...]  # name, spec and layout of each value

_CALLS = 3  # until each step has one before it and one behind it


def verify_stages(compilation: Compilation) -> None:
    """Raise `VerifyError` if the programs of the ranks do not fit one another."""
    if compilation.stages.ranks == 1:
        return
    programs = programs_of_ranks(compilation)
    for title in ("forward", "backward", "step"):
        if there := [graph for made in programs if (graph := getattr(made, title)) is not None]:
            _paired(title, there)
            _progress(title, [_runs_of(made, graph) for made, graph in zip(programs, there, strict=True)])


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
    for node, is_paused in _with_pause(graph, nodes.send):
        if nodes.operands(node).to == to:
            yield node, _described(nodes.operands(node).values, is_paused)


def _received(graph: fx.Graph, source: int) -> Iterator[tuple[fx.Node, _Message]]:
    for node, is_paused in _with_pause(graph, nodes.recv):
        if nodes.operands(node).source == source:
            yield node, _described(picked(node), is_paused)


def _with_pause(graph: fx.Graph, target: Callable) -> Iterator[tuple[fx.Node, bool]]:
    """The nodes of a kind, and whether they stand in a part that the next call runs."""
    is_paused, pausing = False, pauses(graph)
    for part, node in in_parts(graph):
        if node.target is nodes.begin:
            is_paused = pausing and part != PAUSE and (part == END or bool(Action.parse(part).call))
        if node.target is target:
            yield node, is_paused


def _described(values: Sequence[fx.Node], is_paused: bool) -> _Message:
    behind = ", behind the pause" * is_paused
    return tuple((value.meta["value"], _described_spec(value) + behind, value.meta["split"]) for value in values)


def _described_spec(value: fx.Node) -> str:
    spec, turn = value.meta["spec"], value.meta.get("turn")
    return f"{spec}{' of equal rows' * spec.equal_rows}{'' if turn is None else f' of turn {turn}'}"


def _text(message: tuple[fx.Node, _Message] | None) -> str:
    return ", ".join(f"{name}: {spec}" for name, spec, _ in message[1]) if message is not None else "nothing"


class _Rank:
    """The nodes of one rank by lane, and how far each lane is. A node starts when what it reads is done, and its lane is at it."""

    def __init__(self, runs: Sequence[Run]):
        self.done: set[Run] = {run for run in runs if run[1].op in ("placeholder", "output")}
        self.lanes: dict[Lane, list[Run]] = defaultdict(list)
        self._sends: Mapping[Run, list[Run]] = defaultdict(list)
        # A receive stands behind what compute does before it. Compute frees parts as they leave: it stands behind the message before.
        self._behind: dict[Run, list[Run]] = {}
        left: list[Run] = []
        for run in runs:
            call, node = run
            if node.op == "call_function" and (queue := _queue_of(node)) is not None:
                computed = self.lanes[Lane.COMPUTE]
                self._behind[run] = computed[-1:] if node.target is nodes.recv else left if queue is Lane.COMPUTE else []
                self.lanes[queue].append(run)
            if node.target is nodes.send:
                for value in nodes.operands(node).values:
                    self._sends[call, value].append(run)
                if any(map(passes_on, nodes.operands(node).values)):
                    left = [run]
        self.next = dict.fromkeys(self.lanes, 0)

    def heads(self) -> Iterator[tuple[Lane, Run]]:
        """The next node of each lane that may start."""
        for lane, queue in self.lanes.items():
            if self.next[lane] < len(queue) and self._may_start(run := queue[self.next[lane]]):
                yield lane, run

    def _may_start(self, run: Run) -> bool:
        call, node = run
        waits = [*((call, read) for read in node.all_input_nodes), *self._behind[run]]
        if node.target is nodes.release:
            waits += self._sends[call, nodes.operands(node).x]
        return all(map(self._is_done, waits))

    def _is_done(self, run: Run) -> bool:
        """Whether a node is done. One that is no work, but a name, is done when what it reads is."""
        if run in self.done:
            return True
        call, node = run
        is_done = _queue_of(node) is None and all(self._is_done((call, read)) for read in node.all_input_nodes)
        if is_done:
            self.done.add(run)
        return is_done

    def end(self, lane: Lane, run: Run) -> None:
        self.done.add(run)
        self.next[lane] += 1

    @property
    def waiting(self) -> list[str]:
        return [queue[self.next[lane]][1].name for lane, queue in self.lanes.items() if self.next[lane] < len(queue)]


def _queue_of(node: fx.Node) -> Lane | None:
    """Where a node waits until it can run: its lane, the compute lane for a release; None if it is no work, but a name."""
    if node.target is nodes.release:
        return Lane.COMPUTE
    lane = nodes.lane_of(node)
    return lane if lane is not Lane.NONE else None


def _runs_of(made: Compilation, graph: fx.Graph) -> list[Run]:
    """The nodes of a graph as one rank runs them: once or, if the last turns of a call run in the next one, in several calls."""
    return calls_in_a_row(graph, made.schedule.orders[made.stages.rank] if pauses(graph) else (), _CALLS if pauses(graph) else 1)


def _progress(title: str, runs: Sequence[Sequence[Run]]) -> None:
    ranks = [_Rank(each) for each in runs]
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            for lane, run in list(rank.heads()):
                if run[1].target is nodes.recv:
                    continue  # ends together with its send
                if run[1].target is nodes.send and not _meets(ranks, number, run):
                    continue
                rank.end(lane, run)
                moved = True
    stuck = {number: rank.waiting for number, rank in enumerate(ranks) if rank.waiting}
    if stuck:
        number, names = next(iter(stuck.items()))
        text = "; ".join(f"rank {rank} at {', '.join(map(repr, waiting))}" for rank, waiting in stuck.items())
        raise VerifyError("progress", names[0], f"in {title}: the ranks wait for one another, {text}")


def _meets(ranks: Sequence[_Rank], source: int, run: Run) -> bool:
    """Whether the other rank is at the receive of this message, which then ends."""
    call, node = run
    other = ranks[nodes.operands(node).to]
    for lane, there in other.heads():
        if there[0] == call and there[1].target is nodes.recv and nodes.operands(there[1]).source == source:
            other.end(lane, there)
            return True
    return False
