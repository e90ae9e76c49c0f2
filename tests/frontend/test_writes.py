"""Buffers that the model writes into while other layers, other calls or the loop read them: eager's, written once a step."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from l2l_compile import programs
from l2l_compile.errors import L2LError
from l2l_compile.testing import training_equivalent
from models import WIDTH, Layer, Stack, assert_parity, assert_same_state, compilation, compiled, pair_of, repeated, rows

NORMS = {"parametrization": parametrizations.spectral_norm, "hook": spectral_norm}


# ---- a GAN with spectral norm ----------------------------------------------------------------------------------------


def critic(norm, iterations=1):
    return nn.Sequential(
        norm(nn.Conv2d(1, 4, 3, padding=1), n_power_iterations=iterations), nn.LeakyReLU(0.1), nn.Flatten(),
        norm(nn.Linear(4 * 16, 8), n_power_iterations=iterations), nn.LeakyReLU(0.1),
        norm(nn.Linear(8, 8), n_power_iterations=iterations), nn.LeakyReLU(0.1), nn.Linear(8, 1),
    )  # fmt: skip


def generator():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 16), nn.Tanh(), nn.Unflatten(1, (1, 4, 4)))


class Gan(nn.Module):
    """Generator and critic in one module: the critic runs twice in a call with real images."""

    def __init__(self, *critic_arguments):
        super().__init__()
        self.generator, self.critic = generator(), critic(*critic_arguments)

    def forward(self, z, real=None):
        fake = self.generator(z)
        return self.critic(fake) if real is None else (self.critic(real), self.critic(fake.detach()))


def train(gan, parts, steps=5):
    """Steps of both players. `parts` calls them: (z) -> scores of fake images, (z, real) -> scores of both."""
    torch.manual_seed(1)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.5, 0.9)) for m in (gan.critic, gan.generator)]
    for _ in range(steps):
        z, real = rows(6), rows(6, 1, 4, 4)
        on_real, on_fake = parts(z, real)
        for optimizer, loss in (
            (optimizers[0], F.relu(1 - on_real).mean() + F.relu(1 + on_fake).mean()),
            (optimizers[1], None),
        ):
            gan.zero_grad()
            (loss if loss is not None else -parts(z).mean()).backward()
            optimizer.step()


def in_two(generate, judge):
    """Generator and critic as two models: a call of the critic for each kind of image."""

    def parts(z, real=None):
        fake = generate(z)
        return judge(fake) if real is None else (judge(real), judge(fake.detach()))

    return parts


@pytest.mark.parametrize("norm, iterations, models, micro_batches", [
    ("parametrization", 1, "one", 3), ("parametrization", 3, "two", 3), ("parametrization", 1, "one", 1),
    ("hook", 1, "two", 3), ("hook", 2, "one", 3),
])  # fmt: skip
@pytest.mark.slow(but="hook-1-two-3")
def test_a_gan_with_spectral_norm_trains_as_in_eager(norm, iterations, models, micro_batches):
    gan = Gan(NORMS[norm], iterations).double()
    reference = copy.deepcopy(gan)
    train(reference, reference)
    options = {"micro_batches": micro_batches}
    train(
        gan,
        compiled(gan, **options)
        if models == "one"
        else in_two(compiled(gan.generator, **options), compiled(gan.critic, **options)),
    )
    assert_same_state(gan, reference)


def test_a_layer_with_spectral_norm_is_one_split_segment():
    """The power iteration reads no rows: it does not keep its layer from going micro-batch by micro-batch."""
    layers = [nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(5, WIDTH), *layers).double()
    step = assert_parity(model, rows(6), rows(8))
    program = programs(step)[0]
    assert not program.whole_batch
    assert max(block.repeats for block in program.blocks) == 4


@pytest.mark.slow
def test_spectral_norm_with_inductor():
    assert_parity(critic(NORMS["parametrization"]).double(), rows(6, 1, 4, 4), rows(6, 1, 4, 4), block_compiler="inductor")


def test_in_evaluation_nothing_is_written():
    model = critic(NORMS["hook"]).double()
    with torch.no_grad():
        model(rows(2, 1, 4, 4))
    before = {name: b.clone() for name, b in model.eval().named_buffers()}
    assert_parity(model, rows(6, 1, 4, 4))
    assert all(torch.equal(before[name], b) for name, b in model.named_buffers())


def test_a_buffer_stays_the_tensor_that_it_was():
    model = critic(NORMS["parametrization"]).double()
    before = {name: id(b) for name, b in model.named_buffers()}
    with torch.no_grad():
        compiled(model)(rows(6, 1, 4, 4))
    assert {name: id(b) for name, b in model.named_buffers()} == before


# ---- other buffers that layers update and read -----------------------------------------------------------------------


class Codebook(nn.Module):
    """The quantizer of VQ-VAE with moving averages: it reads its codes, and then moves them."""

    def __init__(self, codes=6):
        super().__init__()
        self.register_buffer("codes", torch.randn(codes, WIDTH))
        self.register_buffer("count", torch.ones(codes))
        self.register_buffer("total", self.codes.clone())

    def forward(self, x):
        nearest = torch.cdist(x, self.codes).argmin(-1)
        quantized = self.codes[nearest]
        if self.training:
            chosen = F.one_hot(nearest, len(self.codes)).to(x.dtype)
            self.count.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.total.mul_(0.9).add_(chosen.t() @ x.detach(), alpha=0.1)
            weight = (self.count + 1e-5) / (self.count.sum() + 6e-5) * self.count.sum()
            self.codes.copy_(self.total / weight[:, None])
        return x + (quantized - x).detach(), (quantized.detach() - x).pow(2).mean()


class Quantized(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.down, self.code, self.up = Stack(depth), Codebook(), nn.Linear(WIDTH, 5)
        self.down.head = nn.Identity()

    def forward(self, x):
        y, cost = self.code(self.down(x))
        return self.up(y), cost


class Warming(nn.Module):
    """A counter that the first layer raises and the last one reads."""

    def __init__(self, depth=4):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.stack = Stack(depth)

    def forward(self, x):
        self.steps += 1
        return self.stack(x) * (self.steps / (self.steps + 3)), x[:, 0] * self.steps


class Siamese(nn.Module):
    """One encoder with BatchNorm, called twice: its statistics are written twice."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(5, WIDTH), nn.BatchNorm1d(WIDTH, momentum=momentum), nn.ReLU(), nn.Linear(WIDTH, 4)
        )
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        one, two = self.encoder(x), self.encoder(x.flip(1) * 2)
        return F.cosine_similarity(self.head(one), two.detach()), two


class Momentum(nn.Module):
    """As in MoCo and BYOL: a second encoder without gradient follows the first one."""

    def __init__(self, how):
        super().__init__()
        self.online, self.how = Stack(3), how
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x):
        pairs = zip(self.target.parameters(), self.online.parameters(), strict=True)
        with torch.no_grad():
            if self.how == "foreach":
                targets, sources = map(list, zip(*pairs, strict=True))
                torch._foreach_mul_(targets, 0.9)
                torch._foreach_add_(targets, sources, alpha=0.1)
            for target, source in pairs if self.how != "foreach" else ():
                if self.how == "data":
                    target.data.mul_(0.9).add_(source.data, alpha=0.1)
                else:
                    target.lerp_(source, 0.1)
            wanted = self.target(x * 1.1)
        return (self.online(x) - wanted).pow(2).mean()


class Queue(nn.Module):
    """The memory of contrastive learning: read as it was, then rows of it are replaced through a view."""

    def __init__(self):
        super().__init__()
        self.encoder = Stack(3)
        self.register_buffer("queue", torch.randn(12, 3))

    def forward(self, x):
        keys = self.encoder(x)
        scores = keys @ self.queue.clone().t()
        self.queue[3:].copy_(self.queue[:-3].clone())
        self.queue[:3].copy_(keys.detach()[:3])
        return scores, keys @ self.queue[:4].clone().t()


class Temperature(nn.Module):
    """Every layer reads what the layer before it has made of one buffer, and changes it."""

    def __init__(self, depth=4):
        super().__init__()
        self.register_buffer("heat", torch.ones(WIDTH))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        self.embed = nn.Linear(5, WIDTH)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            self.heat.mul_(0.9).add_(0.05)
            x = torch.tanh(layer(x) * self.heat.clone())
        return x


MODELS = {
    "codebook": Quantized, "counter": Warming, "shared BatchNorm": Siamese, "cumulative BatchNorm": lambda: Siamese(None),
    "momentum encoder": lambda: Momentum("lerp"), "momentum encoder, .data": lambda: Momentum("data"),
    "momentum encoder, foreach": lambda: Momentum("foreach"), "queue": Queue, "in every layer": Temperature,
}  # fmt: skip


@pytest.mark.parametrize("stash", ["host", "device"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow(only="momentum encoder*-host")
def test_buffers_that_are_written_and_read_are_eagers(name, stash):
    assert_parity(MODELS[name]().double(), rows(6), rows(6), rows(8), stash=stash)


def test_a_momentum_encoder_goes_by_layer_by_layer():
    """Its parameters are written at the start of the step and read by its own layers: no cut has to hold all of them."""
    found = compilation(Momentum("foreach").double(), rows(6))
    assert repeated(found) == [[f"target.layers.{i}" for i in range(3)], [f"online.layers.{i}" for i in range(3)]]


@pytest.mark.parametrize("update", ["in_backward", "in_forward"])
@pytest.mark.parametrize("name", ["momentum encoder", "counter"])
def test_parameters_that_are_updated_behind_the_device(name, update):
    training_equivalent(
        MODELS[name](),
        [rows(6) for _ in range(3)],
        lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1),
        updates=(update,),
        options={"micro_batches": 3, "block_compiler": "eager", "compile_update": False},
        loss=lambda out: out if name.startswith("momentum") else out[0].pow(2).mean(),
    )


def test_a_state_in_16_bits_keeps_its_own_precision():
    """What a layer writes for the next step is not rounded on its way from segment to segment."""
    model = Temperature()
    reference = copy.deepcopy(model)
    step = compiled(model, precision="bf16")
    for _ in range(3):
        x = rows(6, dtype=torch.float32)
        step(x).sum().backward()
        reference(x)
    assert torch.equal(model.heat, reference.heat)


def test_two_calls_before_backward_recompute_from_own_values():
    def step(call, *batches):
        first, second = (call(x).pow(2).mean() for x in batches)
        second.backward()
        first.backward()
        return first, second

    found = pair_of(Temperature().double()).run(step, rows(6), rows(6)).check()
    assert [d.key.name for d in found.differences if d.key.kind == "buffer"] == ["heat"]


def test_backward_that_runs_twice_writes_nothing():
    model = Temperature().double()
    loss = compiled(model)(rows(6)).pow(2).mean()
    before = model.heat.clone()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(model.heat, before)


def test_a_written_input_that_is_returned_is_the_callers_own():
    class Raising(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = Stack(2)

        def forward(self, x, seen):
            seen += 1
            return self.stack(x) * seen, seen

    seen = torch.zeros((), dtype=torch.float64)
    _, returned = compiled(Raising().double())(rows(6), seen)
    assert returned is seen and float(seen) == 1


# ---- what stays an error ---------------------------------------------------------------------------------------------


def test_a_write_that_another_name_would_have_to_show_is_refused():
    class Overlapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("all", torch.ones(2, WIDTH, dtype=torch.float64))
            self.register_buffer("part", self.all[0])
            self.stack = nn.ModuleList([Layer() for _ in range(4)])
            self.embed = nn.Linear(5, WIDTH)

        def forward(self, x):
            x = self.embed(x)
            self.all.mul_(0.5)
            for layer in self.stack:
                x = layer(x) + self.all[1]
            return x * self.part

    with pytest.raises(L2LError, match="'all', whose memory 'part' shares"):
        compiled(Overlapping().double())(rows(6))


def test_a_trained_parameter_written_by_one_layer_is_refused():
    class Clipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.stack, self.scale = (
                nn.Linear(5, WIDTH),
                nn.ModuleList([Layer() for _ in range(4)]),
                nn.Parameter(torch.ones(WIDTH)),
            )

        def forward(self, x):
            x = self.embed(x)
            for layer in self.stack:
                with torch.no_grad():
                    self.scale.clamp_(-0.5, 0.5)
                x = layer(x) * self.scale
            return x

    with pytest.raises(L2LError, match="parameter 'scale', which other segments read"):
        compiled(Clipped().double())(rows(6))


def test_buffers_in_one_memory_that_lie_apart_are_not_one_buffer():
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            both = torch.ones(2, WIDTH, dtype=torch.float64)  # .double() would part them
            self.register_buffer("first", both[0])
            self.register_buffer("second", both[1])
            self.embed, self.stack = nn.Linear(5, WIDTH), nn.ModuleList([Layer() for _ in range(3)])

        def forward(self, x):
            x = self.embed(x)
            for layer, buffer in zip(self.stack, itertools.cycle((self.first, self.second))):
                buffer.mul_(0.5)
                x = layer(x) * buffer.clone()
            return x

    assert_parity(Apart().double(), rows(6), rows(6))
