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


@pytest.mark.parametrize("keep", ["100KB", "1GB", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_what_forward_keeps_changes_no_number(computing, name, keep):
    computing.set_lazy(True)
    assert difference(name, "delayed", torch.float64, keep=keep) < 1e-10
