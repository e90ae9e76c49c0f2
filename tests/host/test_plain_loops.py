"""Lines of plain training loops that ask something of gradients or parameters which overlapped updates keep elsewhere."""

from __future__ import annotations

import copy
import io
import pathlib
import threading
import warnings

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm, parameters_to_vector
from torch.optim.swa_utils import AveragedModel

import l2l_compile
from l2l_compile import L2LError
from l2l_compile.host.updates.overlapped import OverlappedUpdates
from l2l_compile.session import session_of
from models import Stack, compiled, rows

X = rows(4)


def nothing(model):
    return None


class Both:
    """A plain model and a streamed one, each with its optimizer, that go through the same loop."""

    def __init__(self, update="in_forward", **options):
        self.plain = Stack(2).double()
        self.model = copy.deepcopy(self.plain)
        self.own, self.optimizer = (
            torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for m in (self.plain, self.model)
        )
        self.step = compiled(self.model, optimizer=self.optimizer, update=update, compile_update=False, **options)

    def train(self, before=nothing, behind=nothing, steps=3, rounds=1, zero=lambda optimizer: optimizer.zero_grad()):
        """The loop, in which `before` and `behind` stand around `optimizer.step()`. Compares weights and their results."""
        for number in range(steps):
            found = []
            for module, call, optimizer in ((self.plain, self.plain, self.own), (self.model, self.step, self.optimizer)):
                for part in range(rounds):
                    (call(X + number + part).pow(2).mean() / rounds).backward()
                found.append([before(module)])
                optimizer.step()
                found[-1].append(behind(module))
                zero(optimizer)
            assert_same(*found)
        l2l_compile.synchronize(self.step)
        assert_same(list(self.model.parameters()), list(self.plain.parameters()))
        assert all(type(p) is torch.nn.Parameter for p in self.model.parameters())


def assert_same(ours, theirs):
    if isinstance(ours, (list, tuple)):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=1e-12)
    else:
        assert ours == theirs


def hold_up_updates(both):
    """Every update waits a little, so that a reader who does not wait sees weights from before it."""
    both.train(steps=1)
    updates = session_of(both.step).server.updates
    update = updates._update
    updates._update = lambda *arguments: (threading.Event().wait(0.02), update(*arguments))


# ---- gradients between backward and step -----------------------------------------------------------------------------


def clip_by_hand(model):
    parameters = [p for p in model.parameters() if p.grad is not None]
    total = torch.sqrt(sum(p.grad.pow(2).sum() for p in parameters))
    for p in parameters:
        p.grad.mul_(0.01 / total)
    return total


def clip_in_two_calls(model):
    norm = get_total_norm([p.grad for p in model.parameters()])
    clip_grads_with_norm_(model.parameters(), 0.01, norm)
    return norm


def replace_gradients(model):
    for p in model.parameters():
        p.grad = p.grad * 0.5 + 0.01


def replace_unread(model):
    for p in model.parameters():
        p.grad = torch.full(p.shape, 0.01, dtype=p.dtype)


def leave_one_out(model):
    model.head.weight.grad = None


CLIPS = {
    "clip_grad_norm_": lambda model: clip_grad_norm_(model.parameters(), 0.01),
    "inf": lambda model: clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"), error_if_nonfinite=True),
    "without foreach": lambda model: clip_grad_norm_(model.parameters(), 0.01, norm_type=1.0, foreach=False),
    "some": lambda model: clip_grad_norm_(model.layers.parameters(), 0.001),
    "one": lambda model: clip_grad_norm_(model.head.weight, 0.001),
    "clip_grad_value_": lambda model: clip_grad_value_(model.parameters(), 0.001),
    "two calls": clip_in_two_calls,
    "by hand": clip_by_hand,
    "replaced": replace_gradients,
    "replaced unread": replace_unread,
    "left out": leave_one_out,
    "read": lambda model: [p.grad.clone() for p in model.parameters()],
}


@pytest.mark.parametrize("name", CLIPS)
def test_a_gradient_is_in_its_place_before_the_step(name):
    Both().train(CLIPS[name])


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"max_grad_norm": 1e9}, {"update": "in_forward"}])
def test_a_clipped_norm_with_other_options(options):
    Both(**options).train(CLIPS["clip_grad_norm_"], rounds=options.get("accumulate", 1))


def test_a_gradient_that_is_read_in_every_round():
    both = Both(accumulate=2)
    for _ in range(2):
        for call, module, optimizer in ((both.plain, both.plain, both.own), (both.step, both.model, both.optimizer)):
            for part in range(2):
                call(X + part).pow(2).mean().backward()
                clip_grad_norm_(module.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    l2l_compile.synchronize(both.step)
    assert_same(list(both.model.parameters()), list(both.plain.parameters()))


def test_a_gradient_with_a_loss_scale_is_read_without_it():
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(model, optimizer=optimizer, update="in_forward", precision="fp16")
    x = X.float()
    (step(x).pow(2).mean() * 0.05).backward()
    expected = torch.autograd.grad(model(x).pow(2).mean() * 0.05, list(model.parameters()))
    norm = clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(norm, get_total_norm(expected), rtol=0.02, atol=0)
    optimizer.step()
    assert l2l_compile.stats(step).gradient_norm == pytest.approx(0.01, rel=1e-3)


def test_a_gradient_read_in_backward_is_an_error_with_options():
    both = Both("in_backward")
    with pytest.raises(L2LError, match="clip_grad_norm_ reads it.* update='in_forward'.* max_grad_norm"):
        both.train(CLIPS["clip_grad_norm_"])
    both = Both("in_backward")
    with pytest.raises(L2LError, match="p.grad is set between"):
        both.train(replace_unread)


@pytest.mark.parametrize("update", ["in_forward", "in_backward"])
def test_a_gradient_read_behind_the_step_is_one_warning(update):
    both = Both(update)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            both.step(X).pow(2).mean().backward()
            both.optimizer.step()
            clip_grad_norm_(both.model.parameters(), 1.0)
            both.optimizer.zero_grad()
    (warning,) = [w for w in caught if "p.grad is read behind optimizer.step()" in str(w.message)]
    assert pathlib.Path(warning.filename).name == pathlib.Path(__file__).name


@pytest.mark.parametrize("update", ["in_forward", "in_backward"])
def test_an_export_behind_the_step_is_silent_and_has_its_numbers(update):
    """A fake tensor of a parameter looks at `p.grad`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Both(update).train(behind=lambda module: torch.export.export(module, (X,)).module()(X), steps=2)
    assert not [w for w in caught if "l2l" in str(w.message)]


def test_a_perturbed_second_backward_is_the_step():
    """Two passes, as sharpness-aware minimization has them."""
    both = Both()
    for _ in range(3):
        for call, module, optimizer in ((both.plain, both.plain, both.own), (both.step, both.model, both.optimizer)):
            call(X).pow(2).mean().backward()
            moved = [p.grad * 0.05 for p in module.parameters()]
            with torch.no_grad():
                for p, by in zip(module.parameters(), moved, strict=True):
                    p.add_(by)
            optimizer.zero_grad()
            call(X).pow(2).mean().backward()
            with torch.no_grad():
                for p, by in zip(module.parameters(), moved, strict=True):
                    p.sub_(by)
            optimizer.step()
            optimizer.zero_grad()
    l2l_compile.synchronize(both.step)
    assert_same(list(both.model.parameters()), list(both.plain.parameters()))


# ---- parameters while they are updated -------------------------------------------------------------------------------


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return list(torch.load(file, weights_only=False).parameters())


def run_plain(model):
    with torch.no_grad():
        return model(X)


def run_compiled_elsewhere(model):
    return torch.compile(lambda parameters: [p * 2 for p in parameters], backend="eager")(list(model.parameters()))


def averaged(model):
    average = AveragedModel(model)
    average.update_parameters(model)
    return list(average.parameters())


def foreach(model):
    kept = [torch.zeros_like(p) for p in model.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(kept, list(model.parameters()), 0.5)
    return kept


READERS = {
    "AveragedModel": averaged,
    "foreach": foreach,
    "torch.save": saved,
    "deepcopy": lambda model: list(copy.deepcopy(model).parameters()),
    "deepcopy of a list": lambda model: copy.deepcopy(list(model.parameters())),
    "norms": lambda model: [p.norm() for p in model.parameters()],
    "one norm": lambda model: get_total_norm(list(model.parameters())),
    "clones": lambda model: [p.detach().clone() for p in model.parameters()],
    "data": lambda model: [p.data.clone() for p in model.parameters()],
    "numbers": lambda model: [torch.tensor(p.tolist(), dtype=p.dtype) for p in model.head.parameters()],
    "NumPy": lambda model: [torch.from_numpy(p.detach().numpy().copy()) for p in model.parameters()],
    "text": lambda model: repr(model.head.bias),
    "a vector": lambda model: parameters_to_vector(model.parameters()),
    "the plain model": run_plain,
    "another compiled function": run_compiled_elsewhere,
    "state_dict": lambda model: list(model.state_dict().values()),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_of_parameters_waits_for_updates(name):
    both = Both()
    hold_up_updates(both)
    both.train(behind=READERS[name], steps=2)


def test_a_reader_of_held_parameters_beside_delayed_clipping():
    both = Both(delay=1)
    held = list(both.model.parameters())
    for number in range(3):
        both.step(X).pow(2).mean().backward()
        clip_grad_norm_(held, 0.01)
        both.optimizer.step()
        seen = [p.detach().clone() for p in held]
        l2l_compile.synchronize(both.step)
        assert_same(seen, held), number
        both.optimizer.zero_grad()


def test_a_look_at_shapes_does_not_wait():
    both = Both()
    both.train(steps=1)
    updates, gate = session_of(both.step).server.updates, threading.Event()
    update = updates._update
    updates._update = lambda *arguments: (gate.wait(20), update(*arguments))
    both.step(X).pow(2).mean().backward()
    both.optimizer.step()
    assert sum(p.numel() for p in both.model.parameters() if p.requires_grad) > 0
    assert {p.dtype for p in both.model.parameters()} == {torch.float64}
    both.optimizer.zero_grad()
    assert session_of(both.step).server.updates._tickets
    gate.set()
    l2l_compile.synchronize(both.step)


def test_a_watched_parameter_compiles_nothing_again():
    both = Both()
    both.train(steps=1)
    torch._dynamo.utils.counters.clear()
    both.train(CLIPS["clip_grad_norm_"], READERS["norms"])
    assert not torch._dynamo.utils.counters["stats"]


def test_a_parameter_read_in_a_step_of_in_backward_is_a_warning():
    both = Both("in_backward")
    with pytest.warns(UserWarning, match="between backward and optimizer.step.*'in_backward' has updated it") as caught:
        both.step(X).pow(2).mean().backward()
        assert both.model.head.weight.norm() > 0
    both.optimizer.step()
    assert [pathlib.Path(w.filename).name for w in caught] == [pathlib.Path(__file__).name]


def test_an_evaluation_in_a_step_of_in_backward_is_a_warning():
    """It reads weights that are updated already, where eager reads those from before the step."""
    both = Both("in_backward")
    both.step(X).pow(2).mean().backward()
    with (
        pytest.warns(UserWarning, match="between backward and optimizer.step.*'in_backward' has updated it"),
        torch.no_grad(),
    ):
        both.step(X)
    both.optimizer.step()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        both.step(X)


# ---- zeros, and steps ------------------------------------------------------------------------------------------------


class Branches(torch.nn.Module):
    """One of two layers takes part in a step."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(2))

    def forward(self, x, first):
        return self.layers[0](x) if first else self.layers[1](x)


@pytest.mark.parametrize("update", ["in_forward", "in_backward"])
@pytest.mark.parametrize("of", ["optimizer", "module"])
def test_zeroed_gradients_are_stepped_as_in_eager(update, of):
    plain = Branches().double()
    model = copy.deepcopy(plain)
    own, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for m in (plain, model))
    step = compiled(model, optimizer=optimizer, update=update, compile_update=False)
    for number, first in enumerate([True, False, True, None, True, True, False]):
        for module, call, stepped in ((plain, plain, own), (model, step, optimizer)):
            if first is not None:
                call(X, first).pow(2).mean().backward()
            stepped.step()
            (stepped if of == "optimizer" else module).zero_grad(set_to_none=number == 4)
    l2l_compile.synchronize(step)
    assert_same(list(model.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("update", ["in_forward", "in_backward"])
def test_a_second_step_behind_one_backward_is_an_error(update):
    both = Both(update)
    both.train(steps=1)
    both.step(X).pow(2).mean().backward()
    both.optimizer.step()
    with pytest.raises(L2LError, match="called twice behind one backward"):
        both.optimizer.step()
    both.optimizer.zero_grad()
    both.optimizer.step()  # changes nothing, as in eager


def test_a_forgotten_step_is_said_without_advice_on_copies():
    both = Both()
    both.step(X).pow(2).mean().backward()
    with pytest.raises(L2LError, match=r"If optimizer.step\(\) is missing in the loop, call it") as raised:
        both.step(X).pow(2).mean().backward()
    assert "copy" not in str(raised.value)


@pytest.mark.parametrize("update", ["in_forward", "in_backward"])
def test_an_optimizer_with_closures_is_refused_with_the_cause(update):
    model = Stack(2)
    step = compiled(model, optimizer=torch.optim.LBFGS(model.parameters()), update=update)
    with pytest.raises(L2LError, match="LBFGS.step needs a closure"):
        step(X.float())


# ---- parameters in no optimizer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["at_step", "in_forward", "in_backward"])
def test_a_parameter_in_no_optimizer_is_said_once(update):
    model = Stack(2)
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    step = compiled(model, optimizer=optimizer, update=update)
    with pytest.warns(UserWarning, match=r"4 parameters take gradients, and no optimizer holds them \(embed.weight, ") as caught:
        for _ in range(2):
            step(X.float()).pow(2).mean().backward()
            optimizer.step()
            model.zero_grad()
    (warning,) = [w for w in caught if "no optimizer" in str(w.message)]
    assert pathlib.Path(warning.filename).name == pathlib.Path(__file__).name


def test_a_parameter_of_a_second_optimizer_is_not():
    model = Stack(2)
    optimizer, second = (torch.optim.SGD(part, lr=0.1) for part in (model.layers.parameters(), model.head.parameters()))
    model.embed.requires_grad_(False)
    step = compiled(model, optimizer=optimizer, update="in_forward")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(X.float()).pow(2).mean().backward()
    assert second.param_groups


def test_updates_begun_while_another_thread_waits_are_waited_for(monkeypatch):
    """A second thread may call state_dict() while the loop makes a step."""
    both = Both()
    both.step(X).sum().backward()
    both.optimizer.step()
    updates = session_of(both.step).server.updates
    parameter, drain, later = next(both.model.parameters()), OverlappedUpdates._drain, []

    def drained_while_a_step_ends(self):
        drain(self)
        later.append(self._updating.submit(lambda: None))
        self._tickets[parameter] = later[0]

    monkeypatch.setattr(OverlappedUpdates, "_drain", drained_while_a_step_ends)
    updates._drain()
    assert updates._tickets == {parameter: later[0]}


def test_compiled_code_of_another_backend_clips():
    def clip(model):
        gradients = [p.grad for p in model.parameters()]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
        for gradient in gradients:
            gradient.mul_(0.1 / norm)
        return norm

    Both().train(before=torch.compile(clip, backend="eager"))


class Guarded(torch.nn.Parameter):
    """A parameter whose class asks for each operation by itself."""

    @classmethod
    def __torch_function__(cls, function, kinds, arguments=(), named=None):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **(named or {}))


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
def test_gradients_that_cannot_be_watched_are_a_warning(update):
    model = Stack(2).double()
    model.head.weight = Guarded(model.head.weight.data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(model, optimizer=optimizer, update=update)
    with pytest.warns(UserWarning, match="p.grad of 1 parameters is None.*max_grad_norm"):
        step(X).sum().backward()
    optimizer.step()
