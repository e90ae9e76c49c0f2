"""The kernels that Triton compiles in a process, with what ptxas says of them."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TAKEN = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes stack frame")  # in the log of `ptxas -v`


@dataclass(frozen=True)
class Candidate:
    """A kernel at one configuration. Inductor compiles several, and takes the fastest.

    source               the name of the file with its Python code, which candidates of one kernel share
    compute_capability   of the machine code, such as 90, by the header of its ELF file
    registers            of a thread
    spilled              bytes that a thread stores in memory for lack of registers
    stack                bytes of memory of a thread. Arrays lie there too, such as that of a cosine of a large angle
    shared               bytes of shared memory of a block
    """

    name: str
    source: str
    compute_capability: int
    registers: int
    spilled: int
    stack: int
    shared: int

    @property
    def is_pointwise(self) -> bool:
        return self.name.startswith("triton_poi_")  # Inductor's name


@contextlib.contextmanager
def recorded() -> Iterator[list[Candidate]]:
    """The list grows by each kernel that is compiled. Kernels from a cache are not in it."""
    from triton import knobs  # late: tests are collected where Triton is missing
    from triton.backends.nvidia.compiler import CUDABackend

    found: list[Candidate] = []
    make, dumps = CUDABackend.make_cubin, knobs.nvidia.dump_ptxas_log

    def make_cubin(backend: CUDABackend, ptx: str, metadata: dict, options: object, capability: int) -> bytes:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            cubin = make(backend, ptx, metadata, options, capability)
        source = Path(_only(r'\.file\s+1\s+"(.+)"', ptx)).name
        taken = (int(_only(pattern, log.getvalue())) for pattern in _TAKEN)
        found.append(Candidate(metadata["name"], source, compute_capability_of(cubin), *taken, metadata["shared"]))
        return cubin

    CUDABackend.make_cubin, knobs.nvidia.dump_ptxas_log = make_cubin, True
    try:
        yield found
    finally:
        CUDABackend.make_cubin, knobs.nvidia.dump_ptxas_log = make, dumps


def _only(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text)
    return found


def compute_capability_of(cubin: bytes) -> int:
    """From the flags in the header of the ELF file. Their layout depends on the version of the ABI."""
    assert cubin[:4] == b"\x7fELF"
    flags = int.from_bytes(cubin[48:52], "little")
    return flags >> 8 & 0xFF if cubin[8] >= 8 else flags & 0xFF
