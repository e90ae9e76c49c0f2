"""Compile a recipe to machine code that updates a flat range of memory in one pass, and run it on several threads.

    for every element:   g = gradient * factor;  statements of the recipe;  p, x0, … = new values;  wire = p

The kernel is plain C, compiled by the compiler that Inductor uses on the host. Ranges are divided among as many threads
as the host lane may take.
"""

from __future__ import annotations

import array
import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from l2l_compile.host.compiled_step.library import build
from l2l_compile.host.compiled_step.record import Formula

_REAL = {torch.float32: "float", torch.float64: "double"}
# dtype -> (C type in memory, from memory to real, from real to memory)
_STORED = {
    torch.float32: ("float", "(real){}", "(float){}"),
    torch.float64: ("double", "(real){}", "(double){}"),
    torch.bfloat16: ("bf16", "from_bf16({})", "to_bf16({})"),
    torch.float16: ("fp16", "from_fp16({})", "to_fp16({})"),
}
_ALONE = 1 << 16  # entries below which a second thread costs more than it gives

_PRELUDE = """\
#include <math.h>
#include <stdint.h>
#include <string.h>
typedef {real} real;
typedef uint16_t bf16;
typedef uint16_t fp16;
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
/* fp16 as the library FP16 (M. Dukhan) converts it: integers and products alone, so that loops are vectorized. Compilers do not
   vectorize conversions of _Float16 where the processor computes in float only. */
static inline uint32_t bits(float f) {{ uint32_t b; memcpy(&b, &f, 4); return b; }}
static inline float of_bits(uint32_t b) {{ float f; memcpy(&f, &b, 4); return f; }}
static inline float from_fp16(fp16 x) {{
  uint32_t w = (uint32_t)x << 16, twice = w + w;
  float normal = of_bits((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f, small = of_bits((twice >> 17) | (126u << 23)) - 0.5f;
  return of_bits((w & 0x80000000u) | (twice < (1u << 27) ? bits(small) : bits(normal)));
}}
static inline fp16 to_fp16(float f) {{
  uint32_t w = bits(f), twice = w + w, bias = twice & 0xFF000000u;
  float base = (of_bits(w & 0x7FFFFFFFu) * 0x1.0p+112f) * 0x1.0p-110f;
  bias = bias < 0x71000000u ? 0x71000000u : bias;
  uint32_t b = bits(of_bits((bias >> 1) + 0x07800000u) + base), rest = ((b >> 13) & 0x7C00u) + (b & 0x0FFFu);
  return (w & 0x80000000u) >> 16 | (twice > 0xFF000000u ? 0x7E00u : rest);
}}
#define STEP 32
#define AHEAD 384
"""


@dataclass(frozen=True)
class UpdateKernel:
    """All that the C text of an update depends on: the formula, the dtypes in memory, whether gradients are scaled."""

    formula: Formula
    real: torch.dtype
    gradient: torch.dtype
    wire: torch.dtype | None
    scaled: bool


@functools.cache
def address_of(kernel: UpdateKernel) -> int:
    """The address of the C function `update(n, s, {g, p, x0, …, w})`. Raises `LoweringError` without a working C compiler."""
    return ctypes.c_size_t.from_buffer(build(source(kernel)).update).value


def source(kernel: UpdateKernel) -> str:
    """The C text of an update.

    The function returns whether an element of the wire was not the copy of its parameter before the update. `s` ends with the
    factor of the gradient.
    """
    formula, real, gradient, wire = kernel.formula, kernel.real, kernel.gradient, kernel.wire
    pointers = ["p", *(f"x{i}" for i in range(formula.states))]
    places = [(f"const {_STORED[gradient][0]}", "g"), *(("real", name) for name in pointers)]
    body = [f"real g = {_STORED[gradient][1].format('g_[j]')};"]
    body += [f"g = g * s[{formula.scalars}];"] if kernel.scaled else []
    body += [f"real {name} = {name}_[j];" for name in pointers]
    if wire is not None:
        kind, _, store = _STORED[wire]
        places.append((kind, "w"))
        body.append(f"{kind} old = {store.format('p')}; stale |= (p == p) & (old != w_[j]);")
    body += formula.lines
    body += [f"{name}_[j] = {value};" for name, value in formula.writes]
    if wire is not None:
        value = dict(formula.writes).get("p", "p")
        body.append(f"w_[j] = {store.format(value)};")
    ahead = " ".join(f"__builtin_prefetch({name}_ + j + AHEAD, 1);" for name in pointers + (["w"] if wire is not None else []))
    block = "\n      ".join(body)
    return f"""{_PRELUDE.format(real=_REAL[real], suffix="f" if real is torch.float32 else "")}
static long __attribute__((noinline)) range(long n, const real* restrict s, {", ".join(f"{kind}* restrict {name}_" for kind, name in places)}) {{
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
long update(long n, const real* s, void** a) {{ return range(n, s, {", ".join(f"a[{i}]" for i in range(len(places)))}); }}
"""


# Runs kernels on several threads without a return to Python: the executor holds Python's lock (GIL) at the same time.
# A row is {thread, result, address of update, n, address of s, addresses of tensors…}.
_RUNS = """
#include <pthread.h>
typedef long (*update)(long, const void*, void**);
typedef struct { long thread, count, width; long* rows; } share;
static void* run_share(void* given) {
  share* mine = given;
  for (long i = 0; i < mine->count; i++) {
    long* row = mine->rows + i * mine->width;
    if (row[0] == mine->thread) row[1] = ((update)row[2])(row[3], (const void*)row[4], (void**)(row + 5));
  }
  return 0;
}
void run(long threads, long count, long width, long* rows) {
  pthread_t others[threads];
  share shares[threads];
  char started[threads];
  for (long t = threads - 1; t >= 0; t--) {
    shares[t] = (share){t, count, width, rows};
    started[t] = t > 0 && pthread_create(others + t, 0, run_share, shares + t) == 0;
    if (!started[t]) run_share(shares + t);
  }
  for (long t = 1; t < threads; t++) if (started[t]) pthread_join(others[t], 0);
}
"""
_HEAD = 5  # entries of a row before the addresses of tensors


@functools.cache
def _run() -> Callable[[int, int, int, int], None]:
    function = build(_RUNS).run
    function.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_void_p]
    function.restype = None
    return function


@dataclass
class Launch:
    """A kernel on contiguous tensors with the same number of elements; `s` points to `scalars`.

    checked   whether the wire must be the copy of the parameter before the step
    stale     after the step: whether the wire was not that copy
    """

    address: int
    scalars: torch.Tensor
    tensors: Sequence[torch.Tensor]
    checked: bool = False
    stale: bool = False

    def __post_init__(self) -> None:
        self.count = self.tensors[0].numel()

    def row(self, thread: int, start: int, end: int, width: int) -> list[int]:
        """The row for a thread that runs the elements from `start` to `end`."""
        places = [t.data_ptr() + start * t.element_size() for t in self.tensors]
        return [thread, 0, self.address, end - start, self.scalars.data_ptr(), *places] + [0] * (width - _HEAD - len(places))


def run_all(launches: Sequence[Launch], threads: int) -> None:
    """Run launches, with their elements divided evenly among threads."""
    total = sum(launch.count for launch in launches)
    threads = max(1, min(threads, total // _ALONE))
    share = -(-total // threads)
    width = _HEAD + max((len(launch.tensors) for launch in launches), default=0)
    owners: list[Launch] = []
    rows = array.array("q")
    position = 0
    for launch in launches:
        start = 0
        while start < launch.count:
            thread = position // share
            end = min(launch.count, start + (thread + 1) * share - position)
            owners.append(launch)
            rows.extend(launch.row(thread, start, end, width))
            position += end - start
            start = end
    _run()(threads, len(owners), width, rows.buffer_info()[0])
    for launch, result in zip(owners, rows[1::width], strict=True):
        launch.stale |= bool(result)
