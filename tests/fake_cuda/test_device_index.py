"""With several GPUs, a process uses the one that it was told, and no other: each takes half a gigabyte of a GPU that it looks at."""

from __future__ import annotations

import pytest

from processes import lines_of
from training_loop import UPDATES


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("update", UPDATES)
def test_training_touches_no_other_device(runtime, update, precision):
    devices = {"FAKE_CUDA_DEVICES": "3", "FAKE_CUDA_STRICT": "2"}
    *wrong, used, trained = lines_of("one_device.py", 2, update, precision, **devices)
    assert [line for line in wrong if line] == []
    assert (used, trained) == ("2", "True")
