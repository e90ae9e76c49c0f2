"""Signal handlers, errors that they raise, and finalizers, at every line and at random moments: no hang, and no other number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import l2l_compile
from l2l_compile import reentry
from l2l_compile.errors import ReentryError
from models import Stack, compiled

SCRIPT = """
import sys
sys.path.append({folder!r})
import torch
torch.set_num_threads(1)
import interruptions
if {threads}:
    interruptions.on_threads()
print(interruptions.{call})
"""
UPDATES = ("at_step", "in_backward", "in_forward", "delayed", "bf16")
LANES = ("inline", "threads")


def run(launcher, call: str, threads: bool, seconds: int = 100) -> str:
    done = launcher.run(SCRIPT.format(folder=str(Path(__file__).parents[1]), call=call, threads=threads), seconds)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.slow(but="inline-in_forward")
def test_a_handler_at_any_line_saves_or_is_refused(launcher, lanes, update):
    every_call = (lanes, update) != ("inline", "in_forward")
    printed = run(launcher, f"at_every_line({update!r}, every_call={every_call})", lanes == "threads", seconds=300)
    assert "'done'" in printed and "'refused'" in printed and "'other'" not in printed, printed


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.slow(but="threads-in_backward")
def test_signals_at_random_moments_change_no_number(launcher, lanes, update):
    printed = run(launcher, f"at_random({update!r}, 40)", lanes == "threads", seconds=300)
    assert "'other'" not in printed, printed


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.slow
def test_two_thousand_signals_change_no_number(launcher, update):
    run(launcher, f"at_random({update!r}, 2000)", threads=False, seconds=900)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.slow(but="in_forward")
def test_a_step_can_be_made_again_after_an_error_of_a_handler(launcher, update):
    run(launcher, f"errors_at_lines({update!r}, 0.02)", threads=False, seconds=300)


@pytest.mark.parametrize("update", ("in_backward", "delayed"))
def test_an_error_at_any_line_of_the_ledger_spoils_no_step(launcher, update):
    printed = run(launcher, f"errors_at_lines({update!r}, 1, within='gradient_ledger')", threads=False)
    assert int(printed.split()[0]) > 50, printed


@pytest.mark.parametrize("update", ("at_step", "in_backward", "in_forward", "delayed"))
@pytest.mark.slow(but="in_backward")
def test_finalizers_at_any_line_wait_for_nothing(launcher, update):
    run(launcher, f"finalizers_at_every_line({update!r})", threads=False, seconds=300)


def test_a_call_within_dynamos_guards_is_refused():
    """Dynamo holds a lock there, which a signal handler that calls the model would wait for. Its guards are functions of a text."""
    step, x = compiled(Stack(2)), torch.randn(4, 5)
    step(x)
    scope = {"step": step, "x": x}
    exec("def guard(): return step(x)\ndef another(): return step(x)", scope)
    with pytest.raises(ReentryError, match="within a look at Dynamo's guards.*docs/saving.md"):
        scope["guard"]()
    scope["another"]()


def test_a_call_while_dynamo_is_reset_is_refused(monkeypatch):
    """It takes programs apart there, and a call would read what is gone."""
    step, x = compiled(Stack(2)), torch.randn(4, 5)
    step(x)
    monkeypatch.setattr(torch._dynamo, "reset_code_state", lambda: step(x))
    with pytest.raises(ReentryError, match=r"within torch._dynamo.reset\(\).*docs/saving.md"):
        torch._dynamo.reset()


def test_the_error_of_a_call_within_a_step_names_the_pattern():
    @reentry.whole("a forward")
    def forward(inner):
        inner()

    @reentry.whole("synchronize()")
    def synchronize():
        reentry.check()

    synchronize()
    with pytest.raises(ReentryError, match=r"synchronize\(\) within a forward.*set a flag.*docs/saving.md"):
        forward(lambda: synchronize())
    assert reentry.running() is None


def test_code_without_a_hash_may_be_on_the_stack():
    """Dynamo writes code with dictionaries among its constants."""

    def caller():
        return None, reentry.running()

    constants = tuple({} if value is None else value for value in caller.__code__.co_consts)
    caller.__code__ = caller.__code__.replace(co_consts=constants)
    with pytest.raises(TypeError):
        hash(caller.__code__)

    @reentry.whole("a forward")
    def forward():
        return caller()

    assert forward()[1] == "a forward"


def test_a_save_between_two_backwards_of_one_step_is_refused():
    """With `in_backward`, some layers are updated and the others are not."""

    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Stack(2), torch.nn.Linear(3, 3)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    model, saved = Broken(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(model, optimizer=optimizer, update="in_backward", block_compiler="eager")
    between = torch.randn(6, 5, requires_grad=True)
    x = between * 1.0
    x.register_hook(lambda gradient: saved.append(model.state_dict()))
    with pytest.raises(ReentryError, match="updated some layers and not the others"):
        step(x).sum().backward()
    assert not saved
    l2l_compile.synchronize(step)
