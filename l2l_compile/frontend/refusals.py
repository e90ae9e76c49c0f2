"""What a captured graph may not do: each refusal names the cause and the remedy."""

from __future__ import annotations

import functools

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from l2l_compile.devices.host import is_host
from l2l_compile.errors import DeviceError, L2LError
from l2l_compile.frontend.draft import Draft
from l2l_compile.frontend.dynamo import adapter, watched_frames
from l2l_compile.frontend.dynamo.readiness import without_values
from l2l_compile.frontend.inputs import readable
from l2l_compile.ir.graph import memory_of, written_operands


def refuse(draft: Draft) -> None:
    """Raise `L2LError` for what cannot be streamed, as long as the graph has the user's own operations. Notes the graph break."""
    draft.break_reason = watched_frames.graph_break(draft.module)
    if draft.world is not None and (draft.world.shards or draft.placed) and draft.break_reason is not None:
        _refuse_break(draft.break_reason)
    _refuse_data_dependence(draft.graph)
    _refuse_hooks(draft.graph)


def refuse_written_constants(draft: Draft) -> None:
    """Raise `L2LError` for a write into a tensor that the graph holds: Dynamo hands it no parameters of an optimizer, but keeps them."""
    held = {memory_of(node): node for node in draft.graph.find_nodes(op="get_attr")}
    held.pop(None, None)
    for node in draft.graph.nodes:
        for operand in written_operands(node):
            if memory_of(operand) in held:
                raise L2LError(
                    f"the graph writes into '{held[memory_of(operand)].target}', a tensor that it holds itself, as a compiled "
                    "optimizer.step() does, and the write would be lost. Compile the model alone, and call optimizer.step() outside of "
                    "compiled functions: the option 'optimizer' compiles the update. Or compile the step with another backend"
                )


def check_on_host(draft: Draft) -> None:
    """Raise `DeviceError` for a parameter or an input that is not on the host."""
    for node in draft.graph.find_nodes(op="placeholder"):
        example = node.meta.get("example_value")
        if isinstance(example, torch.Tensor) and not is_host(example.device):
            what = "parameter" if isinstance(example, torch.nn.Parameter) else "input"
            if example.device.type == "meta" and what == "input" and not adapter.is_module_attribute(node):
                raise DeviceError(
                    f"input '{readable(adapter.source_name(node))}' is on meta, without values: give the model a tensor of the host"
                )
            if example.device.type == "meta":
                raise without_values(f"{what} '{readable(adapter.source_name(node))}'")
            raise DeviceError(
                f"{what} '{readable(adapter.source_name(node))}' is on {example.device}. Backend 'l2l' streams layers "
                "from the host: leave the model and its inputs on the host (do not call .to('cuda')), and name the "
                "accelerator with the option 'device'"
            )


def _refuse_break(reason: str) -> None:
    raise L2LError(
        f"the model is spread over ranks, and its graph breaks ({reason}): the code between two programs would read weights of other "
        "ranks, in an order that may differ between ranks. Remove the break; fullgraph=True shows where it is"
    )


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


def _symbolic_sizes(value: object) -> list[sympy.Basic]:
    sizes: tuple[object, ...] = (value,)
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride(), value.storage_offset()) if value.layout is torch.strided else value.shape
    return [size.node.expr for size in sizes if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool))]


@functools.lru_cache(maxsize=1024)
def _is_unbacked(size: sympy.Basic) -> bool:
    return bool(free_unbacked_symbols(size))
