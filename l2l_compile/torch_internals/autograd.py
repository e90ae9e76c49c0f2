"""The adapter to the private side of autograd: which backward runs, what it is asked for, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._dynamo import utils as dynamo_utils


def unseen_by_saved_tensors_hooks() -> AbstractContextManager:
    """Context manager in which saved-tensors hooks of the user (`torch.utils.checkpoint`, `save_on_cpu`) are not called.

    These hooks expect the tensors that a step saves, the same in every call. Compiling and tracing happen in the first call
    only.
    """
    return dynamo_utils._disable_saved_tensors_hooks_during_tracing()


def in_data_parallel() -> bool:
    """Whether a forward of `DistributedDataParallel` is running: it averages the gradients that arrive at `p.grad`."""
    return torch.distributed.is_available() and torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


def behind_this_backward(call: Callable[[], None]) -> None:
    """Inside of an autograd Function's backward: call `call` when the whole backward is over. Does nothing outside of one."""
    if torch._C._current_graph_task_id() != -1:
        torch.autograd.Variable._execution_engine.queue_callback(call)


def graph_is_kept() -> bool:
    """Inside of an autograd Function's backward: whether the user asked for `retain_graph=True`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def backward_is_running() -> bool:
    """Whether this thread is inside of a call of autograd's backward."""
    return torch._C._current_graph_task_id() != -1


def accumulates(node: Any, arguments: Sequence[object], parameters: Collection[object]) -> bool:
    """Inside of an autograd Function's backward: whether this backward call accumulates into `.grad` of the parameters.

    `node` is the autograd node of the Function, `arguments` are its arguments. False if only gradients of other tensors are
    asked for: `torch.autograd.grad(loss, x)`, `backward(inputs=[x])`. Raises `ValueError` if only some of the parameters are
    asked for, or if their gradients are to be returned (`torch.autograd.grad(loss, parameters)`).
    """
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    asked_for = set()
    for tensor, (accumulator, _) in zip(tensors, node.next_functions, strict=True):
        if accumulator is not None and tensor in parameters:
            try:
                asked_for.add(torch._C._will_engine_execute_node(accumulator))
            except RuntimeError:
                raise ValueError("torch.autograd.grad() of parameters") from None
    if len(asked_for) > 1:
        raise ValueError("backward(inputs=...) with some of the parameters")
    return asked_for != {False}


@contextmanager
def recording_gradients() -> Iterator[None]:
    """Context manager in which autograd records operations, also in an operator's kernel, which Inductor calls below the autograd keys."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
