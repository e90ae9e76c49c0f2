"""`view`: the page of a compiled model."""

from __future__ import annotations

import tempfile
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Any

from l2l_compile.errors import L2LError
from l2l_compile.report.explain import model_name, report_of
from l2l_compile.session import session_of


def view(compiled: Any, path: str | Path | None = None, *, show: bool = True) -> Path:
    """Write the page of a compiled model that has run, and open it in a browser. Returns the path of the page.

    path   the file to write; None for a new temporary file
    show   whether to open it

    The page shows the last measured step (`with l2l_compile.profile(compiled): ...`). Without a measured step, it has no lanes.
    Raises `L2LError` for a model that has not run, and `TypeError` if `compiled` is no compiled model of this backend.
    """
    session = session_of(compiled)
    if session is None or not session.runners:
        raise L2LError("the model has not run yet: run a step, or save the page of l2l_compile.explain(model)(*batch)")
    made = report_of([r.program for r in session.runners], session.options)
    report = replace(made, measured=session.timeline, model=model_name(compiled))
    where = Path(path) if path is not None else Path(tempfile.mkdtemp(prefix="l2l_")) / "report.html"
    report.save(where)
    if show:
        webbrowser.open(where.resolve().as_uri())
    return where
