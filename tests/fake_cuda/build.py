"""Build the CUDA runtime without kernels, and say how a process is started with it.

python tests/fake_cuda/build.py FOLDER    prints the environment variables, NAME=VALUE a line
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
_COMPILER = ("g++", "-O1", "-g", "-Wall", "-fPIC", "-shared", "-std=c++17")


def headers() -> list[Path]:
    """Folders with the headers of CUDA, which the packages of PyTorch's CUDA build bring. Raises `SystemExit` without them."""
    found = []
    for package, folder in (("nvidia", "cu13/include"), ("triton", "backends/nvidia/include")):
        spec = importlib.util.find_spec(package)
        places = [Path(place) / folder for place in (spec.submodule_search_locations or ())] if spec is not None else []
        found += [place for place in places if place.is_dir()]
    if not any((place / "cuda_runtime_api.h").exists() for place in found):
        raise SystemExit("the headers of CUDA 13 are missing: install PyTorch's CUDA build (pip install torch)")
    return found


def build(folder: Path) -> dict[str, str]:
    """Compile both libraries into a folder. Returns the environment variables of a process that uses them."""
    folder.mkdir(parents=True, exist_ok=True)
    runtime, driver = folder / "libfakecudart.so", folder / "libcuda.so.1"
    include = [f"-I{place}" for place in headers()]
    subprocess.run([*_COMPILER, *include, str(HERE / "runtime.cpp"), "-o", str(runtime)], check=True)
    subprocess.run([*_COMPILER, str(HERE / "driver.cpp"), "-o", str(driver)], check=True)
    return {
        "LD_PRELOAD": str(runtime),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # kernels were never run: nothing else may take them from here
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


if __name__ == "__main__":
    for name, value in build(Path(sys.argv[1]).resolve()).items():
        print(f"{name}={value}")
