"""Let weights stay on the device from the forward of a segment to its backward, as many as the option `resident` has bytes for.

    %w = fetch_weights(segment)                    =>      %w = fetch_resident(segment)
    %y = forward(segment, %w, (%x))                        %y = forward(segment, %w, (%x))
                                                           keep_weights(segment, %w)               and in backward
    %w = fetch_weights(segment)
    %g = backward(segment, %w, (%x), (...))                %g = backward(segment, %w_of_forward, (%x), (...))

They cross the link once a step in place of twice. They are spread over the program, so that the link has the time of several segments
for each fetch that is left. The slabs keep what forward fetches last in any case (`runtime/slabs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.ir.segments import Segment
from l2l_compile.ir.values import Bindings
from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.passes.segmentation.canonical import looks_rows_up
from l2l_compile.passes.streaming.left_for_backward import keep, may_run_backward, take


@dataclass(frozen=True)
class KeepWeights:
    """Provides `weights_kept`.

    Sharded weights are gathered for each of their readers: they do not stay. Nor do tables in which forward looks rows up, since
    backward reads none of them.
    """

    name: ClassVar[str] = "keep_weights"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.ACTIVATIONS_KEPT})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.WEIGHTS_KEPT})

    def apply(self, compilation: Compilation) -> None:
        forward, backward, room = compilation.forward, compilation.backward, compilation.options.resident
        if not room or backward is None:
            return
        in_forward, in_backward = ({nodes.operands(n).segment: n for n in nodes.fetches(g)} for g in (forward, backward))
        sizes = compilation.captured.hints
        for segment in _spread([s for s in may_run_backward(compilation) if _may_stay(s, sizes)], room, sizes):
            fetch = _resident(forward, in_forward[segment.index])
            (run,) = fetch.users
            keep(forward, run, kept_name(segment), nodes.keep_weights, fetch)
            weights = take(backward, f"weights_{segment.index}", kept_name(segment), "weights", host=False)
            if (again := in_backward.get(segment.index)) is not None:
                again.replace_all_uses_with(weights)
                backward.erase_node(again)


def _resident(forward: fx.Graph, fetch: fx.Node) -> fx.Node:
    """A fetch into memory of its own, in the place of this one."""
    with forward.inserting_before(fetch):
        made = forward.call_function(nodes.fetch_resident, fetch.args)
    made.meta = dict(fetch.meta)
    fetch.replace_all_uses_with(made)
    forward.erase_node(fetch)
    return made


def kept_name(segment: Segment) -> str:
    """The name of the weights that stay for a segment, in both graphs."""
    return f"weights of {segment.name}"


def _spread(segments: list[Segment], room: int, sizes: Bindings) -> list[Segment]:
    """The segments whose weights stay within the room, at equal distances in bytes; then those for which there is still room."""
    bytes_of = {segment.index: segment.block.weight_bytes(sizes) for segment in segments}
    share, due = room / max(1, sum(bytes_of.values())), 0.0
    chosen: set[int] = set()
    for index, size in bytes_of.items():
        due += size * share
        if size <= min(due, room):
            due, room = due - size, room - size
            chosen.add(index)
    for index, size in bytes_of.items():
        if index not in chosen and size <= room:
            room -= size
            chosen.add(index)
    return [segment for segment in segments if segment.index in chosen]


def _may_stay(segment: Segment, sizes: Bindings) -> bool:
    """Whether backward reads most of a segment's weights, which are not sharded."""
    if not segment.weights or any(weight.shard_spec is not None for weight in segment.weights):
        return False
    block = segment.block
    if block.module is None:  # of a text, which has no operations
        return True
    weights = zip(block.graph.graph.find_nodes(op="placeholder"), block.weights, strict=False)
    read = sum(spec.bytes(sizes) for node, spec in weights if not all(looks_rows_up(user, node) for user in node.users))
    return 2 * read > block.weight_bytes(sizes)
