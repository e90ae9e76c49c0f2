"""The class of each value of the option `update`."""

from __future__ import annotations

from l2l_compile.host.updates.at_step import UpdatesAtStep
from l2l_compile.host.updates.in_backward import UpdatesInBackward
from l2l_compile.host.updates.in_forward import UpdatesInForward

CLASSES = {"at_step": UpdatesAtStep, "in_backward": UpdatesInBackward, "in_forward": UpdatesInForward}
