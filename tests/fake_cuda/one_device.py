"""Trains on one of several GPUs, which the option names and nothing has made the current one. Run in a process of its own.

python tests/fake_cuda/one_device.py INDEX UPDATE PRECISION
"""

from __future__ import annotations

import ctypes
import math
import os
import sys

import torch

import l2l_compile
from training_loop import training


def main(index: str, update: str, precision: str) -> None:
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    ctypes.CDLL(os.environ["FAKE_CUDA_COMPUTING"]).fake_compute(1)
    process = ctypes.CDLL(None)
    process.fake_report.restype = ctypes.c_char_p
    process.fake_set_lazy(1)
    options = {"precision": precision, "keep_on_host": "100KB"}
    model, step = training(update, layers=2, kind=torch.optim.SGD, device=f"cuda:{index}", **options)
    before = [p.detach().clone() for p in model.parameters()]
    losses = [float(step()) for _ in range(3)]
    l2l_compile.synchronize(model)
    lines = process.fake_report().decode().splitlines()
    print(*(line for line in lines if "=" not in line or line.startswith(("copies by", "failed", "not "))), sep="\n")
    print(*(device for device in range(32) if process.fake_contexts() >> device & 1))
    print(all(map(math.isfinite, losses)) and not any(map(torch.equal, before, model.parameters())))


if __name__ == "__main__":
    main(*sys.argv[1:])
