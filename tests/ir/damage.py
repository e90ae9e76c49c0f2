"""Damages the text of a program: letters, tokens, lines and numbers, by a seed."""

from __future__ import annotations

import random
import re

LETTERS = "%()[],:'\"=-+*/.0129 xsB\n\t\0\\_é²٣\ud800\u2028"
TOKENS = (
    "%x", "%forward", "%getitem", "-", "()", "((((", "))))", "'", "''", "'\\ud800'", "'\\x'", "'\\N{DASH}'", "[0]", "[99999999999999999999]",
    "9" * 5000, "9**9**9", "s0**s0", "2**63", "-1", "1/0", "s0//0", "0", "1e999", "nan", "inf", "²", "__import__('os')", "lambda: 0", "B*B*B*B",
    "sympify('1')", "Symbol('x')", "float8_e4m3fn", "float32", "complex128", "int3", "Tensor", "os", "grad", "split", "partial sum", "partial x",
    "computes in os", "host", "device", "compute", "h2d", "d2h", "none", "input", "stash", "gradient", "release(%x)", "forward('one', -, ())",
    "return", "return ()", "return ((), (), ())", "blocks:", "forward:", "backward:", "sizes: B = 0", "sizes: B = 3 (batch)", "ranks: 2", "ranks: ²",
    "x 0 micro-batches", "x -1 micro-batches", "1.2.3 B", "9" * 400 + " TiB", "0 B", "inner loop", "whole batch: ", "after=%x", "after=-",
)  # fmt: skip
_PART = re.compile(r"%?\w+|[^\w\s]|\s+")


def damaged(text: str, seed: int) -> str:
    """The text with one to four damages. The same for the same seed."""
    chosen = random.Random(seed)
    for _ in range(chosen.choice((1, 1, 2, 4))):
        text = chosen.choice((_letter, _token, _token, _lines, _number))(text, chosen)
    return text


def _letter(text: str, chosen: random.Random) -> str:
    at = chosen.randrange(len(text) + 1)
    kept = chosen.choice((0, 1))  # whether a letter is replaced or a letter is added
    return text[:at] + chosen.choice(("", *LETTERS)) + text[at + 1 - kept :]


def _token(text: str, chosen: random.Random) -> str:
    parts = _PART.findall(text)
    if not parts:
        return text
    at = chosen.randrange(len(parts))
    parts[at] = chosen.choice((chosen.choice(TOKENS), chosen.choice(parts), "", parts[at] * 2))
    return "".join(parts)


def _lines(text: str, chosen: random.Random) -> str:
    lines = text.split("\n")
    first, second = (chosen.randrange(len(lines)) for _ in range(2))
    kind = chosen.choice(("drop", "repeat", "swap", "move", "cut"))
    if kind == "drop":
        del lines[first]
    elif kind == "repeat":
        lines.insert(second, lines[first])
    elif kind == "swap":
        lines[first], lines[second] = lines[second], lines[first]
    elif kind == "move":
        lines.insert(second, lines.pop(first))
    else:
        lines = lines[:first]
    return "\n".join(lines)


def _number(text: str, chosen: random.Random) -> str:
    found = list(re.finditer(r"\d+", text))
    if not found:
        return text
    match = chosen.choice(found)
    number = chosen.choice(("0", "1", "7", "-1", str(2**31), str(2**63), "9" * 30, "1.5", chosen.choice(found)[0]))
    return text[: match.start()] + number + text[match.end() :]
