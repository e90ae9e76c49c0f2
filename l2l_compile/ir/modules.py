"""The modules around an operation of Dynamo's graph, by name."""

from __future__ import annotations

import functools
import re

from torch import fx

Path = tuple[str, ...]


def module_stack(node: fx.Node) -> list[tuple[Path, type]]:
    """Path and class of the modules around an operation, outermost first.

    If several modules hold a module, Dynamo names it by its path in the first of them. Here it has its path in the module that
    calls it.
    """
    found: list[tuple[Path, type]] = []
    outer: Path = ()
    path: Path = ()
    for name, kind in (node.meta.get("nn_module_stack") or {}).values():
        inner = _path(name)
        path = (*path, *_below(outer, inner))
        found.append((path, kind))
        outer = inner
    return found


def _below(outer: Path, inner: Path) -> Path:
    """The path of a module relative to its caller; if it is not inside of the caller, its own name and the indices after it."""
    if inner[: len(outer)] == outer:
        return inner[len(outer) :]
    name = max((i for i, part in enumerate(inner) if not part.isdigit()), default=0)
    return inner[name:]


@functools.cache
def _path(name: str) -> Path:
    """The path of a module, from Dynamo's expression for it."""
    name = re.sub(r"^L\['\w+'\]\.?", "", name)
    name = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", name)
    return tuple(part for part in name.split(".") if part and part not in ("__self__", "__dict__", "_modules"))
