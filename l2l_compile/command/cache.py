"""`l2l cache`: the entries that this user has on disk."""

from __future__ import annotations

import argparse

from l2l_compile.cache_folder import FolderRefused
from l2l_compile.errors import L2LError
from l2l_compile.lowering.faster import trace_cache
from l2l_compile.units import format_bytes


def cache(given: argparse.Namespace) -> int:
    """Print the folder and its size, and delete its entries if asked. Raises `L2LError` for a folder that is not used."""
    try:
        folder, usage = trace_cache.clear() if given.clear else trace_cache.size()
    except (FolderRefused, OSError) as error:
        raise L2LError(f"the folder is not used: {error}") from error
    entries = f"{usage.entries} {'entry' if usage.entries == 1 else 'entries'}, {format_bytes(usage.bytes)}"
    if given.clear:
        print(f"{folder}: deleted {entries}")
    else:
        print(f"{folder}: {entries}, of at most {format_bytes(trace_cache.limit())} (L2L_CACHE_SIZE)")
    return 0
