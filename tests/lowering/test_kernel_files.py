"""Kernels of one graph share C++ files: which ones do, and that each gets its own operands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._inductor.async_compile import get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

from l2l_compile.lowering.faster import compile_ahead
from l2l_compile.lowering.faster.kernel_files import WORTH_A_FILE, Kernel, compile_file, in_files, number_of_files

INCLUDE = "\n#include <torch/csrc/inductor/cpp_prefix.h>\n"


def kernel(types: list[str], body: str = "", include: str = INCLUDE) -> Kernel:
    operands = ", ".join(f"{t} x{i}" for i, t in enumerate(types))
    return Kernel(types, f'{include}extern "C"  void  kernel({operands})\n{{\n{body}\n}}\n')


USUAL = ["const float*", "float*", "const int64_t"]


@pytest.mark.parametrize(
    "alone",
    [
        kernel(["const int64_t", "float*"]),
        kernel(["float*", "const float"]),
        kernel(["const int64_t"]),
        kernel(USUAL, include=f"{INCLUDE}#define TWICE 2\n"),
        kernel(USUAL, "#define TWICE 2"),
        kernel(USUAL, 'static int x;\n}\nextern "C" void other() {'),
        kernel(USUAL, include=f"{INCLUDE}struct Pair {{}};\n"),
    ],
    ids=["a number first", "a float", "no tensor", "macro in front", "macro", "another function", "a struct in front"],
)
def test_an_unusual_kernel_has_a_file_of_its_own(alone):
    assert alone.header is None
    assert [alone] in in_files([kernel(USUAL), alone, kernel(USUAL)], 1)


def test_kernels_are_dealt_out_by_their_includes_and_length():
    short, long = [kernel(USUAL, f"// {i}") for i in range(4)], kernel(USUAL, "// long" * 200)
    other = kernel(USUAL, include='\n#include "other.h"\n')
    files = in_files([*short, long, other], 2)
    assert sorted(files, key=len) == [[long], [other], short] or sorted(files, key=len) == [[other], [long], short]
    assert in_files(short, 16) == [[k] for k in short]


def test_short_kernels_share_a_file_and_long_ones_are_spread():
    short, long = kernel(USUAL), kernel(USUAL, "/" * WORTH_A_FILE)
    assert number_of_files([], 4) == number_of_files([short] * 20, 4) == 1
    assert number_of_files([short, long], 4) == 2 and number_of_files([long] * 20, 4) == 4


def test_a_kernel_that_is_alone_is_compiled_as_inductor_has_it():
    compiled = []
    alone = kernel(USUAL)
    compile_file([alone], lambda types, source: compiled.append((types, source)) or (lambda: "loaded"))
    assert compiled == [(alone.types, alone.source)]
    assert alone.load() == "loaded"


def test_each_kernel_of_a_file_gets_its_own_operands():
    calls = []
    several = [
        kernel(["float*"]),
        kernel(["const float*", "float*", "const int64_t", "const int64_t"]),
        kernel(["const float*", "float*"]),
    ]
    compile_file(several, lambda types, source: lambda: lambda *given: calls.append(given))
    for each, operands in zip(several, [("a",), ("a", "b", 1, 2), ("a", "b")], strict=True):
        each.load()(*operands)
    assert calls == [(0, "a", "a", 0, 0), (1, "a", "b", 1, 2), (2, "a", "b", 0, 0)]


def test_a_number_that_no_kernel_has_is_an_error():
    several = [kernel(["float*"], f"x0[0] = {number};") for number in (1, 2)]
    with fresh_cache():
        compile_file(several, CppPythonBindingsCodeCache.load_pybinding_async)
        first, second = (each.load() for each in several)
    x = torch.zeros(1)
    second(x)
    assert x == 2
    with pytest.raises(RuntimeError, match="no kernel of that number"):
        first.func(2, x)


@pytest.mark.skipif(get_compile_threads() < 2, reason="Inductor has no threads on one core")
@pytest.mark.parametrize("dynamic", [False, True], ids=["numbers", "symbols"])
def test_a_graph_with_several_kernels_computes_the_same(dynamic):
    def function(x, w, b):
        y = torch.tanh(x + b) @ w
        z = torch.sigmoid(y * x).softmax(-1) @ w
        u = (z.exp() + y * b - x).sum(0) @ w
        return y.relu() @ w + u, z.cumsum(1), (u * 2).long()

    torch.manual_seed(0)
    operands = torch.randn(6, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    traced = make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*operands)
    with fresh_cache() as _, torch._inductor.config.patch(fx_graph_cache=False):
        folder = Path(torch._inductor.runtime.runtime_utils.cache_dir())
        run = compile_ahead.begin(traced).result()
        sources = [path.read_text() for path in folder.rglob("*.main.cpp")]
    kernels = sum(max(source.count("namespace kernel_"), 1) for source in sources)
    assert kernels > len(sources) and len(sources) <= get_compile_threads()
    for actual, expected in zip(run(*operands), function(*operands), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
