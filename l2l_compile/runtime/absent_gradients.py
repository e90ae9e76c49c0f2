"""Which gradients the ranks of a pipeline do not make.

A value that wants a gradient may get none: a segment reads it, but no gradient passes through. The rank that made the value must not
wait for it. Each rank finds out for the whole program, from the traces of its blocks, without a message.
"""

from __future__ import annotations

from collections.abc import Sequence

from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Value
from l2l_compile.runtime.step import Step


def absent_gradients(step: Step, program: Program, mask: Sequence[bool]) -> frozenset[tuple[int, str]]:
    """The gradients that segments do not make of values that want one, by segment and name.

    `mask` says which outputs of the graph have a gradient.
    """
    captured, own = program.captured, {segment.block for segment in program.here}
    lowering = step.engine.lowering
    of_others = lowering.tracing_alone()  # of blocks that run on other ranks alone
    newest = {value.node: value for segment in program.segments for value in segment.outputs}
    outputs = zip(captured.outputs, mask, strict=False)  # those that the model writes into take none in a pipeline
    there: set[Value] = {newest[node] for node, wanted in outputs if wanted and node in newest}
    absent: set[tuple[int, str]] = set()
    for segment in reversed(program.segments):
        block, arriving = segment.block, tuple(value in there for value in segment.outputs)
        exist: Sequence[bool] = (False,) * len(segment.values)
        if any(arriving) and any(spec.differentiable for spec in block.operands):
            code = (lowering if block in own else of_others).backward(block, step.rows.bindings_of(segment)[0], arriving)
            exist = code.present[len(block.weights) :]
        for value, spec, exists in zip(segment.values, block.values, exist, strict=True):
            if exists:
                there.add(value)
            elif spec.differentiable:
                absent.add((segment.index, f"d {value}"))
    return frozenset(absent)
