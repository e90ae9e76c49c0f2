"""Work beside the first step that should not take processors from it."""
from __future__ import annotations

import os
import sys
import threading


def give_way(niceness: int) -> None:
    """Lower the priority of the calling thread, and of the processes that it starts; where threads have no priority, nothing."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
