"""Puts several kernels of one graph into one C++ file: compiling the headers (Inductor's, Python's) takes longer than a kernel.

Inductor writes a file for each kernel of the host. Here the kernels of a graph share a file. If they are long, they are divided
among several files, at most one for each compiler that runs at the same time. A file has one function that Python calls, with
the number of the kernel and the kernel's operands:

    namespace kernel_0 { void kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0) {...} }
    namespace kernel_1 { ... }
    extern "C" void kernel(const int64_t which, void* p0, void* p1, const int64_t n0) { switch (which) {...} }

A number without a kernel raises `RuntimeError`: Inductor's bindings turn C++ exceptions into Python exceptions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

# bytes of kernels that take as long to compile as the two headers and the linker, which every file needs (0.7 s with g++ 12)
WORTH_A_FILE = 32_000
_MACRO = re.compile(r"^\s*#(?!include|pragma)", re.MULTILINE)
_HEAD = re.compile(r'\s*((?:#include [^\n]*\n\s*)+)extern "C"\s+(void\s+kernel\()')


@dataclass(eq=False)
class Kernel:
    """A kernel as Inductor passes it on: the types of its operands, and its source.

    wait   waits for the compiler, and returns the kernel; None until the compilation of its file has begun
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
        """Its `#include` lines; None if it needs a file of its own because its source or its operands are unusual."""
        head = _HEAD.match(self.source)
        return head[1] if head is not None and self._has_usual_operands() and self._has_usual_source(head) else None

    def _has_usual_operands(self) -> bool:
        """Whether the operands are tensors, at least one, followed by integers alone."""
        pointers, others = self.types[: self.pointers], self.types[self.pointers :]
        return len(pointers) > 0 and all(map(_is_pointer, pointers)) and all(kind.split()[-1] == "int64_t" for kind in others)

    def _has_usual_source(self, head: re.Match) -> bool:
        """Whether the source is its `#include` lines and then one function, without further macros or headers."""
        body = self.source[head.end() :]
        return self.source.count('extern "C"') == 1 and "#include" not in body and _MACRO.search(self.source) is None

    @property
    def pointers(self) -> int:
        return sum(map(_is_pointer, self.types))

    @property
    def numbers(self) -> int:
        return len(self.types) - self.pointers

    def in_namespace(self, name: str) -> str:
        """Its source in a namespace, without the `#include` lines."""
        body = _HEAD.sub(r"\2", self.source, count=1)
        return f"namespace {name} {{\n{body}\n}}\n"


def _is_pointer(kind: str) -> bool:
    return kind.endswith("*")


def number_of_files(kernels: Sequence[Kernel], compilers: int) -> int:
    """The number of files for these kernels: one for a few short kernels, at most one per compiler."""
    return min(compilers, 1 + sum(len(kernel.source) for kernel in kernels) // WORTH_A_FILE)


def in_files(kernels: Sequence[Kernel], files: int) -> list[list[Kernel]]:
    """Divide kernels among about `files` files of equal length. Kernels with different `#include` lines are apart."""
    by_header: dict[str | None, list[Kernel]] = {None: []}
    for kernel in kernels:
        by_header.setdefault(kernel.header, []).append(kernel)
    dealt = [[kernel] for kernel in by_header.pop(None)]
    for alike in by_header.values():
        dealt += [sorted(file, key=kernels.index) for file in _of_equal_length(alike, files)]
    return dealt


def _of_equal_length(kernels: Sequence[Kernel], files: int) -> list[list[Kernel]]:
    """Assign the longest kernel first, each to the file that is shortest so far."""
    dealt: list[list[Kernel]] = [[] for _ in range(min(files, len(kernels)))]
    for kernel in sorted(kernels, key=lambda k: -len(k.source)):
        min(dealt, key=lambda file: sum(len(k.source) for k in file)).append(kernel)
    return dealt


def compile_file(kernels: Sequence[Kernel], compiles: Callable[[Sequence[str], str], Callable[[], Callable]]) -> None:
    """Begin to compile a file of kernels. `compiles(types, source)` is Inductor's function for one kernel; it does not wait."""
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
    """One kernel of a file, as a function of its own operands alone."""
    run, own = load(), kernel.pointers
    if pointers == own and numbers == kernel.numbers:
        return functools.partial(run, which)
    unused, zeros = pointers - own, (0,) * (numbers - kernel.numbers)

    def call(*operands: object) -> None:
        run(which, *operands[:own], *operands[:1] * unused, *operands[own:], *zeros)

    return call
