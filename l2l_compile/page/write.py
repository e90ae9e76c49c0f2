"""The page as text: the template with the data in it."""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any

from ..timeline import Timeline
from .data import data_of

_DATA = "/*DATA*/null"


def page_of(report: Any, timeline: Timeline | None, title: str) -> str:
    """One self-contained HTML page about a `Report`. Raises `LoweringError` for a block that cannot be traced."""
    template = (resources.files("l2l_compile") / "page" / "page.html").read_text(encoding="utf-8")
    text = json.dumps(data_of(report, timeline, title), separators=(",", ":")).replace("</", "<\\/")
    assert _DATA in template
    return template.replace(_DATA, text)


def frame_of(page: str, height: int = 900) -> str:
    """A page embedded in another page, such as a notebook, as an iframe."""
    return f'<iframe srcdoc="{html.escape(page, quote=True)}" width="100%" height="{height}" style="border:0"></iframe>'
