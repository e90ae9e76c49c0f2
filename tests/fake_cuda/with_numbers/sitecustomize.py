"""Computes what a process and its children launch on the CUDA runtime without kernels. `build.py --numbers` puts it on PYTHONPATH.

cuDNN and Triton's kernels compute nothing, so attention is taken from PyTorch's other kernels.
"""

import ctypes
import os

if "libfakecudart" in os.environ.get("LD_PRELOAD", ""):
    try:
        import torch
    except ImportError:  # pip and the like
        pass
    else:
        torch.backends.cudnn.enabled = False
        torch.backends.cuda.enable_cudnn_sdp(False)
        ctypes.CDLL(os.path.join(os.environ["LD_LIBRARY_PATH"].split(":")[0], "libcomputing.so")).fake_compute(1)
