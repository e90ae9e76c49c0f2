"""Every allocation of a step fails in turn. Run in a process of its own, in which each tensor is an allocation of the driver.

python tests/fake_cuda/out_of_memory.py in_forward
"""

from __future__ import annotations

import ctypes
import os
import sys

import torch

import l2l_compile
from training_loop import training

process = ctypes.CDLL(None)
process.fake_report.restype = ctypes.c_char_p


def device_bytes() -> int:
    (line,) = (line for line in process.fake_report().decode().splitlines() if line.startswith("device bytes="))
    return int(line.partition("=")[2])


def trained(update: str, fails: bool) -> tuple[list[torch.Tensor], int, int]:
    """The parameters after as many steps as there are allocations in a step, the number of failures, and of bytes left behind.

    With `fails`, each step is made again after an allocation of it has failed.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, step = training(update, layers=1, micro_batches=2)
    for _ in range(2):
        step()
    l2l_compile.synchronize(model)
    before, failures, left = device_bytes(), 0, 0
    process.fake_fail_malloc(1 << 30)
    step()
    l2l_compile.synchronize(model)
    allocations = (1 << 30) - process.fake_fail_malloc(-1)
    for number in range(allocations):
        if fails:
            process.fake_fail_malloc(number)
            try:
                step()
            except RuntimeError as error:
                assert "out of memory" in str(error), error
                failures += 1
                error.__traceback__ = None  # its frames hold tensors
            else:
                process.fake_fail_malloc(-1)
                continue  # a step in which nothing has failed
            left = max(left, device_bytes() - before)
        step()
    l2l_compile.synchronize(model)
    return [p.detach().clone() for p in model.parameters()], failures, left


if __name__ == "__main__":
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    ctypes.CDLL(os.environ["FAKE_CUDA_COMPUTING"]).fake_compute(1)
    expected, _, _ = trained(sys.argv[1], fails=False)
    found, failures, left = trained(sys.argv[1], fails=True)
    same = all(map(torch.equal, expected, found))
    print(f"{failures} failures, {left} bytes left behind, {'the same numbers' if same else 'other numbers'}")
