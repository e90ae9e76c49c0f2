"""Overlapped updates are those of the same optimizer at `step()`."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import time

import pytest
import torch
from torch import nn

import l2l_compile
import l2l_compile.host.worker as lanes
from l2l_compile import L2LError
from l2l_compile.host.worker import Worker
from l2l_compile.session import session_of
from l2l_compile.testing import training_equivalent
from models import Broken, Shared, Stack, assert_same_state, compiled, rows

MODES = ("in_backward", "in_forward")


def two_groups(parameters):
    parameters = list(parameters)
    decayed, others = ([p for p in parameters if (p.dim() > 1) == matrix] for matrix in (True, False))
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]


def lamb(parameters):
    return pytest.importorskip("pytorch_optimizer").Lamb(two_groups(parameters), lr=1e-2)


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(two_groups(parameters), lr=1e-2),
    "fused adamw": lambda parameters: torch.optim.AdamW(two_groups(parameters), lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "lamb": lamb,
}


def data(step: int):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def frozen_in_the_middle():
    model = Stack(4)
    model.layers[1].requires_grad_(False)
    return model


def same_training(make, optimizer, updates, *, steps=20, accumulate=1, clip=None, **options):
    """Ways to update train as `at_step` does, and that as eager; in float32."""
    return training_equivalent(
        make(),
        [data(number) for number in range(steps * accumulate)],
        OPTIMIZERS[optimizer],
        updates=updates,
        options={"micro_batches": 3, "block_compiler": "eager", **options},
        dtype=None,
        loss=lambda outputs: outputs.pow(2).mean(),
        scheduler=lambda made: torch.optim.lr_scheduler.CosineAnnealingLR(made, 30),
        accumulate=accumulate,
        max_grad_norm=clip,
    )


def same_update(make, optimizer, update, **how):
    """With the same bits as `at_step`."""
    same_training(make, optimizer, (update,), compile_update=False, **how)


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.slow(but=("adamw-in_forward", "adafactor-in_backward", "lamb-in_forward", "sgd-in_backward"))
def test_bit_equal_to_updates_at_step(optimizer, update):
    same_update(Stack, optimizer, update)


@pytest.mark.parametrize("update", MODES)
def test_parameters_in_float64(update):
    """Their gradients' norm is summed in float64."""
    torch.manual_seed(0)
    found = []
    for mode in ("at_step", update):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Stack().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = compiled(model, optimizer=optimizer, update=mode, compile_update=False)
        for number in range(2):
            step(data(number).double()).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((l2l_compile.stats(step).gradient_norm, model.state_dict()))
    (expected, weights), (norm, updated) = found
    assert norm == pytest.approx(expected, rel=1e-12)
    assert all(torch.equal(updated[name], value) for name, value in weights.items())


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize("make", [Shared, frozen_in_the_middle, Broken])
def test_shared_and_frozen_parameters_and_several_programs(make, update):
    same_update(make, "adamw", update, steps=5)


@pytest.mark.parametrize("update", MODES)
def test_accumulation_over_backward_calls(update):
    same_update(Stack, "adamw", update, steps=5, accumulate=3)


def test_clipping_by_the_global_norm():
    same_update(Stack, "sgd", "in_forward", clip=0.01)
    same_update(Stack, "adamw", "in_forward", clip=0.01)


@pytest.mark.parametrize("update", MODES)
def test_sixteen_bits_on_the_wire(update):
    same_update(Stack, "adamw", update, steps=5, precision="bf16")


@pytest.mark.parametrize("update", MODES)
@pytest.mark.slow
def test_on_a_device_of_threads(update, threaded):
    same_update(Stack, "adamw", update, steps=5)
    same_update(Shared, "adamw", update, steps=5, precision="bf16")


def step_of(model, update="in_forward", optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return compiled(model, optimizer=optimizer, update=update, **options), optimizer


@pytest.mark.parametrize("update", MODES)
def test_two_forwards_of_one_backward_are_one_step(update):
    model, reference = Stack(), Stack()
    reference.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    step, optimizer = step_of(model, update)
    for _ in range(3):
        for net, opt in ((step, optimizer), (reference, plain)):
            (net(data(1)).pow(2).mean() + net(data(2)).pow(2).mean()).backward()
            opt.step()
            opt.zero_grad()
    l2l_compile.synchronize(step)
    assert_same_state(model, reference, 1e-5)


@pytest.mark.parametrize("update", MODES)
def test_a_forward_without_backward_holds_nothing_up(update):
    model = Stack()
    step, optimizer = step_of(model, update)
    before = copy.deepcopy(model.state_dict())
    step(data(1))  # forgotten
    kept = step(data(2))  # waits for a backward that never comes
    del kept
    step(data(3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])


@pytest.mark.parametrize("update", MODES)
def test_an_output_that_is_held_holds_no_step_up(update):
    """An evaluation without `no_grad`, whose outputs are kept: every step is that of plain PyTorch nevertheless."""
    model, reference = Stack(), Stack()
    reference.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    step, optimizer = step_of(model, update)
    for number in range(3):
        for net, opt in ((step, optimizer), (reference, plain)):
            held = net(data(10 + number))
            net(data(number)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
            del held
    held = step(data(13))
    step(data(3)).pow(2).mean().backward()
    optimizer.step()
    reference(data(3)).pow(2).mean().backward()
    plain.step()
    assert l2l_compile.stats(step).gradient_norm == pytest.approx(norm_of(reference), rel=1e-5)
    l2l_compile.synchronize(step)
    assert_same_state(model, reference, 1e-5)
    with pytest.raises(RuntimeError, match="ran before optimizer.step|modified by an inplace operation"):
        held.sum().backward()


def decorated(forward):
    @functools.wraps(forward)
    def call(*args, **kwargs):
        return forward(*args, **kwargs)

    return call


class Decorated(Stack):
    """Its module is in the `args` of a decorator, as in models of transformers."""

    forward = decorated(Stack.forward)


@pytest.mark.parametrize("in_place", [False, True])
def test_state_dict_waits_for_updates_with_a_decorated_forward(in_place, monkeypatch):
    model, reference = Decorated(), Stack()
    reference.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"optimizer": optimizer, "update": "in_forward", "block_compiler": "eager"}
    if in_place:
        model.compile(backend="l2l", options=options)
    step = model if in_place else torch.compile(model, backend="l2l", options=options)
    step(data(1)).sum().backward()
    server = session_of(step).server
    update = server.updates._update
    monkeypatch.setattr(server.updates, "_update", lambda *work: (time.sleep(0.05), update(*work)))
    optimizer.step()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    reference(data(1)).sum().backward()
    plain.step()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_parameters_also_read_outside_are_clipped_and_updated(precision):
    """One is read outside alone (a head that Dynamo cannot compile), one inside and outside."""
    dtype = torch.float64 if precision == "fp32" else torch.float32
    norms, models = [], [Stack().to(dtype), Stack().to(dtype)]
    models[1].load_state_dict(models[0].state_dict())
    for model, streams in zip(models, (True, False), strict=True):
        outer = nn.Linear(3, 1).to(dtype)
        outer.load_state_dict({"weight": torch.ones(1, 3), "bias": torch.zeros(1)})
        optimizer = torch.optim.SGD([*model.parameters(), *outer.parameters()], lr=1.0, momentum=0.9)
        update = {"update": "in_forward", "max_grad_norm": 0.02, "precision": precision}
        step = compiled(model, optimizer=optimizer, **update) if streams else model
        for number in range(4):
            loss = outer(step(data(number).to(dtype))).sum() + model.head.weight.pow(2).sum()
            (loss / 1000).backward()
            if not streams:
                norms.append(torch.nn.utils.clip_grad_norm_([*model.parameters(), *outer.parameters()], 0.02).item())
            optimizer.step()
            if streams:
                norms.append(l2l_compile.stats(step).gradient_norm)
            optimizer.zero_grad()
        model.outer = outer
    exact = 1e-10 if precision == "fp32" else 5e-3
    assert norms[:4] == pytest.approx(norms[4:], rel=exact) and norms[0] > 0.02
    ours, theirs = models[0].state_dict(), models[1].state_dict()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=exact, atol=exact)


def norm_of(model):
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


@pytest.mark.parametrize("update", MODES)
def test_a_held_output_with_several_rounds_is_an_error(update):
    step, optimizer = step_of(Stack(), update, accumulate=2)
    held = step(data(10))
    for number in range(2):
        step(data(number)).sum().backward()
    with pytest.raises(L2LError, match="An output of this step is still referenced.*no_grad.*dropped"):
        optimizer.step()
    del held
    for number in range(2):
        step(data(number)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("update", MODES)
def test_a_failure_that_is_kept_holds_no_step_up(update, monkeypatch):
    model = Stack()
    step, optimizer = step_of(model, update)
    step(data(1)).sum().backward()
    optimizer.step()
    server = session_of(step).server
    load, kept = server.load, []

    def fails(*_):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(server, "load", fails)
    try:
        step(data(2))
    except RuntimeError as error:
        kept.append(error)  # with its traceback, and so the forward
    monkeypatch.setattr(server, "load", load)
    before = copy.deepcopy(model.state_dict())
    step(data(3)).sum().backward()
    optimizer.step()
    assert kept and not torch.equal(model.state_dict()["head.weight"], before["head.weight"])


def test_reading_waits_for_updates_that_were_put_off():
    model = Stack()
    step, optimizer = step_of(model, optimizer=Slow(model.parameters(), lr=0.1))
    before = copy.deepcopy(model.state_dict())
    step(data(1)).sum().backward()
    optimizer.step()
    after = model.layers[0].state_dict()
    assert not torch.equal(after["up.weight"], before["layers.0.up.weight"])
    l2l_compile.synchronize(step)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_outside_gradient_is_added_only_in_forward():
    model, reference = Stack(), Stack()
    reference.load_state_dict(model.state_dict())
    step, optimizer = step_of(model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for net, own, opt in ((step, model, optimizer), (reference, reference, plain)):
        (net(data(1)).pow(2).mean() + own.head.weight.pow(2).sum()).backward()
        opt.step()
    l2l_compile.synchronize(step)
    assert_same_state(model, reference, 1e-6)

    step, optimizer = step_of(Stack(), "in_backward")
    (step(data(1)).pow(2).mean() + step.head.weight.pow(2).sum()).backward()
    with pytest.raises(L2LError, match="outside of the compiled model.*in_forward"):
        optimizer.step()
    optimizer.zero_grad()
    step(data(2)).pow(2).mean().backward()
    optimizer.step()


def test_writes_into_parameters_are_seen_by_the_next_forward():
    model = Stack()
    step, _optimizer = step_of(model, precision="bf16")
    for write in (lambda p: p.data.mul_(2), lambda p: p.data.copy_(torch.ones_like(p)), lambda p: nn.init.zeros_(p)):
        before = step(data(1))
        for p in model.parameters():
            write(p)
        assert not torch.allclose(step(data(1)), before, rtol=0.01)


class Slow(torch.optim.SGD):
    """Takes a tenth of a second for a layer."""

    def step(self, closure=None):
        time.sleep(0.1)
        return super().step(closure)


class StashQueue(torch.optim.SGD):
    """Its first update in a step goes on only when the device has gone on."""

    started, device_went_on = threading.Event(), threading.Event()

    def step(self, closure=None):
        self.started.set()
        assert self.device_went_on.wait(60), "the device waits for the host"
        super().step()


def test_the_device_goes_on_while_the_host_updates(threaded):
    model = Stack(10)
    step, optimizer = step_of(model, "in_backward", torch.optim.SGD(model.parameters(), lr=0.1))
    step(data(1))
    lane = threaded.devices[-1].lanes["compute"]
    original = lane.run

    def run(work):
        def noticed():
            if StashQueue.started.is_set():
                StashQueue.device_went_on.set()
            work()

        original(noticed)

    lane.run = run
    optimizer.__class__ = StashQueue
    step(data(2)).sum().backward()
    optimizer.__class__ = torch.optim.SGD
    optimizer.step()
    assert StashQueue.device_went_on.is_set()


@pytest.mark.slow
def test_python_exits_cleanly_with_updates_under_way(launcher):
    script = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(40)])
optimizer = torch.optim.AdamW(model.parameters())
options = {"optimizer": optimizer, "update": "in_forward", "block_compiler": "eager", "device": "cpu"}
step = torch.compile(model, backend="l2l", options=options)
for _ in range(2):
    step(torch.randn(4, 64)).sum().backward()
    optimizer.step()
"""
    done = launcher.run(script)
    assert (done.returncode, done.stderr) == (0, "")


STUCK = """
import sys, threading, time
import l2l_compile.host.worker as lanes
lanes._PATIENCE = 1.0
begun = threading.Event()
worker = lanes.Worker(1)
worker.submit(lambda: (begun.set(), time.sleep(60)))
worker.submit(lambda: print("ran", flush=True))
begun.wait()
"""


@pytest.mark.parametrize(
    "end, code, said", [("raise ValueError('the data ran out')", 1, "the data ran out"), ("", 0, "ends without an update")]
)
@pytest.mark.slow(only="raise*")
def test_python_ends_though_an_update_does_not(launcher, end, code, said):
    begin = time.monotonic()
    done = launcher.run(STUCK + end)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert time.monotonic() - begin < 45  # on a busy machine


def test_what_is_queued_is_done_before_python_ends(launcher):
    script = """
import time
from l2l_compile.host.worker import Worker
worker = Worker(1)
for number in range(4):
    worker.submit(lambda number=number: (time.sleep(0.2), print(number, flush=True)))
"""
    for end, expected in (("", "0\n1\n2\n3\n"), ("raise SystemExit(3)", "0\n1\n2\n3\n")):
        done = launcher.run(script + end)
        assert (done.stdout, done.stderr) == (expected, "")


def test_work_behind_the_end_of_a_worker_is_done_by_its_waiters():
    worker, done = Worker(1), []
    worker.submit(lambda: (time.sleep(0.05), done.append("before")))
    worker.close()
    worker.submit(lambda: done.append("behind"))
    worker.drain()
    assert done == ["before", "behind"]


def test_a_model_released_amid_updates_has_them_in_state_dict():
    plain = Stack(2).double()
    model = copy.deepcopy(plain)
    optimizer, streamed = (Slow(m.parameters(), lr=0.1) for m in (plain, model))
    step, x = compiled(model, optimizer=streamed, update="in_forward", compile_update=False), rows(4)
    for module, own in ((plain, optimizer), (step, streamed)):
        module(x).pow(2).mean().backward()
        own.step()
    del step
    torch._dynamo.reset()
    gc.collect()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


FORKED = """
import os, time, torch
import l2l_compile
class Slow(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.3)
        return super().step(closure)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)))
optimizer = Slow(model.parameters(), lr=0.1)
options = {"update": "in_forward", "optimizer": optimizer, "compile_update": False, "block_compiler": "eager", "device": "cpu"}
step = torch.compile(model, backend="l2l", options=options)
step(torch.randn(4, 8)).pow(2).sum().backward()
optimizer.step()
child = os.fork()
weights = torch.cat([p.flatten() for p in model.state_dict().values()]).tolist()
if child:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(hash(tuple(weights)), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_forked_process_has_the_updates_that_were_under_way(launcher):
    done = launcher.run(FORKED, seconds=60)
    child, status, parent = done.stdout.split() or [done.stderr]
    assert status == "0" and child == parent


def test_a_fork_does_not_wait_for_a_lane_that_has_ended():
    worker, done = Worker(1), []
    worker.submit(lambda: time.sleep(0.2))
    worker.close()
    worker.submit(lambda: done.append("behind"))
    begun = time.monotonic()
    lanes._before_fork()
    assert done == ["behind"] and time.monotonic() - begun < 10


def interrupted(failed):
    raise KeyboardInterrupt


def test_an_interrupted_wait_leaves_updates_under_way(monkeypatch):
    plain = Stack(2).double()
    model = copy.deepcopy(plain)
    optimizer, streamed = (Slow(m.parameters(), lr=0.1) for m in (plain, model))
    step, x = compiled(model, optimizer=streamed, update="in_forward", compile_update=False), rows(4)
    for number in range(3):
        for module, own in ((plain, optimizer), (step, streamed)):
            module(x).pow(2).mean().backward()
            own.step()
            own.zero_grad()
        if number == 0:
            worker = session_of(step).server.worker
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(worker, "drain", interrupted)
                l2l_compile.synchronize(step)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


def test_the_norm_is_that_of_the_last_step():
    """Read at once after the step, while the host lane is slow to look at the gradients."""
    norms = {}
    for update in ("at_step", "in_forward"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = compiled(model, optimizer=optimizer, update=update)
        norms[update] = []
        for number in range(4):
            step(data(number)).pow(2).mean().backward()
            if update == "in_forward":
                session_of(step).server.worker.submit(lambda: time.sleep(0.05))
            optimizer.step()
            norms[update].append(l2l_compile.stats(step).gradient_norm)
            optimizer.zero_grad()
    assert norms["in_forward"] == pytest.approx(norms["at_step"], rel=1e-6)
