"""The text of a program parses back to its graphs, node by node; text that is none is refused with its line."""

from __future__ import annotations

import operator
import os
import time
from collections import Counter
from functools import cache

import pytest
import torch
from damage import damaged
from torch import nn

import l2l_compile
from l2l_compile import ParseError, Program
from l2l_compile.ir import nodes
from l2l_compile.options import Options
from l2l_compile.passes.compilation import Compilation
from l2l_compile.passes.pipeline import PIPELINE
from l2l_compile.passes.verify import verify
from models import EncoderDecoder, Stack, TwoHeads, rows

FACTS = frozenset().union(*(step.provides for step in PIPELINE))


class Normed(Stack):
    """Writes into buffers, mixes rows, and gives a mean."""

    def __init__(self):
        super().__init__(2)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(super().forward(x)).pow(2).mean(), x.shape[0]


class Lengths(nn.Module):
    """Sizes of which some are expressions of others."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        y = torch.cat([x, x[:, : x.shape[1] // 2 + 1]], 1)
        for layer in self.layers:
            y = layer(y).tanh()
        return y.flatten(0, 1)


def adam(model):
    return torch.optim.AdamW(model.parameters())


CASES = {
    "stack": (lambda: Stack(4), (rows(6).float(),), {}),
    "on the device": (lambda: Stack(4), (rows(6).float(),), {"stash": "device", "prefetch": 2}),
    "whole batch": (lambda: Stack(3), (rows(6).float(),), {"micro_batches": 1, "prefetch": 0}),
    "two heads": (lambda: TwoHeads(3), (rows(6).float(),), {}),
    "encoder and decoder": (EncoderDecoder, (torch.randn(6, 4, 8),), {}),
    "writes": (Normed, (rows(6).float(),), {}),
    "lengths": (Lengths, (torch.randn(6, 5, 4),), {}),
    "16 bits": (lambda: Stack(3), (rows(6).float(),), {"precision": "bf16"}),
}


def explained(build, arguments, options) -> Program:
    torch.manual_seed(0)
    options = {"micro_batches": 3, "device": "cpu", **options}
    return l2l_compile.explain(torch.compile(build(), dynamic=None), options)(*arguments).programs[0]


def assert_equal_graphs(parsed: Program, printed: Program) -> None:
    assert parsed.graphs.keys() == printed.graphs.keys()
    for title, graph in printed.graphs.items():
        other = parsed.graphs[title]
        partner = dict(zip(graph.nodes, other.nodes, strict=True))
        for node, found in partner.items():
            assert found.op == node.op
            assert found.name == node.name or f"%{node.name} =" not in str(printed), node
            if node.op == "call_function":
                assert found.target is node.target
                for word, mine, theirs in zip(
                    nodes.VOCABULARY[node.target].operands, nodes.operands(node), nodes.operands(found), strict=True
                ):
                    if word.kind is nodes.InputIndex:
                        names = printed.captured.inputs[mine].name, parsed.captured.inputs[theirs].name
                        assert names[0] == names[1]
                    else:
                        assert torch.fx.node.map_arg(mine, partner.__getitem__) == theirs, node
            elif node.op == "output":
                assert torch.fx.node.map_arg(node.args[0], partner.__getitem__) == found.args[0]
            for key in ("value", "split", "kind", "spec"):
                assert found.meta.get(key) == node.meta.get(key), (node, key)
            assert nodes.on_host(found) == nodes.on_host(node) and nodes.segment_of(found) == nodes.segment_of(node)


@pytest.mark.parametrize("case", CASES)
def test_a_printed_program_parses_back(case):
    program = explained(*CASES[case])
    parsed = Program.parse(str(program))
    assert str(parsed) == str(program)
    assert_equal_graphs(parsed, program)
    assert [s.name for s in parsed.segments] == [s.name for s in program.segments]
    assert [b.reason for b in parsed.blocks] == [b.reason for b in program.blocks]


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
def test_programs_with_updates_parse_back(update):
    model = Stack(3)
    program = explained(lambda: model, (rows(6).float(),), {"optimizer": adam(model), "update": update})
    assert "update('embed'" in str(program)
    parsed = Program.parse(str(program))
    assert str(parsed) == str(program)
    assert_equal_graphs(parsed, program)


@pytest.mark.parametrize("case", CASES)
def test_a_parsed_program_is_verified_by_the_same_rules(case):
    build, arguments, options = CASES[case]
    parsed = Program.parse(str(explained(build, arguments, options)))
    found = Compilation.of(parsed, Options.build({"device": "cpu", **options}))
    verify(found, FACTS)
    release = found.forward.find_nodes(op="call_function", target=nodes.release)[0]
    found.forward.erase_node(release)
    with pytest.raises(l2l_compile.VerifyError, match="released_once"):
        verify(found, FACTS)


def test_a_parsed_program_says_its_blocks_have_no_operations():
    parsed = Program.parse(str(explained(*CASES["stack"])))
    with pytest.raises(l2l_compile.L2LError, match="block 'block_0' was parsed from text, which does not have its operations"):
        parsed.forward_of(parsed.blocks[0])


HAND_WRITTEN = """\
blocks:
  layer      x2    inner loop

forward:
  %x = input  host  x: float32[8, 4]  128 B
  %w = fetch_weights('one')  h2d  80 B
  %moved = restore(%x)  h2d  x: float32[8, 4]  128 B
  %first = forward('one', %w, (%moved))  compute  layer x 2 micro-batches
  %y = %first[0]  none  y: float32[8, 4]  128 B
  return ((-), (%y), ())"""


def test_a_program_written_by_hand():
    program = Program.parse(HAND_WRITTEN)
    (run,) = program.forward.graph.find_nodes(op="call_function", target=nodes.forward)
    assert [s.name for s in program.segments] == ["one"] and program.segments[0].micro_batches == 2
    (pick,) = program.forward.graph.find_nodes(op="call_function", target=operator.getitem)
    assert nodes.operands(pick) == (run, 0) and pick.meta["spec"].shape == (8, 4)
    assert Program.parse(str(program)).forward.graph.nodes.__len__() == program.forward.graph.nodes.__len__()


@pytest.mark.parametrize(
    ("instead_of", "write", "line", "why"),
    [
        ("fetch_weights('one')", "fetch_weight('one')", 6, "no node is called 'fetch_weight'"),
        ("fetch_weights('one')", "fetch_weights()", 6, "takes \\(segment, after\\)"),
        ("restore(%x)", "restore(%z)", 7, "reads %z, which no line before it makes"),
        ("restore(%x)", "restore(%x, late=3)", 7, "'restore' has no operand late"),
        ("restore(%x)  h2d", "restore(%x)  d2h", 7, "runs on lane h2d, not on d2h"),
        ("compute  layer x 2", "compute  other x 2", 8, "names 'other'"),
        ("%y = %first[0]", "%x = %first[0]", 9, "the name '%x' is taken"),
        ("y: float32[8, 4]", "y: float33[8, 4]", 9, "no dtype is called 'float33'"),
        ("y: float32[8, 4]", "y: float32[s0, 4]", 9, "cannot read the size 's0'"),
        ("y: float32[8, 4]", "float32 of 8 x 4", 9, "expected 'name: dtype"),
        ("x2    inner loop", "x2    sometimes", 2, "expected a block"),
        ("  return ((-), (%y), ())", "  return ((-), (%y", 10, "expected '\\)'"),
        ("\n  return ((-), (%y), ())", "", 9, "a graph ends with 'return"),
        ("forward:", "foreward:", 4, "expected 'sizes: "),
        ("blocks:", "sizes: B is 8\n\nblocks:", 1, "expected a size"),
    ],
)
def test_what_is_no_program_is_refused_with_its_line(instead_of, write, line, why):
    assert HAND_WRITTEN.count(instead_of) == 1
    with pytest.raises(ParseError, match=why) as caught:
        Program.parse(HAND_WRITTEN.replace(instead_of, write))
    assert caught.value.line == line


# ---- texts of anybody --------------------------------------------------------------------------------------------------

LONG = 100_000
HOSTILE_SIZES = {
    "sympify": "sympify(\"__import__('os').mkdir('made_by_a_text')\")",
    "lambdify": "lambdify(8, __import__('os').mkdir('made_by_a_text'))",
    "preview": "preview(8, 'file', 'made_by_a_text')",
    "an attribute": "B.__class__.__mro__",
    "a power of powers": "9**9**9",
    "a power": "9**999999",
    "a symbol as exponent": "B**B**B",
    "powers of a size that is 1": "((s0**8)**8)**8",
    "a factorial": "factorial(9999999)",
    "a shift": "LShift(1, 99999999999)",
    "parentheses": "(" * LONG,
    "parentheses that are closed": "(" * LONG + "B" + ")" * LONG,
    "signs": "-" * LONG + "B",
    "a sum of sums": "+".join(["B"] * LONG),
    "factors that SymPy cannot simplify": "*".join(f"(B//{i}+s0//{i}+1)" for i in range(2, 17)),
    "more digits than Python reads": "1" * 5000,
    "a superscript": "B\u00b2",
    "an Arabic digit": "\u0663",
    "a null byte": "B\0",
    "a surrogate": "\ud800",
    "a division by zero": "B//(s0 - 1)",
    "a negative size": "B - 9",
    "a half": "1/2",
    "an operand too few": "FloorDiv(B)",
    "infinity": "1e999",
}


def with_size(size: str) -> str:
    return "sizes: B = 8 (batch), s0 = 1\n\n" + HAND_WRITTEN.replace("x: float32[8, 4]", f"x: float32[{size}, 4]", 1)


@pytest.mark.parametrize("name", HOSTILE_SIZES)
def test_a_size_of_a_text_executes_nothing_and_takes_no_time(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = time.monotonic()
    with pytest.raises(ParseError) as caught:
        Program.parse(with_size(HOSTILE_SIZES[name]))
    assert time.monotonic() - begun < 5 and len(str(caught.value)) < 500
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "size",
    [
        "B",
        "2*B",
        "B*(((s0//2)) + 1)",
        "B*s0**2",
        "Mod(B, 3)",
        "CeilToInt(IntTrueDiv(B, 3))",
        "Max(B, s0)",
        "TruncToInt(0.5*ToFloat(B))",
    ],
)
def test_sizes_that_pytorch_prints_are_parsed(size):
    parsed = Program.parse(with_size(size))
    assert next(iter(parsed.forward.graph.nodes)).meta["spec"].bytes(parsed.bindings) >= 4
    assert f"float32[{size}, 4]" in str(parsed)


LONG_PARTS = ("(", " ", "%x, ", "'", "\\", "x", "9", ", a", "  h", "((", "\0", "\ud800")
PLACES = {
    "operands": ("restore(%x)", "restore({})"),
    "result": ("((-), (%y), ())", "{}"),
    "name of a value": ("y: float32[8, 4]", "y{}: float32[8, 4]"),
    "flags": ("y: float32[8, 4]", "y: float32[8, 4]{}"),
    "segment": ("fetch_weights('one')", "fetch_weights('{}')"),
    "bytes": ("80 B", "{}"),
    "block": ("inner loop", "{}"),
    "node": ("%first = ", "%{} = "),
    "line": ("forward:", "{}"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("part", LONG_PARTS, ids=repr)
def test_a_long_text_is_refused_or_parsed_in_time(place, part):
    found, written = PLACES[place]
    begun = time.monotonic()
    try:
        str(Program.parse(HAND_WRITTEN.replace(found, written.format(part * (LONG // len(part))), 1)))
    except ParseError as error:
        assert len(str(error)) < 700
    assert time.monotonic() - begun < 10


@cache
def printed_programs() -> tuple[tuple[str, str], ...]:
    """Texts to damage, each with the option `update` of its program."""
    found = [(str(explained(*case)), "at_step") for case in map(CASES.__getitem__, ("writes", "lengths", "16 bits"))]
    for update in ("in_backward", "in_forward"):
        model = Stack(3)
        program = explained(lambda model=model: model, (rows(6).float(),), {"optimizer": adam(model), "update": update})
        found.append((str(program), update))
    return (*found, (HAND_WRITTEN, "at_step"))


def outcome_of(text: str, update: str) -> str:
    """What became of a text. A program has to print, to parse back, and to be verified; any other error is raised."""
    try:
        parsed = Program.parse(text)
    except ParseError as error:
        assert len(str(error)) < 700
        return "refused"
    again = str(parsed)
    assert str(Program.parse(again)) == again
    assert parsed.forward.code and parsed.host_stashes is not None
    chosen = {"optimizer": adam(Stack(1)), "update": update} if update != "at_step" else {}
    try:
        verify(Compilation.of(parsed, Options.build({"device": "cpu", **chosen})), FACTS)
    except l2l_compile.VerifyError:
        return "illegal"
    return "legal"


def test_a_damaged_program_is_refused_or_verified():
    """200 texts; `DAMAGED_PROGRAMS=20000` examines as many in ten minutes."""
    texts = printed_programs()
    found = Counter()
    for seed in range(int(os.environ.get("DAMAGED_PROGRAMS", "200"))):
        text, update = texts[seed % len(texts)]
        found[outcome_of(damaged(text, seed), update)] += 1
    assert found["refused"] > found["illegal"] > 0 and found["legal"] > 0
