"""Training loops, each with waits that it cannot do without: deleted, they show where a lane is late."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile import session as sessions
from l2l_compile.devices.device import Device
from l2l_compile.host.updates.loss_scale import LossScale
from l2l_compile.runtime import stored_stashes
from l2l_compile.runtime.step import HostRecord
from models import WIDTH, Stack, UNet, compiled
from waits import BY_NAME

PAUSES = 0.015, 0.1, 0.4  # seconds before each piece of work of a slow lane; longer ones if a busy machine hid what is missing


# ---- what is run -------------------------------------------------------------------------------------------------------


class Detached(nn.Module):
    """Its head passes no gradient on: the layers' weights are fetched in backward, and nothing reads them."""

    def __init__(self):
        super().__init__()
        self.stack, self.skip = Stack(3), nn.Linear(5, 3)

    def forward(self, x):
        return self.stack(x).detach() * self.skip(x)


class WithOutside(Stack):
    """A parameter that the loop reads."""

    def __init__(self):
        super().__init__(3)
        self.outside = nn.Parameter(torch.randn(3))


class TwoWays(nn.Module):
    """In front of its layers, it uses one of its weights, or both."""

    def __init__(self):
        super().__init__()
        self.layers = Stack(3)
        self.weights = nn.ParameterList(torch.randn(5, 5) for _ in range(2))

    def forward(self, x, both=False):
        first, second = self.weights
        return self.layers(x @ first + x @ second if both else x @ first)


class WithBuffer(nn.Module):
    """Layers between two uses of a buffer that each step writes into."""

    def __init__(self):
        super().__init__()
        self.stack = Stack(2)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count.add_(1)
        return self.stack(x) * self.count


class Growing(Stack):
    """Returns what it is given with one more entry."""

    def __init__(self):
        super().__init__(3)

    def forward(self, x, cache=None):
        made = super().forward(x)
        return made if cache is None else torch.cat([cache, made[:, None]], 1)


class Pausing(torch.optim.SGD):
    """Once it has written the weights in front of the layers of `TwoWays`, it takes its time."""

    def step(self, closure=None):
        super().step(closure)
        if any(p.shape == (5, 5) and p.grad is not None for group in self.param_groups for p in group["params"]):
            time.sleep(12 * PAUSES[0])


def one_step(step, optimizer):
    step(batch(0)).pow(2).sum().backward()


def four_forwards(step, optimizer):
    """The stashes of the first forwards go to the host until their backward."""
    outputs = [step(batch(number)) for number in range(4)]
    for output in outputs:
        output.pow(2).sum().backward()


def on_disk(step, optimizer):
    """All stashes that would wait on the host go to the disk, however small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_stashes, "LEAST_ON_DISK", 1)
        one_step(step, optimizer)
    session = sessions.session_of(step)
    assert l2l_compile.stats(step).disk_stash_bytes > 0
    session.stashes_on_disk.recover()


def training(step, optimizer):
    for number in range(3):
        step(batch(number)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def training_and_evaluation(step, optimizer):
    """Evaluation is at weights whose update nobody else waits for."""
    for number in range(3):
        step(batch(number)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            read.append(step(batch(9)))


def used_outside(step, optimizer):
    """Who reads such a parameter behind `optimizer.step()` waits for nothing."""
    for number in range(2):
        (step(batch(number)) * step.outside).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sessions.session_of(step).device.accesses.read_parameters([step.outside])
        read.append(step.outside.detach().clone())


def two_ways(step, optimizer):
    """A parameter crosses the link with others than before while it is updated."""
    wires = sessions.session_of(step).server.wires
    wires._versions.clear(), wires._by_owner.clear()  # of an earlier run
    for other_way in (False, True):
        step(batch(0), other_way).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def overflowing(step, optimizer):
    """The gradients of the first step overflow, and the loss of the next one is scaled by less."""
    sessions.session_of(step).server.updates.scale = LossScale()
    for number in range(3):
        step(batch(number).float() * (1e6 if number == 0 else 1.0)).pow(2).mean().mul(0.01).backward()
        optimizer.step()
        optimizer.zero_grad()


def a_failed_step(step, optimizer):
    """The gradients of a step that fails belong to no other."""
    output, push, pushes = step(batch(0)), Device.push, itertools.count()

    def fails(self, gradients):
        if next(pushes) == 4:  # the last one
            raise OSError("on purpose")
        return push(self, gradients)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "push", fails)
        with contextlib.suppress(OSError):
            output.pow(2).sum().backward()
    assert next(pushes) == 5
    training(step, optimizer)


def watch_nothing(step):
    """Reading entries of a parameter waits as well, and would hide that another wait is gone."""
    updates = sessions.session_of(step).server.updates
    if hasattr(updates, "_watch"):
        updates._watch.end()


def reading(step, optimizer):
    """Parameters are read while updates are under way."""
    step(batch(0)).pow(2).sum().backward()
    optimizer.step()
    watch_nothing(step)
    state = step.state_dict()
    read.extend(tensor.clone() for tensor in state.values())


def a_forward_before_the_step(step, optimizer):
    step(batch(0)).pow(2).sum().backward()
    read.append(step(batch(1)).detach())
    optimizer.step()


def left_out(step, optimizer):
    """The gradients of a step that was left out belong to no other."""
    for number in range(3):
        step(batch(number)).pow(2).sum().backward()
        if number != 1:
            optimizer.step()
        optimizer.zero_grad()


def the_norm(step, optimizer):
    for number in range(2):
        step(batch(number)).pow(2).sum().backward()
        optimizer.step()
        read.append(torch.tensor(l2l_compile.stats(step).gradient_norm))


def an_output_is_held(step, optimizer):
    held = step(batch(1))
    step(batch(0)).pow(2).sum().backward()
    optimizer.step()
    read.extend(p.detach().clone() for p in step.parameters())
    del held


def a_cache_grows(step, optimizer):
    with torch.no_grad():
        read.append(step(batch(0), torch.ones(6, 4, 3, dtype=torch.float64)))


read: list[torch.Tensor] = []  # what a run of a case has read on its way


def batch(number: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


@dataclass(eq=False)
class Case:
    """A training loop, and waits that it cannot do without.

    run    the loop, given the compiled model and its optimizer
    waits  each with the lanes, of the device or of the host, of which any shows its absence if it is slow
    """

    name: str
    run: Callable
    waits: dict[str, str]
    model: Callable[[], nn.Module] = lambda: Stack(3).double()
    options: dict = field(default_factory=dict)
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD


def in_(update: str, **more) -> dict:
    return {"update": f"in_{update}", **more}


CASES = [
    Case(
        "a step",
        one_step,
        {
            "runtime.executor.Executor.submit: queue.wait(value.event)": "h2d compute",
            "runtime.weight_handlers._fetch_weights: run.device.lanes[Lane.H2D].wait(run.slabs.free[slab])": "compute",
            "runtime.executor._release: compute.wait(event)": "d2h",
            "runtime.overlapped_copies.OutputStream._send: d2h.wait(made)": "compute",
            "runtime.overlapped_copies.free_behind: compute.wait(copied)": "d2h",
            "runtime.overlapped_copies.GradientStream.before: self.device.lanes[Lane.COMPUTE].wait(event)": "h2d",
            "runtime.runner.Runner.on_device: device.synchronize()": "d2h",
            "host.server.ParameterServer._collect: self.device.wait_on_host(gradients.event)": "d2h",
            "host.server.ParameterServer.end_backward: self.worker.drain()": "host",
        },
    ),
    Case(
        "activations on the host",
        one_step,
        {
            "runtime.activation_copies.ActivationsToHost.send: d2h.wait(computed)": "compute",
            "runtime.overlapped_copies.free_behind: compute.wait(copied)": "d2h",
            "runtime.activation_copies.ActivationsFromHost.before: self.device.lanes[Lane.COMPUTE].wait(event)": "h2d",
        },
        options={"keep_on_host": "1MB"},
    ),
    Case(
        "skips",
        one_step,
        {"runtime.executor.Executor.submit: queue.wait(value.event)": "d2h"},
        model=lambda: nn.Sequential(nn.Linear(5, WIDTH), UNet(4)).double(),
    ),
    Case("no gradient", one_step, {"runtime.executor._release: compute.wait(x.event)": "h2d"}, model=lambda: Detached().double()),
    Case(
        "a buffer",
        one_step,
        {"runtime.runner.Runner.on_device: device.synchronize()": "d2h"},
        model=lambda: WithBuffer().double(),
    ),
    Case(
        "a cache",
        a_cache_grows,
        {"runtime.outputs.Outputs._part: device.wait_on_host(value.event)": "d2h"},
        model=lambda: Growing().double(),
    ),
    Case("several forwards", four_forwards, {"runtime.stashes.Stashes._move: self.device.synchronize()": "d2h h2d"}),
    Case(
        "stashes on the disk",
        on_disk,
        {
            "runtime.stored_stashes.StashesOnDisk.put: self._device.wait_on_host(x.event)": "d2h",
            "runtime.stored_stashes.StashesOnDisk.get: stash.written.wait()": "disk_write",
            "runtime.stored_stashes.StashesOnDisk.wait_for: ticket.wait()": "disk_read",
        },
        model=lambda: Stack(5).double(),
        options={"stash": "disk", "disk": tempfile.gettempdir()},
    ),
    Case(
        "in_backward",
        a_forward_before_the_step,
        {
            "host.updates.in_backward.UpdatesInBackward.begin_forward: self.synchronize()": "host",
            "host.updates.in_backward.UpdatesInBackward.synchronize: super().synchronize()": "host",
        },
        options=in_("backward"),
    ),
    Case(
        "in_forward",
        training,
        {
            "host.updates.deferred_updates.DeferredUpdates.wait: ticket.wait()": "host",
            "host.server.ParameterServer.await_updates: self.updates.wait(owners)": "host",
            "host.updates.overlapped.OverlappedUpdates._await_updates: self._drain()": "host",
            "host.server.ParameterServer.synchronize: self.updates.synchronize()": "host",
            "host.updates.overlapped.OverlappedUpdates.synchronize: self._drain()": "host",
            "host.updates.overlapped.OverlappedUpdates._drain: self.worker.drain(self.forget)": "host",
            "host.updates.deferred_updates.DeferredUpdates._drain: super()._drain()": "host",
        },
        options=in_("forward"),
    ),
    Case(
        "a failure",
        a_failed_step,
        {
            "host.server.ParameterServer.recover: worker.settle()": ""
        },  # late gradients go to a step that is gone: the watch alone sees it
        options=in_("forward"),
    ),
    Case(
        "state_dict",
        reading,
        {"host.updates.overlapped.OverlappedUpdates.wait_for_reading: self.synchronize()": "host"},
        options=in_("forward"),
    ),
    Case(
        "a step that is left out",
        left_out,
        {"host.updates.overlapped.OverlappedUpdates._leave_out: self._drain()": ""},  # so here
        options=in_("forward"),
    ),
    Case(
        "the norm",
        the_norm,
        {"host.updates.in_forward.UpdatesInForward.describe: self._looked.wait()": "host"},
        options=in_("forward"),
    ),
    Case(
        "delayed",
        training_and_evaluation,
        {
            "host.updates.delayed.DelayedUpdates.begin_forward: self.synchronize()": "update",
            "host.updates.delayed.DelayedUpdates._drain: super()._drain()": "host",
            "host.updates.delayed.DelayedUpdates._drain: self._updating.drain(self.forget)": "update",
        },
        options=in_("forward", delay=1),
    ),
    Case(
        "delayed, another wire",
        two_ways,
        {"host.double_buffer.DelayedWires.load: self.wait(owners)": "h2d"},
        model=lambda: TwoWays().double(),
        options=in_("forward", delay=1),
        optimizer=Pausing,
    ),
    Case(
        "delayed, a loss scale",
        overflowing,
        {"host.updates.delayed.DelayedUpdates.begin_backward: self._looked.wait()": "update"},
        model=lambda: Stack(3).float(),
        options=in_("forward", delay=1, precision="fp16"),
    ),
    Case(
        "a parameter outside of the compiled model",
        used_outside,
        {
            "host.updates.in_forward.UpdatesInForward._end_step: at_once.wait()": "host",
        },
        model=lambda: WithOutside().double(),
        options=in_("forward"),
    ),
    Case(
        "gradients are read",
        training,
        {"host.server.ParameterServer._collect: self.device.wait_on_host(gradients.event)": "d2h"},
        options=in_("backward"),
    ),
    Case(
        "a held output",
        an_output_is_held,
        {"host.updates.in_backward.UpdatesInBackward._end_step: self._drain()": "host"},
        options=in_("backward"),
    ),
]


class Run:
    """A compiled model on a device; each run of its loop begins with the same parameters."""

    def __init__(self, case: Case, device):
        self.case, self.model = case, case.model()
        self.optimizer = case.optimizer(self.model.parameters(), lr=0.01)
        update = (
            {"optimizer": self.optimizer, "compile_update": False, **case.options} if "update" in case.options else case.options
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sessions, "open_device", lambda options: device)
            self.step = compiled(self.model, **update)
            self.step(batch(0).to(next(self.model.parameters()).dtype))
        self.session, self.before = sessions.session_of(self.step), copy.deepcopy(self.model.state_dict())

    def __call__(self) -> list[torch.Tensor]:
        """What the loop reads, parameters and gradients at its end."""
        self._begin_anew()
        read.clear()
        self.case.run(self.step, self.optimizer)
        l2l_compile.synchronize(self.step)
        watch_nothing(self.step)
        state = [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers())]
        return [*read, *state, *(p.grad for p in self.model.parameters() if p.grad is not None)]

    def _begin_anew(self) -> None:
        server = self.session.server
        with contextlib.suppress(Exception):
            self.session.device.synchronize()
        for worker in server.workers:
            with contextlib.suppress(Exception):
                worker.drain()
        self.session.device.recover()
        if self.session.stashes_on_disk is not None:
            self.session.stashes_on_disk.recover()
        server.recover(types.SimpleNamespace(host=HostRecord()))
        self.model.load_state_dict(self.before)
        self.model.zero_grad()


def slow(session, name: str, pause: float) -> None:
    """A lane of the threaded device, or of the host, pauses before each piece of its work; the others do not."""
    for lane, thread in session.device.lanes.items():
        thread._queue.delay = pause if lane == name else 0.0
        thread._queue.random = types.SimpleNamespace(random=lambda: 1.0)
    slow_worker(session, name, pause)


def slow_worker(session, name: str, pause: float) -> None:
    """A lane of the host pauses before each piece of its work, some seconds; the others do not."""
    for worker in workers_of(session):
        submit = functools.partial(type(worker).submit, worker)
        longer = 4 * pause if name == "update" else pause  # updates may take a whole forward
        worker.submit = functools.partial(_paused, submit, longer if name == worker.name else 0.0)


def workers_of(session) -> list:
    """The threads of the host."""
    return [*session.server.workers, *(session.stashes_on_disk.workers if session.stashes_on_disk is not None else ())]


def _paused(submit, pause: float, work: Callable):
    return submit(lambda: (time.sleep(pause), work()))


def is_missed(name: str, run: Run, expected: list[torch.Tensor], slowed: Callable[[float], None]) -> bool:
    """Whether a run without a wait ends in an error, or finds something else. `slowed` makes a lane pause for some seconds."""
    for pause in PAUSES:
        slowed(pause)
        with BY_NAME[name].deleted():
            try:
                found = run()
            except Exception:  # noqa: BLE001 - what is not there yet ends in any error
                return True
        if not same(found, expected):
            return True
    return False


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(close, found, expected))


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
