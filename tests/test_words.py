"""The words of the glossary are in use, and words that were replaced do not come back.

`python tests/test_words.py` prints, for each term, the module that is about it, the classes that have it in their names, and how
often it is used.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    p for name in ("l2l_compile", "passes") for p in (ROOT / name).rglob("*.py") if "l2l_compile/passes" not in str(p)
)
PROSE = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
REPLACED = {  # an identifier, a phrase or a file name, and the word in its place
    r"is_divided|Divided\w*": "sharded",
    r"Pieces\b(?! of)": "ShardSpec",
    r"PART_OF|part_group": "tp_parameter, tp_group",
    r"[Cc]anonical form|BlockForm|Forms": "fingerprint",
    r"UpdatesBehindTheDevice|[Uu]pdates? behind the device": "overlapped update",
    r"Hearer|put_around_those_of_the_user": "Listener, wrap_user_hooks",
    r"PutOff|put_off": "deferred",
    r"l2l_compile\.trace\b": "profile",
    r"own_pieces|own_rows\(|sum_ranks|count_once": "local_shard, local_rows, all_reduce, mask_to_first_rank",
}


@cache
def text_of(path: Path) -> str:
    return path.read_text()


def glossary() -> dict[str, str]:
    """The meaning of each term, in the order of ARCHITECTURE."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text_of(ROOT / "ARCHITECTURE.md").split("## Glossary")[1].split("\n## ")[0], re.M)
    return {term: meaning for names, meaning in rows[1:] for term in names.split(", ")}


def pattern_of(term: str) -> str:
    return re.sub(r"[- ]", "[-_ ]?", term)


def classes_named(term: str) -> list[tuple[Path, str]]:
    words = re.compile(rf"_?\w*{pattern_of(term).replace('[-_ ]?', '')}", re.IGNORECASE)
    return [
        (path, node.name)
        for path in SOURCES
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, ast.ClassDef) and words.match(node.name)
    ]


def modules_about(term: str) -> list[Path]:
    """The modules whose first line has the term."""
    return [path for path in SOURCES if re.search(rf"\b{pattern_of(term)}(e?s)?\b", text_of(path).split("\n")[0], re.IGNORECASE)]


def uses(term: str) -> int:
    return sum(len(re.findall(rf"\b{pattern_of(term)}(?:e?s)?\b", text_of(path), re.IGNORECASE)) for path in (*SOURCES, *PROSE))


def test_every_term_is_used_in_the_code_or_in_a_document():
    assert not [term for term in glossary() if uses(term) < 2], "a term that nothing uses"


def test_replaced_words_do_not_come_back():
    found = [
        f"{path.relative_to(ROOT)}: {match[0]!r} is called {word}"
        for path in (*SOURCES, *PROSE)
        for old, word in REPLACED.items()
        for match in re.finditer(rf"\b(?:{old})", text_of(path))
    ]
    assert not found


def main() -> None:
    for term, meaning in glossary().items():
        about = ", ".join(str(path.relative_to(ROOT)) for path in modules_about(term)[:4])
        classes = ", ".join(sorted({name for _, name in classes_named(term)}))
        print(f"{term}: {meaning}\n    modules: {about or '-'}\n    classes: {classes or '-'}\n    uses: {uses(term)}")
    for old, word in REPLACED.items():
        count = sum(len(re.findall(rf"\b(?:{old})", text_of(path))) for path in (*SOURCES, *PROSE))
        print(f"replaced: {old} -> {word}: {count} left")


if __name__ == "__main__":
    main()
