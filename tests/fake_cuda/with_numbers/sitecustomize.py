"""Computes what a process and its children launch on the CUDA runtime without kernels. `build.py --numbers` puts it on PYTHONPATH.

cuDNN and Triton's kernels compute nothing, so attention is taken from PyTorch's other kernels.
"""

import contextlib
import ctypes
import os

if "FAKE_CUDA_COMPUTING" in os.environ:
    with contextlib.suppress(ImportError):  # an interpreter without PyTorch, such as that of another environment
        import torch

        torch.backends.cudnn.enabled = False
        torch.backends.cuda.enable_cudnn_sdp(False)
        ctypes.CDLL(os.environ["FAKE_CUDA_COMPUTING"]).fake_compute(1)
