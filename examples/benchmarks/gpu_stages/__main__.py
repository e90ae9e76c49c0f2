"""One process of a stage; `gpu.py` starts it.

    python -m gpu_stages parity --journal FILE --until 1790000000 --shard 0/4
"""
from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: deterministic mode asks for it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage")
    parser.add_argument("--journal", type=Path, required=True, help="where figures go, a JSON line each")
    parser.add_argument("--until", type=float, required=True, help="end of the stage's time, seconds since 1970")
    parser.add_argument("--shard", default="0/1", help="i/n: cases i, i + n, i + 2 n, ...")
    parser.add_argument("--device", default="auto", help="cpu or cuda; auto takes a GPU if there is one")
    options = parser.parse_args()

    import torch

    from .cases import Context, run_cases
    from .checkout import find_package
    from .rows import Journal

    warnings.filterwarnings("ignore")
    find_package()
    name = options.device if options.device != "auto" else "cuda:0" if torch.cuda.is_available() else "cpu"
    context = Context(options.stage, torch.device(name), options.until, Journal(options.journal))
    index, count = map(int, options.shard.split("/"))
    module = importlib.import_module(f"gpu_stages.{options.stage}")
    return run_cases(context, module.cases(context)[index::count], options.journal)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.exit(status)
