"""What `torch.compile(model, backend="l2l")` loads: the backend, and the planner behind the option `plan`."""

from __future__ import annotations

from typing import Any

from l2l_compile.backend import l2l
from l2l_compile.session import PLANS_FIRST
from l2l_compile.torch_internals import calls

__all__ = ["l2l"]


def _plan_first(owner: Any, call: calls.CompiledCall) -> None:
    """Before a call of a compiled model: decide on its options, if they are left to the first training step."""
    if (getattr(owner, "kwargs", {}).get("options") or {}).get("plan") is not None:
        setattr(owner, PLANS_FIRST, True)
        # here, since a program without the option need not load a planner
        from l2l_compile.planner.first_training_step import plan_first_step

        plan_first_step(owner, call)


calls.look_before_calls(calls.streams_layers, _plan_first)
