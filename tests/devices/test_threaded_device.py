"""The stand-in for a GPU: programs of the passes are right on it, and a use after free is not. Races are in runtime/test_races.py."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch

import l2l_compile
from l2l_compile.devices.cpu import CPU
from l2l_compile.devices.registry import KINDS
from l2l_compile.ir import nodes
from l2l_compile.lanes import Lane
from l2l_compile.runtime import executor
from l2l_compile.runtime.instructions import edited
from l2l_compile.testing.strict_device import ThreadedDevice
from models import Layer, Shared, Stack, TwoHeads, UNet, assert_parity, compilation, compiled, loss_of, rows


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 0},
        {"prefetch": 1},
        {"prefetch": 2},
        {"prefetch": 3, "stash": "device"},
        {"prefetch": 0, "stash": "device"},
        {"micro_batches": 1},
        {"block_compiler": "inductor"},
    ],
    ids=str,
)
@pytest.mark.slow(only="*inductor*")
def test_parity(threaded, options):
    assert_parity(Stack(5).double(), rows(6), rows(8), **options)


@pytest.mark.parametrize("model", [Shared, lambda: UNet(4), TwoHeads], ids=["shared weights", "skips", "several outputs"])
def test_parity_of_other_shapes(threaded, model):
    made = model().double()
    x = rows(6, 8) if isinstance(made, UNet) else rows(6)
    assert_parity(made, x, x)
    assert threaded.devices[-1].ledger.held == 0


def test_freed_memory_is_poisoned():
    device = ThreadedDevice(0)
    values = [torch.ones(3), torch.ones(3, dtype=torch.long), torch.ones(3, dtype=torch.bool)]
    device.hold(values)
    view = values[0][1:]
    device.free(values)
    assert view.isnan().all()
    assert (values[1] > 2**60).all() and not values[2].any()


def test_memory_that_another_value_holds_is_not_poisoned():
    device, x = ThreadedDevice(0), torch.ones(4)
    device.hold([x])
    device.hold([x[:2]])
    device.free([x])
    assert torch.equal(x, torch.ones(4))
    device.free([x[:2]])
    assert x.isnan().all()


def test_threads_end_with_the_model(threaded):
    torch._dynamo.reset()
    gc.collect()
    before = set(threading.enumerate())
    model = compiled(Stack(2).double())
    model(rows(4)).sum().backward()
    l2l_compile.synchronize(model)
    threads = {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("l2l-")}
    assert {"l2l-compute", "l2l-h2d", "l2l-d2h"} <= {thread.name for thread in threads}

    del model
    threaded.devices.clear()
    torch._dynamo.reset()
    gc.collect()
    for thread in threads:
        thread.join(5)
    assert [thread.name for thread in threads if thread.is_alive()] == []


def test_synchronize_raises_a_lanes_error_and_drops_its_work():
    device, ran = ThreadedDevice(0), []

    def fail():
        raise ValueError("in the lane")

    device.lanes["h2d"].run(fail)
    device.lanes["h2d"].run(lambda: ran.append(1))
    with pytest.raises(ValueError, match="in the lane"):
        device.synchronize()
    assert not ran
    device.lanes["h2d"].run(lambda: ran.append(2))
    device.synchronize()
    assert ran == [2]


def test_the_first_error_is_raised_not_what_comes_of_it():
    device, made = ThreadedDevice(0), []

    def fail():
        raise ValueError("no memory")

    device.lanes["d2h"].run(fail)
    device.lanes["compute"].wait(device.lanes["d2h"].record())
    device.lanes["compute"].run(lambda: made[0])
    with pytest.raises(ValueError, match="no memory"):
        device.synchronize()


def test_lane_that_waits_starts_after_the_event():
    device, order = ThreadedDevice(0.005, 1), []
    for _ in range(5):
        device.lanes["h2d"].run(lambda: order.append("copy"))
    device.lanes["compute"].wait(device.lanes["h2d"].record())
    device.lanes["compute"].run(lambda: order.append("compute"))
    device.synchronize()
    assert order == ["copy"] * 5 + ["compute"]


# ---- the device catches what is wrong --------------------------------------------------------------------------------


def goes_wrong(step, model, x, expected) -> bool:
    """Whether a step raises, or gives other numbers than eager."""
    model.zero_grad()
    try:
        loss = loss_of(step(x))
        loss.backward()
    except Exception:  # noqa: BLE001 - an empty box ends in any error
        return True
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    return not all(torch.allclose(f, e, rtol=1e-9) for f, e in zip(found, expected, strict=True))


def with_reference(depth=5):
    model, x = Stack(depth).double(), rows(6)
    reference = copy.deepcopy(model)
    loss = loss_of(reference(x))
    loss.backward()
    return model, x, [loss.detach(), *(p.grad for p in reference.parameters())]


@pytest.mark.unwatched
@pytest.mark.parametrize("what", [nodes.fetch_weights, nodes.split])
def test_release_moved_early_gives_nan(threaded, what):
    """On a device that frees early the memory is NaN; here its runtime value keeps the tensors to read them after the release."""
    model, x, _ = with_reference()
    step = compiled(model)
    step(x)
    (program,) = l2l_compile.programs(step)
    graph = program.forward.graph
    run = graph.find_nodes(op="call_function", target=nodes.forward)[0]
    release = next(r for r in graph.find_nodes(op="call_function", target=nodes.release) if nodes.operands(r).x.target is what)
    run.prepend(release)
    edited(graph)
    keep = executor.HANDLERS[nodes.release]

    def free_but_keep(run, node, x):
        if node is not release:
            return keep(run, node, x)
        shown = executor.RuntimeValue()
        shown.lane, shown.event, shown.readers, shown.slab = x.lane, x.event, x.readers, x.slab
        run.device.synchronize()
        shown.tensors = x.tensors
        return keep(run, node, shown)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(executor.HANDLERS, nodes.release, free_but_keep)
        assert step(x).isnan().any()


def test_dropout_is_the_same_on_both_devices(threaded, monkeypatch):
    model, x = Stack([Layer(dropout=0.5) for _ in range(3)]).double(), rows(6)
    found = []
    for kind in (KINDS["cpu"], CPU):  # the first is that of `threaded`
        monkeypatch.setitem(KINDS, "cpu", kind)
        torch.manual_seed(3)
        model.zero_grad()
        output = compiled(model)(x)
        output.sum().backward()
        found.append((output.detach(), model.embed.weight.grad.clone()))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("prefetch", [1, 2])
def test_compute_goes_on_while_gradients_are_on_their_way(threaded, monkeypatch, prefetch):
    """Each copy of gradients waits here until the next segment's backward is done: if compute waited for the copy, it never would be."""
    model, x, expected = with_reference()
    step = compiled(model, prefetch=prefetch)
    assert not goes_wrong(step, model, x, expected)
    done, in_time = [threading.Event()], []
    run_backward, push = executor.HANDLERS[nodes.backward], executor.HANDLERS[nodes.push_gradients]

    def backward(run, node, *operands):
        results, over = run_backward(run, node, *operands), done[-1]
        run.device.lanes["compute"].run(over.set)
        done.append(threading.Event())
        return results

    def late_push(run, node, segment, gradients):
        next_one = done[-1]
        if segment > 0:  # behind the first segment, there is no next one
            run.device.lanes["d2h"].run(lambda: in_time.append(next_one.wait(2.0)))
        return push(run, node, segment, gradients)

    monkeypatch.setitem(executor.HANDLERS, nodes.backward, backward)
    monkeypatch.setitem(executor.HANDLERS, nodes.push_gradients, late_push)
    assert not goes_wrong(step, model, x, expected)
    assert len(in_time) >= 5 and all(in_time)


@pytest.mark.parametrize("depth", [4, 12])
def test_a_copy_to_the_host_has_the_time_of_one_segment(depth):
    """No longer: what waits for its copy is then of one segment at most, at every depth."""
    found = compilation(Stack(depth).double(), rows(6), prefetch=1)
    for graph in (found.forward, found.backward):
        runs, begun, late = 0, {}, {}
        for node in graph.nodes:
            runs += nodes.runs_segment(node)
            if nodes.lane_of(node) == Lane.D2H:
                begun |= dict.fromkeys(node.all_input_nodes, runs)
            if node.target is nodes.release and (freed := nodes.operands(node).x) in begun:
                late[freed] = runs - begun[freed]
        assert set(late.values()) <= {0, 1}
        ends = {read for read, at in begun.items() if at == runs}
        pushed = {nodes.operands(n).gradients for n in graph.find_nodes(op="call_function", target=nodes.push_gradients)}
        assert all(late[read] == 1 for read in pushed - ends)
