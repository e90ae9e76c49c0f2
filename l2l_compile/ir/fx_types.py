"""Arguments and targets of `fx` nodes, with types: `fx` declares each as a union over all kinds of nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a call."""
    return node.args


def source_of(node: fx.Node) -> fx.Node:
    """The first argument of an operation that works on one tensor, such as a cast or a view."""
    source, *_ = node.args
    if not isinstance(source, fx.Node):
        raise TypeError(f"the first argument of '{node.name}' is no node: {source!r}")
    return source


def function_of(node: fx.Node) -> Callable[..., Any]:
    """The target of a `call_function` node."""
    if isinstance(node.target, str):
        raise TypeError(f"'{node.name}' has no function as its target: {node.target!r}")
    return node.target


def name_of(node: fx.Node) -> str:
    """The target of a node that is no `call_function`: the name of an input, an attribute or a method."""
    if not isinstance(node.target, str):
        raise TypeError(f"'{node.name}' has no name as its target: {node.target!r}")
    return node.target


def attribute(module: torch.nn.Module, node: fx.Node) -> Any:
    """The object that a `get_attr` node in a graph of `module` stands for."""
    return operator.attrgetter(name_of(node))(module)
