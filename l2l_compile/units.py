"""Bytes and numbers as text: 1.5 KiB, 70.6 billion."""

from __future__ import annotations

import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    size = float(count)
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"


def format_count(number: int) -> str:
    """70_600_000_000 -> "70.6 billion", 144 -> "144"."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"


def parse_bytes(text: str) -> int:
    """ "1.5 KiB" -> 1536. Raises `ValueError` for a text that `format_bytes` does not write."""
    match = re.fullmatch(r"([\d.]+) (\w+)", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"expected bytes such as '1.5 KiB', got {text!r}")
    return round(float(match[1]) * 1024 ** _UNITS.index(match[2]))
