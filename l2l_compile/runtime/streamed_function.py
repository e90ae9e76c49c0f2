"""Joins a program to autograd: forward streams, backward streams in reverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from l2l_compile.errors import L2LError
from l2l_compile.ir.captured import Captured
from l2l_compile.reentry import check, whole
from l2l_compile.runtime.call_arguments import Arguments
from l2l_compile.runtime.outputs import Outputs
from l2l_compile.runtime.runtime_value import RuntimeValue
from l2l_compile.runtime.stashes import Stashes
from l2l_compile.runtime.step import Engine, Step
from l2l_compile.torch_internals.autograd import accumulates, graph_is_kept


class Streamed(Protocol):
    """A program that runs (`runtime/runner.py`)."""

    engine: Engine
    captured: Captured
    arguments: Arguments
    outputs: Outputs

    def forward(self, arguments: Sequence, to_train: bool) -> tuple[list[torch.Tensor], Step, Stashes]: ...

    def backward(
        self, step: Step, stashes: list[RuntimeValue], gradients: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor]: ...


class StreamedFunction(torch.autograd.Function):
    """A call of a program."""

    @staticmethod
    def forward(ctx: Any, runner: Streamed, *arguments: Any) -> Any:
        outputs, step, stashes = runner.forward(arguments, to_train=True)
        ctx.runner, ctx.step, ctx.stashes = runner, step, stashes
        ctx.set_materialize_grads(False)
        written = {*step.writes, *runner.outputs.carried, *runner.arguments.snapshots(arguments)}
        late = (
            step.host.pending.parameters if step.host.pending is not None and runner.engine.options.delay else ()
        )  # versions of them are kept
        tensors = {
            i: a for i, a in enumerate(arguments) if isinstance(a, torch.Tensor) and i not in written and not (late and a in late)
        }
        ctx.versions = {i: a._version for i, a in tensors.items() if not a.is_inference()}
        ctx.save_for_backward(*tensors.values())  # so that a write into one before backward is an error, as in eager
        ctx.mark_non_differentiable(*[o for o, d in zip(outputs, runner.outputs.differentiable, strict=True) if not d])
        return tuple(outputs)

    @staticmethod
    @torch.compiler.disable  # a compiled frame may call backward: this is not a part of it
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True: the result would be silently cut off from the model
            raise L2LError(
                "backend 'l2l' computes first derivatives only: backward was called with create_graph=True. "
                "Differentiate the uncompiled model where second derivatives are needed"
            )
        try:
            ctx.saved_tensors  # noqa: B018 - raises when a saved tensor was written into, or when backward has run before
        except RuntimeError as error:
            if ctx.step.host.pending is not None:
                ctx.step.host.pending.check()  # the writer may be an update
            inputs = ctx.runner.captured.inputs
            changed = [inputs[i] for i, v in ctx.versions.items() if ctx.step.given[i]._version != v]
            if changed:
                kind = "input" if changed[0].kind == "value" else changed[0].kind
                error.add_note(
                    f"{kind} '{changed[0].name}' was written after the forward, and backend 'l2l' recomputes the forward from it. Write into it "
                    "after backward, or have the model read a copy of it (x.clone())"
                )
            raise
        return _differentiate(ctx, gradients)


@whole("a backward")
def _differentiate(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The backward of a program. Raises `ReentryError`."""
    check()
    count = len(ctx.runner.captured.inputs)
    if all(g is None for g in gradients):
        return (None,) * (1 + count)
    kept = graph_is_kept()
    _choose_gradients(ctx, ctx.step, kept)
    found = ctx.runner.backward(ctx.step, ctx.stashes.take(keep=kept), gradients)
    return None, *(found.get(index) for index in range(count))


def _choose_gradients(node: Any, step: Step, kept: bool) -> None:
    """Set `step.host.for_optimizer`: whether the current backward is for the optimizer.

    If it is not, and if it is the last backward through its forward, the pending backward is given up. Raises `L2LError`.
    """
    step.host.for_optimizer = True
    if step.host.pending is None:
        return
    try:
        step.host.for_optimizer = accumulates(node, step.given, step.host.pending.parameters)
    except ValueError as error:
        raise L2LError(
            f"{error}: the option optimizer has all gradients of a backward go to its updates, so that none can be returned or left "
            "out. Use update='at_step'"
        ) from error
    if not (step.host.for_optimizer or kept):
        step.host.pending.give_up()
