"""A model that ranks divide, as one of them has it, by the lines of code that a plan gives. Nobody answers for the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from l2l_compile.integrations import pipelines
from l2l_compile.ir.rank_layout import Layout
from l2l_compile.planner.divisions import lines_of


@contextmanager
def world(layout: Layout, stage: int = 0) -> Iterator[None]:
    """The process is a rank of a stage, in the first replica."""
    dist.init_process_group("fake", store=FakeStore(), rank=layout.member(0, 0, stage), world_size=layout.ranks)
    try:
        with mock.patch.object(pipelines, "agreed", lambda mesh, decide: decide()):  # rank 0 says nothing to the others
            yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
        _clear_sharding_prop_cache()  # DTensor keeps meshes, whose process groups are gone; one of another rank compares equal


@contextmanager
def placed(model: torch.nn.Module, batch: Mapping[str, Any], layout: Layout, stage: int = 0) -> Iterator[torch.nn.Module]:
    """The model, of a rank of a stage, in the first replica."""
    with world(layout, stage):
        exec("\n".join(lines_of(layout)), {"model": model, "batch": batch})
        yield model
