"""Tests of several ranks share four processes."""

from __future__ import annotations

import pytest
import torch
from pool import Pool


@pytest.fixture(scope="session")
def _pools(tmp_path_factory):
    pools: list[Pool] = []
    yield pools, tmp_path_factory
    for pool in pools:
        pool.close()


@pytest.fixture
def ranks(_pools):
    """`ranks.run(check, world=3)` calls a function in three processes of `torch.distributed`."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("needs gloo")
    pools, folders = _pools
    if not pools or not pools[-1].alive:
        pools.append(Pool(folders.mktemp("ranks")))
    return pools[-1]
