"""Traces and proofs on disk: found by the next process, right or not used at all."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import os
from pathlib import Path

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import l2l_compile
import l2l_compile.lowering.code_cache
import l2l_compile.lowering.lower
from l2l_compile import cache_folder, row_check
from l2l_compile.lowering.faster import compile_ahead, stored_traces, trace_cache
from l2l_compile.lowering.inductor import compile_graph
from l2l_compile.lowering.sizes import Sizes
from l2l_compile.passes.batching import proof
from models import WIDTH, Layer, Stack, compiled, pair_of, rows

LIBRARY = torch.library.Library("l2l_test_disk", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")


@pytest.fixture(autouse=True)
def kept(monkeypatch, tmp_path):
    """Entries are kept, in a folder of the test's own, as Inductor needs them; graphs run as they are."""
    monkeypatch.setenv("L2L_CACHE", "1")
    monkeypatch.setattr(compile_ahead, "compile_graph", lambda graph, device: graph)
    monkeypatch.setattr(trace_cache, "cache_dir", lambda: str(tmp_path))
    monkeypatch.setattr(trace_cache, "_said", set())
    monkeypatch.setattr(trace_cache, "_unchecked", None)
    start()


@pytest.fixture
def traced(monkeypatch):
    """What was traced, and what was proven, in order."""
    made = []

    def noted(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: made.append(name) or original(*args))

    for name in ("trace_forward", "trace_backward"):
        noted(l2l_compile.lowering.lower, name)
    noted(proof, "probe")
    return made


@pytest.fixture
def inductor(monkeypatch):
    """Graphs are compiled after all; kernels stay from test to test."""
    monkeypatch.setattr(compile_ahead, "compile_graph", compile_graph)


def start() -> None:
    """As a new process does, with what is on disk."""
    torch._dynamo.reset()
    l2l_compile.lowering.code_cache.store.clear()
    proof.forget()


def step(model: nn.Module, *shapes: tuple[int, ...]) -> None:
    """Steps of a fresh process at these shapes, each compared with eager."""
    start()
    pair = pair_of(copy.deepcopy(model), block_compiler="inductor")
    for shape in shapes:
        pair.step(rows(*shape)).check()


def entries() -> list[Path]:
    return sorted(trace_cache._folder().path.rglob("*.json"))


def with_checksum(text: str) -> str:
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


MODELS = {
    "layers": (lambda: Stack(2), [(6,)]),
    "lengths": (lambda: nn.Sequential(Causal(), Causal()), [(6, 9, WIDTH), (6, 8, WIDTH), (5, 7, WIDTH)]),
    "batch norm": (lambda: Stack([Layer(norm=nn.BatchNorm1d) for _ in range(2)]), [(6,)]),
    "a branch on the length": (lambda: nn.Sequential(Causal(), Causal()), [(6, 9, WIDTH), (6, 12, WIDTH)]),
}


class Causal(nn.Module):
    """Attention in PyTorch's elementary operations: 2.11 cannot compile its own in float64. Long sequences are squashed."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + (q @ k.transpose(1, 2)).masked_fill(future, -torch.inf).softmax(-1) @ v
        return x.tanh() if x.shape[1] > 10 else x


@pytest.mark.parametrize("name", MODELS)
def test_the_next_process_traces_and_proves_nothing(traced, name):
    make, shapes = MODELS[name]
    model = make().double()
    step(model, *shapes)
    assert set(traced) == {"trace_forward", "trace_backward", "probe"}
    del traced[:]
    step(model, *shapes)
    assert not traced


@pytest.mark.slow
def test_graphs_from_disk_are_compiled(traced, inductor):
    model = nn.Sequential(Causal(), Causal(), nn.BatchNorm1d(9)).double()
    step(model, (6, 9, WIDTH))
    del traced[:]
    step(model, (6, 9, WIDTH))
    assert not traced


def test_random_draws_are_kept(traced, inductor):
    model = Stack(2, dropout=0.5).double()
    gradients = []
    for _ in range(2):
        start()
        fresh = copy.deepcopy(model)
        torch.manual_seed(7)
        compiled(fresh, block_compiler="inductor")(rows(6)).sum().backward()
        gradients.append([p.grad for p in fresh.parameters()])
        first, traced[:] = list(traced), []
    assert first == []
    assert all(map(torch.equal, *gradients))


def test_graphs_from_disk_have_values_as_traced_ones_have(traced):
    model = nn.Sequential(Causal(), Causal()).double()
    found = []
    for _ in range(2):
        start()
        del traced[:]
        run = compiled(copy.deepcopy(model), block_compiler="inductor")
        for length in (9, 8):
            run(rows(6, length, WIDTH)).sum().backward()
        program = l2l_compile.programs(run)[-1]
        for block in program.blocks:
            found.append(
                [
                    (node.name, *map(str, tree_leaves(node.meta.get("val"))))
                    for graph in (program.forward_of(block), program.backward_of(block))
                    for node in graph.graph.nodes
                    if node.op != "output"
                ]
            )
    assert not traced
    half = len(found) // 2
    assert found[:half] == found[half:] and half


def test_check_knows_how_exactly_a_graph_from_disk_computes(traced):
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x + self.linear(x).bfloat16().tanh().double()

    found, amount = [], []
    for _ in range(2):
        start()
        del traced[:]
        run = compiled(nn.Sequential(Narrow(), Narrow()).double(), block_compiler="inductor", check=True)
        run(rows(6, WIDTH)).sum().backward()
        program = l2l_compile.programs(run)[0]
        found.append([row_check._tolerance(program.forward_of(block)) for block in program.blocks])
        amount.append(len(traced))
    assert amount[1] < amount[0]
    assert found[0] == found[1] and found[0][0][0] > 1e-2


def damaged(text: str) -> dict[str, str]:
    entry = json.loads(text.split("\n", 1)[1])
    foreign = text.split("\n", 1)[1].replace('"aten.', '"os.')
    return {
        "empty": "", "truncated": text[: len(text) // 2], "without its end": text[:-1], "another number": text.replace("0", "1"),
        "not JSON": with_checksum("{"), "a list": with_checksum("[]"), "without its parts": with_checksum(json.dumps(dict.fromkeys(entry))),
        "an operator of another library": with_checksum(foreign),
    }  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [
        "empty",
        "truncated",
        "without its end",
        "another number",
        "not JSON",
        "a list",
        "without its parts",
        "an operator of another library",
    ],
)
def test_a_damaged_entry_is_dropped_and_made_again(traced, kind):
    model = Stack(2).double()
    step(model, (6,))
    before, whole = list(traced), {path: path.read_text() for path in entries()}
    for path, text in whole.items():
        path.write_text(damaged(text)[kind])
    del traced[:]
    step(model, (6,))
    assert traced
    if kind != "an operator of another library":  # proofs have none
        assert sorted(traced) == sorted(before)
    assert {path: path.read_text() for path in entries()} == whole


def test_an_entry_that_was_not_written_to_its_end_is_none(traced, monkeypatch):
    model = Stack(2).double()

    def killed(*paths, **folders):
        raise OSError("killed")

    with monkeypatch.context() as dying, pytest.warns(UserWarning, match="cannot use its folder on disk .*: killed"):
        dying.setattr(cache_folder.os, "replace", killed)
        step(model, (6,))
    assert not entries()
    before, traced[:] = list(traced), []
    step(model, (6,))
    assert traced == before and entries()


def test_the_version_of_this_package_is_all_its_code():
    batch_rules = importlib.import_module("l2l_compile.passes.batching.batch_rules")
    assert {Path(module.__file__) for module in (trace_cache, proof, batch_rules, l2l_compile)} <= set(trace_cache.sources())


def test_other_versions_have_entries_of_their_own(traced, monkeypatch):
    model = Stack(2).double()
    step(model, (6,))
    before, traced[:] = list(traced), []
    monkeypatch.setattr(trace_cache, "_versions", lambda: ("another",))
    step(model, (6,))
    assert traced == before


@pytest.mark.parametrize("ours", [True, False])
def test_nothing_is_kept_if_it_is_switched_off(monkeypatch, ours):
    monkeypatch.setenv("L2L_CACHE", str(int(not ours)))
    with torch._inductor.config.patch(force_disable_caches=not ours):
        step(Stack(2).double(), (6,))
    assert not entries()


def test_what_the_user_has_written_is_not_known_by_name(traced):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return torch.ops.l2l_test_disk.twice(self.linear(x))

    model = nn.Sequential(Own(), Own()).double()
    for _ in range(2):
        del traced[:]
        step(model, (6, WIDTH))
        assert traced and not entries()


@pytest.mark.parametrize(
    "target",
    [
        lambda x: x,
        print.__self__.__import__,
        F.gelu,
        torch.matmul,
        torch.ops.aten.add.Tensor,
        torch.ops.l2l_test_disk.twice.default,
    ],
)
def test_names_of_functions(target):
    known = target in (F.gelu, torch.matmul, torch.ops.aten.add.Tensor, print.__self__.__import__)
    if known:
        assert trace_cache.target_name(target)
    else:
        with pytest.raises(trace_cache.Untold):
            trace_cache.target_name(target)


def test_a_graph_calls_nothing_but_operators():
    for name in ("builtins.eval", "os.system", "eval", "aten.add", "l2l_test_disk.twice.default", "aten.__class__.mro"):
        with pytest.raises(ValueError):
            stored_traces._from_target(name)


EVIL = "x=__import__('os').environ.__setitem__('L2L_EVIL', '1')"


@pytest.mark.parametrize(
    "nodes",
    [
        [
            ["placeholder", "x", EVIL, ["tensor", [2], {"dtype": "float32"}, "cpu"]],
            ["output", "output", "output", {"tuple": [{"node": 0}]}],
        ],
        [
            ["constant", "x", f'a", {EVIL}), "', [[0], {"dtype": "float32"}, ""]],
            ["output", "output", "output", {"tuple": [{"node": 0}]}],
        ],
        [
            ["call", "x", "aten.ones.default", {"tuple": [{"list": [2]}]}, {"dict": {EVIL: 1}}],
            ["output", "output", "output", {"tuple": [{"node": 0}]}],
        ],
    ],
    ids=["operand", "constant", "keyword"],
)
def test_names_in_an_entry_are_not_executed(monkeypatch, nodes):
    """`torch.fx` writes a graph as Python source, and executes it."""
    monkeypatch.delenv("L2L_EVIL", raising=False)
    trace_cache.write("a" * 64, {"conditions": [], "graph": nodes, "draws": [], "seeded": False, "present": [True], "taken": []})
    assert stored_traces.load("a" * 64, Sizes({})) == (False, None)
    assert "L2L_EVIL" not in os.environ and not entries()


def test_an_entry_that_cannot_be_dropped_costs_nothing(traced, monkeypatch):
    def refuse(*path, **folder):
        raise PermissionError("read-only")

    model = Stack(2).double()
    step(model, (6,))
    for path in entries():
        path.write_text("")
    monkeypatch.setattr(cache_folder.os, "unlink", refuse)
    del traced[:]
    step(model, (6,))
    assert traced


def test_conditions_tell_which_trace_is_right():
    symbol = sympy.Symbol("s", integer=True, positive=True)
    for kind in (sympy.Le, sympy.Gt):
        sizes = Sizes({symbol: 5 if kind is sympy.Le else 12}, [symbol])
        assert sizes.decide([kind(sizes.names[0], 8)])
        stored_traces.save("a" * 64, None, sizes)
    assert len(entries()) == 2
    for size, op in ((3, "<="), (8, "<="), (9, ">"), (100, ">")):
        sizes = Sizes({symbol: size}, [symbol])
        assert stored_traces.load("a" * 64, sizes) == (True, None)
        guards = sizes.guards()
        assert guards.hold([size]) and not guards.hold([9 if op == "<=" else 8])


# Forks two processes at a time: the second two find what the first two have left.
TWO_AT_ONCE = """
import os, sys, traceback
import torch
from l2l_compile.testing import assert_equivalent
from torch._inductor import cpu_vec_isa

def train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3))).double()
    x = torch.randn(6, 8, dtype=torch.float64)
    assert_equivalent(model, x, options={"micro_batches": 2, "device": "cpu"}, tolerance=1e-12)

def fork():
    child = os.fork()
    if child:
        return child
    try:
        train()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)

cpu_vec_isa.pick_vec_isa()  # the compiler is asked once, with the cache that is there
os.environ["TORCHINDUCTOR_CACHE_DIR"] = {folder!r}
for _ in range(2):
    assert [os.waitpid(child, 0)[1] for child in (fork(), fork())] == [0, 0]
"""


@pytest.mark.slow
def test_two_processes_at_once(launcher, tmp_path):
    done = launcher.run(TWO_AT_ONCE.replace("{folder!r}", repr(str(tmp_path))), seconds=120)
    assert not done.returncode, done.stderr[-2000:]
    assert list((tmp_path / f"l2l_compile_{os.geteuid()}").rglob("*.json"))
