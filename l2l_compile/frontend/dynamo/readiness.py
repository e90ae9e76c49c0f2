"""Refuses models that cannot be traced, before Dynamo fails while tracing them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._dynamo import trace_rules
from torch.utils import _pytree as pytree

from l2l_compile.errors import DeviceError, L2LError
from l2l_compile.torch_internals.calls import CompiledCall


def check_ready(values: Iterable[Any]) -> None:
    """Check the local variables of a frame: the model and its arguments are among them.

    Raises `L2LError` for a model with layers of `fully_shard`, and `DeviceError` for a model on meta if its arguments have
    tensors of another device.
    """
    values = list(values)
    given = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    for module in values:
        if isinstance(module, nn.Module) and "_modules" in module.__dict__:  # else the frame is its __init__
            _check_module(module, any(tensor.device.type != "meta" for tensor in given))


def without_values(what: str) -> DeviceError:
    """The error for a tensor on meta in a model that has to run. `what` names the tensor."""
    return DeviceError(
        f"{what} is on meta, without values: give the model memory with model.to_empty(device='cpu'), and load its weights. (explain "
        "takes a model on meta as it is)"
    )


def _check_module(module: nn.Module, is_run: bool) -> None:
    if (name := _sharded_by_hooks(module)) is not None:
        raise L2LError(
            f"layer '{name}' is sharded by fully_shard, whose hooks gather weights outside of the graph: shard the plain model with "
            "l2l_compile.shard"
        )
    _leave_unpacked(module)
    if is_run and (name := next((n for n, p in module.named_parameters() if p.device.type == "meta"), None)) is not None:
        raise without_values(f"parameter '{name}'")


def _leave_unpacked(module: nn.Module) -> None:
    """Have bitsandbytes leave its 4-bit weights as they are stored.

    On a host with AVX512-BF16, a layer in eval mode writes them into a form of its own when it first runs. Dynamo cannot trace that,
    and no device but this host could read them.
    """
    for layer in module.modules():
        if layer.__dict__.get(_PACKS):
            layer.__dict__[_PACKS] = False


def refuse_what_dynamo_skips(backend: Any, call: CompiledCall) -> None:
    """Raise `L2LError` for a module of PyTorch, such as `nn.Sequential`, that `module.compile()` has compiled in place.

    Dynamo does not look at frames of PyTorch's own files: the module would run uncompiled. `torch.compile(module)` puts a frame around
    it. Looked at before the first call of each `torch.compile` call.
    """
    if getattr(backend, _LOOKED_AT, False):
        return
    module = call.compiled_in_place
    if module is not None and trace_rules.check(module.forward):
        name = type(module).__name__
        raise L2LError(
            f"{name}.compile() compiles nothing: {name}.forward is PyTorch's own code, which Dynamo leaves uncompiled there. Take "
            "torch.compile(model, backend='l2l')"
        )
    setattr(backend, _LOOKED_AT, True)


_LOOKED_AT = "_l2l_looked_at"


def refuse_packed(modules: Iterable[nn.Module]) -> None:
    """Raise `L2LError` for weights that bitsandbytes has packed for the host, in a model whose layers run elsewhere."""
    for module in modules:
        for name, layer in module.named_modules():
            state = getattr(layer._parameters.get("weight"), "quant_state", None)
            if getattr(state, "packing_format_for_cpu", False):
                raise L2LError(
                    f"the weight of '{name}' is packed for this host, in a form that no other device can read: bitsandbytes did it when the "
                    "model ran on the host in eval mode. Load the model anew, and call the compiled model first"
                )


_PACKS = "support_avx512bf16_for_cpu"  # an attribute of `Linear4bit` of bitsandbytes


def _sharded_by_hooks(module: nn.Module) -> str | None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if not imported, no model uses it
    if fsdp is None:
        return None
    layers = itertools.islice(module.named_modules(), 1, None)  # its own hooks run before its forward is traced
    return next((name for name, layer in layers if isinstance(layer, fsdp.FSDPModule)), None)
