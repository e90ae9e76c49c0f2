"""Programs broken on purpose are refused, with the rule that they break."""

from __future__ import annotations

import operator

import pytest
import torch

from l2l_compile import VerifyError
from l2l_compile.ir import nodes
from l2l_compile.passes.pipeline import PIPELINE
from l2l_compile.passes.verify import verify
from models import Stack, TwoHeads, compilation, rows

FACTS = frozenset().union(*(step.provides for step in PIPELINE))


class Skipping(Stack):
    """Its embedding has two readers, so backward adds two gradients."""

    def forward(self, x):
        first = x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first)


def program(depth=5, model=Stack, **options):
    torch.manual_seed(0)
    return compilation(model(depth).double(), rows(6), **options)


def pick(graph, target, which=0):
    return graph.find_nodes(op="call_function", target=target)[which]


def refused(found, rule: str) -> VerifyError:
    with pytest.raises(VerifyError) as caught:
        verify(found, FACTS)
    assert caught.value.rule == rule, str(caught.value)
    assert caught.value.node in str(caught.value)
    return caught.value


def without(graph, node) -> None:
    """Erase a node and what only frees it; its readers get nothing."""
    for user in list(node.users):
        if user.target is nodes.release:
            graph.erase_node(user)
        else:
            user.args = tuple(None if a is node else a for a in user.args)
    graph.erase_node(node)


def again(graph, node):
    with graph.inserting_after(node):
        copy = graph.call_function(node.target, node.args)
    copy.meta = dict(node.meta)
    return copy


@pytest.mark.parametrize(
    "options",
    [{}, {"stash": "device"}, {"stash": "disk", "disk": "."}, {"prefetch": 0}, {"prefetch": 3}, {"micro_batches": 1}],
    ids=str,
)
def test_programs_of_the_passes_are_legal(options):
    verify(program(**options), FACTS)


def test_a_stored_value_has_no_other_reader():
    """The store frees it."""
    found = program(stash="disk", disk=".")
    stored = pick(found.forward, nodes.store)
    with found.forward.inserting_after(stored):
        back = found.forward.call_function(nodes.restore, stored.args)
    back.meta = dict(stored.meta)
    with found.forward.inserting_after(back):
        found.forward.call_function(nodes.release, (back,)).meta["segment"] = None
    assert refused(found, "stored").node == stored.name


def test_a_loaded_value_has_one_reader():
    """Its restore frees it."""
    found = program(stash="disk", disk=".")
    loaded = pick(found.backward, nodes.load)
    (restored,) = loaded.users
    other = again(found.backward, restored)
    with found.backward.inserting_after(other):
        found.backward.call_function(nodes.release, (other,)).meta["segment"] = None
    assert refused(found, "stored").node == loaded.name


def test_a_stash_on_disk_that_is_restored_without_a_load():
    found = program(stash="disk", disk=".")
    loaded = pick(found.backward, nodes.load)
    (restored,) = loaded.users
    nodes.set_operands(restored, x=nodes.operands(loaded).x)
    assert "on the disk, where it needs the host" in str(refused(found, "lane"))


def test_backward_takes_from_the_host_what_forward_has_stored():
    found = program(stash="disk", disk=".")
    for loaded in found.backward.find_nodes(op="call_function", target=nodes.load):
        taken = nodes.operands(loaded).x
        loaded.replace_all_uses_with(taken)
        found.backward.erase_node(loaded)
        taken.meta.update(disk=False, host=True)
    refused(found, "stash")


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_fetch_removed(which):
    found = program()
    graph = getattr(found, which)
    without(graph, pick(graph, nodes.fetch_weights, 2))
    assert "layers.1" in str(refused(found, "weights")) or which == "backward"


def test_weights_of_another_segment():
    found = program()
    one, other = (pick(found.forward, nodes.forward, i) for i in (1, 2))
    nodes.set_operands(other, weights=nodes.operands(one).weights)
    refused(found, "weights")


def test_push_removed():
    found = program()
    found.backward.erase_node(pick(found.backward, nodes.push_gradients, 1))
    refused(found, "pushed_once")


def test_push_doubled():
    found = program()
    again(found.backward, pick(found.backward, nodes.push_gradients, 1))
    refused(found, "pushed_once")


def test_push_of_a_segment_that_ran_no_backward():
    found = program()
    push = pick(found.backward, nodes.push_gradients, 0)
    nodes.set_operands(push, segment=0)  # its own is missing now, and that of segment 0 is there twice
    refused(found, "pushed_once")


@pytest.mark.parametrize(
    ("which", "target"),
    [
        ("forward", nodes.forward),
        ("forward", nodes.offload),
        ("forward", nodes.split),
        ("backward", nodes.backward),
        ("backward", nodes.push_gradients),
        ("backward", nodes.accumulate),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_release_moved_up(which, target):
    found = program(model=Skipping)
    graph = getattr(found, which)
    reader, release = next(
        (reader, user)
        for reader in graph.find_nodes(op="call_function", target=target)
        for read in reader.all_input_nodes
        for user in read.users
        if user.target is nodes.release
    )
    reader.prepend(release)
    assert reader.name == refused(found, "alive").node


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_release_doubled(which):
    found = program()
    graph = getattr(found, which)
    again(graph, pick(graph, nodes.release, -1))
    with pytest.raises(VerifyError) as caught:
        verify(found, FACTS)
    assert caught.value.rule in ("released_once", "alive")  # the second one reads what the first has freed


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_any_release_removed(which):
    found = program(3, TwoHeads)
    graph = getattr(found, which)
    for release in graph.find_nodes(op="call_function", target=nodes.release):
        before = release.prev
        args, meta = release.args, release.meta
        graph.erase_node(release)
        refused(found, "released_once")
        with graph.inserting_after(before):
            graph.call_function(nodes.release, args).meta = meta
    verify(found, FACTS)


def test_restore_of_a_value_on_the_device():
    found = program()
    restore = pick(found.backward, nodes.restore, -1)
    nodes.set_operands(restore, x=nodes.operands(pick(found.backward, nodes.backward, 0)).values[-1])
    refused(found, "lane")


def test_segment_that_reads_the_host():
    found = program()
    run = pick(found.forward, nodes.forward, 0)
    (source,) = found.forward.find_nodes(op="placeholder")
    nodes.set_operands(run, values=(source,))
    refused(found, "lane")


def test_gradient_on_the_host_that_backward_does_not_bring():
    found = program()
    run = pick(found.backward, nodes.backward, 0)
    (source,) = nodes.operands(run).streamed_gradients
    nodes.set_operands(run, gradients=(source,), streamed_gradients=())
    refused(found, "lane")


def test_whole_batch_segment_that_brings_a_gradient():
    found = program(micro_batches=1)
    run = pick(found.backward, nodes.backward, 0)
    source = next(n for n in found.backward.find_nodes(op="placeholder") if n.meta["kind"] == "gradient")
    nodes.set_operands(run, gradients=(None,), streamed_gradients=(source,))
    refused(found, "layout")


def test_inner_looped_segment_that_reads_a_whole_value():
    found = program()
    run, split = pick(found.forward, nodes.forward, 0), pick(found.forward, nodes.split)
    nodes.set_operands(run, values=(nodes.operands(split).x,))
    refused(found, "layout")


def test_whole_batch_segment_that_reads_a_split_value():
    found = program(micro_batches=1)
    pick(found.forward, operator.getitem, 1).meta["split"] = True
    refused(found, "layout")


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_more_slabs_than_there_are(which, prefetch):
    found = program(prefetch=prefetch)
    graph = getattr(found, which)
    fetches = graph.find_nodes(op="call_function", target=nodes.fetch_weights)
    fetches[prefetch].append(fetches[prefetch + 1])
    refused(found, "slabs")


def test_slab_kept_beyond_its_turn():
    """A slab is taken until it is released, not until it was last read: the next fetch would write into it."""
    found = program(prefetch=0)
    releases = [
        r
        for r in found.forward.find_nodes(op="call_function", target=nodes.release)
        if nodes.operands(r).x.target is nodes.fetch_weights
    ]
    fetches = found.forward.find_nodes(op="call_function", target=nodes.fetch_weights)
    fetches[1].append(releases[0])
    refused(found, "slabs")


@pytest.mark.parametrize("stash", ["host", "device"])
def test_kept_value_that_backward_does_not_take(stash):
    found = program(stash=stash)
    output = found.forward.output_node()
    outputs, kept, writes = nodes.returned(found.forward)
    output.args = ((outputs, (*kept, kept[0]), writes),)
    refused(found, "stash")


def test_stash_where_forward_did_not_leave_it():
    found = program(stash="device")
    output = found.forward.output_node()
    outputs, kept, writes = nodes.returned(found.forward)
    output.args = ((outputs, (kept[1], kept[0], *kept[2:]), writes),)  # one of the two is on the host
    refused(found, "stash")


def test_two_stashes_exchanged():
    found = program(stash="host")
    output = found.forward.output_node()
    outputs, kept, writes = nodes.returned(found.forward)
    output.args = ((outputs, (kept[0], kept[2], kept[1], *kept[3:]), writes),)  # same shape, same place, other layer
    refused(found, "stash")


def test_node_outside_of_the_vocabulary():
    found = program()
    release = pick(found.forward, nodes.release)
    with found.forward.inserting_before(release):
        found.forward.call_function(torch.relu, (nodes.operands(release).x,))
    refused(found, "known_node")


def test_segment_that_does_not_exist():
    found = program()
    fetch = pick(found.forward, nodes.fetch_weights)
    fetch.args = (len(found.segments),)
    refused(found, "known_node")


def test_node_before_what_it_reads():
    found = program()
    fetch, run = pick(found.forward, nodes.fetch_weights, 1), pick(found.forward, nodes.forward, 1)
    run.append(fetch)
    refused(found, "defined")


# ---- updates of the host ----------------------------------------------------------------------------------------------


def updating(update):
    weight = torch.nn.Parameter(torch.zeros(1))
    return program(optimizer=torch.optim.SGD([weight], lr=0.1), update=update)


def test_programs_with_updates_are_legal():
    for update, graph in (("in_backward", "backward"), ("in_forward", "forward")):
        found = updating(update)
        verify(found, FACTS)
        updates = getattr(found, graph).find_nodes(op="call_function", target=nodes.update)
        assert [nodes.operands(n).segment for n in updates] == sorted(range(len(found.segments)), reverse=graph == "backward")
        assert len(updates) == len(found.segments)
    assert not any(g.find_nodes(op="call_function", target=nodes.update) for g in (program().forward, program().backward))


@pytest.mark.parametrize("update, graph", [("in_backward", "backward"), ("in_forward", "forward")])
def test_a_lost_update_and_one_too_many_are_refused(update, graph):
    found = updating(update)
    without(getattr(found, graph), pick(getattr(found, graph), nodes.update, 1))
    refused(found, "updated")
    found = updating(update)
    again(getattr(found, graph), pick(getattr(found, graph), nodes.update, 1))
    refused(found, "updated")


def test_an_update_on_gradients_of_another_segment_is_refused():
    found = updating("in_backward")
    first, second = (pick(found.backward, nodes.update, i) for i in (0, 1))
    nodes.set_operands(second, after=nodes.operands(first).after)
    refused(found, "updated")


def test_an_update_in_a_program_that_updates_at_step_is_refused():
    found = program()
    push = pick(found.backward, nodes.push_gradients)
    with found.backward.inserting_after(push):
        found.backward.call_function(nodes.update, (nodes.operands(push).segment, push))
    refused(found, "updated")


def test_a_result_that_nobody_reads_is_refused():
    found = program()
    (end,) = found.forward.find_nodes(op="output")
    returned = nodes.returned(found.forward)
    end.args = ((((None,) * len(returned.outputs)), *returned[1:]),)
    assert "read by nobody" in str(refused(found, "read"))


def test_an_operand_that_is_missing_is_refused():
    found = program()
    restore = pick(found.forward, nodes.restore)
    restore.args = (None,)
    assert "lacks its x" in str(refused(found, "known_node"))


def test_a_stash_that_is_not_kept_is_refused():
    found = program()
    (end,) = found.forward.find_nodes(op="output")
    outputs, stashes, writes = nodes.returned(found.forward)
    end.args = ((outputs, (None, *stashes[1:]), writes),)
    assert "keeps nothing" in str(refused(found, "stash"))
