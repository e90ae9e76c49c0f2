"""Inlines subgraphs that stand for plain calls, so that block finding sees one flat list of operations.

`torch.utils.checkpoint` inside the model arrives as `tag_activation_checkpoint(body, *args)`: the streamed backward
recomputes every layer anyway, so the wrapper is dropped. `torch.compiler.nested_compile_region` arrives as
`invoke_subgraph(body, name, *args)`: the block finder finds the same repeats in the inlined bodies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from l2l_compile.ir.fx_types import arguments, attribute, name_of

_BEFORE_OPERANDS: dict[Any, int] = {  # operator -> number of arguments between the body and its operands
    torch.ops.higher_order.tag_activation_checkpoint: 0,
    torch.ops.higher_order.invoke_subgraph: 1,
    torch.ops.higher_order.wrap: 0,
}


def inline_subgraphs(gm: fx.GraphModule) -> None:
    """Inline checkpointed and nested-compile regions of `gm` in place, inner ones too."""
    changed = False
    while calls := [n for n in gm.graph.nodes if n.op == "call_function" and n.target in _BEFORE_OPERANDS]:
        for call in calls:
            _inline(gm, call)
        changed = True
    if changed:
        gm.graph.lint()
        gm.recompile()


def _inline(gm: fx.GraphModule, call: fx.Node) -> None:
    body_node, *rest = arguments(call)
    operands = rest[_BEFORE_OPERANDS[call.target] :]
    body: fx.GraphModule = attribute(gm, body_node)
    env = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "get_attr":
                env[node] = _hoist_attribute(gm, body, node)
            elif node.op not in ("placeholder", "output"):
                env[node] = gm.graph.node_copy(node, lambda n: env[n])
    (returned,) = body.graph.output_node().args
    _replace(gm, call, fx.node.map_arg(returned, lambda n: env[n]))
    gm.graph.erase_node(call)
    if not body_node.users:
        gm.graph.erase_node(body_node)


def _hoist_attribute(gm: fx.GraphModule, body: fx.GraphModule, node: fx.Node) -> fx.Node:
    value = attribute(body, node)
    name = f"_inlined_{name_of(node).replace('.', '_')}"
    while hasattr(gm, name):
        if getattr(gm, name) is value:
            break
        name += "_"
    setattr(gm, name, value)
    copied = gm.graph.get_attr(name)
    copied.meta = dict(node.meta)
    return copied


def _replace(gm: fx.GraphModule, call: fx.Node, result: Any) -> None:
    if isinstance(result, fx.Node):
        call.replace_all_uses_with(result)
        return
    for user in list(call.users):  # the body returns a tuple, and its users pick elements
        _, index = arguments(user)
        user.replace_all_uses_with(result[index])
        gm.graph.erase_node(user)
