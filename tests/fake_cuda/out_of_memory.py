"""Every allocation of a step fails in turn. Run in a process of its own, in which each tensor is an allocation of the driver.

python tests/fake_cuda/out_of_memory.py in_forward
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

import torch

import l2l_compile
from training_loop import training

process = ctypes.CDLL(None)
process.fake_report.restype = ctypes.c_char_p


def device_bytes() -> int:
    (line,) = (line for line in process.fake_report().decode().splitlines() if line.startswith("device bytes="))
    return int(line.partition("=")[2])


def allocations_of(step: Callable[[], object]) -> int:
    """How often a call allocates device memory."""
    process.fake_fail_malloc(1 << 30)
    step()
    return (1 << 30) - process.fake_fail_malloc(-1)


def fails_at(number: int, step: Callable[[], object]) -> bool:
    """Make a call in which this allocation fails. Returns whether it was reached."""
    process.fake_fail_malloc(number)
    try:
        step()
    except RuntimeError as error:
        assert "out of memory" in str(error), error
        error.__traceback__ = None  # its frames hold tensors
        return True
    process.fake_fail_malloc(-1)
    return False


def updated_in_part() -> tuple[int, int, int, int]:
    """The number of failures, of bytes left behind, of steps that have updated some layers and others not, and of parameters that are
    neither as before the step nor as behind it.

    A twin makes each step that fails, from the same parameters; the optimizer has no state.
    """
    (model, step), (twin, step_of_twin) = (_with_seed() for _ in range(2))
    for each in (step, step_of_twin) * 2:
        each()
    l2l_compile.synchronize(model)
    before, failures, left, parts, torn = device_bytes(), 0, 0, 0, 0
    for number in range(allocations_of(step)):
        l2l_compile.synchronize(model)
        old = [p.detach().clone() for p in model.parameters()]
        failed = fails_at(number, step)
        l2l_compile.synchronize(model)
        left = max(left, device_bytes() - before)
        failures += failed
        with torch.no_grad():
            for p, value in zip(twin.parameters(), old, strict=True):
                p.copy_(value)
        step_of_twin()
        l2l_compile.synchronize(twin)
        is_new = [torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)]
        is_old = [torch.equal(p, value) for p, value in zip(model.parameters(), old, strict=True)]
        torn += sum(not new and not same for new, same in zip(is_new, is_old, strict=True))
        parts += any(is_new) and not all(is_new)
        assert failed or all(is_new)
    return failures, left, parts, torn


def _with_seed() -> tuple[Callable, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    return training("in_backward", layers=1, micro_batches=2, kind=torch.optim.SGD)


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
    allocations = allocations_of(step)
    for number in range(allocations):
        if fails:
            if not fails_at(number, step):
                continue  # a step in which nothing has failed
            failures += 1
            left = max(left, device_bytes() - before)
        step()
    l2l_compile.synchronize(model)
    return [p.detach().clone() for p in model.parameters()], failures, left


if __name__ == "__main__":
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    ctypes.CDLL(os.environ["FAKE_CUDA_COMPUTING"]).fake_compute(1)
    if sys.argv[1] == "in_backward":
        failures, left, parts, torn = updated_in_part()
        print(f"{failures} failures, {left} bytes left behind, {parts} steps in part, {torn} parameters torn")
        sys.exit()
    expected, _, _ = trained(sys.argv[1], fails=False)
    found, failures, left = trained(sys.argv[1], fails=True)
    same = all(map(torch.equal, expected, found))
    print(f"{failures} failures, {left} bytes left behind, {'the same numbers' if same else 'other numbers'}")
