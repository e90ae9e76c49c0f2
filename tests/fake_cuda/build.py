"""Build the CUDA runtime without kernels, and say how a process is started with it.

python tests/fake_cuda/build.py FOLDER               prints the environment variables, NAME=VALUE a line
python tests/fake_cuda/build.py FOLDER --numbers     of a process that also computes what it launches
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
_COMPILER = ("g++", "-O1", "-Wall", "-fPIC", "-shared", "-std=c++20")


def headers() -> list[Path]:
    """Folders with the headers of CUDA, which the packages of PyTorch's CUDA build bring. Raises `SystemExit` without them."""
    found = []
    for package, folder in (("nvidia", "cu13/include"), ("triton", "backends/nvidia/include"), ("nvidia", "nccl/include")):
        spec = importlib.util.find_spec(package)
        places = [Path(place) / folder for place in (spec.submodule_search_locations or ())] if spec is not None else []
        found += [place for place in places if place.is_dir()]
    if not any((place / "cuda_runtime_api.h").exists() for place in found):
        raise SystemExit("the headers of CUDA 13 are missing: install PyTorch's CUDA build (pip install torch)")
    return found


def build(folder: Path) -> dict[str, str]:
    """Compile the libraries into a folder. Returns the environment variables of a process that uses them."""
    folder.mkdir(parents=True, exist_ok=True)
    runtime = folder / "libfakecudart.so"
    include = [f"-I{place}" for place in headers()]
    _compile(HERE / "runtime.cpp", runtime, *include)
    _compile(HERE / "driver.cpp", folder / "libcuda.so.1")
    nccl = folder / "libfakenccl.so"
    _compile(HERE / "nccl.cpp", nccl, *include, str(runtime))
    torch = _torch()
    libraries = ("torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda")
    include += [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}", "-Wno-maybe-uninitialized"]
    computing = folder / "libcomputing.so"
    _compile(HERE / "computing.cpp", computing, *include, f"-L{torch / 'lib'}", *(f"-l{name}" for name in libraries))
    return {
        "LD_PRELOAD": f"{runtime}:{nccl}",
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_CUDA_COMPUTING": str(computing),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # kernels were never run: nothing else may take them from here
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def _torch() -> Path:
    """The folder of PyTorch, which is not imported: that takes seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _compile(source: Path, library: Path, *arguments: str) -> None:
    """Compile a file, unless its library is newer than the file, the headers and PyTorch."""
    newest = max(file.stat().st_mtime for file in (source, *HERE.glob("*.h"), _torch() / "version.py"))
    if not library.exists() or library.stat().st_mtime < newest:
        subprocess.run([*_COMPILER, str(source), *arguments, "-o", str(library)], check=True)


if __name__ == "__main__":
    variables = build(Path(sys.argv[1]).resolve())
    if "--numbers" in sys.argv:
        variables["PYTHONPATH"] = str(HERE / "with_numbers")
    for name, value in variables.items():
        print(f"{name}={value}")
