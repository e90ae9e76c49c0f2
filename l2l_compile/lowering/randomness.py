"""Turns random draws into operands of a block, so that recompute uses the same masks as forward.

Every operation of an ATen graph that draws random numbers and accepts a generator is replaced by an operand. The executor
draws this operand from a generator that is seeded by (step, segment, micro-batch, number of the draw). Forward and backward
of a block trace the same operations in the same order. Therefore draw number i is the same in both, even if dead-code
elimination or the compiler drops or reorders other operations. Attention kernels with dropout inside draw random numbers
themselves: for these, the executor seeds the device's default generator before each call.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from l2l_compile.ir.fx_types import arguments
from l2l_compile.ir.values import Bindings, Dim, dim_of, evaluate

aten = torch.ops.aten
FILLS = ("bernoulli_", "uniform_", "normal_", "exponential_", "random_")


@dataclass(frozen=True)
class Draw:
    """One random operand: an empty tensor of this shape, dtype and device, filled by its method `fill` with `arguments`.

    `number` is its position among the draws of the block.
    """

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    device: torch.device
    fill: str
    arguments: tuple[int | float, ...] = ()
    number: int = 0

    @classmethod
    def like(cls, node: fx.Node, fill: str, *arguments: int | float, dtype: torch.dtype | None = None) -> Draw:
        """A draw with the shape and device of a node's value, and with its dtype unless `dtype` is given."""
        value = _value(node)
        return cls(tuple(map(dim_of, value.shape)), dtype or value.dtype, value.device, fill, arguments)

    def at(self, bindings: Bindings) -> Draw:
        """The draw with numbers for symbolic sizes."""
        return replace(self, shape=tuple(evaluate(d, bindings) for d in self.shape))

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """Draw the tensor. All sizes must be numbers."""
        empty = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return getattr(empty, self.fill)(*self.arguments, generator=generator)


def derived_seed(*numbers: int) -> int:
    """A seed of 63 bits from numbers of 64 bits. Different numbers, or another order, give an unrelated seed."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}Q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def hoist_draws(module: fx.GraphModule) -> tuple[tuple[Draw, ...], bool]:
    """Turn random operations of an ATen graph into operands. Also returns whether other random operations remain.

    The new placeholders follow the existing ones, one per draw, in the order of the returned `Draw`s.
    """
    graph, number, remain = module.graph, 0, False
    draws: list[Draw] = []
    last = next((n for n in reversed(graph.nodes) if n.op == "placeholder"), None)
    for node in list(graph.nodes):
        if not _is_random(node):
            continue
        rewrite = _REWRITES.get(node.target)
        if rewrite is None or any(
            isinstance(a, fx.Node) and isinstance(_value(a), (torch.SymInt, torch.SymFloat)) for a in node.args
        ):
            remain = True
            continue
        draw = rewrite(node)
        number += 1
        if not node.users and not _writes(node):
            graph.erase_node(node)
            continue
        with graph.inserting_after(last) if last is not None else graph.inserting_before(next(iter(graph.nodes))):
            operand = graph.placeholder(f"draw_{number - 1}")
        value = _value(node)
        with value.fake_mode:
            operand.meta = {"val": torch.empty(value.shape, dtype=draw.dtype, device=value.device)}
        last = operand
        _substitute(graph, node, operand)
        draws.append(replace(draw, number=number - 1))
    graph.eliminate_dead_code()
    module.recompile()
    return tuple(draws), remain


def draws_random(graph: fx.Graph) -> bool:
    """Whether any operation of an ATen graph draws random numbers."""
    return any(map(_is_random, graph.nodes))


def _is_random(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if node.target is aten.native_dropout.default:
        _, probability, train = arguments(node)
        return probability != 0 and train is not False
    for name in ("dropout_p", "dropout"):
        index = next((i for i, a in enumerate(node.target._schema.arguments) if a.name == name), None)
        if index is not None:
            probability = _argument(node, index, name, 0.0)
            return not isinstance(probability, (int, float)) or probability != 0
    return True


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _value(node: fx.Node) -> FakeTensor:
    value = node.meta["val"]
    return value[0] if isinstance(value, (tuple, list)) else value


def _argument(node: fx.Node, index: int, name: str, default: float) -> Any:
    return node.kwargs.get(name, node.args[index] if index < len(node.args) else default)


def _dropout_mask(node: fx.Node) -> Draw:
    _, probability, _ = arguments(node)
    return Draw.like(node, "bernoulli_", 1.0 - probability, dtype=torch.bool)


def _bernoulli_of(node: fx.Node) -> Draw:
    """`bernoulli(p)` with a tensor of probabilities: the uniform draw becomes an operand, the comparison stays in the graph."""
    return Draw.like(node, "uniform_", dtype=torch.get_default_dtype())


def _uniform(node: fx.Node) -> Draw:
    low, high = _argument(node, 1, "from", 0.0), _argument(node, 2, "to", 1.0)
    return Draw.like(node, "uniform_", low, high)


def _normal(node: fx.Node) -> Draw:
    mean, std = _argument(node, 1, "mean", 0.0), _argument(node, 2, "std", 1.0)
    return Draw.like(node, "normal_", mean, std)


def _exponential(node: fx.Node) -> Draw:
    rate = _argument(node, 1, "lambd", 1.0)
    return Draw.like(node, "exponential_", rate)


def _bernoulli(node: fx.Node) -> Draw:
    chance = _argument(node, 1, "p", 0.5)
    return Draw.like(node, "bernoulli_", chance)


def _randint(low: int | None, high: int) -> Callable[[fx.Node], Draw]:
    def rewrite(node: fx.Node) -> Draw:
        bounds = arguments(node)
        least, most = 0 if low is None else bounds[low], bounds[high]
        return Draw.like(node, "random_", least, most)

    return rewrite


def _standard(fill: str) -> Callable[[fx.Node], Draw]:
    return lambda node: Draw.like(node, fill)


_REWRITES: dict[object, Callable[[fx.Node], Draw]] = {
    aten.native_dropout.default: _dropout_mask,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli_.float: _bernoulli,
    aten.bernoulli.default: _bernoulli_of,
    aten.rand.default: _standard("uniform_"),
    aten.rand_like.default: _standard("uniform_"),
    aten.randn.default: _standard("normal_"),
    aten.randn_like.default: _standard("normal_"),
    aten.uniform.default: _uniform,
    aten.uniform_.default: _uniform,
    aten.normal_.default: _normal,
    aten.normal_functional.default: _normal,
    aten.exponential_.default: _exponential,
    aten.exponential.default: _exponential,
    aten.randint.default: _randint(None, 0),
    aten.randint.low: _randint(0, 1),
    aten.randint_like.default: _randint(None, 1),
    aten.randint_like.low_dtype: _randint(1, 2),
}


def _substitute(graph: fx.Graph, node: fx.Node, operand: fx.Node) -> None:
    """Replace a random operation by an operand. New nodes get a `meta["val"]`, which later draws that read them need."""
    described = {"val": _value(node)}
    with graph.inserting_before(node):
        if node.target is aten.native_dropout.default:
            x, probability, _ = arguments(node)
            scale = 0.0 if probability == 1 else 1.0 / (1.0 - probability)
            kept = graph.call_function(aten.mul.Tensor, (x, operand))
            scaled = graph.call_function(aten.mul.Tensor, (kept, scale))
            scaled.meta = described
            for pick in list(node.users):
                _, index = arguments(pick)
                pick.replace_all_uses_with((scaled, operand)[index])
                graph.erase_node(pick)
        elif node.target is aten.bernoulli.default:
            below = graph.call_function(aten.lt.Tensor, (operand, node.args[0]))
            converted = graph.call_function(aten._to_copy.default, (below,), {"dtype": _value(node).dtype})
            converted.meta = described
            node.replace_all_uses_with(converted)
        elif _writes(node):
            written, *_ = arguments(node)
            graph.call_function(aten.copy_.default, (written, operand))
            node.replace_all_uses_with(written)
        else:
            node.replace_all_uses_with(operand)
    graph.erase_node(node)
