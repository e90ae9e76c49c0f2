"""Preparations that a model makes in its first call, such as hooks: they run while Dynamo traces the call, before it goes on.

Dynamo does not compile such code: a model of transformers takes a lock and registers hooks in its layers when hidden states,
attentions or router logits are first asked for. Dynamo would end its graph there, and trace the layers below without their hooks.
The adapter to this function of transformers. In a version without it, Dynamo ends the graph and the frame is reported as skipped.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch._dynamo.comptime import comptime

from l2l_compile.torch_internals.patches import is_replaced, replace

_MODULE, _FUNCTION = "transformers.utils.output_capturing", "maybe_install_capturing_hooks"


def prepare_while_tracing() -> None:
    """Install a hook: hooks of transformers are installed while a call is traced. Does nothing before transformers is imported."""
    module = sys.modules.get(_MODULE)
    original = getattr(module, _FUNCTION, None)
    if original is None or is_replaced(original):
        return

    def install_now(context: Any) -> None:
        """Called by Dynamo with the frame that it traces."""
        original(context.get_local("model")._i_will_not_complain_if_bc_breaks_VariableTracker().value)

    @functools.wraps(original)
    def maybe_install_capturing_hooks(model: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            comptime(install_now)
        else:
            original(model)

    replace(module, _FUNCTION, maybe_install_capturing_hooks)
