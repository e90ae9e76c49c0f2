"""Reuses the fake results of operations that Dynamo has run before. An adapter to PyTorch's fake tensors.

While it traces, Dynamo runs every operation on fake tensors, to find the shape, dtype and strides of its result. With a
symbolic batch, every size is computed with sympy, and this becomes the largest part of a capture (a linear takes about
4 ms). But layers repeat: the same operation gets operands with the same metadata again and again. Therefore, in frames
that are compiled by this backend:

    run_node(operation, operands)
        key = (operation, the metadata of each operand, the modes of the thread)
        not seen:  run the operation; if its result is a function of its key alone, keep the metadata of the result
        seen:      make tensors with that metadata again

A result is made again as PyTorch would make it. It has a storage of its own, or, if it is a view, the storage and the version
counter of the operand. If it had a `grad_fn`, its new `grad_fn` leads to the operands. Its guards exist since the first run.
Some operations cannot be described by such a key, and run as always: operations that write, return sizes or create new
symbols, operations on tensors with values or on subclasses, and higher-order operations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef

from l2l_compile.devices.registry import KINDS

_PLAIN = (
    type(None), bool, int, float, complex, str, type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def propagate(memory: dict[Hashable, FakeResult], target: Hashable, operands: Any, run: Callable[[], Any]) -> Any:
    """The result of `run`, an operation on fake tensors. It is made from `memory` if the key is in it."""
    tensors: list[FakeTensor] = []
    try:
        key = (target, _describe(operands, tensors), _modes())
    except _Unknown:
        return run()
    if not tensors or torch.is_inference_mode_enabled():
        return run()  # a factory may depend on more than its operands; in inference mode, tensors have no version counters
    if key in memory:
        return memory[key].again(tensors)
    versions = [t._version for t in tensors]
    result = run()
    if [t._version for t in tensors] == versions and _is_still(operands, key[1]):
        if (known := _learn(result, tensors)) is not None:
            memory[key] = known
    return result


def _is_still(operands: Any, description: Hashable) -> bool:
    try:
        return _describe(operands, []) == description
    except _Unknown:
        return False


class _Unknown(Exception):
    """An operand that no key describes."""


def _describe(value: Any, tensors: list[FakeTensor]) -> Hashable:
    """A key for an operand, or for a nested structure of operands; its tensors are appended to `tensors`."""
    kind = type(value)
    if kind is FakeTensor:
        tensors.append(value)
        return _metadata(value)
    if kind in _PLAIN:
        return (kind, value)  # with its type: 1, 1.0 and True are equal
    if kind in (torch.SymInt, torch.SymFloat):
        return (kind, value.node.expr)
    if kind in (tuple, list, torch.Size):
        return (kind, *(_describe(v, tensors) for v in value))
    if isinstance(value, dict):
        return (kind, *((k, _describe(v, tensors)) for k, v in value.items()))
    if kind is slice:
        return (kind, *(_describe(v, tensors) for v in (value.start, value.stop, value.step)))
    raise _Unknown


def _metadata(t: FakeTensor) -> Hashable:
    if t.layout is not torch.strided or t.constant is not None or t.real_tensor is not None:
        raise _Unknown
    sizes = (*t.shape, *t.stride(), t.storage_offset())
    return (
        *(s.node.expr if isinstance(s, torch.SymInt) else s for s in sizes),
        t.dtype, t.fake_device, t.requires_grad, t.is_conj(), t.is_neg(), t.pytype, t.dispatch_keys,
    )  # fmt: skip


def _modes() -> Hashable:
    """The modes that an operation's result depends on besides its operands."""
    cuda = torch.backends.cuda
    return (
        torch.is_grad_enabled(), torch.get_default_dtype(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in KINDS),
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(), torch._C._len_torch_function_stack(),
    )  # fmt: skip


@dataclass(frozen=True)
class _Same:
    """A result that is the operand at `index` itself."""

    index: int


@dataclass(frozen=True)
class _Made:
    """A result that is made from its metadata.

    pattern   a meta tensor with this metadata
    base      the index of the operand whose storage the result views; None if the result has a storage of its own
    nbytes    the size of its own storage in bytes, int or SymInt; None with a `base`
    """

    pattern: torch.Tensor
    base: int | None
    nbytes: Any
    fake_device: torch.device
    dispatch_keys: Any
    requires_grad: bool


@dataclass(frozen=True)
class FakeResult:
    """The result of an operation: one tensor (`kind` is None), or a tuple or list of tensors."""

    kind: type | None
    parts: tuple[_Same | _Made, ...]

    def again(self, operands: Sequence[FakeTensor]) -> Any:
        """The operation's result for operands with the same metadata."""
        made = [operands[p.index] if isinstance(p, _Same) else _make(p, operands) for p in self.parts]
        return made[0] if self.kind is None else self.kind(made)


def _learn(result: Any, operands: Sequence[FakeTensor]) -> FakeResult | None:
    """How to make a result again; None if its metadata is not enough for that."""
    kind = type(result) if type(result) in (tuple, list) else None
    leaves = [result] if kind is None else result
    found = [_learn_part(leaf, operands) for leaf in leaves]
    parts = [part for part in found if part is not None]
    if len(parts) < len(leaves):
        return None
    own = [
        StorageWeakRef(leaf.untyped_storage())
        for leaf, p in zip(leaves, parts, strict=True)
        if isinstance(p, _Made) and p.base is None
    ]
    if len(set(own)) < len(own):  # two results in one storage
        return None
    return FakeResult(kind, tuple(parts))


def _learn_part(leaf: Any, operands: Sequence[FakeTensor]) -> _Same | _Made | None:
    if type(leaf) is not FakeTensor or isinstance(leaf, torch.nn.Parameter) or leaf.layout is not torch.strided:
        return None
    for index, operand in enumerate(operands):
        if leaf is operand:
            return _Same(index)
    storage = StorageWeakRef(leaf.untyped_storage())
    bases = [i for i, operand in enumerate(operands) if StorageWeakRef(operand.untyped_storage()) == storage]
    plain = leaf.constant is None and leaf.real_tensor is None and leaf.pytype is None
    if not plain or len(bases) > 1 or free_unbacked_symbols(leaf) or (leaf.requires_grad and leaf.grad_fn is None):
        return None
    with in_kernel_invocation_manager(leaf.fake_mode), torch.no_grad():
        pattern = leaf.data
    return _Made(
        pattern, bases[0] if bases else None, None if bases else _storage_bytes(leaf),
        leaf.fake_device, leaf.dispatch_keys, leaf.requires_grad,
    )  # fmt: skip


def _storage_bytes(t: torch.Tensor) -> Any:
    if any(isinstance(size, int) and size == 0 for size in t.shape):
        return 0
    elements = t.storage_offset() + 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return elements * t.element_size()


def _make(part: _Made, operands: Sequence[FakeTensor]) -> FakeTensor:
    mode = operands[0].fake_mode

    def fake() -> FakeTensor:
        with in_kernel_invocation_manager(mode), torch.no_grad():
            elem = part.pattern.data  # the same metadata with a version counter of its own
            if part.base is None:
                owner = torch.empty(0, dtype=torch.uint8, device="meta")
                torch.ops.inductor.resize_storage_bytes_(owner, part.nbytes)
                torch._functionalize_unsafe_set(elem, owner)
            else:
                view = operands[part.base].detach()
                torch._functionalize_unsafe_set(elem, view)
                view.data = elem  # keeps the version counter that the view shares with its operand
                elem = view
        return FakeTensor(mode, elem, part.fake_device, dispatch_keys=part.dispatch_keys)

    return _Known.apply(fake, *operands) if part.requires_grad else fake()


class _Known(torch.autograd.Function):
    """Gives a tensor that was made again a `grad_fn` that leads to the operands."""

    @staticmethod
    def forward(ctx: Any, fake: Callable[[], FakeTensor], *operands: FakeTensor) -> FakeTensor:
        ctx.operands = operands
        return fake()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple:
        return None, *(torch.empty_like(o) if o.requires_grad else None for o in ctx.operands)
