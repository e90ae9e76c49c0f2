"""Random compositions of stacks, for `test_random_structure`: towers in chains, branches, turns and with skips, some shared or frozen."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from structures import WIDTH, Layer, Mlp, Separate, units


class Gated(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PostNorm(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Convolution(nn.Module):
    """A convolution over the tokens and a projection."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.mix, self.out = nn.Conv1d(width, width, 3, padding=1), nn.Linear(width, width)

    def forward(self, x):
        return x + self.out(torch.tanh(self.mix(x.transpose(1, 2)).transpose(1, 2)))


class StackedTower(nn.Module):
    """Weights of all layers in two parameters."""

    def __init__(self, depth: int):
        super().__init__()
        self.up = nn.Parameter(torch.randn(depth, WIDTH, 2 * WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(depth, 2 * WIDTH, WIDTH) * 0.1)

    @property
    def layers(self):
        return [functools.partial(self, i) for i in range(self.up.shape[0])]

    def forward(self, i, x):
        return x + torch.tanh(x @ self.up[i]) @ self.down[i]


class ListTower(nn.Module):
    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)


KINDS = {kind.__name__: kind for kind in (Layer, Separate, Mlp, Gated, PostNorm, Convolution)}
STACKED = "stacked"


@dataclass(frozen=True)
class TowerPlan:
    """A stack. `odd` is the place of a layer of another kind: "first", "second", "middle", "last" or None."""

    kind: str
    depth: int
    odd: str | None
    frozen: bool
    ends: bool  # an embedding before and a norm and projection after

    def layers(self) -> nn.Module:
        if self.kind == STACKED:
            return StackedTower(self.depth)
        layers = [KINDS[self.kind]() for _ in range(self.depth)]
        if self.odd is not None and self.depth > 1:  # a list without two of a kind is no stack
            place = {"first": 0, "second": 1, "middle": self.depth // 2, "last": self.depth}[self.odd]
            layers.insert(place, KINDS["Mlp" if self.kind != "Mlp" else "PostNorm"]())
        return ListTower(layers)


@dataclass(frozen=True)
class Call:
    """One step of a model. `how`: "one" tower; two in "turns", in turns and "exchanging", or with "skips" from one to the other.

    `reads` are the values that it starts from: the two inputs are 0 and 1, every call adds one or, with turns, two.
    """

    how: str
    towers: tuple[int, ...]
    reads: tuple[int, int]
    without_gradient: bool = False


@dataclass(frozen=True)
class Plan:
    towers: tuple[TowerPlan, ...]
    calls: tuple[Call, ...]
    join: str  # "add", "concat", "mse" or "cosine"

    def deeper(self, factor: int) -> Plan:
        return replace(self, towers=tuple(replace(tower, depth=factor * tower.depth) for tower in self.towers))


class Planned(nn.Module):
    def __init__(self, plan: Plan):
        super().__init__()
        self.plan = plan
        self.towers = nn.ModuleDict({f"t{i}": tower.layers() for i, tower in enumerate(plan.towers)})
        self.embeds, self.norms, self.heads = (
            nn.ModuleDict({f"t{i}": made() for i, tower in enumerate(plan.towers) if tower.ends})
            for made in (
                lambda: nn.Linear(WIDTH, WIDTH, bias=False),
                lambda: nn.LayerNorm(WIDTH),
                lambda: nn.Linear(WIDTH, WIDTH),
            )
        )
        for i, tower in enumerate(plan.towers):
            if tower.frozen:
                for part in (self.towers, self.embeds, self.norms, self.heads):
                    if f"t{i}" in part:
                        part[f"t{i}"].requires_grad_(False)

    def begin(self, tower, x):
        return self.embeds[f"t{tower}"](x) if f"t{tower}" in self.embeds else x

    def end(self, tower, x):
        return self.heads[f"t{tower}"](self.norms[f"t{tower}"](x)) if f"t{tower}" in self.heads else x

    def one(self, tower, x, y):
        x = self.begin(tower, x if x is y else x + 0.5 * y)
        for layer in self.towers[f"t{tower}"].layers:
            x = layer(x)
        return [self.end(tower, x)]

    def turns(self, left, right, x, y, exchanging=False):
        x, y = self.begin(left, x), self.begin(right, y)
        ours, theirs = list(self.towers[f"t{left}"].layers), list(self.towers[f"t{right}"].layers)
        for i in range(max(len(ours), len(theirs))):
            if i < len(ours):
                x = ours[i](x + 0.5 * y if exchanging else x)
            if i < len(theirs):
                y = theirs[i](y - 0.5 * x if exchanging else y)
        return [self.end(left, x), self.end(right, y)]

    def skips(self, left, right, x, y):
        made, x = [], self.begin(left, x)
        for layer in self.towers[f"t{left}"].layers:
            x = layer(x)
            made.append(x)
        x = self.begin(right, self.end(left, x) + 0.5 * y)
        for layer in self.towers[f"t{right}"].layers:
            x = layer(x + 0.5 * made.pop() if made else x)
        return [self.end(right, x)]

    def forward(self, a, b):
        values, read = [a, b], set()
        for call in self.plan.calls:
            x, y = (values[i] for i in call.reads)
            with torch.set_grad_enabled(not call.without_gradient):
                if call.how == "one":
                    made = self.one(*call.towers, x, y)
                elif call.how == "skips":
                    made = self.skips(*call.towers, x, y)
                else:
                    made = self.turns(*call.towers, x, y, call.how == "exchanging")
            read |= set(call.reads)
            values += made
        return self.joined([value for i, value in enumerate(values) if i not in read])

    def joined(self, ends):
        first, *others = ends
        if self.plan.join == "concat":
            return torch.cat(ends, -1).square().mean()
        if self.plan.join == "add":
            return sum(ends).tanh().mean()
        measure = {"mse": F.mse_loss, "cosine": lambda x, y: F.cosine_similarity(x.mean(1), y.mean(1)).square().mean()}[
            self.plan.join
        ]
        return sum((measure(first, other) for other in others), first.square().mean())


def owners(model: Planned) -> dict[str, str]:
    """The layer that each parameter, or slice of a stacked one, belongs to, in towers of several layers."""
    alone = {f"t{i}" for i, tower in enumerate(model.plan.towers) if tower.depth == 1}
    found = {p: layer for layer, parameters in units(model).items() if layer.split(".")[1] not in alone for p in parameters}
    for name, module in model.named_modules():
        if isinstance(module, StackedTower) and module.up.shape[0] > 1:
            found |= {f"{name}.{w}[{i}]": f"{name}.{i}" for w in ("up", "down") for i in range(module.up.shape[0])}
    return found


def largest_bytes(model: Planned) -> int:
    """Bytes of the largest layer, or of the largest single module outside of layers. A tower of one layer is one with its ends."""
    owner, sizes = owners(model), {}
    for name, parameter in model.named_parameters():
        slices = [key for key in owner if key.startswith(f"{name}[")]
        for key in slices or [name]:
            tower = name.split(".")[1]
            alone = model.plan.towers[int(tower[1:])].depth == 1
            holder = tower if alone else owner.get(key, name.rpartition(".")[0])
            sizes[holder] = sizes.get(holder, 0) + parameter.nbytes // max(len(slices), 1)
    return max(sizes.values())


@st.composite
def plans(draw, depths=(1, 2, 3, 4, 5), kinds=(*KINDS, STACKED)):
    """A composition in which every tower is called."""
    odd = st.sampled_from([None, None, None, "first", "second", "middle", "last"])
    tower = st.builds(
        TowerPlan, st.sampled_from(kinds), st.sampled_from(depths), odd, st.booleans() | st.just(False), st.booleans()
    )
    towers = draw(st.lists(tower, min_size=1, max_size=3))
    waiting, calls, values = list(range(len(towers))), [], 2
    more = draw(st.integers(0, 1))  # calls of towers that were called before
    while waiting or more:
        again, more = not waiting, more - (not waiting)
        how = draw(st.sampled_from(["one", "one", "turns", "exchanging", "skips"]))
        first = draw(st.integers(0, len(towers) - 1)) if again else waiting.pop(0)
        second = draw(st.integers(0, len(towers) - 1)) if again or not waiting else waiting.pop(0)
        used = (first,) if how == "one" else (first, second)
        if (
            how == "one"
            and not again
            and second != first
            and second not in waiting
            and not any(second in c.towers for c in calls)
        ):
            waiting.insert(0, second)
        reads = (draw(st.integers(0, values - 1)), draw(st.integers(0, values - 1)))
        frozen = all(towers[i].frozen for i in used) and draw(st.booleans())
        calls.append(Call(how, used, reads, frozen))
        values += 2 if how in ("turns", "exchanging") else 1
    return Plan(tuple(towers), tuple(calls), draw(st.sampled_from(["add", "concat", "mse", "cosine"])))
