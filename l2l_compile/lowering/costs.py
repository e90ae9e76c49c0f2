"""How long operations take on a machine, from their FLOPs and bytes (a roofline: Williams, Waterman and Patterson, CACM 2009)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils import flop_counter

from l2l_compile.ir.values import Bindings, dim_of, evaluate

aten = torch.ops.aten
_FREE = (
    aten._unsafe_view,
    aten.empty,
    aten.empty_like,
    aten.new_empty,
    aten.empty_strided,
    aten.new_empty_strided,
    aten.detach,
    aten.alias,
)
_WRITTEN_ONLY = (aten.copy_, aten.fill_, aten.zero_)  # they do not read the operand that they write into
_WRITTEN_IN_PART = (aten.index_copy_, aten.index_put_, aten.scatter_)  # they write the entries of their last operand


def _attention(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return flop_counter.sdpa_flop_count(query.shape, *_for_all_heads(query, key, value))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return flop_counter.sdpa_backward_flop_count(gradient.shape, query.shape, *_for_all_heads(query, key, value))


def _for_all_heads(query: Any, *grouped: Any) -> list[tuple[int, ...]]:
    """The shapes of keys and values with a head for each head of the queries: the formulas of torch 2.11 ask for that."""
    return [(shape[0], query.shape[1], *shape[2:]) for shape in (tensor.shape for tensor in grouped)]


_ATTENTION = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
_ATTENTION_BACKWARD = (
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
)
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_counter.flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,  # blocks are traced on the host
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    **dict.fromkeys(_ATTENTION, _attention),
    **dict.fromkeys(_ATTENTION_BACKWARD, _attention_backward),
}


class Rates(Protocol):
    """How fast a device works (`simulation/machine.py`): bytes that its kernels move in a second, and FLOP/s of its products."""

    @property
    def kernel_bandwidth(self) -> float: ...

    def flops_of(self, dtype: torch.dtype, /) -> float: ...


@dataclass(frozen=True)
class TypicalRates:
    """Rates of a kind of device whose own are not known: what counts is their ratio."""

    kernel_bandwidth: float
    flops: float
    flops_in_16_bits: float

    def flops_of(self, dtype: torch.dtype, /) -> float:
        return self.flops_in_16_bits if dtype.itemsize == 2 else self.flops


_TYPICAL = {"cpu": TypicalRates(1e10, 1e11, 1e11), "cuda": TypicalRates(2e12, 4e13, 4e14)}


def typical_rates(device: torch.device) -> Rates:
    """Rates of a device of this type."""
    return _TYPICAL.get(device.type, _TYPICAL["cuda"])


@dataclass(frozen=True)
class Cost:
    """FLOPs of matrix products in `dtype`, and the bytes that are read and written."""

    flops: int = 0
    dtype: torch.dtype = torch.float32
    bytes: int = 0

    def seconds(self, machine: Rates) -> float:
        """Seconds on the device of a machine: the longer of computing and moving bytes."""
        computing = self.flops / machine.flops_of(self.dtype) if self.flops else 0.0
        return max(computing, self.bytes / machine.kernel_bandwidth)


def is_free(operation: OpOverload) -> bool:
    """Whether an operation computes nothing and moves nothing: it makes a view, or uninitialized memory."""
    if operation.overloadpacket in _FREE:
        return True
    returns = operation._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all entries."""
    return sum(t.numel() * t.element_size() for t in tensors)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def written(operation: OpOverload, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The operands that an operation writes into."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))
    return found


def moved(operation: OpOverload, args: tuple, kwargs: dict[str, Any], result: Any) -> int:
    """Bytes that an operation reads and writes when it runs by itself."""
    if is_free(operation):
        return 0
    into = written(operation, args, kwargs)
    made = [] if into else tensors_in(result)
    if not into and not made:  # it reads metadata, such as a device or a size
        return 0
    read = tensors_in((args, kwargs))
    if operation.overloadpacket in _WRITTEN_ONLY:
        read = read[1:]
    if operation.overloadpacket in _WRITTEN_IN_PART:
        return nbytes(read[1:]) + nbytes(read[-1:])
    return nbytes(read) + nbytes(into) + nbytes(made)


def cost_of(operation: OpOverload, args: tuple, kwargs: dict[str, Any], result: Any) -> Cost:
    """The cost of an operation that runs by itself."""
    formula = _FORMULAS.get(operation.overloadpacket)
    flops = formula(*args, **kwargs, out_val=result) if formula is not None else 0
    floating = [t.dtype for t in tensors_in(args) if t.is_floating_point()]
    return Cost(flops, floating[0] if floating else torch.float32, moved(operation, args, kwargs, result))


def kernels_of(graph: fx.Graph, bindings: Bindings, fused: bool) -> list[Cost]:
    """The costs of the kernels that run an ATen graph, at these sizes.

    With `fused`, neighbouring elementwise operations and reductions are one kernel, as in Inductor. It reads the values that
    come from outside of it, and writes the values that are read outside of it. Without `fused`, each operation is a kernel.
    """
    values = {node: concrete(node.meta.get("val"), bindings) for node in graph.nodes}
    found: list[Cost] = []
    group: list[fx.Node] = []
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload) or is_free(node.target):
            continue
        if fused and is_light(node.target):
            group.append(node)
            continue
        found += _joined(group, values)
        group = []
        args, kwargs = pytree.tree_map_only(fx.Node, values.__getitem__, (node.args, node.kwargs))
        found.append(cost_of(node.target, args, kwargs, values[node]))
    return found + _joined(group, values)


def is_light(operation: OpOverload) -> bool:
    """Whether a compiler fuses an operation with its neighbours: elementwise operations, reductions, fills."""
    tags = operation.tags
    return torch.Tag.pointwise in tags or operation.overloadpacket in _REDUCTIONS or not operation._schema.arguments


_REDUCTIONS = (
    *(aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.var_mean, aten._softmax, aten._log_softmax),
    *(aten._softmax_backward_data, aten._log_softmax_backward_data, aten.native_layer_norm, aten.native_layer_norm_backward),
    *(aten.clone, aten._to_copy, aten.cat, aten.full, aten.full_like, aten.zeros, aten.zeros_like, aten.ones_like, aten.arange),
    *(aten.nll_loss_forward, aten.nll_loss_backward, aten.scalar_tensor, aten.slice_backward, aten.select_backward),
    *(aten._fused_rms_norm, aten._fused_rms_norm_backward, aten.constant_pad_nd, aten.new_zeros, aten.copy_, aten.add_),
)


def _joined(group: Sequence[fx.Node], values: dict[fx.Node, Any]) -> list[Cost]:
    """One kernel for a run of light operations."""
    if not group:
        return []
    inside = set(group)
    read = dict.fromkeys(_source(r) for node in group for r in node.all_input_nodes)
    outside = [node for node in read if node not in inside]
    kept = [node for node in group if any(_is_read_outside(user, inside) for user in node.users)]
    return [Cost(bytes=sum(nbytes(tensors_in(values[node])) for node in (*outside, *kept)))]


def _source(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows; any other node itself."""
    while isinstance(node.target, OpOverload) and is_free(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_read_outside(user: fx.Node, inside: set[fx.Node]) -> bool:
    if isinstance(user.target, OpOverload) and is_free(user.target):
        return any(_is_read_outside(further, inside) for further in user.users)
    return user not in inside


def concrete(value: Any, bindings: Bindings) -> Any:
    """A value with its tensors on meta and its symbolic sizes as numbers, at these bindings."""

    def at(tensor: torch.Tensor) -> torch.Tensor:
        shape = [evaluate(dim_of(size), bindings) for size in tensor.shape]
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    value = pytree.tree_map_only(torch.Tensor, at, value)
    value = pytree.tree_map_only(torch.SymFloat, lambda _: 1.0, value)  # costs do not depend on it
    return pytree.tree_map_only(torch.SymInt, lambda size: evaluate(dim_of(size), bindings), value)
