"""Errors of other code (the user's, or a library's), told as a sentence."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from l2l_compile.errors import L2LError, OptionError

_OURS = Path(__file__).parent.parent
_LIBRARIES = ("site-packages", "dist-packages", "lib/python", "<frozen")


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Context manager in which other code runs. Its error becomes an `OptionError`: a sentence with the last line of the user's code.

    Warnings for developers of libraries are not shown.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        try:
            yield
        except L2LError:
            raise
        except (Exception, SystemExit) as error:
            raise OptionError(f"{what}: {said(error)}{_place_of(error)}") from error


def said(error: BaseException) -> str:
    """An error's type and its text in one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def _place_of(error: BaseException) -> str:
    """The user's line in a traceback, the one called last: " (model.py, line 12)"."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_of_the_user(f.filename)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _is_of_the_user(file: str) -> bool:
    return not Path(file).is_relative_to(_OURS) and not any(part in file for part in _LIBRARIES)
