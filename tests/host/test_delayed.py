"""`delay=1`: gradients are taken at the weights of one step before, as in a loop with two copies of the model, bit for bit."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.session import session_of
from models import Stack, assert_same_state, compiled


def data(step: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.pow(2).mean()


def backward_of(model, batch) -> torch.Tensor:
    loss = loss_of(model(*batch) if isinstance(batch, tuple) else model(batch))
    loss.backward()
    return loss.detach()


class TwoCopies:
    """The loop that delay=1 stands for: `ahead` has the weights, `behind` those of one step before, at which gradients are taken."""

    def __init__(self, model: nn.Module, make, max_norm: float | None = None, accumulate: int = 1, **options):
        self.ahead, self.behind = model, copy.deepcopy(model)
        self.optimizer, self.max_norm = make(self.ahead.parameters()), max_norm
        self.grads_of = compiled(self.behind, **options)
        self.skipped = 0

    def step(self, batches) -> list[torch.Tensor]:
        losses = [backward_of(self.grads_of, batch) for batch in batches]
        before = copy.deepcopy(self.ahead.state_dict())
        for ahead, behind in zip(self.ahead.parameters(), self.behind.parameters(), strict=True):
            ahead.grad, behind.grad = behind.grad, None
        norm = nn.utils.get_total_norm([p.grad for p in self.ahead.parameters() if p.grad is not None])
        if norm.isfinite():
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(self.ahead.parameters(), self.max_norm)
            self.optimizer.step()
        else:
            self.skipped += 1
        self.optimizer.zero_grad()
        self.behind.load_state_dict(before)
        return losses


class Delayed:
    """The same loop, by the option."""

    def __init__(self, model: nn.Module, make, max_norm: float | None = None, **options):
        self.model, self.optimizer = model, make(model.parameters())
        more = {"optimizer": self.optimizer, "update": "in_forward", "delay": 1, "max_grad_norm": max_norm}
        self.compiled = compiled(model, **more, **{"compile_update": False, **options})

    def step(self, batches) -> list[torch.Tensor]:
        losses = [backward_of(self.compiled, batch) for batch in batches]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


def assert_same_weights(delayed: Delayed, expected: nn.Module, tolerance: float = 0.0) -> None:
    l2l_compile.synchronize(delayed.compiled)
    assert_same_state(delayed.model, expected, tolerance)


OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def frozen_in_the_middle(width: int = 8) -> nn.Module:
    model = Stack(4, width=width)
    model.layers[1].requires_grad_(False)
    return model


class Routed(nn.Module):
    """Some weights have no gradient in some steps."""

    def __init__(self):
        super().__init__()
        self.layers = Stack(3)
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, x, expert: int = 0):
        return self.layers(x) + self.experts[expert](x)


def both(make_model, optimizer: str, **how):
    torch.manual_seed(0)
    model = make_model().double()
    options = how.pop("options", {})
    return TwoCopies(copy.deepcopy(model), OPTIMIZERS[optimizer], **how, **options), Delayed(
        model, OPTIMIZERS[optimizer], **how, **options
    )


def assert_same(expected: TwoCopies, delayed: Delayed, batches_of, steps: int) -> None:
    for number in range(steps):
        batches = batches_of(number)
        for found, loss in zip(delayed.step(batches), expected.step(batches), strict=True):
            assert torch.equal(found, loss), f"step {number}"
    assert_same_weights(delayed, expected.ahead)


@pytest.mark.parametrize("device", ["cpu", "threaded"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make_model", [Stack, frozen_in_the_middle])
@pytest.mark.slow(but=("*-cpu", "Stack-momentum-threaded"))
def test_bit_equal_to_two_copies(make_model, optimizer, device, request):
    if device == "threaded":
        request.getfixturevalue("threaded")
    expected, delayed = both(make_model, optimizer)
    assert_same(expected, delayed, lambda number: [data(number)], 6)


def test_the_first_two_steps_are_at_the_weights_of_the_beginning():
    _, delayed = both(Stack, "sgd")
    first, second, third = (delayed.step([data(7)])[0] for _ in range(3))
    assert torch.equal(first, second) and third < first


def test_clipping_and_a_schedule():
    expected, delayed = both(Stack, "adamw", max_norm=0.05)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5) for run in (expected, delayed)]

    def batches_of(number: int) -> list[torch.Tensor]:
        if number:
            for schedule in schedules:
                schedule.step()
        return [data(number)]

    assert_same(expected, delayed, batches_of, 6)


def test_two_backward_calls_in_a_step():
    expected, delayed = both(Stack, "momentum", accumulate=2)
    assert_same(expected, delayed, lambda number: [data(number), data(number + 100, rows=4)], 5)


def test_a_step_that_is_skipped():
    expected, delayed = both(Stack, "momentum")
    with pytest.warns(RuntimeWarning, match="updates nothing"):
        for number in range(6):
            batches = [data(number) * (float("inf") if number in (1, 2) else 1.0)]
            assert torch.equal(delayed.step(batches)[0].nan_to_num(), expected.step(batches)[0].nan_to_num())
    assert_same_weights(delayed, expected.ahead)
    assert expected.skipped == l2l_compile.stats(delayed.compiled).skipped_steps == 2


def test_weights_without_a_gradient_in_some_steps():
    """An expert that a step does not use keeps its weights, also in the version that the next update is not written into."""
    expected, delayed = both(Routed, "sgd")
    assert_same(expected, delayed, lambda number: [(data(number), (0, 0, 1, 0, 1, 1, 0)[number])], 7)


def test_a_shape_that_comes_later_and_evaluation_in_between():
    """Evaluation is at the newest weights, and leaves training as it was."""
    expected, delayed = both(Stack, "adamw")
    for rows in (6, 4, 1, 6):
        assert_same(expected, delayed, lambda number, rows=rows: [data(number, rows)], 2)
        with torch.no_grad():
            assert torch.equal(delayed.compiled(data(9)), compiled(expected.ahead)(data(9)))


class Sliced(nn.Module):
    """A parameter whose slices are the weights of layers, in two programs, and that a third one reads as a whole."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 8, 8) * 0.4)
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, activation=torch.tanh, as_a_whole=False):
        x = self.first(x)
        for weight in [self.weights.sum(0)] if as_a_whole else [self.weights[number] for number in range(3)]:
            x = activation(x @ weight)
        return self.last(x)


@pytest.mark.parametrize("later", [(torch.sigmoid,), (torch.tanh, True)], ids=["other slices", "as a whole"])
def test_slices_are_read_a_step_late_by_a_later_program(later):
    expected, delayed = both(Sliced, "momentum")
    for given in ((), later, ()):
        assert_same(expected, delayed, lambda number, given=given: [(data(number), *given)], 3)


def test_the_compiled_update():
    expected, delayed = both(Stack, "adamw", options={"compile_update": True})
    for number in range(6):
        assert torch.allclose(delayed.step([data(number)])[0], expected.step([data(number)])[0], rtol=1e-9)
    assert_same_weights(delayed, expected.ahead, 1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_on_the_wire(precision):
    """As two copies that cross the link in 16 bits."""
    torch.manual_seed(0)
    model, x = Stack(), [data(number).float() for number in range(6)]
    expected = TwoCopies(copy.deepcopy(model), OPTIMIZERS["adamw"], precision="bf16")
    delayed = Delayed(model, OPTIMIZERS["adamw"], precision=precision)
    losses = [delayed.step([batch])[0] for batch in x], [expected.step([batch])[0] for batch in x]
    if precision == "bf16":
        assert all(torch.equal(*pair) for pair in zip(*losses, strict=True))
        assert_same_weights(delayed, expected.ahead)
    else:
        assert torch.allclose(*map(torch.stack, losses), rtol=0.05)


# ---- what the host has to keep ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])  # before the checkpoint is loaded
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"compile_update": True}])
@pytest.mark.slow(only="options2-*")
def test_a_resumed_run_is_bit_equal(options, trained):
    dtype = torch.float32 if options else torch.float64
    torch.manual_seed(0)
    model = Stack().to(dtype)
    run = Delayed(copy.deepcopy(model), OPTIMIZERS["adamw"], **options)
    for number in range(4):
        run.step([data(number).to(dtype)])
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    losses = [run.step([data(number).to(dtype)])[0] for number in range(4, 8)]

    l2l_compile.synchronize(run.compiled)
    torch._dynamo.reset()
    again = Delayed(copy.deepcopy(model), OPTIMIZERS["adamw"], **options)
    if trained:
        again.step([data(99).to(dtype)])
    again.optimizer.load_state_dict(saved[1])
    again.model.load_state_dict(saved[0])
    assert [again.step([data(number).to(dtype)])[0] for number in range(4, 8)] == losses
    assert_same_weights(again, run.model)


def test_a_checkpoint_serves_without_the_option():
    run = both(Stack, "momentum")[1]
    for number in range(3):
        run.step([data(number)])
    plain = copy.deepcopy(run.model)
    optimizer = OPTIMIZERS["momentum"](plain.parameters())
    optimizer.load_state_dict(run.optimizer.state_dict())
    for update in ({}, {"update": "in_backward"}):
        step = compiled(plain, optimizer=optimizer, **update)
        loss_of(step(data(5))).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_written_parameters_are_those_of_the_next_step():
    expected, delayed = both(Stack, "sgd")
    for number in range(3):
        delayed.step([data(number)]), expected.step([data(number)])
    l2l_compile.synchronize(delayed.compiled)
    with torch.no_grad():
        for parameter in delayed.model.parameters():
            parameter.mul_(0.5)
    written = copy.deepcopy(delayed.model)
    assert torch.equal(delayed.step([data(5)])[0], loss_of(compiled(written)(data(5))).detach())


def test_an_entry_of_a_frozen_parameter_written_through_data():
    """PyTorch does not record it, and no update would find it."""
    expected, delayed = both(lambda: frozen_in_the_middle(width=80), "sgd")
    for number in range(3):
        expected.step([data(number)]), delayed.step([data(number)])
        for model in (expected.ahead, expected.behind, delayed.model):
            model.layers[1].up.weight.data[number, 3] += 1.0
    assert torch.equal(delayed.step([data(5)])[0], expected.step([data(5)])[0])


def test_a_write_while_an_update_is_to_come_is_an_error(threaded):
    delayed = both(Stack, "sgd")[1]
    held = next(iter(delayed.model.parameters())).data
    delayed.step([data(0)])
    with _gate(delayed) as gate:
        delayed.step([data(1)])
    held.mul_(0.5)
    gate.set()
    with pytest.raises(L2LError, match="written while its update was still to come"):
        l2l_compile.synchronize(delayed.compiled)


# ---- nobody waits ----------------------------------------------------------------------------------------------------


@contextmanager
def _gate(delayed: Delayed) -> Iterator[threading.Event]:
    """Updates of steps that end within it stand still until the event is set."""
    updates, gate = session_of(delayed.compiled).server.updates, threading.Event()
    update = updates._update

    def later(*arguments) -> None:
        assert gate.wait(20)
        update(*arguments)

    updates._update = later
    yield gate
    updates._update = update


def test_a_step_ends_before_the_updates_of_the_step_before(threaded):
    expected, delayed = both(Stack, "momentum")
    delayed.step([data(9)]), expected.step([data(9)])
    with _gate(delayed) as gate:
        delayed.step([data(0)])
    expected.step([data(0)])
    loss = backward_of(delayed.compiled, data(1))  # no update has begun
    assert torch.equal(loss, expected.step([data(1)])[0])
    threading.Timer(0.3, gate.set).start()
    start = time.monotonic()
    delayed.optimizer.step()
    assert time.monotonic() - start > 0.2  # it is here that the updates are waited for
    delayed.optimizer.zero_grad()
    assert_same_weights(delayed, expected.ahead)


@pytest.mark.parametrize("update", ["at_step", "in_backward"])
def test_other_updates_are_refused(update):
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(Exception, match="delay=1 .* Use update='in_forward'"):
        compiled(model, optimizer=optimizer, update=update, delay=1)(data(0).float())
