"""Compile an ATen graph with Inductor so that an out-of-range index raises an error and does not end the process.

Inductor's C++ kernels check indices inside of OpenMP regions, where a failed check terminates the process. Therefore, on the
host, look-ups remain calls of PyTorch's own kernels. Each is hidden from Inductor behind an operator of the same signature,
so an out-of-range token raises the same IndexError as in eager.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch._inductor.exc import InductorError

from l2l_compile.devices.host import is_host
from l2l_compile.errors import LoweringError
from l2l_compile.lowering.code_cache import with_values
from l2l_compile.lowering.floats import Numbers, Unfit, reads_floats, take_numbers
from l2l_compile.lowering.inductor_folder import ensure_writable
from l2l_compile.lowering.widening import storages_of

aten = torch.ops.aten
LOOKUPS = (
    aten.embedding.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    aten.embedding_dense_backward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_backward.default,
)
_LIBRARY = torch.library.Library("l2l_compile", "DEF")


def compile_graph(module: fx.GraphModule, device: torch.device) -> Callable:
    """Compile a functional ATen graph with Inductor, for operands like the operands of its trace.

    The compiled function raises `LoweringError` for operands of other dtypes: Inductor's kernels would read their bytes as the
    traced dtypes. (Inductor checks sizes and strides itself.) CUDA graphs are off, even if the user turned them on: the next
    replay would overwrite results that still wait for a copy.
    """
    numbers: Numbers | None = None
    if reads_floats(module.graph):
        with_values(module)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    if reads_floats(graph):
        try:
            numbers = take_numbers(graph, device)
        except Unfit as reason:
            warnings.warn(f"backend 'l2l' does not compile the operations around a float that changes: {reason}", stacklevel=2)
            reshape_where_needed(module)
            return module
    examples = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    if is_host(device):
        for node in graph.nodes:
            if node.target in LOOKUPS:
                node.target = _opaque(node.target)
    copy = fx.GraphModule(module, graph)
    reshape_where_needed(copy)
    ensure_writable()
    with torch.no_grad():
        compiled = _compiled(copy, examples)
    dtypes = _dtypes(examples)

    def run(*given: int | float | torch.Tensor) -> Sequence[torch.Tensor]:
        operands = given if numbers is None else numbers.operands(given)
        found = _dtypes(operands)
        if found != dtypes:
            raise LoweringError(f"a graph compiled for operands of {dtypes} was called with {found}")
        return compiled(*operands)

    return run


def _compiled(module: fx.GraphModule, examples: Sequence) -> Callable:
    """Compile a graph. Inductor computes indices that are known from positions, such as T5's distances, as formulas.

    Up to PyTorch 2.14 it fails where such formulas have a minimum and are padded, with `torch.compile` as well. Then the graph is
    compiled without formulas, and its kernels compute the indices.
    """
    settings: dict = {"triton.cudagraphs": False}
    try:
        return torch._inductor.compile(module, list(examples), settings)
    except InductorError as error:
        if "is not comparable" not in str(error):
            raise
        return torch._inductor.compile(module, list(examples), settings | {"constant_and_index_propagation": False})


def reshape_where_needed(module: fx.GraphModule) -> None:
    """Turn `view` into `reshape`, which copies if a kernel's result has other strides than in the trace.

    A view of memory that an operation writes into stays a `view`.
    """
    written = {
        storage._cdata
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        for read in node.all_input_nodes
        for storage in storages_of(read)
    }
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        if not any(storage._cdata in written for storage in storages_of(node)):
            node.target = torch.ops.aten.reshape.default
    module.recompile()


def _dtypes(operands: Sequence) -> list[torch.dtype]:
    return [operand.dtype for operand in operands if isinstance(operand, torch.Tensor)]


@functools.cache
def _opaque(operator: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """An operator with the kernel and signature of `operator` that no compiler knows."""
    name = operator.name().replace("aten::", "").replace(".", "_")
    signature = str(operator._schema).split("(", 1)[1]
    _LIBRARY.define(f"{name}({signature}")
    _LIBRARY.impl(name, operator, "CompositeExplicitAutograd")
    return getattr(torch.ops.l2l_compile, name).default
