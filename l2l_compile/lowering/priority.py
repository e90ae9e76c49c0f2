"""Work beside the first step that should not take processors from it."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress


def give_way(niceness: int) -> None:
    """Lower the priority of the calling thread, and of the processes that it starts; nothing where that is not possible."""
    if sys.platform == "linux":  # elsewhere, threads have no priority of their own
        with suppress(OSError):  # not allowed: the work is done all the same
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
