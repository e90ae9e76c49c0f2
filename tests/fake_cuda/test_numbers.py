"""Numbers of the CUDA device, with PyTorch's own allocator, streams and events: those of the same training with layers on the host."""

from __future__ import annotations

import pytest
import torch

from training_loop import UPDATES
from zoo import MODELS, difference

WAYS = {"float64, late": (torch.float64, True, 1e-10), "float32, at once": (torch.float32, False, 1e-5)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", MODELS)
def test_trains_with_the_numbers_of_the_cpu(computing, name, update, way):
    dtype, lazy, most = WAYS[way]
    computing.set_lazy(lazy)
    assert difference(name, update, dtype) < most


KEPT = [{"keep": "100KB"}, {"keep": "1GB"}, {"keep": "auto"}, {"keep_on_host": "1GB"}, {"keep": "100KB", "keep_on_host": "auto"}]


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_forward_keeps_changes_no_number(computing, name, kept):
    computing.set_lazy(True)
    assert difference(name, "delayed", torch.float64, **kept) < 1e-10
