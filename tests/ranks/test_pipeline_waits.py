"""Messages between stages: each wait, taken away, is missed on devices whose lanes are threads.

The waits are found in the source (`waits.py`): one that no case names fails a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from pipelines import Case, Trained, train
from test_memory_taken_again import WAIT, memory_is_taken_again
from test_order import threads
from torch import fx

import l2l_compile
from l2l_compile import L2LError, row_check, session
from l2l_compile.ir import nodes
from l2l_compile.passes.verify_stages import picked
from l2l_compile.ranks.pipeline_ranks import PipelineRanks
from l2l_compile.runtime import message_handlers, messages
from l2l_compile.runtime.messages import Arrival, ArrivingParts
from l2l_compile.runtime.runtime_value import RuntimeValue
from waits import waits

OF_MESSAGES = "runtime.messages", "runtime.message_handlers"
ALL = (
    *waits(OF_MESSAGES, ("submit", "submit_behind_releases", "send_parts", "wait")),  # work that waits for what it reads
    *waits((*OF_MESSAGES, "runtime.executor"), ("complete", "finish_message", "finish_messages")),
)
FOUND = {f"{wait.function}: {wait.called}": wait for wait in ALL}
TWICE = {  # waits that others make needless
    "ArrivingParts.end: complete": "who reads or releases the value next completes it as well",
    "Executor.end: finish_messages": "a release does the same; what is stashed has been read, or was sent for the loss",
    "Executor.pause: finish_messages": "a release in the next call does the same; until then, other ranks have asked for all messages",
    "_release: finish_messages": "a segment does the same for its results; a message of a whole value holds its memory itself",
}
LLAMA, GATED = Case("llama", torch.float64), Case("gated", torch.float64)


# ---- a wait that is taken away ------------------------------------------------------------------------------------------


@contextmanager
def patched(module, name: str, other: Callable) -> Iterator[None]:
    """`other` takes the place of a function, and gets it first."""
    with pytest.MonkeyPatch.context() as patch:
        before = getattr(module, name)
        patch.setattr(module, name, lambda *arguments, **named: other(before, *arguments, **named))
        yield


def parts_are_not_awaited():
    return patched(ArrivingParts, "before", lambda before, self, micro_batch: ((), ()))


def parts_leave_early():
    def send(before, run, to, values, parts, *made):
        for value in made:
            value.event = None
        before(run, to, values, parts, *made)

    return patched(messages, "send_parts", send)


def whole_values_leave_early():
    return patched(message_handlers, "send_parts", lambda before, *arguments: before(*arguments, RuntimeValue()))


def memory_is_freed_early():
    def finish(before, run, values, reads):
        before(run, values, reads)
        for value in reads:
            value.readers.pop("send", None)

    return patched(messages, "_finish", finish)


def messages_are_not_finished():
    return patched(messages, "_finish", lambda before, run, values, reads: None)


def nobody_knows_of_an_arrival():
    def awaited(before, self, part):
        made = before(self, part)
        made.event = None
        return made

    return patched(Arrival, "_awaited", awaited)


def the_last_part_alone_is_awaited():
    def part(before, self, value, micro_batch):
        parts, position = self._parts, next(i for i, each in enumerate(self._values) if each is value)
        self._parts = [(position, min(micro_batch, max(self._counts[position] - 1, 0)))]
        try:
            return before(self, value, micro_batch)
        finally:
            self._parts = parts

    return patched(Arrival, "part", part)


def the_check_sees_all_parts():
    """Raises `L2LError` if it reads what has not come: it compares the rows of two micro-batches."""

    def compare(before, pair, weights, operands, gradients, made):
        for value in (*operands, *(gradient for gradient, _ in gradients)):
            if any(t.is_floating_point() and t.isnan().any() for t in value.tensors[:2]):
                raise L2LError("a part has not come")
        before(pair, weights, operands, gradients, made)

    return patched(row_check._Pair, "compare", compare)


@contextmanager
def the_check_reads_early() -> Iterator[None]:
    def one_part(before, self, values, ahead):
        before(self, values, 0)

    with the_check_sees_all_parts(), patched(ArrivingParts, "__init__", one_part):
        yield


@contextmanager
def memory_in_use_is_received_into() -> Iterator[None]:
    with WAIT.deleted(), memory_is_taken_again("recv"):
        yield


@dataclass(frozen=True)
class ForNobody:
    """A pass of the user's: the last rank sends the loss once more, and the other one releases it unread."""

    name: ClassVar[str] = "for_nobody"
    requires: ClassVar[frozenset] = frozenset()
    provides: ClassVar[frozenset] = frozenset()

    def apply(self, compilation):
        graph = compilation.forward
        sends, receives, releases = (
            graph.find_nodes(op="call_function", target=kind) for kind in (nodes.send, nodes.recv, nodes.release)
        )
        of_loss = [node for node in sends if not any(value.meta["split"] for value in nodes.operands(node).values)]
        if of_loss:
            copied_behind(graph, of_loss[-1], of_loss[-1], of_loss[-1].args)
            return
        received = [node for node in receives if not any(value.meta["split"] for value in picked(node))][-1]
        # Behind the rank's own last message: the loss is computed from it, and the release below waits for the loss.
        again = copied_behind(graph, sends[-1], received, received.args)
        for pick in picked(received):
            there = copied_behind(graph, again, pick, (again, *pick.args[1:]))
            copied_behind(graph, there, releases[0], (there,))


def copied_behind(graph: fx.Graph, place: fx.Node, node: fx.Node, arguments: tuple) -> fx.Node:
    with graph.inserting_after(place):
        made = graph.call_function(node.target, arguments)
    made.meta = dict(node.meta)
    return made


@dataclass(frozen=True)
class Away:
    """A wait that is taken away.

    take   takes it away
    slow   the lane that shows it, if it is slow
    waits  those of the source
    case   a training loop that needs it
    """

    take: Callable[[], AbstractContextManager]
    slow: str
    waits: tuple[str, ...] = ()
    case: Case = LLAMA


def deleted(wait: str, slow: str, case: Case = LLAMA) -> Away:
    return Away(FOUND[wait].deleted, slow, (wait,), case)


CASES = {
    "a part is not awaited": Away(parts_are_not_awaited, "recv"),
    "a value is not awaited": deleted("Executor.submit: complete", "recv"),
    "a value for nobody is not awaited": deleted(
        "finish_messages: complete", "recv", replace(LLAMA, options={"passes": [ForNobody()]})
    ),
    "nobody knows of an arrival": Away(nobody_knows_of_an_arrival, "recv", ("Arrival._awaited: submit",)),
    "the last part alone is awaited": Away(the_last_part_alone_is_awaited, "recv", case=GATED),
    "the check reads too early": Away(the_check_reads_early, "send", case=replace(LLAMA, options={"check": True})),
    "memory in use is received into": Away(
        memory_in_use_is_received_into, "compute", ("Arrival.__init__: submit_behind_releases",)
    ),
    "a receive is not finished": deleted("Arrival._awaited: finish_message", "recv"),
    "a part is sent too early": Away(parts_leave_early, "compute", ("LeavingParts.after: send_parts", "send_parts: submit")),
    "a whole value is sent too early": Away(whole_values_leave_early, "compute", ("_send: send_parts",)),
    "a message is cut off": Away(messages_are_not_finished, "send"),
    "a part is freed too early": deleted("LeavingParts._free: wait", "send"),
    "a send is not finished": deleted("_finish: finish_message", "recv"),
    "memory is freed too early": Away(memory_is_freed_early, "send", ("_finish: submit",)),
}
FAST = "a part is not awaited", "a value is not awaited", "a part is sent too early", "a message is cut off"


# ---- is missed ----------------------------------------------------------------------------------------------------------


def figures(trained: Trained) -> tuple[list[float], int]:
    return trained.losses, l2l_compile.stats(trained.compiled).received_bytes


@contextmanager
def what_has_not_come_is_nan() -> Iterator[None]:
    def receive(before, self, tensor, source, channel=0):
        return before(self, tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor, source)

    with patched(PipelineRanks, "receive", receive):
        yield


@contextmanager
def slow_threads(rank: int, slow: str) -> Iterator[None]:
    """Devices without a watch, which would refuse to run."""
    with pytest.MonkeyPatch.context() as patch, threads(rank, slow), what_has_not_come_is_nan():
        patch.setattr(session, "open_device", session.plain_open)
        yield


def is_missed(rank, world, name):
    away = CASES[name]
    expected = figures(train(away.case, world))
    try:
        with slow_threads(rank, away.slow), away.take():
            return figures(train(away.case, world)) != expected
    except (AttributeError, IndexError, TypeError, RuntimeError, L2LError):
        return True


def all_waits_are_there(rank, world, slow):
    for case in (GATED, replace(LLAMA, options={"check": True, "passes": [ForNobody()]})):
        expected = figures(train(case, world))
        with slow_threads(rank, slow), the_check_sees_all_parts(), memory_is_taken_again("recv"):
            assert figures(train(case, world)) == expected


@pytest.mark.parametrize("slow", ["recv", "compute"])
@pytest.mark.slow(only="compute")
def test_nothing_is_missed_where_all_waits_are_there(ranks, slow):
    ranks.run(all_waits_are_there, slow, world=2, seconds=150)


def test_every_wait_for_a_message_has_a_case():
    in_cases = {wait for away in CASES.values() for wait in away.waits}
    assert len(FOUND) == len(ALL)
    assert in_cases | set(TWICE) == set(FOUND) and not in_cases & set(TWICE)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(but=FAST)
def test_each_wait_for_a_message_is_missed(ranks, name):
    assert any(ranks.run(is_missed, name, world=2))
