"""Compile a recipe to machine code that updates a flat range of memory in one pass, and run it on several threads.

    for every element:   g = gradient * factor;  statements of the recipe;  p, x0, … = new values;  wire = p

The kernel is plain C, compiled by the compiler that Inductor uses on the host, without threads of its own: ranges are
given to the threads of a pool, so their number is what the host lane may take.
"""
from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import LoweringError
from .record import Recipe
from .worker import Worker

_REAL = {torch.float32: "float", torch.float64: "double"}
# dtype -> (C type in memory, from memory to real, from real to memory)
_STORED = {
    torch.float32: ("float", "(real){}", "(float){}"),
    torch.float64: ("double", "(real){}", "(double){}"),
    torch.bfloat16: ("bf16", "from_bf16({})", "to_bf16({})"),
    torch.float16: ("_Float16", "(real){}", "(_Float16){}"),
}
_FLAGS = "-x c -std=gnu11 -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math -shared -fPIC".split()
_ALONE = 1 << 16  # entries below which a second thread costs more than it gives

_PRELUDE = """\
#include <math.h>
#include <stdint.h>
#include <string.h>
typedef {real} real;
typedef uint16_t bf16;
#define HALF ((real)0.5)
#define SQRT(a) __builtin_sqrt{suffix}(a)
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define FMA(a, b, c) __builtin_fma{suffix}(a, b, c)
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif
static inline float from_bf16(bf16 x) {{ uint32_t b = (uint32_t)x << 16; float f; memcpy(&f, &b, 4); return f; }}
static inline bf16 to_bf16(float f) {{
  uint32_t b; memcpy(&b, &f, 4);
  return f != f ? 0x7fc0 : (b + 0x7fff + ((b >> 16) & 1)) >> 16;
}}
#define STEP 32
#define AHEAD 256
"""


def source(recipe: Recipe, real: torch.dtype, gradient: torch.dtype, scaled: bool, wire: torch.dtype | None) -> str:
    """The C text of a recipe, for tensors of these dtypes.

    `update(n, s, g, p, x0, …, w)` returns whether an element of the wire was not the copy of its parameter before.
    """
    pointers = ["p", *(f"x{i}" for i in range(len(recipe.reads)))]
    arguments = ["long n", "const real* restrict s", f"const {_STORED[gradient][0]}* restrict g_"]
    arguments += [f"real* restrict {name}_" for name in pointers]
    body = [f"real g = {_STORED[gradient][1].format('g_[j]')};"]
    body += [f"g = g * s[{len(recipe.scalars)}];"] if scaled else []
    body += [f"real {name} = {name}_[j];" for name in pointers]
    if wire is not None:
        kind, _, store = _STORED[wire]
        arguments.append(f"{kind}* restrict w_")
        body.append(f"{kind} old = {store.format('p')}; stale |= (p == p) & (old != w_[j]);")
    body += recipe.lines
    body += [f"{name}_[j] = {value};" for name, value in recipe.writes]
    if wire is not None:
        value = dict(recipe.writes).get("p", "p")
        body.append(f"w_[j] = {store.format(value)};")
    ahead = " ".join(f"__builtin_prefetch({name}_ + j + AHEAD, 1);" for name in pointers + (["w"] if wire is not None else []))
    block = "\n      ".join(body)
    return f"""{_PRELUDE.format(real=_REAL[real], suffix="f" if real is torch.float32 else "")}
long update({", ".join(arguments)}) {{
  int stale = 0;
  long i = 0;
  for (; i + STEP <= n; i += STEP) {{
    for (long j = i; j < i + STEP; j += 64 / sizeof(real)) {{ {ahead} __builtin_prefetch(g_ + j + AHEAD, 0); }}
    for (long j = i; j < i + STEP; j++) {{
      {block}
    }}
  }}
  for (long j = i; j < n; j++) {{
      {block}
  }}
  return stale;
}}
"""


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="l2l_compile_")


@functools.cache
def build(text: str) -> ctypes._CFuncPtr:
    """The function `update` of a C text. Raises `LoweringError` where there is no C compiler, or it fails."""
    remedy = "The option compile_update=False runs the optimizer's own step"
    found = [name for name in (os.environ.get("CXX"), "g++", "gcc", "clang", "cc") if name and shutil.which(name)]
    if not found:
        raise LoweringError(f"no C compiler (g++, gcc or clang, or the variable CXX) was found to compile the update. {remedy}")
    library = Path(_folder().name) / f"{len(list(Path(_folder().name).iterdir()))}.so"
    done = subprocess.run([found[0], *_FLAGS, "-", "-o", str(library), "-lm"], input=text, capture_output=True, text=True)
    if done.returncode:
        raise LoweringError(f"{found[0]} cannot compile the update: {done.stderr.strip()[-500:]}. {remedy}")
    function = ctypes.CDLL(str(library)).update
    function.argtypes = [ctypes.c_long] + [ctypes.c_void_p] * (text.split("long update(")[1].split(")")[0].count("*"))
    function.restype = ctypes.c_long
    return function


@dataclass
class Launch:
    """A kernel on contiguous tensors of as many elements each; `scalars` is what `s` points to.

    checked   whether the wire must be the copy of the parameter before the step
    stale     after the step: whether it was not
    """

    function: ctypes._CFuncPtr
    scalars: torch.Tensor
    tensors: Sequence[torch.Tensor]
    checked: bool = False
    stale: bool = False

    def __post_init__(self) -> None:
        self.count = self.tensors[0].numel()
        self._addresses = [(t.data_ptr(), t.element_size()) for t in self.tensors]

    def run(self, start: int, end: int) -> None:
        """Update the elements from `start` to `end`."""
        places = [address + start * size for address, size in self._addresses]
        if self.function(end - start, self.scalars.data_ptr(), *places):
            self.stale = True


def run_all(launches: Sequence[Launch], helpers: Sequence[Worker]) -> None:
    """Run launches, with their elements shared out evenly among this thread and the helpers."""
    total = sum(launch.count for launch in launches)
    threads = max(1, min(len(helpers) + 1, total // _ALONE))
    share = -(-total // threads)
    shares: list[list[tuple[Launch, int, int]]] = [[] for _ in range(threads)]
    position = 0
    for launch in launches:
        start = 0
        while start < launch.count:
            mine = position // share
            end = min(launch.count, start + (mine + 1) * share - position)
            shares[mine].append((launch, start, end))
            position += end - start
            start = end
    tickets = [helper.submit(lambda part=part: _run_share(part)) for helper, part in zip(helpers, shares[1:], strict=False)]
    _run_share(shares[0])
    for helper, ticket in zip(helpers, tickets, strict=False):
        ticket.wait()
        helper.raise_failure()


def _run_share(parts: Sequence[tuple[Launch, int, int]]) -> None:
    for launch, start, end in parts:
        launch.run(start, end)
