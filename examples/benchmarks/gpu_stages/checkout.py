"""Imports the package from this checkout if it is not installed: a GPU machine lent for half an hour may have no network."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class Checkout(importlib.abc.MetaPathFinder):
    """Finds `l2l_compile` in this checkout, whose folder `passes` is the package `l2l_compile.passes`."""

    def find_spec(self, name, path=None, target=None):
        if name != "l2l_compile":
            return None
        folder = ROOT / "l2l_compile"
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder), str(ROOT)]
        )


def find_package() -> None:
    """Make `import l2l_compile` work. An installed package is found first."""
    if not any(isinstance(finder, Checkout) for finder in sys.meta_path):
        sys.meta_path.append(Checkout())
