"""Warnings that point to the user's line, however deep in PyTorch and in this package their cause is found."""

from __future__ import annotations

import os
import sys
import types
import warnings

import torch

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_SITE = os.path.join(_LIBRARY, "site-packages") + os.sep


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the line that called into PyTorch or this package: the first one above that is not theirs, nor Python's."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and not _is_users(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_users(frame: types.FrameType) -> bool:
    path = frame.f_code.co_filename
    if path.startswith("<"):  # code that is generated, by Dynamo for example; also an interactive line, which has no file
        return frame.f_globals.get("__name__") == "__main__"
    return not path.startswith((OURS, _TORCH)) and (path.startswith(_SITE) or not path.startswith(_LIBRARY))
