"""A kernel fails in a step: from then on, each call of CUDA fails. Run in a process of its own.

python tests/fake_cuda/broken_device.py UPDATE SHARE       SHARE: the part of a step's launches before the one that fails
"""

from __future__ import annotations

import ctypes
import sys
import traceback

import torch

import l2l_compile
from training_loop import training

process = ctypes.CDLL(None)


def launches_of(step) -> int:
    """How many kernels a step launches."""
    process.fake_fail_launch(1 << 30)
    step()
    return (1 << 30) - process.fake_fail_launch(-1)


def main(update: str, share: float) -> None:
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    model, step = training(update, layers=2, kind=torch.optim.SGD)
    for _ in range(2):
        step()
    launches = launches_of(step)
    l2l_compile.synchronize(model)
    before = [p.detach().clone() for p in model.parameters()]
    process.fake_fail_launch(int(share * (launches - 1)))
    try:
        step()
    except RuntimeError as error:
        text = "".join(traceback.format_exception_only(error))
    else:
        text = "no error"
    print(text.splitlines()[0])
    print(update == "in_backward" or all(map(torch.equal, before, model.parameters())))
    try:
        step()
    except RuntimeError as error:
        print(str(error).splitlines()[0])


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
