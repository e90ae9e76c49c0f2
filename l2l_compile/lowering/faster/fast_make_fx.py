"""Faster traces of `make_fx`: slow steps that do not change the graph are left out. An adapter to private `torch.fx`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx import _symbolic_trace
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.utils._pytree import tree_leaves

from l2l_compile.ir.values import Bindings, TensorSpec
from l2l_compile.torch_internals.fake_results import result_of
from l2l_compile.torch_internals.patches import replace

SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
_mode: ContextVar[FakeTensorMode | None] = ContextVar("mode", default=None)  # of the current trace
_unpatched: ContextVar[bool] = ContextVar("unpatched", default=False)


class TraceMode(FakeTensorMode):
    """The fake tensor mode of a trace. Results whose operands have only numbers as sizes are cached for traces of other blocks.

    A result with symbols is valid in its own trace alone, and caching it takes longer than computing it.
    """

    def __init__(self, shape_env: Any):
        super().__init__(allow_non_fake_inputs=True, shape_env=shape_env)
        self.cache_enabled = True

    def _cached_dispatch_impl(
        self, func: Any, types: Sequence[type], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        made = result_of(self, func, args, kwargs)
        if made is not None:
            return made
        if any(map(_is_symbolic, tree_leaves((args, kwargs)))):
            return self._dispatch_impl(func, types, args, kwargs)
        return super()._cached_dispatch_impl(func, types, args, kwargs)

    def operands(self, specs: Sequence[TensorSpec], bindings: Bindings, device: torch.device) -> list[torch.Tensor]:
        """Contiguous tensors with the specs' sizes. Calls of `torch.empty` within the mode would take ten times as long."""
        with in_kernel_invocation_manager(self):
            meta = [torch.empty(spec.sizes(bindings), dtype=spec.dtype, device="meta") for spec in specs]
        return [FakeTensor(self, tensor, device) for tensor in meta]


def _is_symbolic(value: object) -> bool:
    return value._has_symbolic_sizes_strides if isinstance(value, torch.Tensor) else isinstance(value, SIZES)


@contextmanager
def lean(mode: TraceMode) -> Iterator[None]:
    """Context manager in which `make_fx` traces fake tensors of this mode without slow steps (see the module's docstring).

    Not for traces of Inductor: its rules for quantized tensors read `meta["tensor_meta"]`.
    """
    token = _mode.set(mode)
    try:
        with mode, modules_left_alone(), _use_lazy_graph_module(True):  # a graph's Python code is written where it runs
            yield
    finally:
        _mode.reset(token)


@contextmanager
def modules_left_alone() -> Iterator[None]:
    """Context manager in which `make_fx` does not patch the methods of `nn.Module`.

    Its patches change nothing here, but they invalidate Python's attribute caches for all modules.
    """
    token = _unpatched.set(True)
    try:
        yield
    finally:
        _unpatched.reset(token)


_extract_tensor_metadata = proxy_tensor._extract_tensor_metadata
_new_patcher = _symbolic_trace._new_patcher


def _metadata(value: torch.Tensor, *settings: bool) -> object:
    """`meta["tensor_meta"]` of a node; None in our traces: they use `meta["val"]`, and it would take a tenth of the time."""
    mode = _mode.get()
    if mode is not None and getattr(value, "fake_mode", None) is mode:
        return None
    return _extract_tensor_metadata(value, *settings)


class _NoPatches(_symbolic_trace._Patcher):
    def patch(self, frame_dict: dict[str, Any], name: str, new_fn: Callable, deduplicate: bool = True) -> None:
        pass

    def patch_method(self, cls: type, name: str, new_fn: Callable, deduplicate: bool = True) -> None:
        pass


def _patcher() -> AbstractContextManager[_symbolic_trace._Patcher]:
    return nullcontext(_NoPatches()) if _unpatched.get() else _new_patcher()


replace(proxy_tensor, "_extract_tensor_metadata", _metadata)
replace(_symbolic_trace, "_new_patcher", _patcher)
