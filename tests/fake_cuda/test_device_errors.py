"""A kernel that fails: CUDA returns its error from each call until the process ends."""

from __future__ import annotations

import pytest

from processes import lines_of


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("update", ["at_step", "in_backward"])
def test_the_first_error_of_a_broken_device_is_shown(runtime, update, share):
    """Recovery fails as well, and hides nothing; parameters on the host stay, and the process ends by itself."""
    first, same, again = lines_of("broken_device.py", update, share)
    assert first.startswith("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
    assert same == "True"
    assert "an illegal memory access was encountered" in again


@pytest.mark.parametrize("lazy", [0, 1], ids=["at once", "late"])
def test_an_index_out_of_range_is_an_error_of_later_calls(runtime, lazy):
    """As on a GPU: the look-up itself returns, and each call that waits for it has the error of its assertion."""
    first, *errors = lines_of("index_out_of_range.py", lazy)
    assert first == "the call returns"
    assert errors == ["CUDA error: device-side assert triggered"] * 2
