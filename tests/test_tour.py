"""The notebook examples/tour.ipynb runs from its first cell to its last, and shows the page of a report."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "examples" / "tour.ipynb"


@pytest.mark.slow
def test_the_cells_of_the_tour_run_in_order(capsys, monkeypatch):
    notebook = json.loads(PATH.read_text())
    module = types.ModuleType("tour")  # Dynamo looks its globals up by the name of their module
    monkeypatch.setitem(sys.modules, "tour", module)
    scope = vars(module)
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        exec(compile(cell, str(PATH), "exec"), scope)
    printed = capsys.readouterr().out
    for words in ("device memory at its peak", "equal in all of", "at first", "peak_device_bytes", "fetch_weights('1'"):
        assert words in printed, words
    assert scope["report"]._repr_html_().startswith("<iframe"), "a notebook shows the report as its page"
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "outputs are not kept in the repository"
