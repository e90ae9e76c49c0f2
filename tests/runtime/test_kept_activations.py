"""The option `keep`: forward keeps what it computes inside of layers, backward computes the rest again. No number changes."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import l2l_compile
from kept_cases import MODELS, MUCH, UPDATES, WIDE, Convolutions, Routed, assert_equal_bits, assert_equal_gradients, trained
from l2l_compile.devices.device import MemoryState
from l2l_compile.errors import LoweringError, OptionError
from l2l_compile.estimate.activations import kept_activations
from l2l_compile.ir import nodes
from l2l_compile.ir.program import Program
from l2l_compile.lowering.code_cache import Store
from l2l_compile.lowering.costs import TypicalRates
from l2l_compile.lowering.lower import Lowering
from l2l_compile.lowering.saving import SavingChoice
from l2l_compile.lowering.savings import Savings
from l2l_compile.options import Options
from l2l_compile.runtime.activation_room import ActivationRoom
from l2l_compile.runtime.kept_activations import Room
from l2l_compile.runtime.stats import Stats
from l2l_compile.session import session_of
from l2l_compile.simulation.machine import Machine
from models import WIDTH, EncoderDecoder, Funnel, Layer, Stack, TwoHeads, UNet, compiled, loss_of, rows


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", MODELS)
def test_no_bit_depends_on_what_is_kept(name, update):
    assert_equal_bits(name, **UPDATES[update])


@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"precision": "fp16"}, {"stash": "device"}, {"micro_batches": 1}, {"prefetch": 0}], ids=str
)
@pytest.mark.parametrize("name", ["stack", "encoder and decoder", "convolutions"])
def test_no_bit_depends_on_it_with_other_options(name, options):
    assert_equal_bits(name, dtype=torch.float32, **options)


@pytest.mark.parametrize("name", ["stack", "u-net", "two heads"])
def test_lanes_that_work_at_once_find_what_is_kept(threaded, name):
    step = assert_equal_bits(name, check=True)
    assert session_of(step).device.ledger.held == 0


@pytest.mark.parametrize("keep", [1, 100, 1000, 3000, 10_000, 100_000])
def test_no_more_is_kept_than_the_option_allows(keep):
    expected, without = trained("stack", 0)
    found, step = trained("stack", keep)
    assert all(map(torch.equal, found, expected))
    kept = _report(step, keep).kept
    assert kept.bytes <= keep and 0 <= kept.share <= 1
    assert l2l_compile.stats(step).peak_device_bytes <= l2l_compile.stats(without).peak_device_bytes + keep


def _report(step, keep):
    return l2l_compile.explain(
        copy.deepcopy(step._orig_mod), options={"micro_batches": 3, "block_compiler": "eager", "keep": keep, "device": "cpu"}
    )(rows(7))


@pytest.mark.parametrize("name", ["stack", "encoder and decoder", "u-net", "funnel", "convolutions"])
@pytest.mark.parametrize("keep", [2000, MUCH])
def test_the_peak_is_the_expected_one(name, keep):
    build, shape = MODELS[name]
    model, x = build().double(), rows(7, *shape)
    options = {"micro_batches": 3, "block_compiler": "eager", "keep": keep, "device": "cpu"}
    expected = l2l_compile.explain(copy.deepcopy(model), options=options)(x).device_memory.peak
    step = compiled(model, keep=keep)
    loss_of(step(x)).backward()
    assert l2l_compile.stats(step).peak_device_bytes == expected


def test_the_peak_does_not_grow_with_depth():
    peaks = set()
    for depth in (8, 16, 32):
        model = Stack(depth).double()
        step = compiled(model, keep=4000)
        for _ in range(2):
            step(rows(6)).pow(2).mean().backward()
        peaks.add(l2l_compile.stats(step).peak_device_bytes)
    assert max(peaks) <= 1.01 * min(peaks)


def test_backward_computes_again_what_is_not_kept():
    """All that backward reads is kept: it runs half of the operations, and no product of forward."""
    _, step = trained("stack", MUCH)
    session = session_of(step)
    (saving, *_) = [s for key, s in session.savings._done.items() if key[0].repeats == 3]
    products = [str(n.target) for n in saving.backward.graph.graph.nodes if "mm" in str(n.target)]
    plain = [str(n.target) for n in saving.forward.graph.graph.nodes if "mm" in str(n.target)]
    assert len(products) == 4 and len(plain) == 2
    assert all(not n.target.startswith("draw_") for n in saving.backward.graph.graph.find_nodes(op="placeholder"))


def test_the_program_shows_what_may_be_kept():
    _, step = trained("stack", MUCH)
    (program,) = l2l_compile.programs(step)
    kept = program.forward.graph.find_nodes(op="call_function", target=nodes.keep_activations)
    assert [program.segments[nodes.operands(n).segment].name for n in kept][-1] == "head"
    text = str(program)
    assert str(Program.parse(text)) == text
    assert "keep_activations('layers.1', %forward_2)" in text and "activations=%inside_2" in text


@pytest.mark.parametrize("kept", [{}, {"keep": 3000}, {"keep": MUCH}, {"resident": MUCH}], ids=str)
def test_other_forwards_come_before_the_backward(threaded, kept):
    """They keep what is left, and what the first ones keep waits on the host."""
    torch.manual_seed(0)
    model = Stack(3).double()
    step, twin = compiled(model, **kept), copy.deepcopy(model)
    batches = [rows(6) for _ in range(4)]
    for call in (step, twin):
        losses = [call(x).pow(2).sum() for x in batches]
        for loss in losses:
            loss.backward()
    assert_equal_gradients(model, twin)
    assert session_of(step).device.ledger.held == 0


@pytest.mark.parametrize("kept", [{}, {"keep": MUCH}, {"keep_on_host": MUCH}, {"resident": MUCH}], ids=str)
def test_a_graph_that_is_kept_keeps_it(threaded, kept):
    torch.manual_seed(0)
    model = Stack(3).double()
    step, twin, x = compiled(model, **kept), copy.deepcopy(model), rows(6)
    for call in (step, twin):
        loss = call(x).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_equal_gradients(model, twin)
    assert session_of(step).device.ledger.held == 0


@pytest.mark.parametrize("kept", [{"keep": MUCH}, {"keep_on_host": MUCH}, {"resident": MUCH}], ids=str)
def test_a_gradient_that_was_not_expected_recomputes(threaded, kept):
    """The program expects a gradient of the loss alone. What has come from the host is freed."""
    torch.manual_seed(0)
    model = TwoHeads().double()
    step, twin, x = compiled(model, **kept), copy.deepcopy(model), rows(6)
    for call in (step, twin):
        call(x)["logits"].pow(2).sum().backward()
    assert_equal_gradients(model, twin)
    assert session_of(step).device.ledger.held == 0


@pytest.mark.parametrize("kept", [{"keep": MUCH}, {"keep_on_host": MUCH}, {"keep": 1500, "keep_on_host": 1500}], ids=str)
@pytest.mark.parametrize("first", [("late",), ("early",), ("aux",), ("late", "aux")], ids=str)
def test_gradients_may_reach_other_segments_than_expected(threaded, kept, first):
    """A loss is made outside of the model, of any of its outputs, and of others in the next step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Routed().double()
    step, twin = compiled(model, check=True, **kept), copy.deepcopy(model)
    for names in (first, ("early", "late", "aux"), ("aux",), ("late",)):
        x = rows(6, WIDTH)
        for call in (step, twin):
            made = call(x)
            sum(made[name].pow(2).sum() for name in names).backward()
        assert_equal_gradients(model, twin)
        model.zero_grad(), twin.zero_grad()
        assert session_of(step).device.ledger.held == 0


class Prefixed(nn.Module):
    """Layers run on a prefix, which may be empty."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, prefix, x):
        for layer in self.layers:
            prefix = layer(prefix)
        return torch.cat([prefix, x], 1)


@pytest.mark.parametrize(
    "kept", [{"keep": MUCH}, {"keep_on_host": MUCH}, {"keep_on_host": 100}, {"keep": 1, "keep_on_host": 1}], ids=str
)
def test_values_without_entries_are_kept_too(kept):
    torch._dynamo.reset()
    model = Prefixed().double()
    step, twin = compiled(model, **kept), copy.deepcopy(model)
    for call in (step, twin):
        call(torch.zeros(6, 0, WIDTH, dtype=torch.float64), rows(6, 4, WIDTH)).sum().backward()
    assert_equal_gradients(model, twin)


class OfParametersAlone(nn.Module):
    """A single segment, which has no value to stash."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self):
        return torch.tanh(self.weight @ self.weight)


@pytest.mark.parametrize("kept", [{"keep": MUCH}, {"keep_on_host": MUCH}, {"keep": MUCH, "keep_on_host": MUCH}], ids=str)
def test_a_forward_that_stashes_nothing_else_keeps(kept):
    torch._dynamo.reset()
    model = OfParametersAlone().double()
    step, twin = compiled(model, **kept), copy.deepcopy(model)
    for call in (step, twin):
        call().sum().backward()
    assert_equal_gradients(model, twin)


class MadeOfParameters(nn.Module):
    """Computes with a weight that is made of its parameters."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.ones(width, width))

    def forward(self, x):
        weight = torch.tanh(self.weight @ self.weight) * self.scale  # takes long, and is larger than what a row has
        return torch.tanh(x @ weight)


def test_what_is_made_of_weights_alone_is_not_kept():
    """It is the same in each micro-batch, and would be kept in each. A part that runs once keeps it once."""
    torch._dynamo.reset()
    model = nn.Sequential(*(MadeOfParameters(32) for _ in range(3))).double()
    step = compiled(model, keep=MUCH, micro_batches=6)
    step(rows(6, 32)).sum().backward()
    saved = [value for key, known in session_of(step).savings._done.items() if key[0].inner_looped for value in _saved(known)]
    assert saved and all(value.shape != (32, 32) for value in saved)


def _saved(saving):
    results = saving.forward.graph.graph.output_node().args[0]
    return [node.meta["val"] for node in results[len(results) - saving.count :]]


class Scored(nn.Module):
    """A loss beside the scores that it is made from, by a layer of another size than those before."""

    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.ModuleList(Layer() for _ in range(2)), Layer(hidden=5 * WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        scores = torch.tanh(self.last(x))
        return {"loss": scores.pow(2).mean(), "logits": scores}


def test_the_gradients_of_the_step_before_are_expected(monkeypatch):
    """From the second step on, what is kept is used by the segment that makes the loss and the scores as well."""
    torch._dynamo.reset()
    step, x = compiled(Scored().double(), keep=MUCH), rows(6, WIDTH)
    step(x)["logits"].pow(2).sum().backward()
    plain, whole = Lowering.backward, []
    monkeypatch.setattr(Lowering, "backward", lambda self, block, *rest: whole.append(block.name) or plain(self, block, *rest))
    for _ in range(2):
        step(x)["logits"].pow(2).sum().backward()
    assert not set(whole) & {key[0].name for key in session_of(step).savings._done}


class Asserting(nn.Module):
    """Says in its forward what its values must be."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Layer(), Layer()

    def forward(self, x):
        x = self.first(x)
        torch._assert_async((x.abs() < 100).all(), "too large")
        return self.last(x)


@pytest.mark.parametrize("keep", [0, MUCH])
def test_assertions_of_the_model_stay(keep):
    torch._dynamo.reset()
    step = compiled(Asserting().double(), keep=keep)
    step(rows(6, WIDTH)).sum().backward()
    with pytest.raises(RuntimeError, match="too large"):
        step(1000 * rows(6, WIDTH).abs() + 1000)


class Scaled(nn.Module):
    """Reads a number that changes from call to call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x, scale):
        for layer in self.layers:
            x = torch.tanh(layer(x) * scale)
        return x


def test_what_reads_a_changing_number_keeps_nothing():
    torch._dynamo.reset()
    model = Scaled().double()
    step, x = compiled(model, keep=MUCH), rows(6, WIDTH)
    made = []
    for number in range(5):
        step(x, 0.5 + number / 8).sum().backward()
        made.append(len(session_of(step).savings._done))
    assert len(set(made)) == 1  # of the first call, whose number counts as a constant
    options = Options.build({"micro_batches": 3, "block_compiler": "eager", "keep": MUCH, "device": "cpu"})
    kept = kept_activations(l2l_compile.programs(step)[-1:], options, None)
    assert kept.bytes == 0 and "it reads a number that may change from call to call" in str(kept)


def test_a_block_that_cannot_be_compiled_keeps_nothing(monkeypatch):
    """With a warning, and with the gradients of a model that keeps nothing."""
    expected, _ = trained("stack", 0)

    def fails(*_):
        raise LoweringError("on purpose")

    monkeypatch.setattr(Savings, "_finish", fails)
    monkeypatch.setattr("l2l_compile.lowering.savings._joints", Store(8))
    with pytest.warns(UserWarning, match="keeps nothing inside of .*, since on purpose"):
        found, _ = trained("stack", MUCH)
    assert all(map(torch.equal, found, expected))


def test_a_block_without_symbolic_sizes_keeps_too(monkeypatch):
    """As everywhere, it is traced anew for each size."""
    expected, _ = trained("stack", 0)
    traced = Savings._traced_with

    def fails(self, sizes, *rest):
        if sizes.symbols:
            raise LoweringError("on purpose")
        return traced(self, sizes, *rest)

    monkeypatch.setattr(Savings, "_traced_with", fails)
    monkeypatch.setattr("l2l_compile.lowering.savings._joints", Store(8))
    found, step = trained("stack", MUCH)
    assert all(map(torch.equal, found, expected)) and session_of(step).savings._done


def test_a_forward_without_backward_gives_back_what_it_kept():
    torch._dynamo.reset()
    model = Stack(3).double()
    step = compiled(model, keep=MUCH)
    out = step(rows(6))
    assert session_of(step).device.ledger.held > 0
    assert session_of(step).waiting.activations.device > 0
    del out
    assert session_of(step).device.ledger.held == session_of(step).waiting.activations.both == 0


def test_a_failed_step_leaves_nothing_behind(threaded, monkeypatch):
    _, step = trained("stack", MUCH)
    device = session_of(step).device
    with monkeypatch.context() as patch, pytest.raises(OSError, match="on purpose"):
        patch.setattr(type(device), "push", lambda *_: (_ for _ in ()).throw(OSError("on purpose")))
        step(rows(6)).pow(2).sum().backward()
    step(rows(6)).pow(2).sum().backward()
    assert device.ledger.held == 0


def test_compiled_blocks_keep_and_agree():
    x = rows(8, dtype=torch.float32)
    found = []
    for keep in (0, MUCH):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Stack(2, dropout=0.2)
        step = compiled(model, keep=keep, block_compiler="inductor")
        torch.manual_seed(1)
        step(x).pow(2).mean().backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_free_is_kept_with_auto():
    """The host is the device here: half of its free memory is more than a tiny model needs."""
    step = assert_equal_bits("stack", keep="auto")
    _, most = trained("stack", "1GB")
    assert l2l_compile.stats(step).peak_device_bytes == l2l_compile.stats(most).peak_device_bytes


def test_auto_fills_a_device_but_for_a_fifth():
    model, x = nn.Sequential(*(Layer(64) for _ in range(16))), rows(256, 64, dtype=torch.float32)
    options = {"micro_batches": 4, "block_compiler": "eager"}
    large = replace(Machine.load("h200"), node=2e-5, micro_batch=2e-5)  # so that tiny layers are not bound by the caller
    none, all_of_it = (_simulated(model, x, large, keep=keep, **options) for keep in (0, "1GB"))
    kept = all_of_it.stats.peak_device_bytes - none.stats.peak_device_bytes
    small = replace(large, device_memory=(none.stats.peak_device_bytes + kept / 2) / 0.8, device_reserve=0.0)
    found = _simulated(model, x, small, keep="auto", **options)
    assert none.seconds > found.seconds > all_of_it.seconds
    assert none.stats.peak_device_bytes + kept / 4 < found.stats.peak_device_bytes <= 0.8 * small.device_memory
    assert _simulated(model, x, small, keep="auto", **options).stats == found.stats


def _simulated(model, x, machine, **options):
    return l2l_compile.simulate(copy.deepcopy(model), machine, options)(x)


class Device:
    """A device with 1,000 bytes, of which 100 are taken."""

    is_host = False

    def memory(self):
        return MemoryState(100, 900, 1000)


def test_auto_leaves_more_for_larger_sizes_and_after_a_failure():
    room = ActivationRoom(Device(), "auto")
    assert room.at((4, 16)).device == 0
    room.measured((4, 16), Stats(300), Room())
    assert room.at((4, 16)).device == room.at((4, 8)).device == room.at((2, 16)).device == 495  # of 500: a part is 15 bytes
    assert room.at((5, 16)).device == 330 and room.at((8, 16)).device == 0
    room.measured((4, 16), Stats(700), Room(350))  # what was kept is not what the step needs
    assert room.at((4, 16)).device == 450
    room.ran_out()
    assert room.at((4, 16)).device == 225


def test_a_step_that_runs_out_of_memory_names_the_option(threaded, monkeypatch):
    _, step = trained("stack", MUCH)

    def fails(*_):
        raise torch.OutOfMemoryError("on purpose")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError, match="on purpose") as error:
        patch.setattr(type(session_of(step).device), "push", fails)
        step(rows(6)).pow(2).sum().backward()
    assert "in this order: smaller options keep and keep_on_host (the step keeps" in error.value.__notes__[-1]


def test_what_cannot_be_kept_is_named():
    options = {"micro_batches": 3, "block_compiler": "eager", "device": "cpu", "keep": MUCH}
    report = l2l_compile.explain(nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))), options=options)(
        rows(6, dtype=torch.float32)
    )
    assert "nothing of 2, 1, 0: it has no value that may be kept and saves time" in str(report.kept)
    with torch.no_grad():
        assert l2l_compile.explain(Stack(2), options=options)(rows(6, dtype=torch.float32)).kept is None


@pytest.mark.parametrize("keep", [-1, True, "much", 1.5, None])
def test_keep_is_a_number_of_bytes_or_auto(keep):
    if keep is None:
        assert Options.build({"keep": None}).keep == 0
        return
    with pytest.raises(OptionError, match="'keep' must be bytes, or a size such as '8GB' or '512MiB', or 'auto'"):
        torch.compile(Stack(2), backend="l2l", options={"keep": keep})


# ---- the choice ----------------------------------------------------------------------------------------------------------

BLOCKS = {
    "mlp": (lambda: Stack([Layer(64)], 64), (5,)),
    "attention": (lambda: EncoderDecoder(1), WIDE),
    "gated": (lambda: Gated(), (WIDTH,)),
    "convolution": (Convolutions, (3, 6, 6)),
    "u-net": (lambda: UNet(2), (WIDTH,)),
    "funnel": (Funnel, (5,)),
}


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_choice_is_nearly_the_best_of_all(name, fused):
    """Seconds with the values that are chosen, against the best of all sets of values, for every budget."""
    build, shape = BLOCKS[name]
    step = compiled(build().double(), keep=MUCH)
    torch._dynamo.reset()
    step(rows(6, *shape)).pow(2).mean().backward()
    (program,) = l2l_compile.programs(step)
    for segment in program.segments:
        joints = [
            joint
            for known in l2l_compile.lowering.savings._joints._codes.values()
            for joint in known
            if joint.block is segment.block
        ]
        for joint in joints:
            _assert_nearly_best(joint, fused)


def _assert_nearly_best(joint, fused):
    at = dict(zip(joint.guards.symbols, [4] * len(joint.guards.symbols), strict=True))
    choice = SavingChoice(joint.joint, at, TypicalRates(1e10, 1e10, 1e10), fused)
    candidates = sorted(choice.candidates, key=lambda c: -(choice.recompute - choice.time(c)))[:11]
    if not choice.recompute or not candidates:
        return
    sets = [
        [n for c in chosen for n in c] for k in range(len(candidates) + 1) for chosen in itertools.combinations(candidates, k)
    ]
    every = [(sum(choice.bytes[n] for n in chosen), choice.time(chosen)) for chosen in sets]
    levels = [
        (0, choice.recompute),
        *((sum(choice.bytes[n] for n in level.saved), choice.time(level.saved)) for level in choice.every_level()),
    ]
    # a step takes three times as long as its recompute: forward, recompute, gradients of values and of weights
    for budget, _ in levels[1:]:
        ours = min(seconds for size, seconds in levels if size <= budget)
        best = min(seconds for size, seconds in every if size <= budget)
        assert ours - best <= 0.03 * 4 * choice.recompute
