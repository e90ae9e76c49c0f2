"""One process of a stage; `gpu.py` starts it.

    python -m gpu_stages parity --journal FILE --go FILE --shard 0/4

The process imports its modules, and begins when the file `--go` exists. The file has the end of its time, as `time.time()`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: deterministic mode asks for it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # several processes compile at once


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage")
    parser.add_argument("--journal", type=Path, required=True, help="where figures go, a JSON line each")
    parser.add_argument("--go", type=Path, required=True, help="a file with the end of the stage's time, seconds since 1970")
    parser.add_argument("--shard", default="0/1", help="i/n: cases i, i + n, i + 2 n, ...")
    parser.add_argument("--device", default="auto", help="cpu or cuda; auto takes a GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="small sizes, on a GPU as well")
    options = parser.parse_args()

    from .cases import Context, run_cases
    from .checkout import find_package
    from .rows import Journal

    warnings.filterwarnings("ignore")
    find_package()
    module = importlib.import_module(f"gpu_stages.{options.stage}")
    if hasattr(module, "prepare"):
        module.prepare()
    until = wait_for(options.go)
    context = Context(options.stage, device_named(options.device), until, Journal(options.journal), options.quick)
    index, count = map(int, options.shard.split("/"))
    return run_cases(context, module.cases(context)[index::count], options.journal)


def device_named(name: str) -> torch.device:
    """The device of the option `--device`; a GPU with its index, which `torch.cuda.set_device` asks for."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def wait_for(path: Path) -> float:
    """Wait for a file and return the number in it. Ends this process if the script that started it has ended."""
    parent = os.getppid()
    while not path.exists():
        if os.getppid() != parent:
            sys.exit("the script has ended")
        time.sleep(0.02)
    return float(path.read_text())


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.exit(status)
