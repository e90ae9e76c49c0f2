"""Several kernels of one graph in one C++ file: to read the header and Python's takes longer than to compile a kernel.

Inductor gives each kernel for the host a file of its own. Here the kernels of a graph share a file. Long ones are dealt out to
as many files as compilers run at once. A file has one function that Python calls, with the number of the kernel and the kernel's operands:

    namespace kernel_0 { void kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0) {...} }
    namespace kernel_1 { ... }
    extern "C" void kernel(const int64_t which, void* p0, void* p1, const int64_t n0) { switch (which) {...} }

A number that no kernel has raises `RuntimeError`: Inductor's bindings turn C++ exceptions into Python's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

# bytes of kernels whose compilation takes as long as the two headers and the linker, which every file pays for (0.7 s with g++ 12)
WORTH_A_FILE = 32_000
_MACRO = re.compile(r"^\s*#(?!include|pragma)", re.MULTILINE)
_HEAD = re.compile(r'\s*((?:#include [^\n]*\n\s*)+)extern "C"\s+(void\s+kernel\()')


@dataclass(eq=False)
class Kernel:
    """A kernel as Inductor hands it over: the types of its operands, and its source.

    wait   waits for the compiler, and gives the kernel; None before its file is being compiled
    """

    types: Sequence[str]
    source: str
    wait: Callable[[], Callable] | None = field(default=None, init=False)

    def load(self) -> Callable:
        """The compiled kernel. Waits for the compiler."""
        assert self.wait is not None, "compile_file comes first"
        return self.wait()

    @property
    def header(self) -> str | None:
        """What it includes; None if it has to have a file of its own: its source or its operands are not as usual."""
        head = _HEAD.match(self.source)
        return head[1] if head is not None and self._has_usual_operands() and self._has_usual_source(head) else None

    def _has_usual_operands(self) -> bool:
        """Whether there are tensors, and then whole numbers, and nothing else."""
        pointers, others = self.types[: self.pointers], self.types[self.pointers :]
        return len(pointers) > 0 and all(map(_is_pointer, pointers)) and all(kind.split()[-1] == "int64_t" for kind in others)

    def _has_usual_source(self, head: re.Match) -> bool:
        """Whether behind what it includes there is one function, without further macros or headers."""
        body = self.source[head.end() :]
        return self.source.count('extern "C"') == 1 and "#include" not in body and _MACRO.search(self.source) is None

    @property
    def pointers(self) -> int:
        return sum(map(_is_pointer, self.types))

    @property
    def numbers(self) -> int:
        return len(self.types) - self.pointers

    def in_namespace(self, name: str) -> str:
        """Its source, without what it includes."""
        body = _HEAD.sub(r"\2", self.source, count=1)
        return f"namespace {name} {{\n{body}\n}}\n"


def _is_pointer(kind: str) -> bool:
    return kind.endswith("*")


def number_of_files(kernels: Sequence[Kernel], compilers: int) -> int:
    """Into how many files to deal kernels out: one for a few short ones, at most one a compiler."""
    return min(compilers, 1 + sum(len(kernel.source) for kernel in kernels) // WORTH_A_FILE)


def in_files(kernels: Sequence[Kernel], files: int) -> list[list[Kernel]]:
    """Deal kernels out to about so many files of equal length; those that include other things are apart."""
    by_header: dict[str | None, list[Kernel]] = {None: []}
    for kernel in kernels:
        by_header.setdefault(kernel.header, []).append(kernel)
    dealt = [[kernel] for kernel in by_header.pop(None)]
    for alike in by_header.values():
        dealt += [sorted(file, key=kernels.index) for file in _of_equal_length(alike, files)]
    return dealt


def _of_equal_length(kernels: Sequence[Kernel], files: int) -> list[list[Kernel]]:
    """The longest first, each to the file that is shortest so far."""
    dealt: list[list[Kernel]] = [[] for _ in range(min(files, len(kernels)))]
    for kernel in sorted(kernels, key=lambda k: -len(k.source)):
        min(dealt, key=lambda file: sum(len(k.source) for k in file)).append(kernel)
    return dealt


def compile_file(kernels: Sequence[Kernel], compiles: Callable[[Sequence[str], str], Callable[[], Callable]]) -> None:
    """Have a file of kernels compiled. `compiles(types, source)` is Inductor's function for one kernel, which does not wait."""
    if len(kernels) == 1:
        kernels[0].wait = compiles(kernels[0].types, kernels[0].source)
        return
    pointers, numbers = max(k.pointers for k in kernels), max(k.numbers for k in kernels)
    load = compiles(
        ["const int64_t", *["void*"] * pointers, *["const int64_t"] * numbers], "".join(_source(kernels, pointers, numbers))
    )
    for which, kernel in enumerate(kernels):
        kernel.wait = functools.partial(_one_of, load, which, kernel, pointers, numbers)


def _source(kernels: Sequence[Kernel], pointers: int, numbers: int) -> Iterator[str]:
    yield f"\n{kernels[0].header}#include <stdexcept>\n"
    for which, kernel in enumerate(kernels):
        yield kernel.in_namespace(f"kernel_{which}")
    operands = [*(f"void* p{i}" for i in range(pointers)), *(f"const int64_t n{i}" for i in range(numbers))]
    yield f'extern "C" void kernel(const int64_t which, {", ".join(operands)})\n{{\n    switch (which) {{\n'
    for which, kernel in enumerate(kernels):
        arguments = [f"static_cast<{kind}>(p{i})" for i, kind in enumerate(kernel.types[: kernel.pointers])]
        arguments += [f"n{i}" for i in range(kernel.numbers)]
        yield f"        case {which}: kernel_{which}::kernel({', '.join(arguments)}); break;\n"
    yield '        default: throw std::out_of_range("this file has no kernel of that number");\n    }\n}\n'


def _one_of(load: Callable[[], Callable], which: int, kernel: Kernel, pointers: int, numbers: int) -> Callable:
    """A kernel of a file as a function of its own operands."""
    run, own = load(), kernel.pointers
    if pointers == own and numbers == kernel.numbers:
        return functools.partial(run, which)
    unused, zeros = pointers - own, (0,) * (numbers - kernel.numbers)

    def call(*operands: object) -> None:
        run(which, *operands[:own], *operands[:1] * unused, *operands[own:], *zeros)

    return call
