"""Strategies of Hypothesis: options, batches and models. Hypothesis is imported when one of them is called."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from l2l_compile.errors import L2LError
from l2l_compile.testing.stacks import LayerPlan, Stack, StackPlan

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def _hypothesis(caller: str) -> ModuleType:
    try:
        import hypothesis.strategies
    except ImportError as error:
        raise L2LError(f"l2l_compile.testing.{caller} draws with Hypothesis: pip install hypothesis") from error
    return hypothesis.strategies


def options(**fixed: Any) -> SearchStrategy[dict[str, Any]]:
    """Options that do not change the numbers: a dict for `torch.compile(model, backend="l2l", options=...)`.

    `fixed` sets options that are not drawn. Blocks are not compiled (block_compiler="eager") unless `fixed` says so, since
    compilation takes seconds.
    """
    st = _hypothesis("options")
    drawn = {
        "micro_batches": st.integers(1, 5),
        "prefetch": st.integers(0, 3),
        "stash": st.sampled_from(["host", "device"]),
        "keep_on_host": st.sampled_from([0, 0, "1MB"]),
        "resident": st.sampled_from([None, None, "1KB", "1MB"]),
        "check": st.booleans(),
        "block_compiler": st.just("eager"),
    }
    return st.fixed_dictionaries(drawn | {name: st.just(value) for name, value in fixed.items()})


def batches(example: Any, rows: tuple[int, int] = (1, 9), dim: int = 0) -> SearchStrategy[Any]:
    """Batches like an example (a tensor, or tuples and dicts of tensors): rows of it in any order and number, some more than once.

    `rows` are the least and the largest number of rows; most numbers are no multiple of `micro_batches`. `dim` is the dimension
    of the rows. A tensor with another size in `dim` than the first tensor is passed on as it is.
    """
    st = _hypothesis("batches")
    count = next(t.shape[dim] for t in pytree.tree_leaves(example) if isinstance(t, torch.Tensor) and t.dim() > dim)

    def chosen(indices: list[int]) -> Any:
        def rows_of(tensor: torch.Tensor) -> torch.Tensor:
            has_rows = tensor.dim() > dim and tensor.shape[dim] == count
            return tensor.index_select(dim, torch.tensor(indices)) if has_rows else tensor

        return pytree.tree_map_only(torch.Tensor, rows_of, example)

    return st.lists(st.integers(0, count - 1), min_size=rows[0], max_size=rows[1]).map(chosen)


def stacks(depths: tuple[int, int] = (1, 6)) -> SearchStrategy[Stack]:
    """Models: an embedding, layers of one or two kinds, a head. Some layers are shared, some frozen; outputs differ.

    `depths` are the least and the largest number of layers. `model.example()` is a batch.
    """
    st = _hypothesis("stacks")
    layer = st.builds(
        LayerPlan,
        mixer=st.sampled_from(["mlp", "gated", "attention"]),
        norm=st.sampled_from(["layer", "rms", "none"]),
        residual=st.booleans(),
        activation=st.sampled_from(["gelu", "silu", "tanh"]),
        bias=st.booleans(),
    )

    @st.composite
    def plans(draw: Any) -> StackPlan:
        kinds, depth = draw(st.lists(layer, min_size=1, max_size=2, unique=True)), draw(st.integers(*depths))
        pattern = draw(st.sampled_from(["same", "alternate", "halves"]))
        which = {"same": lambda i: 0, "alternate": lambda i: i % len(kinds), "halves": lambda i: i * len(kinds) // depth}[pattern]
        return StackPlan(
            layers=tuple(kinds[which(i)] for i in range(depth)),
            order=draw(st.sampled_from([tuple(range(depth)), (0,) * depth, tuple(i // 2 for i in range(depth))])),
            width=draw(st.sampled_from([4, 6])),
            outputs=draw(
                st.sampled_from([("logits",), ("loss", "logits"), ("logits", "states"), ("best", "logits", "detached")])
            ),
            frozen=frozenset(draw(st.sets(st.integers(-1, depth - 1), max_size=3))),
            seed=draw(st.integers(0, 1000)),
        )

    return plans().map(Stack)
