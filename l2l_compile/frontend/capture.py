"""Turns Dynamo's graph into a `Captured` graph: inputs sorted by kind, one batch symbol, a spec for every tensor."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..devices.host import HOST, is_host
from ..devices.registry import KINDS
from ..errors import DeviceError, L2LError
from ..ir.captured import Captured, Input
from ..ir.fx_types import attribute, name_of
from ..ir.values import TensorSpec, dim_of
from ..ranks.sharded import count_steps
from ..ranks.sharing import ranks_sharing
from . import dynamo
from .indices import IndexCheck
from .inline import inline_subgraphs
from .readiness import without_values
from .shards import make_whole
from .simplify import memory_of, simplify
from .stacked import take_slices_apart
from .tensor_parallel import make_local
from .views import take_views
from .writes import settle_writes, with_states, written_operands

_CLONES = ("clone", torch.clone, torch.ops.aten.clone.default)


def capture(gm: fx.GraphModule) -> Captured:
    """Rewrite Dynamo's graph module in place, and describe it for the passes.

    Raises `DeviceError` if an input is not on the host, and `L2LError` for a graph that cannot be streamed.
    """
    inline_subgraphs(gm)
    dynamo.name_the_owner_self(gm.graph)
    divided, ranks = make_whole(gm.graph)
    parallel_layer, mesh = make_local(gm.graph)
    if ranks is None and mesh is not None:
        count_steps()
        ranks = ranks_sharing(mesh)
    world = ranks if ranks is not None and ranks.count > 1 else None
    break_reason = dynamo.graph_break(gm)
    if world is not None and world.divides and break_reason is not None:
        _refuse_break(break_reason)
    _refuse_data_dependence(gm.graph)
    _refuse_hooks(gm.graph)
    cloned = {n for n in gm.graph.nodes if n.op == "placeholder" and any(u.target in _CLONES for u in n.users)}
    simplify(gm.graph)
    settle_writes(gm.graph)
    _refuse_written_constants(gm)
    _check_on_host(gm)
    inputs = tuple(replace(_describe(i, n), pieces=divided.get(n)) for i, n in enumerate(gm.graph.find_nodes(op="placeholder")))
    batch, why_static = _batch_symbol(inputs)
    inputs = with_states([_functional_weight(i, batch) for i in inputs], gm.graph)
    views = take_views(gm.graph, inputs)
    parts = take_slices_apart(gm.graph, inputs)
    specs = {
        node: TensorSpec.of(node.meta["example_value"], batch)
        for node in gm.graph.nodes
        if isinstance(node.meta.get("example_value"), torch.Tensor)
    }
    symbol_at, hints = _symbols(inputs)
    captured = Captured(
        gm.graph,
        gm,
        inputs,
        specs,
        batch,
        why_static,
        hints,
        symbol_at,
        grad_enabled=torch.is_grad_enabled(),
        autocast=_autocast(),
        break_reason=break_reason,
        parts=parts,
        views=views,
        ranks=world.size if world is not None else 1,
        world=world,
        parallel_layer=parallel_layer,
        snapshots=frozenset(i.index for i in inputs if i.node in cloned and i.kind in ("buffer", "value")),
    )
    _lift_constants(captured)
    captured.indices = IndexCheck(captured)
    return captured


def _refuse_break(reason: str) -> None:
    raise L2LError(
        f"the model is divided among ranks, and its graph breaks ({reason}): what lies between two programs would gather weights by "
        "itself, in no order that all ranks share. Remove the break; fullgraph=True shows where it is"
    )


def _autocast() -> torch.dtype | None:
    for name in KINDS:
        if name != HOST.type and torch.is_autocast_enabled(name):
            raise L2LError(
                f"torch.autocast({name!r}) is on, but the model is traced on the host, where it has no effect. Use "
                f"torch.autocast({HOST.type!r}), which holds for the device that the layers run on"
            )
    return torch.get_autocast_dtype(HOST.type) if torch.is_autocast_enabled(HOST.type) else None


def _refuse_data_dependence(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if any(map(_is_unbacked, _symbolic_sizes(node.meta.get("example_value")))):
            where = (node.meta.get("stack_trace") or "").strip().split("\n")
            raise L2LError(
                f"'{node.name}' makes a number or a size from the values of a tensor, which backend 'l2l' cannot stream: "
                "keep it a tensor, or compile without fullgraph=True and capture_scalar_outputs, which breaks the graph there"
                + "".join(f"\n  {line.strip()}" for line in where[-2:])
            )


def _refuse_hooks(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if getattr(node.target, "_name", None) == "register_hook":
            hooked, *_ = node.args
            raise L2LError(
                f"the model registers a gradient hook on its value '{hooked}' (register_hook), which backend 'l2l' does not call: write "
                "it as the backward of a torch.autograd.Function. Hooks on parameters are called"
            )


def _refuse_written_constants(gm: fx.GraphModule) -> None:
    """Raise `L2LError` for a write into a tensor that the graph holds: Dynamo hands it no parameters of an optimizer, but keeps them."""
    held = {memory_of(node): node for node in gm.graph.find_nodes(op="get_attr")}
    held.pop(None, None)
    for node in gm.graph.nodes:
        for operand in written_operands(node):
            if memory_of(operand) in held:
                raise L2LError(
                    f"the graph writes into '{held[memory_of(operand)].target}', a tensor that it holds itself, as a compiled "
                    "optimizer.step() does, and the write would be lost. Compile the model alone, and call optimizer.step() outside of "
                    "compiled functions: the option 'optimizer' compiles the update. Or compile the step with another backend"
                )


def _symbolic_sizes(value: object) -> list[sympy.Basic]:
    sizes: tuple[object, ...] = (value,)
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride(), value.storage_offset()) if value.layout is torch.strided else value.shape
    return [size.node.expr for size in sizes if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool))]


@functools.lru_cache(maxsize=1024)
def _is_unbacked(size: sympy.Basic) -> bool:
    return bool(free_unbacked_symbols(size))


def _describe(index: int, node: fx.Node) -> Input:
    example = node.meta.get("example_value")
    name = _readable(dynamo.source_name(node))
    if not isinstance(example, torch.Tensor):
        return Input(index, node, name, "symbol")
    if isinstance(example, torch.nn.Parameter):
        return Input(index, node, name, "parameter")
    if dynamo.is_module_attribute(node):
        return Input(index, node, name, "buffer")
    return Input(index, node, name, "value")


def _functional_weight(found: Input, batch: sympy.Symbol | None) -> Input:
    """Turn a leaf that requires a gradient and has no batch dimension into a parameter: models may be plain functions."""
    if found.kind != "value":
        return found
    example = found.node.meta["example_value"]
    if not example.requires_grad or not example.is_leaf:
        return found
    batched = batch is not None and any(dim_of(s) == batch for s in example.shape)
    return found if batched else replace(found, kind="parameter")


def _readable(source: str) -> str:
    """`L['self']._modules['h']._modules['0']._parameters['w']` -> `h.0.w`; `L['kwargs']['labels']` -> `labels`."""
    source = re.sub(r"\.__dict__\['(_modules|_parameters|_buffers)'\]", r".\1", source)
    name = re.sub(r"\._(modules|parameters|buffers)\['([^']*)'\]", r".\2", source)
    name = re.sub(r"^L\['\w+'\]\.(__self__\.)?(?=.)", "", name)
    name = re.sub(r"\['?([^']*?)'?\]", r".\1", name)
    return re.sub(r"^L\.(kwargs\.|args\.)?", "", name) or source


def _check_on_host(gm: fx.GraphModule) -> None:
    for node in gm.graph.find_nodes(op="placeholder"):
        example = node.meta.get("example_value")
        if isinstance(example, torch.Tensor) and not is_host(example.device):
            what = "parameter" if isinstance(example, torch.nn.Parameter) else "input"
            if example.device.type == "meta":
                raise without_values(f"{what} '{_readable(dynamo.source_name(node))}'")
            raise DeviceError(
                f"{what} '{_readable(dynamo.source_name(node))}' is on {example.device}. Backend 'l2l' streams layers "
                "from the host: leave the model and its inputs on the host (do not call .to('cuda')), and name the "
                "accelerator with the option 'device'"
            )


def _batch_symbol(inputs: tuple[Input, ...]) -> tuple[sympy.Symbol | None, str]:
    """The symbol of the batch size, or why there is none. All inputs with the most frequent batch size share the symbol."""
    tensors = [i for i in inputs if i.kind == "value" and i.node.meta["example_value"].dim()]
    data = [i for i in tensors if not i.node.meta["example_value"].requires_grad] or tensors
    candidates = _batch_sizes(data)
    symbolic = [s for s in candidates if _is_symbol(s)]
    if not symbolic:
        if not candidates:
            return None, "no input of this graph is a batched tensor"
        if any(s == 1 for s in candidates):
            return None, "a batch of one row cannot be split"
        return None, "Dynamo specialised the size of the batch to a number"
    size = Counter(s.node.hint for s in symbolic).most_common(1)[0][0]
    handed_on = [i for i in tensors if i not in data and not i.node.meta["example_value"].is_leaf]  # across a graph break
    same = [s for s in (*symbolic, *filter(_is_symbol, _batch_sizes(handed_on))) if s.node.hint == size]
    for other in same[1:]:
        bool(same[0] == other)  # adds a guard: Dynamo captures anew if these batch sizes differ
    batch = dim_of(same[0])
    return (batch, "") if isinstance(batch, sympy.Symbol) else (None, "Dynamo specialised the size of the batch")


def _batch_sizes(inputs: Sequence[Input]) -> list[int | torch.SymInt]:
    """The sizes of these inputs in their batch dimensions; inputs without rows are left out."""
    places = [(i.node.meta["example_value"].shape, dynamo.batch_dimension_of(i.node)) for i in inputs]
    return [shape[place] for shape, place in places if place is not None and place < len(shape)]


def _is_symbol(size: int | torch.SymInt) -> TypeGuard[torch.SymInt]:
    return isinstance(size, torch.SymInt) and isinstance(dim_of(size), sympy.Symbol)


def _symbols(inputs: tuple[Input, ...]) -> tuple[dict, dict]:
    where: dict[sympy.Symbol, tuple[int, int | None]] = {}
    hints: dict[sympy.Symbol, int] = {}
    for i in inputs:
        example = i.node.meta.get("example_value")
        sizes = enumerate(example.shape) if isinstance(example, torch.Tensor) else [(None, example)]
        for dim, size in sizes:
            if isinstance(size, torch.SymInt) and isinstance(dim_of(size), sympy.Symbol):
                where.setdefault(dim_of(size), (i.index, dim))
                hints.setdefault(dim_of(size), int(size.node.hint))
    return where, hints


def _lift_constants(captured: Captured) -> None:
    """Tensor constants of the graph become buffers of the segments that read them."""
    for node in captured.graph.find_nodes(op="get_attr"):
        value = attribute(captured.module, node)
        if isinstance(value, torch.Tensor):
            captured.constants[name_of(node)] = value
            captured.specs[node] = TensorSpec.of(value, None)
