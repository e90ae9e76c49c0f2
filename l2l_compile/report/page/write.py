"""The page as text: the template with the data in it.

Names of modules and of inputs are data of a model, which may come from anybody. They get into the page as JSON alone, in which no
letter is left that HTML or JavaScript could read as markup. The script of the page writes them as text, never as HTML.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from l2l_compile.report.page.data import data_of
from l2l_compile.timeline import Timeline

_DATA = "/*DATA*/null"


def page_of(report: Any, timeline: Timeline | None, title: str, stages: Sequence[Timeline] = ()) -> str:
    """One self-contained HTML page about a `Report`; `stages` are the timelines of all ranks of a pipeline, in their order.

    Raises `LoweringError` for a block that cannot be traced.
    """
    template = (resources.files("l2l_compile.report.page") / "page.html").read_text(encoding="utf-8")
    text = in_script(data_of(report, timeline, title, stages))
    assert _DATA in template
    return template.replace(_DATA, text)


# "<" would end the script (`</script>`) or change how its end is found (`<!--<script>`). The two separators end a line of
# JavaScript within a string.
_ESCAPED = str.maketrans({letter: f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"})


def in_script(data: Any) -> str:
    """Data as JSON that may stand in a script of a page."""
    return json.dumps(data, separators=(",", ":")).translate(_ESCAPED)


def frame_of(page: str, height: int = 900) -> str:
    """A page embedded in another page, such as a notebook, as an iframe.

    It is sandboxed: its script runs, but has no access to the notebook, its cookies or its kernel.
    """
    content = html.escape(page, quote=True)
    return f'<iframe srcdoc="{content}" sandbox="allow-scripts" width="100%" height="{height}" style="border:0"></iframe>'
