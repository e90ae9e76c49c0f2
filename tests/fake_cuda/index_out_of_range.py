"""A kernel meets an index out of range. Run in a process of its own: no call of CUDA works from then on.

python tests/fake_cuda/index_out_of_range.py LAZY
"""

from __future__ import annotations

import ctypes
import os
import sys

import torch


def main(lazy: int) -> None:
    ctypes.CDLL(os.environ["FAKE_CUDA_COMPUTING"]).fake_compute(1)
    table, indices = torch.ones(4, 2, device="cuda"), torch.full((3,), 7, device="cuda")
    torch.cuda.synchronize()
    ctypes.CDLL(None).fake_set_lazy(lazy)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.nn.functional.embedding(indices, table)
        print("the call returns")
        for _ in range(2):
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(str(error).splitlines()[0])


if __name__ == "__main__":
    main(int(sys.argv[1]))
