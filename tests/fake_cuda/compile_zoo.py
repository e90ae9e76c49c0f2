"""Compile the blocks of models for the GPU that FAKE_CUDA_CAPABILITY names, forward and backward. Prints JSON.

python tests/fake_cuda/compile_zoo.py                 all models
python tests/fake_cuda/compile_zoo.py stack skips     these
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
import triton
import triton.language as tl
from torch._inductor.utils import fresh_cache

import l2l_compile
import models
import real_sizes
import zoo
from compiled_kernels import Candidate, recorded
from l2l_compile.lowering.code_cache import store

MODELS = {**zoo.MODELS, **real_sizes.MODELS}


def compiled(name: str, precision: str) -> list[Candidate]:
    """The kernels of a training step, each compiled anew."""
    make, batch = MODELS[name]
    torch._dynamo.reset()
    store.clear()
    model, given = make().train(), batch(0)
    options = {"micro_batches": 3, "device": "cuda", "block_compiler": "inductor", "precision": precision}
    with fresh_cache(), recorded() as found:
        step = torch.compile(model, backend="l2l", fullgraph=True, options=options)
        models.loss_of(step(**given) if isinstance(given, dict) else step(given)).backward()
        l2l_compile.synchronize(step)
    return found


@triton.jit
def normalized(source, target, size: tl.constexpr):
    at = tl.arange(0, size)
    values = tl.load(source + at)
    tl.store(target + at, values / tl.sum(values * values))


def spilling() -> dict:
    """A kernel that has too few registers for its values, and what the driver says that it takes."""
    with fresh_cache(), recorded() as found:
        values = torch.zeros(4096, device="cuda")
        loaded = normalized[(1,)](values, values, 4096, num_warps=1, maxnreg=32)
    (candidate,) = found
    return {**asdict(candidate), "of the driver": [loaded.n_regs, 4 * loaded.n_spills]}  # n_spills: in words of 4 bytes


if __name__ == "__main__":
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    kernels: dict[str, dict[str, list[dict]]] = {}
    for name in sys.argv[1:] or MODELS:
        for precision in ("fp32", "bf16"):
            print(f"{name}, {precision}", file=sys.stderr, flush=True)
            kernels.setdefault(name, {})[precision] = [asdict(candidate) for candidate in compiled(name, precision)]
    versions = f"PyTorch {torch.__version__.partition('+')[0]} and Triton {triton.__version__}"
    print(json.dumps({"versions": versions, "spilling": spilling(), "kernels": kernels}))
