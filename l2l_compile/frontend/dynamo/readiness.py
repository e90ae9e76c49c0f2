"""Refuses models that cannot be traced, before Dynamo fails while tracing them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from l2l_compile.errors import DeviceError, L2LError


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
    if is_run and (name := next((n for n, p in module.named_parameters() if p.device.type == "meta"), None)) is not None:
        raise without_values(f"parameter '{name}'")


def _sharded_by_hooks(module: nn.Module) -> str | None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if not imported, no model uses it
    if fsdp is None:
        return None
    layers = itertools.islice(module.named_modules(), 1, None)  # its own hooks run before its forward is traced
    return next((name for name, layer in layers if isinstance(layer, fsdp.FSDPModule)), None)
