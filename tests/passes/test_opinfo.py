"""Batch rules on the calls that PyTorch's own tests make (OpInfo): what `analyse` says of them is so in numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from batch_rule_checker import LARGE, SAME, SMALL, analyse, check_numbers, trace
from torch.utils import _pytree as pytree

from l2l_compile.passes.batching.batch_rules import Mixing, Rows, rules

CHUNKS = 16
SAMPLES = 3  # of each op, spread over its first twelve
PROVEN = 40  # calls in a chunk, at least
UNSET = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}  # memory as it was


@dataclass(frozen=True)
class Sampled:
    """A tensor of a sample; along `dim` it gets as many rows as the batch has. It stays as it is if `dim` is None."""

    sample: torch.Tensor
    dim: int | None

    def place(self) -> Rows | None:
        return None if self.dim is None else Rows(self.dim)

    def draw(self, batch: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """Rows of the sample: indices stay in range. What are no whole numbers becomes smaller, each by its own factor."""
        if generator is None:
            sizes = [batch if dim == self.dim else size for dim, size in enumerate(self.sample.shape)]
            return torch.empty(sizes, dtype=self.sample.dtype)
        if self.dim is None:
            return self.sample.clone()
        picked = torch.randint(self.sample.shape[self.dim], (batch,), generator=generator)
        drawn = self.sample.index_select(self.dim, picked)
        if not (drawn.is_floating_point() or drawn.is_complex()):
            return drawn
        return drawn * torch.empty(drawn.shape, dtype=torch.float64).uniform_(0.5, 1, generator=generator).to(drawn.dtype)


def calls(op: Any) -> Iterator[tuple[Callable, list[Sampled]]]:
    """An op's samples as functions of their tensors, with one of the first two dimensions as the batch."""
    dtype = next((dtype for dtype in (torch.float64, torch.int64) if dtype in op.dtypes), torch.bool)
    samples = list(
        itertools.islice(op.sample_inputs_func(op, "cpu", dtype, False), 12)
    )  # op.sample_inputs looks at the stack each time
    for sample in samples[:: -(-len(samples) // SAMPLES) or 1]:
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[i].detach() for i in where]

        def function(*given: torch.Tensor, call: Callable = op, leaves=leaves, spec=spec, where=where) -> Any:
            filled = list(leaves)
            for i, tensor in zip(where, given, strict=True):
                filled[i] = tensor
            first, args, kwargs = pytree.tree_unflatten(filled, spec)
            return call(first, *args, **kwargs)

        def in_place(first: torch.Tensor, *rest: torch.Tensor, function=function) -> Any:
            return function(first.clone(), *rest, call=op.inplace_variant)

        for dim in range(min(2, tensors[0].ndim) if tensors else 0):
            fits = [t.ndim > dim and t.shape[dim] == tensors[0].shape[dim] > 0 for t in tensors]
            if not fits[0]:
                continue
            batched = [Sampled(t, dim if fit else None) for t, fit in zip(tensors, fits, strict=True)]
            yield function, batched
            if sum(fits) > 1:
                yield function, [batched[0], *(Sampled(t, None) for t in tensors[1:])]
            if op.inplace_variant is not None and sample is samples[0]:
                yield in_place, batched


def judged(op: Any) -> Iterator[tuple[Callable, list[Sampled], list]]:
    """Calls that can be made at other sizes of the batch and draw no random numbers, with what `analyse` says of each."""
    for function, specs in calls(op):
        try:
            small = trace(function, specs, SMALL)  # before numbers: some kernels do not check sizes that do not fit
            if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in small.nodes):
                continue
            function(*(spec.draw(6, torch.Generator().manual_seed(0)) for spec in specs))
            large = trace(function, specs, LARGE)
        except Exception:  # noqa: BLE001 - PyTorch has samples that fail on purpose
            continue
        yield function, specs, analyse(small, large, SMALL, LARGE, [spec.place() for spec in specs])


def disagreement(function: Callable, specs: list[Sampled], states: list) -> str:
    """How the numbers contradict the states; "" if they do not."""
    try:
        check_numbers(function, specs, states)
    except Exception as error:  # noqa: BLE001 - whatever an operation raises
        if not isinstance(error, AssertionError) and any(isinstance(state, Mixing) for state in states):
            return ""  # what mixes rows may well fail on some of them
        sizes = [(tuple(spec.sample.shape), spec.dim) for spec in specs]
        return f"{sizes} gives {[str(state) for state in states]}, but {error}"
    return ""


def judge(op: Any) -> tuple[int, list[str]]:
    """How many calls of an op are proven, and where the numbers disagree."""
    proven = [call for call in judged(op) if not all(isinstance(state, Mixing) for state in call[2])]
    found = [disagreement(*call) for call in proven]
    return len(proven), [f"{op.full_name} of {reason}" for reason in found if reason]


@pytest.fixture(scope="module")
def op_db() -> list:
    pytest.importorskip("expecttest", reason="PyTorch's test utilities need it")
    from torch.testing._internal.common_methods_invocations import op_db  # slow: not when tests are collected

    return [op for op in op_db if op.name not in UNSET]


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.slow(but=("0", "1"))
def test_numbers_agree(op_db: list, chunk: int) -> None:
    judgements = [judge(op) for op in op_db[chunk::CHUNKS]]
    reasons = [reason for _, found in judgements for reason in found]
    assert not reasons, "\n".join(reasons)
    assert sum(count for count, _ in judgements) >= PROVEN


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("cumsum", "cumsum.default"),
        ("flip", "flip.default"),
        ("softmax", "_softmax.default"),
        ("sort", "sort.stable"),
        ("index_select", "index_select.default"),
        ("cumprod", "cumprod.default"),
    ],
)
def test_a_wrong_rule_is_caught(op_db: list, monkeypatch: pytest.MonkeyPatch, name: str, wrong: str) -> None:
    op = next(op for op in op_db if op.name == name)
    assert not judge(op)[1]
    monkeypatch.setitem(rules.RULES, rules.key(wrong), SAME)
    assert any("not close" in reason for reason in judge(op)[1])
