"""Indices out of range are errors before a step, on a device whose kernels end the process for them."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from l2l_compile import IndexRangeError, L2LError
from l2l_compile.frontend.index_checks.indices import LookupCheck
from models import WIDTH, Layer, Stack, assert_parity, assert_same_state, compiled, rows
from test_huggingface import VOCAB, build

SIZE = 10
ROWS = 6


class Reader(nn.Module):
    """Layers on what `read` looks up in a table of `SIZE` rows."""

    def __init__(self, read, **buffers):
        super().__init__()
        self.read, self.table = read, nn.Parameter(torch.randn(SIZE, WIDTH))
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, tokens):
        x = self.read(self, tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def tokens_of(length=4):
    """All numbers that are allowed."""
    return torch.arange(ROWS * length).view(ROWS, length) % SIZE


def with_one(number):
    wrong = tokens_of()
    wrong[4, 2] = number
    return wrong


def chosen(tokens, where):
    """One where there is a token, for each of the rows."""
    hot = torch.zeros(len(tokens), SIZE, dtype=torch.float64)
    where(hot, tokens)
    return hot


def put(hot, tokens):
    hot.index_put_((torch.arange(len(hot)), tokens[:, 2]), torch.ones((), dtype=hot.dtype))


def by_brackets(hot, tokens):
    hot[torch.arange(len(hot)), tokens[:, 2]] = 1.0


NOT_NEGATIVE = {
    "embedding": lambda m, tokens: F.embedding(tokens, m.table),
    "embedding_bag": lambda m, tokens: F.embedding_bag(tokens, m.table),
    "index_select": lambda m, tokens: m.table.index_select(0, tokens.flatten()).view(*tokens.shape, -1),
    "gather": lambda m, tokens: m.table.expand(len(tokens), -1, -1).gather(1, tokens[..., None].expand(-1, -1, WIDTH)),
    "one_hot": lambda m, tokens: one_hot(m, tokens),
    "scatter": lambda m, tokens: tokens.new_zeros(len(tokens), SIZE, dtype=torch.float64).scatter(1, tokens, 1.0) @ m.table,
    "scatter_": lambda m, tokens: chosen(tokens, lambda hot, at: hot.scatter_(1, at, 1.0)) @ m.table,
}
FROM_END = {
    "getitem": lambda m, tokens: m.table[tokens],
    "getitem after an ellipsis": lambda m, tokens: m.table.t()[..., tokens].movedim(0, -1),
    "getitem after a new dimension": lambda m, tokens: m.table[None, tokens][0],
    "getitem in the second dimension": lambda m, tokens: m.table.expand(2, -1, -1)[:, tokens][0],
    "setitem": lambda m, tokens: chosen(tokens, by_brackets) @ m.table,
    "index_put_": lambda m, tokens: chosen(tokens, put) @ m.table,
    "take": lambda m, tokens: m.table[:, 0].contiguous().take(tokens)[..., None] * torch.ones(WIDTH, dtype=torch.float64),
    "take_along_dim": lambda m, tokens: torch.take_along_dim(m.table.expand(len(tokens), -1, -1), tokens[..., None], 1),
}


@pytest.mark.parametrize("name", [*NOT_NEGATIVE, *FROM_END])
def test_look_ups(stand_in, name):
    model = Reader((NOT_NEGATIVE | FROM_END)[name]).double()
    good = tokens_of()
    step = assert_parity(model, good, device=stand_in)
    with pytest.raises(IndexRangeError, match=rf"given the index {SIZE}, but .*input 'tokens'"):
        step(with_one(SIZE))
    if name in FROM_END:
        torch.testing.assert_close(step(good - SIZE), step(good))
        with pytest.raises(IndexRangeError, match=rf"index {-SIZE - 1}, but {-SIZE} to {SIZE - 1} are"):
            step(with_one(-SIZE - 1))
    else:
        with pytest.raises(IndexRangeError, match=rf"index -1, but 0 to {SIZE - 1} are"):
            step(with_one(-1))
    assert_parity(model, good, device=stand_in)


def test_error_is_an_index_error_with_all_wrong_ends(stand_in):
    class Named(Stack):
        def __init__(self):
            super().__init__(2)
            self.embed = nn.Embedding(SIZE, WIDTH)

    wrong = with_one(77)
    wrong[0, 0] = -3
    with pytest.raises(IndexError) as caught:
        compiled(Named(), device=stand_in)(wrong)
    assert isinstance(caught.value, L2LError)
    assert str(caught.value) == (
        "'embed': embedding is given the indices -3 and 77, but 0 to 9 are allowed. The index comes from input 'x'. "
        "Compare the vocabulary of the tokenizer with the rows of the embedding"
    )


def shifted_right(m, tokens):
    """As T5 makes the inputs of its decoder from labels."""
    before = tokens.new_zeros(tokens.shape)
    before[:, 1:] = tokens[:, :-1].clone()
    before[:, 0] = 0
    before.masked_fill_(before == -100, 0)
    return F.embedding(before, m.table)


def one_hot(m, numbers):
    """It does not keep the numbers for backward, so that they may be written into."""
    return F.one_hot(numbers, SIZE).double() @ m.table


def read_before_a_write(m, tokens):
    """The second look-up is of zeros alone."""
    numbers = tokens.clone()
    x = one_hot(m, numbers)
    numbers.mul_(0)
    return x + one_hot(m, numbers)


def read_before_and_after(m, tokens):
    numbers = tokens.clone()
    x = one_hot(m, numbers)
    numbers.add_(1)
    return x + one_hot(m, numbers)


KNOWN = {
    "offset": (lambda m, tokens: F.embedding(tokens + 1, m.table), tokens_of() - 1, tokens_of()),
    "mask": (lambda m, tokens: m.table[torch.where(tokens == 99, 0, tokens)], with_one(99), with_one(98)),
    "mask by a method": (lambda m, tokens: m.table[tokens.masked_fill(tokens.__eq__(99), 0)], with_one(99), with_one(98)),
    "labels shifted": (shifted_right, with_one(-100), with_one(-101)),
    "before a write": (read_before_a_write, tokens_of(), with_one(SIZE)),
    "after a write": (read_before_and_after, tokens_of() // 2, with_one(SIZE - 1)),
    "clamp": (lambda m, tokens: m.table[tokens.clamp(max=SIZE - 1)], with_one(77), with_one(-77)),
    "table of numbers": (lambda m, tokens: F.embedding(m.numbers[tokens], m.table), with_one(-1), with_one(-SIZE - 1)),
    "detected entries": (lambda m, tokens: m.table[(tokens == 5).int().argmax(-1)], tokens_of(), None),
    "constant": (
        lambda m, tokens: F.embedding(tokens, m.table) + m.table[torch.tensor([2, 3, 4, -1])],
        tokens_of(),
        with_one(-1),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_operations_that_lead_to_an_index(stand_in, name):
    read, good, wrong = KNOWN[name]
    before = good.clone()
    step = assert_parity(Reader(read, numbers=torch.arange(SIZE)).double(), good, good, device=stand_in)
    if wrong is not None:
        with pytest.raises(IndexRangeError):
            step(wrong)
    torch.testing.assert_close(good, before)


def test_buffer_as_index(stand_in):
    model = Reader(
        lambda m, tokens: F.embedding(m.places[:, : tokens.shape[1]], m.table) + m.table[tokens], places=torch.arange(8)[None]
    )
    step = assert_parity(model.double(), tokens_of(4), tokens_of(5), device=stand_in)
    model.places[0, 1] = SIZE
    with pytest.raises(IndexRangeError, match=r"index 10, but .* from buffer 'places'"):
        step(tokens_of(4))
    model.places[0, 1], model.places[0, 7] = 1, SIZE
    torch.testing.assert_close(step(tokens_of(4)), model(tokens_of(4)))


def learned_positions(m, tokens):
    return F.embedding(torch.arange(tokens.shape[1]), m.table) + m.table[tokens]


def test_learned_positions(stand_in):
    step = assert_parity(Reader(learned_positions).double(), tokens_of(4), tokens_of(SIZE), tokens_of(3), device=stand_in)
    with pytest.raises(IndexRangeError, match="index 10, but 0 to 9 are allowed.*sizes of the inputs alone"):
        step(tokens_of(SIZE + 1))
    with pytest.raises(IndexRangeError):
        step(tokens_of(SIZE + 1))  # a size is known as legal once it has passed
    step(tokens_of(SIZE))


def test_indices_made_of_sizes_are_checked_once(stand_in):
    ran = []
    run = LookupCheck.run

    def count(check, *arguments):
        ran.append(check.lookup.operation)
        run(check, *arguments)

    with mock.patch.object(LookupCheck, "run", count):
        step = compiled(Reader(learned_positions).double(), device=stand_in)
        for _ in range(3):
            step(tokens_of(4))
        assert ran == ["embedding", *["getitem"] * 3]
        step(tokens_of(5))
        assert ran.count("embedding") == 2


def writes_into_a_buffer(m, tokens):
    x = F.embedding(tokens + m.numbers[0], m.table)
    m.numbers.add_(0)
    return x + F.embedding(tokens + m.numbers[0], m.table)


UNKNOWN = {
    "parameter": lambda m, tokens: F.embedding(tokens + (m.table[0, 0] * 0).long(), m.table),
    "parameter of whole numbers": lambda m, tokens: F.embedding(tokens + m.fixed[0], m.table),
    "float": lambda m, tokens: F.embedding((tokens * 1.0).long(), m.table),
    "random": lambda m, tokens: F.embedding(tokens + torch.randint(0, 1, (1,)), m.table),
    "random in place": lambda m, tokens: F.embedding(tokens + torch.zeros(1, dtype=torch.int64).bernoulli_(0.0), m.table),
    "vmap": lambda m, tokens: torch.vmap(lambda row: m.table[row])(tokens),
    "written buffer": lambda m, tokens: F.embedding(tokens + m.numbers.add_(0)[0], m.table),
    "slice": lambda m, tokens: m.table[: tokens.shape[1]] + tokens[..., None],
    "mask": lambda m, tokens: torch.where(tokens[..., None] > 3, m.table[3], m.table[2]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_before_the_step_is_not_checked(stand_in, name):
    model = Reader(UNKNOWN[name], numbers=torch.zeros(2, dtype=torch.int64)).double()
    model.fixed = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    step = compiled(model, device=stand_in)
    step(tokens_of()).sum().backward()
    try:
        step(with_one(SIZE))
    except (IndexError, RuntimeError) as error:  # of the kernel, which has the memory of the host behind it
        assert not isinstance(error, IndexRangeError)
        assert "out of range" in str(error) or "out of bounds" in str(error)


def test_before_a_write_into_a_buffer_the_index_is_known(stand_in):
    model = Reader(writes_into_a_buffer, numbers=torch.zeros(2, dtype=torch.int64)).double()
    step = assert_parity(model, tokens_of(), device=stand_in)
    with pytest.raises(IndexRangeError, match="input 'tokens' and buffer 'numbers'"):
        step(with_one(SIZE))


# ---- losses ----------------------------------------------------------------------------------------------------------


class Classifier(Stack):
    """Three classes."""

    def __init__(self, loss):
        super().__init__(2)
        self.loss = loss

    def forward(self, x, labels):
        return self.loss(super().forward(x), labels)


LOSSES = {
    "cross_entropy": F.cross_entropy,
    "nll_loss": lambda scores, labels: F.nll_loss(scores.log_softmax(-1), labels, reduction="sum"),
    "ignore_index": lambda scores, labels: F.cross_entropy(scores, labels, ignore_index=-100, label_smoothing=0.1),
    "module": nn.CrossEntropyLoss(torch.rand(3, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_labels(stand_in, name):
    labels = torch.tensor([0, 1, 2, -100, 2, 1])
    step = assert_parity(Classifier(LOSSES[name]).double(), (rows(ROWS), labels), device=stand_in)
    with pytest.raises(IndexRangeError, match="index 3, but 0 to 2 are allowed.*input 'labels'.*ignore_index, here -100"):
        step(rows(ROWS), labels + (labels == 2))
    with pytest.raises(IndexRangeError, match="index -1, but"):
        step(rows(ROWS), torch.where(labels == -100, -1, labels))


def test_another_number_is_ignored(stand_in):
    model = Classifier(lambda scores, labels: F.cross_entropy(scores, labels, ignore_index=7)).double()
    step = assert_parity(model, (rows(ROWS), torch.tensor([0, 1, 2, 7, 2, 1])), device=stand_in)
    with pytest.raises(IndexRangeError, match="index -100, but.*here 7"):
        step(rows(ROWS), torch.tensor([0, 1, 2, -100, 2, 1]))


def test_probabilities_are_no_labels(stand_in):
    assert_parity(Classifier(F.cross_entropy).double(), (rows(ROWS), rows(ROWS, 3).softmax(-1)), device=stand_in)


# ---- after the error -------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Draws masks, and writes into buffers: all that a step may leave behind."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed, self.norm, self.drop = nn.Embedding(SIZE, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        self.steps.add_(1)
        x = self.norm(self.drop(self.embed(tokens))[:, 0])
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_refused_call_changes_nothing(stand_in):
    model = Counting(dropout=0.5).double()
    step = compiled(model, device=stand_in)
    step(tokens_of()).backward()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    gradients = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(IndexRangeError):
        step(with_one(SIZE))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, gradients, (p.grad for p in model.parameters())))


@pytest.mark.parametrize("update", ["at_step", "in_backward", "in_forward"])
def test_training_goes_on(stand_in, update):
    model, eager = Counting().double(), Counting().double()
    eager.load_state_dict(model.state_dict())
    optimizer, of_eager = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, eager))
    given = {"optimizer": optimizer, "update": update} if update != "at_step" else {}
    step = compiled(model, device=stand_in, **given)
    for turn in range(3):
        with pytest.raises(IndexRangeError):
            step(with_one(SIZE))
        for call, its in ((step, optimizer), (eager, of_eager)):
            call((tokens_of() + turn) % SIZE).backward()
            its.step()
            its.zero_grad()
    model.state_dict()  # updates that wait for the next forward
    assert_same_state(model, eager)


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_token_beyond_the_vocabulary_of_llama(stand_in):
    model, inputs = build("llama")
    step = assert_parity(model, inputs, device=stand_in)
    wrong = inputs["input_ids"].clone()
    wrong[1, 3] = VOCAB
    with pytest.raises(IndexRangeError, match=r"'model.embed_tokens'.* index 32, .*'input_ids'\. Compare the vocabulary"):
        step(**inputs | {"input_ids": wrong})
    with pytest.raises(IndexRangeError, match="'loss': cross_entropy|cross_entropy is given the index 32, .*'labels'"):
        step(**inputs | {"labels": wrong})
    assert_parity(model, inputs, device=stand_in)


@pytest.mark.slow
def test_text_beyond_the_positions_of_gpt2(stand_in):
    model, inputs = build("gpt2")
    step = compiled(model, device=stand_in)
    step(**inputs)
    longer = torch.randint(VOCAB, (5, 33))
    with pytest.raises(IndexRangeError, match="'transformer.wpe': embedding is given the index 32, but 0 to 31"):
        step(input_ids=longer)
    step(input_ids=longer[:, :32])
