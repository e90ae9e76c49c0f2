"""The formulas by which `computing.cpp` computes attention that only CUDA has: the CPU's attention, and its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

MOST = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("heads", [4, 2], ids=["own heads", "shared heads"])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
@pytest.mark.parametrize("dtype", MOST)
def test_attention_of_cuda_has_the_numbers_of_the_cpu(computing, dtype, masked, heads):
    torch.manual_seed(0)
    operands = [torch.randn(2, count, 33, 16).to(dtype) for count in (4, heads, heads)]
    mask = torch.randn(2, 1, 33, 33).to(dtype) if masked else None
    found, kernels = [], []
    for device in ("cpu", "cuda"):
        q, k, v = (tensor.detach().to(device).requires_grad_() for tensor in operands)
        bias = mask.to(device) if mask is not None else None
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=not masked, enable_gqa=heads != 4)
        kernels.append(output.grad_fn.name())
        output.float().square().sum().backward()
        found.append([output.detach(), q.grad, k.grad, v.grad])
    assert ("Efficient" if masked or dtype == torch.float32 else "FlashAttentionBackward") in kernels[1]
    for theirs, ours in zip(*found, strict=True):
        theirs, ours = theirs.double(), ours.cpu().double()
        assert (ours - theirs).norm() / theirs.norm() < MOST[dtype]


def test_flash_attention_has_the_strides_of_the_query(computing):
    """As CUDA's kernel has them: code of Inductor checks them."""
    q = torch.randn(2, 33, 4, 16, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    output, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)
    assert output.stride() == q.stride()


@pytest.mark.parametrize("bias", [False, True], ids=["flash", "efficient"])
def test_dropout_within_attention_is_the_same_in_backward(computing, bias):
    """With v the identity, the output is what was kept; its gradient for v has to be of the same entries."""
    rows = 16
    q, k = (torch.randn(1, 1, rows, rows, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.eye(rows, device="cuda", dtype=torch.bfloat16)[None, None].requires_grad_()
    mask = torch.zeros(1, 1, rows, rows, device="cuda", dtype=torch.bfloat16) if bias else None
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.5)
    output.sum().backward()
    kept = output.detach().cpu().float()
    assert 0.2 < (kept == 0).float().mean() < 0.8
    assert torch.allclose(v.grad.cpu().float()[..., 0], kept.sum(-2), rtol=2e-2, atol=1e-2)


def test_an_operation_that_fails_later_is_counted(computing, capfd):
    """It fails where it is carried out, long after its call."""
    torch.special.bessel_j0(torch.ones(3, dtype=torch.float16, device="cuda"))  # the CPU has no kernel for this dtype
    assert [name for name in computing.not_computed if "bessel_j0" in name]
    assert "Its results are undefined" in capfd.readouterr().err
    computing.reset()
