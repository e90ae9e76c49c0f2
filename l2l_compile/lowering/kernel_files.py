"""Several kernels of one graph in one C++ file: to read the header and Python's takes longer than to compile a kernel.

Inductor gives each kernel for the host a file of its own. Here the kernels of a graph share a file. Long ones are dealt out to
as many files as compilers run at once. A file has one function that Python calls, with the number of the kernel and the kernel's operands:

    namespace kernel_0 { void kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0) {...} }
    namespace kernel_1 { ... }
    extern "C" void kernel(const int64_t which, void* p0, void* p1, const int64_t n0) { switch (which) {...} }
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

# bytes of kernels whose compilation takes as long as the two headers and the linker, which every file pays for (0.7 s with g++ 12)
WORTH_A_FILE = 32_000
_HEAD = re.compile(r'\s*((?:#include [^\n]*\n\s*)+)extern "C"\s+(void\s+kernel\()')


@dataclass(eq=False)
class Kernel:
    """A kernel as Inductor hands it over: the types of its operands, and its source."""

    types: Sequence[str]
    source: str
    load: Callable[[], Callable] | None = field(default=None, init=False)  # once its file is being compiled

    @property
    def header(self) -> str | None:
        """What it includes; None if it has to have a file of its own: its source or its operands are not as usual."""
        head = _HEAD.match(self.source)
        kinds = ["p" if t.endswith("*") else "n" if t.split()[-1] == "int64_t" else "?" for t in self.types]
        equal_rows = kinds == sorted(kinds, reverse=True) and "?" not in kinds and "p" in kinds
        usual = (
            head and self.source.count('extern "C"') == 1 and not re.search(r"^\s*#(?!include|pragma)", self.source, re.MULTILINE)
        )
        return head[1] if usual and equal_rows and "#include" not in self.source[head.end() :] else None

    @property
    def pointers(self) -> int:
        return sum(t.endswith("*") for t in self.types)

    @property
    def numbers(self) -> int:
        return len(self.types) - self.pointers

    def in_namespace(self, name: str) -> str:
        """Its source, without what it includes."""
        head = _HEAD.match(self.source)
        return f"namespace {name} {{\n{head[2]}{self.source[head.end() :]}\n}}\n"


def number_of_files(kernels: Sequence[Kernel], compilers: int) -> int:
    """Into how many files to deal kernels out: one for a few short ones, at most one a compiler."""
    return min(compilers, 1 + sum(len(kernel.source) for kernel in kernels) // WORTH_A_FILE)


def in_files(kernels: Sequence[Kernel], files: int) -> list[list[Kernel]]:
    """Deal kernels out to about so many files of equal length; those that include other things are apart."""
    dealt: list[list[Kernel]] = [[k] for k in kernels if k.header is None]
    for header in dict.fromkeys(k.header for k in kernels if k.header is not None):
        mine = sorted((k for k in kernels if k.header == header), key=lambda k: -len(k.source))
        bins: list[list[Kernel]] = [[] for _ in range(min(files, len(mine)))]
        for kernel in mine:
            min(bins, key=lambda b: sum(len(k.source) for k in b)).append(kernel)
        dealt += [sorted(b, key=kernels.index) for b in bins]
    return dealt


def compile_file(kernels: Sequence[Kernel], compiles: Callable[[Sequence[str], str], Callable[[], Callable]]) -> None:
    """Have a file of kernels compiled. `compiles(types, source)` is Inductor's function for one kernel, which does not wait."""
    if len(kernels) == 1:
        kernels[0].load = compiles(kernels[0].types, kernels[0].source)
        return
    pointers, numbers = max(k.pointers for k in kernels), max(k.numbers for k in kernels)
    load = compiles(
        ["const int64_t", *["void*"] * pointers, *["const int64_t"] * numbers], "".join(_source(kernels, pointers, numbers))
    )
    for which, kernel in enumerate(kernels):
        kernel.load = functools.partial(_one_of, load, which, kernel, pointers, numbers)


def _source(kernels: Sequence[Kernel], pointers: int, numbers: int) -> Iterator[str]:
    yield f"\n{kernels[0].header}"
    for which, kernel in enumerate(kernels):
        yield kernel.in_namespace(f"kernel_{which}")
    operands = [*(f"void* p{i}" for i in range(pointers)), *(f"const int64_t n{i}" for i in range(numbers))]
    yield f'extern "C" void kernel(const int64_t which, {", ".join(operands)})\n{{\n    switch (which) {{\n'
    for which, kernel in enumerate(kernels):
        given = [f"static_cast<{t}>(p{i})" for i, t in enumerate(kernel.types[: kernel.pointers])] + [
            f"n{i}" for i in range(kernel.numbers)
        ]
        yield f"        case {which}: kernel_{which}::kernel({', '.join(given)}); break;\n"
    yield "    }\n}\n"


def _one_of(load: Callable[[], Callable], which: int, kernel: Kernel, pointers: int, numbers: int) -> Callable:
    """A kernel of a file as a function of its own operands."""
    run, own = load(), kernel.pointers
    if pointers == own and numbers == kernel.numbers:
        return functools.partial(run, which)
    unused, zeros = pointers - own, (0,) * (numbers - kernel.numbers)

    def call(*operands: object) -> None:
        run(which, *operands[:own], *operands[:1] * unused, *operands[own:], *zeros)

    return call
