"""Recurrent layers: a layer is a segment, rows are sequences of their own, and numbers are eager's."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import l2l_compile
from capabilities import has_lstm_in_bf16
from l2l_compile.ir.recurrent_operator import layer
from models import assert_parity, compilation, compiled, forward_alone, loss_of, pair_of, rows
from narrow_errors import gradient_errors

VOCABULARY, WIDTH = 20, 8


class LanguageModel(nn.Module):
    """Embedding, recurrent layers, head; indices [batch, time], or [time, batch] without `batch_first`."""

    def __init__(self, kind=nn.LSTM, *, width=WIDTH, inputs=WIDTH, batch_first=True, keep_state=True, **options):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, inputs)
        self.rnn = kind(inputs, width, batch_first=batch_first, **options)
        directions = 2 if options.get("bidirectional") else 1
        self.head = nn.Linear(directions * (options.get("proj_size") or width), VOCABULARY)
        self.keep_state = keep_state

    def forward(self, ids, target, state=None):
        y, state = self.rnn(self.table(ids), state)
        loss = F.cross_entropy(self.head(y).flatten(0, 1), target.flatten())
        return {"loss": loss, "state": state if self.keep_state else None}


def words(*shape: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape)


def batch(count: int, batch_first: bool = True, time: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (count, time) if batch_first else (time, count)
    return words(*shape), words(*shape)


def segments(step) -> dict[str, object]:
    return {s.name: s for program in l2l_compile.programs(step) for s in program.segments}


def micro_batches(step) -> set[int]:
    """Of the segments that have parameters."""
    return {s.micro_batches for s in segments(step).values() if s.parameter_names}


# ---- language models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.slow(but=("LSTM-batch first", "GRU-time first"))
def test_each_layer_is_a_segment_of_one_block(kind, batch_first):
    model = LanguageModel(kind, num_layers=3, batch_first=batch_first).double()
    step = assert_parity(model, batch(6, batch_first), batch(8, batch_first), batch(2, batch_first))
    layers = [segments(step)[f"rnn.l{i}"] for i in range(3)]
    assert [s.parameter_names for s in layers] == [
        tuple(f"rnn.{name}_l{i}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")) for i in range(3)
    ]
    assert len({s.block for s in layers}) == 1 and micro_batches(step) == {3}


class Tagger(nn.Module):
    """Time first; scores and classes are folded with time before the loss."""

    def __init__(self, loss):
        super().__init__()
        self.rnn, self.head, self.loss = nn.GRU(5, WIDTH), nn.Linear(WIDTH, 4), loss

    def forward(self, x, target):
        return {"loss": self.loss(self.head(self.rnn(x)[0]).view(-1, 4), target.reshape(-1))}


@pytest.mark.parametrize(
    "reduction, weighted, smoothing", [("mean", False, 0.0), ("sum", False, 0.0), ("mean", True, 0.0), ("mean", True, 0.2)]
)
@pytest.mark.slow(but=("mean-True-0.2", "sum-*"))
def test_losses_over_folded_time_stay_row_wise_up_to_their_sum(reduction, weighted, smoothing):
    weight = torch.rand(4).double() if weighted else None
    model = Tagger(
        lambda s, t: F.cross_entropy(s, t, weight, ignore_index=2, reduction=reduction, label_smoothing=smoothing)
    ).double()
    step = assert_parity(model, (rows(5, 6, 5), torch.randint(4, (5, 6))), (rows(5, 7, 5), torch.randint(4, (5, 7))))
    assert micro_batches(step) == {3}


def test_classes_that_lie_batch_first_in_memory():
    model = Tagger(lambda s, t: F.nll_loss(s.log_softmax(1), t)).double()
    assert_parity(model, (rows(5, 6, 5), torch.randint(4, (6, 5)).t()), (rows(5, 6, 5), torch.randint(4, (6, 5)).t()))


@pytest.mark.parametrize(
    "options",
    [
        {"bidirectional": True},
        {"proj_size": 4},
        {"proj_size": 3, "bidirectional": True, "bias": False},
        {"inputs": 6},
        {"num_layers": 1},
    ],
    ids=str,
)
@pytest.mark.slow(but=("{'bidirectional': True}", "*'proj_size': 3*"))
def test_forms_of_an_lstm(options):
    model = LanguageModel(**{"num_layers": 3, **options}).double()
    step = assert_parity(model, batch(6), batch(8))
    assert micro_batches(step) == {3}


@pytest.mark.parametrize("options", [{"nonlinearity": "relu"}, {"bidirectional": True, "bias": False}], ids=str)
@pytest.mark.slow(but="*relu*")
def test_forms_of_an_rnn(options):
    step = assert_parity(LanguageModel(nn.RNN, num_layers=2, **options).double(), batch(6), batch(8))
    assert micro_batches(step) == {3}


def test_twice_the_layers_need_no_more_blocks():
    blocks = [len(compilation(LanguageModel(num_layers=n, dropout=0.1, inputs=6), *batch(6)).blocks) for n in (4, 8)]
    assert blocks[0] == blocks[1]


def operators_of(module) -> list[torch._ops.OpOverload]:
    return [node.target for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def test_blocks_do_not_grow_with_time():
    """One operator a layer, forward and backward: time is a loop of PyTorch's kernel, not of the graph."""
    model = LanguageModel(num_layers=2, keep_state=False)
    step = compiled(model)
    lengths = []
    for time in (3, 30):
        step(*batch(6, time=time))["loss"].backward()
        block = segments(step)["rnn.l1"].block
        program = next(p for p in l2l_compile.programs(step) if block in p.blocks)
        lowered = [program.forward_of(block), program.backward_of(block)]
        lengths.append([len(operators_of(graph)) for graph in lowered])
        targets = [str(node.target) for node in lowered[1].graph.nodes]
        assert "l2l_compile.recurrent_layer_backward.default" in targets
        assert "l2l_compile.recurrent_layer.default" not in targets  # backward alone runs the layer again
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize(
    "options",
    [
        {"block_compiler": "inductor"},
        {"check": True},
        {"stash": "device", "prefetch": 2},
        {"outputs": "loss"},
    ],
    ids=str,
)
@pytest.mark.slow(only="*inductor*")
def test_options(options):
    assert_parity(LanguageModel(num_layers=2, keep_state=False).double(), batch(6), **options)


def test_on_a_device_with_memory_of_its_own(threaded):
    assert_parity(LanguageModel(num_layers=3, bidirectional=True).double(), batch(6), batch(8))
    assert threaded.devices[-1].ledger.held == 0


def test_evaluation():
    pair = pair_of(LanguageModel(num_layers=3, dropout=0.5).double().eval(), tolerance=1e-12)
    with torch.no_grad():
        pair.run(forward_alone, *batch(6)).check()
    assert micro_batches(pair.compiled) == {3}


def test_dropout_between_layers():
    """Masks come again with the seed, and backward differentiates the function that forward computed."""
    model = LanguageModel(num_layers=3, dropout=0.5).double()
    step, inputs = compiled(model), batch(6)
    parameters = list(model.parameters())

    def loss() -> torch.Tensor:
        torch.manual_seed(1)
        return step(*inputs)["loss"]

    loss().backward()
    direction = [torch.randn_like(p) for p in parameters]
    expected = sum((p.grad * d).sum() for p, d in zip(parameters, direction, strict=True))
    found = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p += sign * 1e-5 * d
            found.append(loss())
            for p, d in zip(parameters, direction, strict=True):
                p -= sign * 1e-5 * d
    assert (found[0] - found[1]).item() / 2e-5 == pytest.approx(expected.item(), rel=1e-6)
    assert loss() == loss() and abs(loss() - model.eval()(*inputs)["loss"]) > 1e-4


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.slow(but="GRU")
def test_gradients_in_16_bits_are_as_good_as_those_of_autocast(kind):
    if kind is nn.LSTM and not has_lstm_in_bf16():
        pytest.skip("eager has no LSTM in bf16 on this CPU")

    class WithLoss(LanguageModel):
        def forward(self, ids, target):
            return SimpleNamespace(loss=super().forward(ids, target)["loss"])

    torch.manual_seed(0)
    ids, target = batch(6, time=12)
    found, expected = gradient_errors(WithLoss(kind, num_layers=3, width=32, inputs=32), {"ids": ids, "target": target}, "bf16")
    assert found <= 1.5 * expected


# ---- states ------------------------------------------------------------------------------------------------------------


def states(kind, layers: int, count: int, **options) -> tuple[torch.Tensor, ...]:
    found = tuple(torch.randn(layers, count, WIDTH, dtype=torch.float64, **options) for _ in range(2))
    return found if kind is nn.LSTM else found[:1]


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
@pytest.mark.parametrize(
    "kind, options", [(nn.LSTM, {}), (nn.GRU, {}), (nn.LSTM, {"bidirectional": True})], ids=["LSTM", "GRU", "both directions"]
)
@pytest.mark.slow(but=("LSTM-batch first", "both directions-time first"))
def test_gradients_go_through_given_states(kind, options, batch_first):
    """In both directions, there are as many states as rows: 3 * 2 = 6."""
    model = LanguageModel(kind, num_layers=3, batch_first=batch_first, **options).double()
    pair = pair_of(model)
    given = states(kind, 6 if options else 3, 6, requires_grad=True)
    found = pair.step(*batch(6, batch_first), given if kind is nn.LSTM else given[0]).check()
    assert sum(d.key.kind == "gradient of input" for d in found.differences) == len(given)
    step = pair.compiled
    assert micro_batches(step) == {3} and len({segments(step)[f"rnn.l{i}"].block for i in (1, 2)}) == 1


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
def test_states_are_carried_from_batch_to_batch(batch_first):
    model = LanguageModel(num_layers=3, batch_first=batch_first).double()

    def step(call, *batches):
        state, made = None, []
        for inputs in batches:
            made.append(call(*inputs, state))
            made[-1]["loss"].backward()
            state = tuple(s.detach() for s in made[-1]["state"])
        return made

    pair = pair_of(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (pair.streamed, pair.eager)]
    for count in (6, 7):
        for number in (1, 2):
            pair.run(step, *(batch(count, batch_first) for _ in range(number))).check()
            for optimizer in optimizers:
                optimizer.step()
    assert micro_batches(pair.compiled) == {3}


class OwnStates(nn.Module):
    """States as users make them: zeros like a weight, a parameter for all rows, zeros that are written into."""

    def __init__(self, how: str):
        super().__init__()
        self.rnn, self.head, self.how = nn.GRU(5, WIDTH, num_layers=2, batch_first=True), nn.Linear(WIDTH, 3), how
        self.first = nn.Parameter(torch.randn(2, 1, WIDTH))

    def forward(self, x):
        self.rnn.flatten_parameters()
        state = self.first.expand(-1, x.shape[0], -1).contiguous()
        if self.how != "parameter":
            state = next(self.parameters()).new_zeros(2, x.shape[0], WIDTH)
        if self.how == "written":
            state[0] = 1.0
        y, state = self.rnn(x, state)
        return self.head(y[:, -1]) + state[-1, :, :3]


@pytest.mark.parametrize("how", ["zeros", "parameter", "written"])
def test_states_that_the_model_makes(how):
    step = assert_parity(OwnStates(how).double(), rows(6, 4, 5), rows(8, 4, 5))
    assert micro_batches(step) == {3}
    if how == "zeros":  # made in each layer, without the weight that was asked for its dtype
        assert not any("first" in s.parameter_names for s in segments(step).values())


# ---- other ways to use them --------------------------------------------------------------------------------------------


def test_words_of_letters():
    """Rows are folded: each word is a sequence of the inner layer, [batch * words, letters]."""

    class Letters(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.letters = nn.Embedding(VOCABULARY, 5), nn.LSTM(5, 4, bidirectional=True, batch_first=True)
            self.rnn, self.head = nn.LSTM(8, WIDTH, num_layers=2, batch_first=True), nn.Linear(WIDTH, 3)

        def forward(self, ids):
            count, length, letters = ids.shape
            _, (h, _) = self.letters(self.table(ids.view(count * length, letters)))
            return self.head(self.rnn(torch.cat([h[0], h[1]], -1).view(count, length, -1))[0])

    step = assert_parity(Letters().double(), words(6, 3, 4), words(8, 3, 4))
    assert micro_batches(step) == {3}


def test_one_sequence_without_a_batch_is_whole():
    """Time is the only dimension that could be split."""
    step = assert_parity(nn.Sequential(nn.Linear(5, WIDTH), First(nn.LSTM(WIDTH, WIDTH, 2))).double(), rows(9))
    reasons = {s.block.reason for s in segments(step).values() if ".l" in s.name}
    assert "l2l_compile.recurrent_layer.default carries a state from row to row" in reasons and None not in reasons


class First(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0]


class Cells(nn.Module):
    """Layers of cells, called step by step."""

    def __init__(self, kind, layers: int = 2):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.cells = nn.ModuleList([kind(WIDTH, WIDTH) for _ in range(layers)])

    def forward(self, ids, target):
        x, states, made = self.table(ids), [None] * len(self.cells), []
        for moment in range(ids.shape[1]):
            y = x[:, moment]
            for number, cell in enumerate(self.cells):
                states[number] = cell(y, states[number])
                y = states[number][0] if isinstance(states[number], tuple) else states[number]
            made.append(self.head(y))
        return {"loss": F.cross_entropy(torch.stack(made, 1).flatten(0, 1), target.flatten())}


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.slow(but="LSTMCell")
def test_loops_over_cells(kind):
    step = assert_parity(Cells(kind).double(), batch(6, time=3), batch(8, time=3))
    assert micro_batches(step) == {3}


class Translator(nn.Module):
    """An encoder of two directions, a bridge, and a decoder that attends to the encoder in every step."""

    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH // 2, num_layers=2, batch_first=True, bidirectional=True)
        self.bridge, self.query = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cell, self.head = nn.GRUCell(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, source, target):
        memory, state = self.encoder(self.source(source))
        state = torch.tanh(self.bridge(torch.cat([state[-2], state[-1]], -1)))
        x, context, made = self.target(target), torch.zeros_like(state), []
        for moment in range(target.shape[1] - 1):
            state = self.cell(torch.cat([x[:, moment], context], -1), state)
            weights = (memory @ self.query(state).unsqueeze(-1)).softmax(1)
            context = (weights * memory).sum(1)
            made.append(self.head(torch.cat([state, context], -1)))
        return {"loss": F.cross_entropy(torch.stack(made, 1).flatten(0, 1), target[:, 1:].flatten())}


@pytest.mark.slow
def test_translation_with_attention():
    step = assert_parity(Translator().double(), (words(6, 5), words(6, 4)), (words(8, 5), words(8, 4)))
    assert micro_batches(step) == {3}


class Packed(nn.Module):
    """Without a table, the graph break comes before any operation: there is no graph that could tell of it."""

    def __init__(self, kind, enforce_sorted: bool, with_table: bool):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH) if with_table else lambda x: x
        self.rnn, self.enforce_sorted = kind(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True), enforce_sorted
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.table(x), lengths, batch_first=True, enforce_sorted=self.enforce_sorted)
        y, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(y)


@pytest.mark.parametrize("kind, enforce_sorted, with_table", [(nn.LSTM, True, True), (nn.GRU, False, False)])
def test_packed_sequences(kind, enforce_sorted, with_table):
    """Dynamo does not trace them: the numbers are right, and a warning and the report say what runs on the host."""
    lengths = torch.tensor([5, 4, 4, 3, 2, 1] if enforce_sorted else [3, 5, 2, 4, 1, 5])
    model = Packed(kind, enforce_sorted, with_table).double()
    x = words(6, 5) if with_table else rows(6, 5, WIDTH)
    with pytest.warns(UserWarning, match="does not run a recurrent layer: .* no packed sequences"):
        assert_parity(model, (x, lengths), (x, lengths.clamp(max=4)))
    report = l2l_compile.explain(model, {"micro_batches": 3, "device": "cpu"})(x, lengths)
    (skipped,) = report.uncompiled
    assert "packed sequences" in skipped and __file__ in skipped
    assert [("pack_padded_sequence" in reason) for reason in report.graph_breaks] == ([True] if with_table else [])


# ---- Dynamo's setting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [False, True])
def test_other_backends_frames_and_the_setting_stay_as_they_were(allowed):
    seen = []

    def other(gm, examples):
        seen.append([str(node.target) for node in gm.graph.nodes])
        return gm.forward

    with torch._dynamo.config.patch(allow_rnn=allowed):
        for _ in range(2):
            for backend in (compiled, lambda model: torch.compile(model, backend=other)):
                torch._dynamo.reset()  # Dynamo remembers by code, for all backends, what it cannot compile
                step = backend(LanguageModel())
                step(*batch(6))
                assert torch._dynamo.config.allow_rnn == allowed
                assert backend is not compiled or "rnn" in segments(step)
    assert any("lstm" in target for targets in seen for target in targets) == allowed


# ---- the operator ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_the_operator_is_a_layer_of_pytorch(kind):
    for bidirectional, batch_first, bias, projected in itertools.product((False, True), repeat=4):
        if projected and kind != "lstm":
            continue
        made = {"lstm": nn.LSTM, "gru": nn.GRU}.get(kind, nn.RNN)
        named = {"proj_size": 3} if projected else {"nonlinearity": kind.removeprefix("rnn_")} if made is nn.RNN else {}
        module = made(5, 4, bidirectional=bidirectional, batch_first=batch_first, bias=bias, **named).double()
        x = rows(6, 7, 5).requires_grad_()
        widths = [3 if projected else 4, 4][: 1 + (kind == "lstm")]
        given = [rows(1 + bidirectional, 6 if batch_first else 7, width).requires_grad_() for width in widths]
        y, final = module(x, tuple(given) if kind == "lstm" else given[0])
        expected = [y, *(final if kind == "lstm" else [final])]
        actual = layer(kind, x, given, module._flat_weights, bias, True, bidirectional, batch_first)
        leaves = [x, *given, *module.parameters()]
        gradients = [torch.autograd.grad(loss_of(results), leaves) for results in (list(actual), expected)]
        torch.testing.assert_close(list(actual), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_gradients_of_some_results_alone():
    module, x, zeros = nn.LSTM(5, 4), torch.randn(3, 2, 5), [torch.zeros(1, 2, 4)] * 2
    parameters = list(module.parameters())
    for picked in range(3):
        y, (h, c) = module(x)
        expected = torch.autograd.grad((y, h, c)[picked].sum(), parameters)
        results = layer("lstm", x, zeros, module._flat_weights, True, True, False, False)
        torch.testing.assert_close(torch.autograd.grad(results[picked].sum(), parameters), expected)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_autocast_casts_as_it_does_in_pytorch(kind):
    """In results of 16 bits, as those of all kernels of cuDNN are."""
    if kind == "lstm" and not has_lstm_in_bf16():
        pytest.skip("eager has no LSTM in bf16 on this CPU")
    module, x = getattr(nn, kind.upper())(5, 4), torch.randn(3, 2, 5)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x)[0].to(torch.bfloat16)
        zeros = [torch.zeros(1, 2, 4)] * (1 + (kind == "lstm"))
        traced = make_fx(lambda x: layer(kind, x, zeros, module._flat_weights, True, True, False, False)[0])(x)
    assert torch.equal(traced(x), expected)  # a graph runs without the autocast that it was traced under
