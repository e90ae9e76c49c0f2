"""Low priority for work that runs in the background of the first step, so that the step keeps the processors."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress


def give_way(niceness: int) -> None:
    """Lower the priority of the calling thread, and of the processes that it starts, where that is possible."""
    if sys.platform == "linux":  # elsewhere, threads have no priority of their own
        with suppress(OSError):  # not allowed: the work is done at the normal priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
