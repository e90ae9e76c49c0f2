"""Nodes that send values to another stage of a pipeline, or receive them. Handlers as in `executor.py`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.ir.leaving import picked
from l2l_compile.runtime.executor import Executor, handles
from l2l_compile.runtime.messages import Arrival, parts_left, send_parts
from l2l_compile.runtime.runtime_value import RuntimeValue


@handles(nodes.send)
def _send(run: Executor, node: fx.Node, values: Sequence[RuntimeValue], to: int) -> RuntimeValue:
    described = nodes.operands(node).values
    there = [(value, n) for value, n in zip(values, described, strict=True) if not value.absent]
    parts = parts_left(run.step, [n for _, n in there], node in run.left)
    if parts:
        send_parts(run, to, [value for value, _ in there], parts)
        run.outgoing += [value for value, _ in there]
    return RuntimeValue(absent=True)


@handles(nodes.recv)
def _recv(run: Executor, node: fx.Node, source: int) -> RuntimeValue:
    received = picked(node)
    absent = run.step.absent
    values = [RuntimeValue(absent=(user.meta["segment"], user.meta["value"]) in absent) for user in received]
    arriving = [(user, value) for user, value in zip(received, values, strict=True) if not value.absent]
    if arriving:
        run.arriving += [value for _, value in arriving]
        Arrival(run, source, [user for user, _ in arriving], [value for _, value in arriving])
    return RuntimeValue(results=values)
