"""Import the package from this checkout where it is not installed: a GPU that is lent for half an hour has no network."""
from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def import_package() -> None:
    """Make `import l2l_compile` work. The folder `passes` of the checkout is the package `l2l_compile.passes`."""
    if importlib.util.find_spec("l2l_compile") is not None:
        return
    spec = importlib.util.spec_from_file_location(
        "l2l_compile", ROOT / "l2l_compile" / "__init__.py", submodule_search_locations=[str(ROOT / "l2l_compile"), str(ROOT)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["l2l_compile"] = module
    spec.loader.exec_module(module)
