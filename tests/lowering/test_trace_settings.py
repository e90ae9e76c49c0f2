"""The settings of PyTorch that a trace depends on."""

from __future__ import annotations

import pytest
import torch

from l2l_compile.lowering.trace import settings_of_a_trace
from models import Stack, compiled, rows

MATMUL, CONVOLUTION = torch.backends.cuda.matmul, torch.backends.cudnn.conv


@pytest.fixture(params=[MATMUL, CONVOLUTION, torch.backends.mkldnn.matmul], ids=["matmul", "convolution", "mkldnn"])
def tf32(request):
    """TF32 by the setting that PyTorch recommends; its older getter then raises an error."""
    before = request.param.fp32_precision
    yield lambda: setattr(request.param, "fp32_precision", "ieee" if before == "tf32" else "tf32")
    request.param.fp32_precision = before


def test_tf32_by_its_new_setting_compiles(tf32):
    x, plain = rows(6), Stack(2).double()
    tf32()
    torch.testing.assert_close(compiled(plain)(x), plain(x))


def test_a_new_precision_of_products_is_a_new_trace(tf32):
    before = settings_of_a_trace()
    tf32()
    assert settings_of_a_trace() != before
