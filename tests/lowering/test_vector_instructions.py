"""The C++ compiler is asked for the best vector instructions first; in the end Inductor knows of all that there are."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._inductor import cpu_vec_isa

import l2l_compile.backend
from l2l_compile.frontend.capture import capture
from l2l_compile.lowering.faster import vector_instructions
from l2l_compile.torch_internals import gc_pause
from models import Stack, rows


class Kind:
    """A kind of vector instructions, for a processor that has it and a compiler that may."""

    def __init__(self, name: str, compiles: bool = True):
        self.name, self.compiles, self.asked = name, compiles, 0

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        self.asked += 1
        return self.compiles


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    functions = (vector_instructions.ask, vector_instructions.ask_for_the_others, cpu_vec_isa.valid_vec_isa_list)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    for function in functions:
        function.cache_clear()
    yield
    for function in functions:
        function.cache_clear()


@pytest.fixture
def kinds(monkeypatch) -> list[Kind]:
    offered = [Kind("absent"), Kind("broken", compiles=False), Kind("best"), Kind("second")]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", offered)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["broken", "best", "second"])
    monkeypatch.setattr(vector_instructions.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu_vec_isa.platform, "machine", lambda: "x86_64")
    return offered


def test_the_best_kind_is_asked_for_first_and_all_others_later(kinds):
    absent, _broken, best, second = kinds
    vector_instructions.ask().join()
    assert cpu_vec_isa.pick_vec_isa() is best
    assert (absent.asked, second.asked) == (0, 0)
    assert cpu_vec_isa.supported_vec_isa_list is kinds
    vector_instructions.ask_for_the_others().join()
    assert second.asked
    assert cpu_vec_isa.valid_vec_isa_list() == [best, second]
    assert cpu_vec_isa.pick_vec_isa() is best


def test_inductor_asks_where_no_kind_is_there(kinds):
    for kind in kinds:
        kind.compiles = False
    vector_instructions.ask().join()
    assert cpu_vec_isa.valid_vec_isa_list() == []


def test_a_kind_that_the_user_wants_is_left_to_inductor(kinds):
    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        assert vector_instructions.ask() is None
        assert vector_instructions.ask_for_the_others() is None


def test_what_fails_is_left_to_inductor(kinds, monkeypatch):
    monkeypatch.setattr(Kind, "__bool__", lambda kind: 1 / 0)
    vector_instructions.ask().join()
    with pytest.raises(ZeroDivisionError):
        cpu_vec_isa.valid_vec_isa_list()


@pytest.mark.parametrize("enabled", [True, False])
def test_no_cycles_are_collected_while_a_model_is_captured(monkeypatch, enabled):
    seen = []
    monkeypatch.setattr(l2l_compile.backend, "capture", lambda gm: seen.append(gc.isenabled()) or capture(gm))
    torch._dynamo.reset()
    (gc.enable if enabled else gc.disable)()
    try:
        torch.compile(Stack(2).double(), backend="l2l", options={"device": "cpu", "block_compiler": "eager"})(rows(6))
        assert (seen, gc.isenabled()) == ([False], enabled)
        with pytest.raises(ZeroDivisionError), gc_pause.paused_gc():
            raise ZeroDivisionError
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
