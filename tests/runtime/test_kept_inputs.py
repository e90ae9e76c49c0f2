"""An attention cache: its new entries alone cross the link, and the device keeps it from call to call."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import l2l_compile
from l2l_compile.errors import OptionError
from l2l_compile.session import session_of
from l2l_compile.testing.strict_device import ThreadedDevice
from models import WIDTH

LAYERS, BATCH, FLOAT = 3, 4, 8  # bytes of a float64


class Reader(nn.Module):
    """A layer with attention to a cache: `write` says how new entries come into it."""

    def __init__(self, write):
        super().__init__()
        self.qkv, self.out, self.write = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), write

    def forward(self, x, cache, position):
        q, k, v = self.qkv(x).chunk(3, -1)
        cache, k, v = self.write(cache, k, v, position)
        return x + self.out(F.scaled_dot_product_attention(q, k, v)), cache


def joined(cache, k, v, position):
    k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
    return (k, v), k, v


def windowed(cache, k, v, position):
    (k, v), *_ = joined(cache, k, v, position)
    return (k[:, -3:], v[:, -3:]), k, v


def written(cache, k, v, position):
    cache[0].index_copy_(1, position, k)
    cache[1].index_copy_(1, position, v)
    return cache, cache[0], cache[1]


def assigned(cache, k, v, position):
    cache[0][:, position] = k
    cache[1][:, position] = v
    return cache, cache[0], cache[1]


class Decoder(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.layers = nn.ModuleList(Reader(write) for _ in range(LAYERS))

    def forward(self, x, caches, position):
        made = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, cache, position)
            made.append(cache)
        return x, made


def decoder(write=joined):
    torch.manual_seed(0)
    return Decoder(write).double().eval()


def empty_caches(length):
    return [tuple(torch.zeros(BATCH, length, WIDTH, dtype=torch.float64) for _ in range(2)) for _ in range(LAYERS)]


def drawn(*shape, seed=0):
    return torch.randn(BATCH, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compiled(model, **options):
    torch._dynamo.reset()
    options = {"micro_batches": 2, "block_compiler": "eager", "device": "cpu", **options}
    return torch.compile(copy.deepcopy(model), backend="l2l", options=options, dynamic=True)


class Decoding:
    """A text that grows by one token a call: eager's results, and the streamed ones, which must be equal."""

    def __init__(self, write=joined, length=5, mode=torch.no_grad, **options):
        self.model, self.mode = decoder(write), mode
        self.step, self.position = compiled(self.model, **options), torch.zeros(1, dtype=torch.long)
        self.caches = [empty_caches(length) for _ in range(2)]

    def token(self, seed=0):
        x = drawn(1, WIDTH, seed=seed)
        with self.mode():
            made = [call(x, c, self.position) for call, c in zip((self.model, self.step), self.caches, strict=True)]
        for found, expected in zip(tree_leaves(made[1]), tree_leaves(made[0]), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        self.caches = [caches for _, caches in made]
        self.position = self.position + 1
        return l2l_compile.stats(self.step)

    def tokens(self, count):
        return [self.token(seed) for seed in range(count)][-1]


ROW = BATCH * WIDTH * FLOAT
NEW = 2 * LAYERS * ROW  # bytes of the new entries


@pytest.mark.parametrize("write", [joined, windowed, written, assigned], ids=lambda write: write.__name__)
def test_new_entries_of_a_cache_cross_the_link_once(threaded, write):
    stats = Decoding(write, check=True).tokens(3)
    assert stats.offloaded_bytes <= NEW + ROW + LAYERS * FLOAT  # the entries, the result, the position for each layer
    assert stats.restored_bytes <= ROW + FLOAT  # the token and its position


def test_without_a_device_cache_all_of_it_crosses(threaded):
    decoding = Decoding(device_cache=0)
    stats = decoding.tokens(3)
    assert stats.restored_bytes == ROW + 2 * LAYERS * 7 * ROW
    assert "keep_" not in str(l2l_compile.programs(decoding.step)[-1])


def test_what_fits_is_kept_and_the_rest_crosses(threaded):
    """A cache of 8 entries a layer: the budget holds the first layer's, and keys of the second."""
    decoding = Decoding(device_cache=3 * 8 * ROW)
    assert decoding.tokens(3).restored_bytes == ROW + (2 * LAYERS - 3) * 7 * ROW
    assert session_of(decoding.step).kept_inputs.bytes == 3 * 8 * ROW


@pytest.mark.parametrize("write", [joined, written], ids=lambda write: write.__name__)
def test_what_the_caller_writes_into_a_cache_is_seen(threaded, write):
    decoding = Decoding(write)
    decoding.tokens(2)
    for caches in decoding.caches:
        caches[1][0].mul_(0.5)
    assert decoding.token().restored_bytes >= 5 * ROW


def test_two_texts_go_on_from_one_cache(threaded):
    decoding = Decoding()
    decoding.tokens(2)
    fork = decoding.caches
    decoding.token(7)
    decoding.caches = fork
    decoding.token(8)


def test_memory_is_free_when_the_caller_lets_go(threaded):
    decoding = Decoding()
    decoding.tokens(2)
    session = session_of(decoding.step)
    assert session.device.ledger.held == session.kept_inputs.bytes == 2 * LAYERS * 7 * ROW
    decoding.caches = None
    gc.collect()
    session.device.start_peak()  # finalizers only note what is free
    assert session.device.ledger.held == session.kept_inputs.bytes == 0


def test_a_cache_of_inference_mode_is_right(threaded):
    Decoding(mode=torch.inference_mode).tokens(3)
    Decoding(written, mode=torch.inference_mode).tokens(3)


def test_training_between_tokens_has_the_device_for_itself(threaded):
    """The cache goes up once more behind it."""
    decoding = Decoding()
    decoding.tokens(2)
    loss = decoding.step(drawn(1, WIDTH), empty_caches(2), decoding.position)[0].sum()
    assert session_of(decoding.step).kept_inputs.bytes == 0
    loss.backward()
    assert decoding.token().restored_bytes == ROW + 2 * LAYERS * 7 * ROW
    assert decoding.token().restored_bytes == ROW


def test_an_input_that_comes_again_stays_on_the_device(threaded):
    """The first call sees it, the second one keeps it."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x, scales):
            for layer, scale in zip(self.layers, scales, strict=True):
                x = layer(x) * scale
            return x

    model = Twice().double().eval()
    step, scales = compiled(model), [drawn(WIDTH, seed=i) for i in range(3)]
    size = BATCH * WIDTH * FLOAT
    crossed = []
    for seed in range(4):
        x = drawn(WIDTH, seed=seed)
        if seed == 3:
            scales[1].add_(1)
        with torch.no_grad():
            torch.testing.assert_close(step(x, scales), model(x, scales), rtol=1e-12, atol=1e-12)
        crossed.append(l2l_compile.stats(step).restored_bytes)
    assert crossed == [4 * size, 4 * size, size, 2 * size]


def test_a_failed_call_leaves_no_cache_behind(threaded):
    decoding = Decoding()
    decoding.tokens(2)
    session = session_of(decoding.step)
    decoding.caches[1][2] = (decoding.caches[1][2][0], decoding.caches[1][2][1].clone())
    broken = next(iter(decoding.step._orig_mod.layers[1].out.parameters()))
    kept, broken.data = broken.data, broken.data[:1].clone()
    with pytest.raises(Exception, match="size|shape|match"), torch.no_grad():
        decoding.step(drawn(1, WIDTH), decoding.caches[1], decoding.position)
    broken.data = kept
    assert decoding.token().restored_bytes <= ROW + FLOAT + 2 * LAYERS * 7 * ROW
    assert session.kept_inputs.bytes == 2 * LAYERS * 8 * ROW


def test_a_copy_that_fails_is_named_and_not_the_join(threaded, monkeypatch):
    decoding = Decoding()
    decoding.tokens(2)

    def fails(self, tensor):
        raise OSError("on purpose")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="on purpose"), torch.no_grad():
        patch.setattr(ThreadedDevice, "download", fails)
        decoding.step(drawn(1, WIDTH), decoding.caches[1], decoding.position)
    decoding.tokens(2)


@pytest.mark.parametrize("cache", [None, 2 * 8 * ROW])
def test_explain_counts_what_is_kept(cache):
    """A call keeps what it has made; the first one has nothing from before."""
    model, x = decoder(), drawn(1, WIDTH)
    step = compiled(model, device_cache=cache)
    with torch.no_grad():
        report = l2l_compile.explain(step)(x, empty_caches(7), torch.zeros(1, dtype=torch.long))
        step(x, empty_caches(7), torch.zeros(1, dtype=torch.long))
    assert report.device_memory.peak == l2l_compile.stats(step).peak_device_bytes


@pytest.mark.parametrize("size", [-1, True, "much", 1.5])
def test_a_device_cache_is_a_number_of_bytes(size):
    with pytest.raises(OptionError, match="'device_cache' must be bytes"):
        torch.compile(decoder(), backend="l2l", options={"device_cache": size})
