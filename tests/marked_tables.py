"""Tables of documents that stand between two marks: `<!-- mark -->` and `<!-- end -->`. `UPDATE_DOCUMENTS=1` writes them anew."""

from __future__ import annotations

import os
import re
from pathlib import Path


def assert_written(page: Path, mark: str, table: str) -> None:
    """The page has this table behind the mark. Writes it first where documents are to be updated."""
    text = page.read_text()
    written = re.sub(rf"(?s)(?<=<!-- {mark} -->\n).*?(?=<!-- end -->)", lambda _: table + "\n", text, count=1)
    if os.environ.get("UPDATE_DOCUMENTS"):
        page.write_text(written)
    assert f"<!-- {mark} -->\n" in text and page.read_text() == written
