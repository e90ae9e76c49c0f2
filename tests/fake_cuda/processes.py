"""Scripts of this folder in processes of their own, with the CUDA runtime of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def started(script: str, *arguments: object, **variables: str) -> subprocess.Popen:
    """A process that runs a script of this folder."""
    paths = os.pathsep.join(map(str, (FOLDER, FOLDER.parent / "ranks", FOLDER.parent)))
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (paths, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-W", "ignore", str(FOLDER / script), *map(str, arguments)]
    return subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_of(script: str, *arguments: object, seconds: float = 300, **variables: str) -> list[str]:
    """What a script has printed. Raises `AssertionError` with the end of its errors if it fails."""
    process = started(script, *arguments, **variables)
    try:
        printed, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, printed[-2000:] + errors[-4000:]
    return printed.splitlines()
