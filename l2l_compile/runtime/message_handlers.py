"""Nodes that send values to another stage of a pipeline, or receive them. Handlers as in `executor.py`."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from l2l_compile.ir import nodes
from l2l_compile.runtime.executor import Executor, handles
from l2l_compile.runtime.messages import Arrival, counts_of, parts_of, send_parts
from l2l_compile.runtime.runtime_value import RuntimeValue


@handles(nodes.send)
def _send(run: Executor, node: fx.Node, values: Sequence[RuntimeValue], to: int) -> RuntimeValue:
    described = nodes.operands(node).values
    there = [(value, n) for value, n in zip(values, described, strict=True) if not value.absent]
    counts = counts_of(run.step, [n for _, n in there])
    parts = [(position, number) for position, number in parts_of(counts) if not (node in run.left and counts[position])]
    if parts:
        send_parts(run, to, [value for value, _ in there], parts)
        run.outgoing += [value for value, _ in there]
    return RuntimeValue(absent=True)


@handles(nodes.recv)
def _recv(run: Executor, node: fx.Node, source: int) -> RuntimeValue:
    picked = sorted((user for user in node.users if user.target is operator.getitem), key=lambda user: nodes.operands(user).index)
    absent = run.step.absent
    values = [RuntimeValue(absent=(user.meta["segment"], user.meta["value"]) in absent) for user in picked]
    arriving = [(user, value) for user, value in zip(picked, values, strict=True) if not value.absent]
    if arriving:
        run.arriving += [value for _, value in arriving]
        Arrival(run, source, [user for user, _ in arriving], [value for _, value in arriving])
    return RuntimeValue(results=values)
