"""Models that combine stacks of layers in every way that people do, for the tests of what becomes a segment.

Each class takes the depth of its stacks, and two inputs [rows, tokens, WIDTH]. `units(model)` names the parameters of each
layer: no segment should hold parameters of two.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 8


class Layer(nn.Module):
    """Pre-norm self-attention with one projection for queries, keys and values, and an MLP."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Separate(nn.Module):
    """Attention with four projections of one shape, without a norm: uses of parameters repeat within the layer."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        return x + self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, depth: int, kind: type = Layer, width: int = WIDTH):
        super().__init__()
        self.layers = nn.ModuleList(kind(width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Backbone(nn.Module):
    """Embedding, tower, norm and head, as a language model has them."""

    def __init__(self, depth: int, kind: type = Layer):
        super().__init__()
        self.embed, self.tower = nn.Linear(WIDTH, WIDTH, bias=False), Tower(depth, kind)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.norm(self.tower(self.embed(x))))


class Siamese(nn.Module):
    """One tower on two inputs."""

    def __init__(self, depth, kind=Layer):
        super().__init__()
        self.tower = Tower(depth, kind)

    def forward(self, a, b):
        return F.mse_loss(self.tower(a).mean(1), self.tower(b).mean(1))


class SiameseOfFour(Siamese):
    def __init__(self, depth):
        super().__init__(depth, Separate)


class SiameseBackbone(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.tower = Backbone(depth)

    def forward(self, a, b):
        return F.cosine_similarity(self.tower(a).mean(1), self.tower(b).mean(1)).pow(2).mean()


class Triplet(nn.Module):
    """One tower on three inputs."""

    def __init__(self, depth):
        super().__init__()
        self.tower = Tower(depth)

    def forward(self, a, b):
        anchor, near, far = (self.tower(x).mean(1) for x in (a, b, a.flip(1) - b))
        return F.triplet_margin_loss(anchor, near, far)


class Teacher(nn.Module):
    """A frozen teacher of another depth beside a student."""

    ratio = 2

    def __init__(self, depth):
        super().__init__()
        self.student, self.teacher = Tower(depth), Tower(self.ratio * depth).requires_grad_(False)

    def forward(self, a, b):
        with torch.no_grad():
            wanted = self.teacher(a)
        return F.mse_loss(self.student(a), wanted) + b.mean() * 0


class TeacherOfEqualDepth(Teacher):
    ratio = 1


class Preference(nn.Module):
    """A policy and its frozen reference, each on a chosen and a rejected sequence."""

    def __init__(self, depth):
        super().__init__()
        self.policy, self.reference = Backbone(depth), Backbone(depth).requires_grad_(False)

    def forward(self, chosen, rejected):
        score = lambda model, x: model(x).log_softmax(-1).mean((1, 2))  # noqa: E731
        with torch.no_grad():
            base = score(self.reference, chosen) - score(self.reference, rejected)
        return -F.logsigmoid(score(self.policy, chosen) - score(self.policy, rejected) - base).mean()


class Branches(nn.Module):
    """Two towers on one value; their results are added."""

    def __init__(self, depth):
        super().__init__()
        self.embed, self.left, self.right = nn.Linear(WIDTH, WIDTH), Tower(depth), Tower(depth)

    def forward(self, a, b):
        x = self.embed(a)
        return F.mse_loss(self.left(x) + self.right(x), b)


class Ensemble(nn.Module):
    def __init__(self, depth, members=3):
        super().__init__()
        self.members = nn.ModuleList(Backbone(depth) for _ in range(members))

    def forward(self, a, b):
        return F.mse_loss(sum(member(a) for member in self.members), b[..., :3])


class UnevenEnsemble(nn.Module):
    """Towers of one, two and `depth` layers."""

    def __init__(self, depth):
        super().__init__()
        self.members = nn.ModuleList(Tower(d) for d in (1, 2, depth))

    def forward(self, a, b):
        return F.mse_loss(sum(member(a) for member in self.members), b)


class Adversaries(nn.Module):
    """Generator and critic in one module."""

    def __init__(self, depth):
        super().__init__()
        self.generator, self.critic = Backbone(depth), Backbone(depth)
        self.widen = nn.Linear(3, WIDTH)

    def forward(self, noise, real):
        fake = self.widen(self.generator(noise))
        return (self.critic(real) - self.critic(fake)).mean().square() + F.softplus(self.critic(fake)).mean()


class Cascade(nn.Module):
    """Whole backbones one after the other: stages of layers."""

    def __init__(self, depth):
        super().__init__()
        self.stages = nn.ModuleList(Tower(depth) for _ in range(2))
        self.between = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, a, b):
        for stage, between in zip(self.stages, self.between, strict=True):
            a = between(stage(a))
        return F.mse_loss(a, b)


class Interleaved(nn.Module):
    """Two towers whose layers take turns."""

    kinds = (Layer, Layer)

    def __init__(self, depth):
        super().__init__()
        self.left, self.right = Tower(depth, self.kinds[0]), Tower(depth, self.kinds[1])

    def forward(self, a, b):
        for left, right in zip(self.left.layers, self.right.layers, strict=True):
            a, b = left(a), right(b)
        return F.mse_loss(a, b)


class InterleavedKinds(Interleaved):
    kinds = (Layer, Mlp)


class Exchanging(nn.Module):
    """Two towers whose layers take turns and read each other, as in two-stream and co-attention models."""

    def __init__(self, depth):
        super().__init__()
        self.left, self.right = Tower(depth), Tower(depth)

    def forward(self, a, b):
        for left, right in zip(self.left.layers, self.right.layers, strict=True):
            a, b = left(a + b), right(b - 0.5 * a)
        return F.mse_loss(a, b)


class Skips(nn.Module):
    """The second tower reads what each layer of the first one made, the last first."""

    def __init__(self, depth):
        super().__init__()
        self.down, self.up = Tower(depth), Tower(depth)

    def forward(self, a, b):
        made = []
        for layer in self.down.layers:
            a = layer(a)
            made.append(a)
        for layer in self.up.layers:
            a = layer(a + 0.5 * made.pop())
        return F.mse_loss(a, b)


class Odd(nn.Module):
    """An odd layer in the middle of a stack."""

    def __init__(self, depth):
        super().__init__()
        half = depth // 2
        self.layers = nn.ModuleList([*(Layer() for _ in range(half)), Mlp(), *(Layer() for _ in range(depth - half))])

    def forward(self, a, b):
        for layer in self.layers:
            a = layer(a)
        return F.mse_loss(a, b)


class Gates(nn.Module):
    """Two small gates, in a list."""

    def __init__(self):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x):
        for gate in self.gates:
            x = x * torch.sigmoid(gate(x))
        return x


class Lent(nn.Module):
    """Every layer holds one and the same small module besides its own."""

    class Layer(nn.Module):
        def __init__(self, lent):
            super().__init__()
            self.own, self.lent = Layer(), lent

        def forward(self, x):
            return self.own(self.lent(x))

    def __init__(self, depth):
        super().__init__()
        lent = Gates()
        self.layers = nn.ModuleList(self.Layer(lent) for _ in range(depth))

    def forward(self, a, b):
        for layer in self.layers:
            a = layer(a)
        return F.mse_loss(a, b)


class Again(Odd):
    """A whole backbone, with an odd layer in its stack, twice one after the other: its copies are stages."""

    def __init__(self, depth):
        super().__init__(depth)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, a, b):
        for _ in range(2):
            a = self.embed(a)
            for layer in self.layers:
                a = layer(a)
            a = self.head(a)
        return F.mse_loss(a, b)


class ExchangingAgain(Exchanging):
    """Two towers that read each other, twice one after the other."""

    def forward(self, a, b):
        for _ in range(2):
            for left, right in zip(self.left.layers, self.right.layers, strict=True):
                a, b = left(a + b), right(b - 0.5 * a)
            a, b = a.tanh(), b.tanh()
        return F.mse_loss(a, b)


class Joined(nn.Module):
    """Two towers joined into a third."""

    def __init__(self, depth):
        super().__init__()
        self.left, self.right, self.top = Tower(depth), Tower(depth), Tower(depth)

    def forward(self, a, b):
        return self.top(self.left(a) + self.right(b)).square().mean()


class Stacked(nn.Module):
    """Weights of all layers in one parameter, read layer by layer."""

    def __init__(self, depth):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(depth, WIDTH, WIDTH) * 0.1)

    def forward(self, a, b):
        for i in range(self.weight.shape[0]):
            a = a + torch.tanh(a @ self.weight[i])
        return F.mse_loss(a, b)


class StackedPairs(nn.Module):
    """Two stacked parameters, read by iteration, and a stacked bias read as `b[i, 0]`."""

    def __init__(self, depth):
        super().__init__()
        self.up = nn.Parameter(torch.randn(depth, WIDTH, 2 * WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(depth, 2 * WIDTH, WIDTH) * 0.1)
        self.bias = nn.Parameter(torch.randn(depth, 1, WIDTH) * 0.1)

    def forward(self, a, b):
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            a = a + torch.tanh(a @ up) @ down + self.bias[i, 0]
        return F.mse_loss(a, b)


class StackedSkips(nn.Module):
    """Stages with stacked weights between projections; the second one reads what each layer of the first one made."""

    def __init__(self, depth):
        super().__init__()
        self.stages = nn.ModuleList(Stacked(depth) for _ in range(2))
        self.ends = nn.ModuleDict({f"{end}{i}": nn.Linear(WIDTH, WIDTH) for i in range(2) for end in ("begin", "end")})

    def forward(self, a, b):
        made = []
        for i, stage in enumerate(self.stages):
            a = self.ends[f"begin{i}"](a)
            for j in range(stage.weight.shape[0]):
                a = a if i == 0 else a + 0.5 * made.pop()
                a = a + torch.tanh(a @ stage.weight[j])
                if i == 0:
                    made.append(a)
            a = self.ends[f"end{i}"](a)
        return F.mse_loss(a, b)


MODELS = {
    c.__name__: c
    for c in (
        Siamese,
        SiameseOfFour,
        SiameseBackbone,
        Triplet,
        Teacher,
        TeacherOfEqualDepth,
        Preference,
        Branches,
        Ensemble,
        UnevenEnsemble,
        Adversaries,
        Cascade,
        Interleaved,
        InterleavedKinds,
        Exchanging,
        Skips,
        Odd,
        Lent,
        Again,
        ExchangingAgain,
        Joined,
        Stacked,
        StackedPairs,
        StackedSkips,
    )
}


def units(model: nn.Module) -> dict[str, set[str]]:
    """The parameters of each layer alone by its name: layers are the innermost items of lists that are no plain module."""
    items = {
        f"{name}.{child}": layer
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for child, layer in module.named_children()
        if next(layer.children(), None) is not None
    }
    inner = {name for name in items if not any(other.startswith(f"{name}.") for other in items)}
    held = Counter(p for name in inner for p in items[name].parameters())
    return {name: {f"{name}.{p}" for p, parameter in items[name].named_parameters() if held[parameter] == 1} for name in inner}
