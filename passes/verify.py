"""The rules of a legal program. They are checked after every pass, and each rule has a name.

known_node        every node is in the vocabulary, has the operands that the vocabulary declares, and names an existing segment
defined           a node reads only nodes that stand before it
lane              every operand is where its kind requires it, on the host or on the device
weights           a segment runs on the weights that were fetched for it
gathered          a segment whose weights are sharded over ranks runs on a gathered slab, and only the gather reads the
                  fetched shards; other segments have no gather
reduced_once      a sharded segment pushes reduced gradients, and reduces each bundle exactly once; with batch_scope='global',
                  if it ran on the rows of all ranks, it pushes this rank's shards of gradients that are the same on all ranks
rows_of_ranks     with batch_scope='global', a segment that mixes rows reads the rows of all ranks, and no other segment does; a
                  sum over rows is summed over the ranks
layout            an inner-looped segment reads its batched operands split, any other segment reads them whole; only
                  inner-looped segments stream gradients
slabs             the weights of at most `prefetch` + 1 segments are on the device at once
alive             no node reads a value after its release
released_once     every slab and every value on the device is released exactly once, or stashed
pushed_once       every segment that makes weight gradients pushes them exactly once
read              every result, every gradient of a result and every write has a reader
updated           with update='in_forward', every segment with parameters to train is updated once before its fetch; with
                  'in_backward', every push is followed by one update that reads it; with 'at_step', there are no updates
turns             in a step that goes by turns, each segment runs forward and back in its turns in order, each of them once, back behind
                  forward, and reads values of that turn; the parts of the step are the turns of the schedule, in its order, and what runs
                  in a turn is in its part
stash             backward takes exactly the values that forward keeps, on the host, the disk or the device, where forward leaves them
stored            nothing but its `store` reads a value that goes to the disk, and one `restore` alone a value that comes from there:
                  these free it
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch import fx

from l2l_compile.errors import VerifyError
from l2l_compile.ir import nodes
from l2l_compile.ir.schedule import END, PAUSE, Action, Direction
from l2l_compile.ir.segments import Segment
from l2l_compile.ir.step_parts import in_parts
from l2l_compile.ir.values import TensorSpec
from l2l_compile.passes.compilation import Compilation, Fact
from l2l_compile.passes.streaming.keep_weights import kept_name
from l2l_compile.passes.streaming.place_stash import stash_inputs
from l2l_compile.update_modes import UpdatePlace


def verify(compilation: Compilation, facts: frozenset[Fact]) -> None:
    """Raise `VerifyError` with the rule and the node if a program graph is illegal. `facts` decide which rules apply."""
    for graph in compilation.graphs:
        verify_graph(graph, compilation, facts)
    if Fact.STASHES_PLACED in facts and compilation.backward is not None:
        _stash(compilation.forward, compilation.backward)


def verify_graph(graph: fx.Graph, compilation: Compilation, facts: frozenset[Fact]) -> None:
    """Check the rules that concern one graph."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        _known_node(node, compilation)
        _defined(node, position)
        _lane(node)
        if nodes.runs_segment(node):
            segment = compilation.segments[nodes.operands(node).segment]
            _weights(node, segment)
            _layout(node, segment)
    if Fact.PREFETCHED in facts or Fact.RELEASED in facts:
        _slabs(graph, compilation.options.prefetch + 1, position)
    if Fact.RELEASED in facts:
        _alive(graph)
        _released_once(graph)
    _pushed_once(graph, compilation)
    if graph is compilation.step:
        _turns(graph, compilation, position)
        if compilation.goes_by_turns:  # not so for a text, whose options are those of the caller
            _parts(graph, compilation)
    if Fact.RANKS_PLACED in facts:
        _gathered(graph, compilation)
        if compilation.is_global:
            _rows_of_ranks(graph, compilation)
        _reduced_once(graph, compilation)
    _read(graph)
    _stored(graph)
    if Fact.UPDATES_PLACED in facts:
        _updated(graph, compilation)


def _known_node(node: fx.Node, compilation: Compilation) -> None:
    if node.op in ("placeholder", "output"):
        return
    word = nodes.operation_of(node)
    if word is None:
        raise VerifyError("known_node", node.name, f"is no node of the vocabulary ({node.target})")
    try:
        nodes.operands(node)
    except TypeError as error:
        raise VerifyError("known_node", node.name, f"does not have the operands of '{word.name}': {error}") from error
    if missing := nodes.missing_operands(node):
        raise VerifyError("known_node", node.name, f"lacks its {' and '.join(missing)}")
    segment = nodes.segment_of(node)
    if segment is not None and not 0 <= segment < len(compilation.segments):
        raise VerifyError("known_node", node.name, f"names segment {segment}, which does not exist")


def _defined(node: fx.Node, position: dict[fx.Node, int]) -> None:
    for read in node.all_input_nodes:
        if position[read] >= position[node]:
            raise VerifyError("defined", node.name, f"reads '{read.name}', which is made after it")


def _lane(node: fx.Node) -> None:
    for kind, wanted in ((nodes.OnDevice, "device"), (nodes.OnHost, "host"), (nodes.StoredOnDisk, "disk")):
        for read in nodes.reads(node, kind):
            where = nodes.place_of(read)
            if where != wanted:
                raise VerifyError("lane", node.name, f"reads '{read.name}' on the {where}, where it needs the {wanted}")


def _weights(node: fx.Node, segment: Segment) -> None:
    weights = nodes.operands(node).weights
    if not segment.block.weights:
        return
    read = [weights]
    if isinstance(weights, fx.Node) and weights.target is nodes.all_gather_weights:
        read.append(nodes.operands(weights).slab)
    if not _are_weights(read[-1]) or not all(_belong_to(segment, node) for node in read):
        raise VerifyError("weights", node.name, f"runs '{segment.name}' without the weights fetched for it")


def _are_weights(node: fx.Node | None) -> bool:
    return node is not None and (nodes.fetches_weights(node) or node.meta.get("kind") == "weights")


def _belong_to(segment: Segment, weights: fx.Node) -> bool:
    is_kept = weights.op == "placeholder"
    return weights.meta["value"] == kept_name(segment) if is_kept else nodes.operands(weights).segment == segment.index


def _layout(node: fx.Node, segment: Segment) -> None:
    block, operands = segment.block, nodes.operands(node)
    _same_number(node, operands.values, block.values, "values", segment)
    if node.target is nodes.backward:
        _same_number(node, operands.gradients, block.outputs, "gradients", segment)
    read = list(zip(operands.values, block.values, strict=True))
    if node.target is nodes.backward:
        read += [(g, spec) for g, spec in zip(operands.gradients, block.outputs, strict=True) if g is not None]
        _streamed_layout(node, segment)
    for operand, spec in read:
        wanted = _is_split(segment, spec)
        if operand.meta["split"] != wanted:
            layout = "split" if wanted else "whole"
            raise VerifyError("layout", node.name, f"reads '{operand.name}', which is not {layout}, for '{segment.name}'")


def _same_number(node: fx.Node, read: Sequence, specs: Sequence[TensorSpec], what: str, segment: Segment) -> None:
    if len(read) != len(specs):
        raise VerifyError("layout", node.name, f"reads {len(read)} {what} for '{segment.name}', which has {len(specs)}")


def _streamed_layout(node: fx.Node, segment: Segment) -> None:
    """Streamed gradients are whole on the host, and belong to outputs that the segment makes split."""
    streamed = nodes.operands(node).streamed_gradients
    if streamed:
        _same_number(node, streamed, segment.block.outputs, "streamed gradients", segment)
    for gradient, spec in zip(streamed, segment.block.outputs, strict=bool(streamed)):
        if gradient is not None and (gradient.meta["split"] or not _is_split(segment, spec)):
            raise VerifyError("layout", node.name, f"streams '{gradient.name}' for '{segment.name}', which cannot be taken apart")


def _is_split(segment: Segment, spec: TensorSpec) -> bool:
    """Whether a segment handles a value with this spec micro-batch by micro-batch."""
    return bool(segment.block.inner_looped) and spec.batch is not None


def _slabs(graph: fx.Graph, slabs: int, position: dict[fx.Node, int]) -> None:
    events = []
    for node in graph.find_nodes(op="call_function", target=nodes.fetch_weights):
        if node.users:  # a slab is free after its release; before releases are placed, after its last reader
            readers = {reader for user in node.users for reader in (user, *_readers_of_slab(user))}
            events += [(position[node], 1, node), (max(position[u] for u in readers), -1, node)]
    taken = 0
    for _, change, node in sorted(events, key=lambda e: e[:2]):
        taken += change
        if taken > slabs:
            raise VerifyError("slabs", node.name, f"needs slab {taken} of {slabs}")


def _readers_of_slab(node: fx.Node) -> Iterable[fx.Node]:
    """The readers of a slab after `node`, if `node` is the gather that completes it."""
    return node.users if node.target is nodes.all_gather_weights else ()


def _gathered(graph: fx.Graph, compilation: Compilation) -> None:
    for node in nodes.fetches(graph):
        segment = compilation.segments[nodes.operands(node).segment]
        gathers = [user for user in node.users if user.target is nodes.all_gather_weights]
        if len(gathers) != int(segment.sharded):
            raise VerifyError("gathered", node.name, f"of '{segment.name}' is gathered {len(gathers)} times")
        if gathers and len(node.users) > 1:
            raise VerifyError("gathered", node.name, f"of '{segment.name}' is read before it is gathered")
        if any(nodes.operands(gather).segment != segment.index for gather in gathers):
            raise VerifyError("gathered", gathers[0].name, f"gathers the slab of '{segment.name}' as that of another segment")


_TO_PIECES = (nodes.reduce_scatter_gradients, nodes.local_shard)


def _reduced_once(graph: fx.Graph, compilation: Compilation) -> None:
    made = [n for n in graph.nodes if n.target in _TO_PIECES]
    counted = Counter(nodes.operands(n).gradients for n in made)
    for node in graph.find_nodes(op="call_function", target=nodes.push_gradients):
        index, pushed = nodes.operands(node)
        segment, is_reduced = compilation.segments[index], pushed.target in _TO_PIECES
        if is_reduced != segment.sharded:
            how = "without a reduction over the ranks" if segment.sharded else "reduced over ranks, among which it is not sharded"
            raise VerifyError("reduced_once", node.name, f"pushes the gradients of '{segment.name}' {how}")
        if is_reduced and compilation.is_global and (pushed.target is nodes.local_shard) != (not segment.block.inner_looped):
            raise VerifyError(
                "reduced_once", pushed.name, f"of '{segment.name}' counts gradients more than once, or not all of them"
            )
        if is_reduced and (counted.pop(nodes.operands(pushed).gradients) != 1 or nodes.operands(pushed).segment != index):
            raise VerifyError("reduced_once", pushed.name, f"does not reduce the gradients of '{segment.name}' exactly once")
    if counted:
        raise VerifyError("reduced_once", next(iter(counted)).name, "is reduced, and not pushed")


def _rows_of_ranks(graph: fx.Graph, compilation: Compilation) -> None:
    for node in graph.nodes:
        if nodes.runs_segment(node):
            segment = compilation.segments[nodes.operands(node).segment]
            _reads_rows_of_ranks(node, segment)
        elif node.target is nodes.merge and node.meta["spec"].batch is None:
            if any(user.target not in (nodes.all_reduce, nodes.release) for user in node.users):
                raise VerifyError(
                    "rows_of_ranks", node.name, "is a part of a sum, and is read before it is summed over the ranks"
                )


def _reads_rows_of_ranks(node: fx.Node, segment: Segment) -> None:
    mixes, operands = not segment.block.inner_looped, nodes.operands(node)
    read = [*operands.values, *(operands.gradients if node.target is nodes.backward else ())]
    for value in read:
        if value is not None and value.meta["spec"].batch is not None and mixes != (value.target is nodes.all_gather_rows):
            whose = "this rank's rows alone" if mixes else "the rows of all ranks"
            raise VerifyError("rows_of_ranks", node.name, f"of '{segment.name}' reads {whose} in '{value.name}'")
    for made in node.users if mixes else ():
        if made.target is operator.getitem and "spec" in made.meta and made.meta["spec"].batch is not None:
            if any(user.target not in (nodes.local_rows, nodes.release) for user in made.users):
                raise VerifyError(
                    "rows_of_ranks", made.name, f"has the rows of all ranks of '{segment.name}', and is read as this rank's"
                )


def _alive(graph: fx.Graph) -> None:
    released: set[fx.Node] = set()
    for node in graph.nodes:
        for read in node.all_input_nodes:
            if read in released:
                raise VerifyError("alive", node.name, f"reads '{read.name}' after its release")
        if node.target in (nodes.release, *nodes.KEEPS):
            released.add(nodes.operands(node).x)


def _released_once(graph: fx.Graph) -> None:
    count = Counter(nodes.operands(n).x for n in graph.find_nodes(op="call_function", target=nodes.release))
    for node in filter(nodes.holds_device_memory, graph.nodes):
        if count[node] != (0 if nodes.is_kept(node) else 1):
            raise VerifyError("released_once", node.name, f"is released {count[node]} times")


def _pushed_once(graph: fx.Graph, compilation: Compilation) -> None:
    pushed = Counter(nodes.operands(n).segment for n in graph.find_nodes(op="call_function", target=nodes.push_gradients))
    seen: set[int] = set()
    for node in graph.find_nodes(op="call_function", target=nodes.backward):
        segment = compilation.segments[nodes.operands(node).segment]
        if segment.index not in seen and pushed.pop(segment.index, 0) != int(segment.block.is_trained):
            raise VerifyError("pushed_once", node.name, f"of '{segment.name}' does not push its gradients exactly once")
        seen.add(segment.index)
        for user in node.users:
            is_pick = user.target is operator.getitem
            if is_pick and nodes.operands(user).index == len(segment.block.values) and not segment.block.is_trained:
                raise VerifyError("pushed_once", user.name, "holds gradients of weights that want none")
    if pushed:
        raise VerifyError("pushed_once", "push_gradients", f"pushes gradients that no backward made: {sorted(pushed)}")


def _parts(graph: fx.Graph, compilation: Compilation) -> None:
    schedule, rank = compilation.schedule, compilation.stages.rank
    here, later = schedule.apart(rank)
    wanted = [*map(str, here), *([] if schedule.flushes else [PAUSE]), *map(str, later), END]
    begins = graph.find_nodes(op="call_function", target=nodes.begin)
    for node, name in itertools.zip_longest(begins, wanted):
        if node is None or nodes.operands(node).turn != name:
            shown = "nothing" if node is None else repr(nodes.operands(node).turn)
            raise VerifyError("turns", "begin" if node is None else node.name, f"begins {shown}, where the schedule has {name!r}")
    for name, node in in_parts(graph):
        part = Action.parse(name) if name not in ("", PAUSE, END) else None
        turn = nodes.operands(node).turn if nodes.runs_segment(node) else None
        direction = Direction.FORWARD if node.target is nodes.forward else Direction.BACKWARD
        if turn is not None and (part is None or (turn, direction) != (part.turn, part.direction)):
            raise VerifyError("turns", node.name, f"of turn {turn} stands in part '{part}' of the step")


def _turns(graph: fx.Graph, compilation: Compilation, position: dict[fx.Node, int]) -> None:
    found: dict[tuple[Callable, int], list[fx.Node]] = {}
    for node in filter(nodes.runs_segment, graph.nodes):
        turn = nodes.operands(node).turn
        if turn is not None:
            found.setdefault((node.target, nodes.operands(node).segment), []).append(node)
        for read in node.all_input_nodes:
            if turn is not None and read.meta.get("turn", turn) != turn:
                raise VerifyError("turns", node.name, f"of turn {turn} reads '{read.name}' of turn {read.meta['turn']}")
    for (function, index), of_segment in found.items():
        turns = [nodes.operands(node).turn for node in of_segment]
        name = compilation.segments[index].name
        if turns != list(range(compilation.turns)):
            raise VerifyError(
                "turns", of_segment[0].name, f"of '{name}': turns {turns}, where {compilation.turns} in order are needed"
            )
        before = found.get((nodes.forward, index))
        if function is nodes.backward and before is None:
            raise VerifyError("turns", of_segment[0].name, f"goes back through '{name}', which has no turns forward")
        for node, forward in zip(of_segment, before or (), strict=False):
            if function is nodes.backward and position[node] < position[forward]:
                raise VerifyError("turns", node.name, f"goes back through '{name}' before it goes forward in '{forward.name}'")


def _read(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if _is_for_a_reader(node) and not any(user.target is not nodes.release for user in node.users):
            raise VerifyError("read", node.name, "is read by nobody")


def _is_for_a_reader(node: fx.Node) -> bool:
    """Whether a node must have a reader: a result on the host, a gradient from the caller, or a write to the host.

    The rule `stash` checks the values that are kept for backward. Other values may have no reader: the last write into a tensor
    that nothing reads afterwards, and the gradient of a value as it was before a write.
    """
    if node.op == "placeholder":
        return node.meta.get("kind") == "gradient" and not node.meta.get("elsewhere")
    return node.target is nodes.write_back or (nodes.operation_of(node) is not None and nodes.on_host(node))


def _stored(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is nodes.store and len(nodes.operands(node).x.users) != 1:
            raise VerifyError("stored", node.name, f"frees '{nodes.operands(node).x.name}', which others read")
        if node.target is nodes.load and [user.target for user in node.users] != [nodes.restore]:
            raise VerifyError("stored", node.name, "is not read by one 'restore' alone, which frees it")


def _updated(graph: fx.Graph, compilation: Compilation) -> None:
    mode, is_forward = compilation.options.mode, graph is not compilation.backward
    updates = graph.find_nodes(op="call_function", target=nodes.update)
    if mode.place is UpdatePlace.BEFORE_FETCH and is_forward:
        _updated_before_fetches(graph, updates, compilation)
    elif mode.place is UpdatePlace.AFTER_PUSH and not is_forward:
        _updated_after_pushes(graph, updates, compilation)
    elif updates:
        raise VerifyError("updated", updates[0].name, f"has no place in this graph with update={mode.name!r}")


def _updated_before_fetches(graph: fx.Graph, updates: list[fx.Node], compilation: Compilation) -> None:
    for node in updates:
        _same_segment(node, [reader for reader in nodes.fetches(graph) if reader in node.users])
    trained = [n for n in nodes.fetches(graph) if compilation.segments[nodes.operands(n).segment].block.is_trained]
    _one_update_each(trained, updates, compilation)


def _updated_after_pushes(graph: fx.Graph, updates: list[fx.Node], compilation: Compilation) -> None:
    for node in updates:
        after = nodes.operands(node).after
        _same_segment(node, [after] if after is not None and after.target is nodes.push_gradients else [])
    _one_update_each(graph.find_nodes(op="call_function", target=nodes.push_gradients), updates, compilation)


def _same_segment(update: fx.Node, partners: list[fx.Node]) -> None:
    """Raise `VerifyError` if an update has no partner, or a partner that belongs to another segment."""
    if not partners or any(nodes.operands(p).segment != nodes.operands(update).segment for p in partners):
        raise VerifyError("updated", update.name, "does not stand between the gradients and the next fetch of its segment")


def _one_update_each(partners: list[fx.Node], updates: list[fx.Node], compilation: Compilation) -> None:
    counted = Counter(nodes.operands(n).segment for n in updates)
    for node in partners:
        segment = compilation.segments[nodes.operands(node).segment]
        if counted[segment.index] != 1:
            raise VerifyError("updated", node.name, f"of '{segment.name}' goes with {counted[segment.index]} updates")


def _stash(forward: fx.Graph, backward: fx.Graph) -> None:
    kept = nodes.returned(forward).stashes
    taken = stash_inputs(backward)
    if len(kept) != len(taken):
        raise VerifyError("stash", "output", f"keeps {len(kept)} values, backward takes {len(taken)}")
    for left, right in zip(kept, taken, strict=True):
        if left is None:
            raise VerifyError("stash", "output", f"keeps nothing in the place of '{right.meta['value']}'")
        if left.meta["value"] != right.meta["value"]:
            raise VerifyError("stash", right.name, f"takes the place of '{left.meta['value']}' in what forward keeps")
        is_taken = right.users or left.target is not nodes.stash
        if _left_on(left) != nodes.place_of(right) and is_taken:
            raise VerifyError("stash", right.name, f"is not where forward left '{left.name}'")


def _left_on(kept: fx.Node) -> str:
    """Where forward leaves a value that it keeps."""
    return "host" if kept.op == "placeholder" else nodes.place_of(kept)
