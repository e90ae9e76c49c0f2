"""The lanes of a step: the queues of a device and the threads of the host that work at the same time."""

from __future__ import annotations

from enum import StrEnum


class Lane(StrEnum):
    """A name, and in `work` what the lane does. A node that no lane runs has the lane NONE."""

    work: str

    def __new__(cls, name: str, work: str) -> Lane:
        member = str.__new__(cls, name)
        member._value_ = name
        member.work = work
        return member

    CALLER = "caller", "the thread of the training loop"
    COMPUTE = "compute", "compute"
    H2D = "h2d", "copies to the device"
    D2H = "d2h", "copies to the host"
    COMM = "comm", "collectives of ranks"
    SEND = "send", "messages to other stages"
    RECV = "recv", "messages from other stages"
    HOST = "host", "work of the host on gradients and updates"
    UPDATE = "update", "updates of the step before"
    DISK_READ = "disk_read", "reads of parameters, optimizer state and stashes from the disk"
    DISK_WRITE = "disk_write", "writes of parameters, optimizer state and stashes to the disk"
    NONE = "none", "nothing"


OF_DEVICE = (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.COMM, Lane.SEND, Lane.RECV)
AT_WORK = tuple(lane for lane in Lane if lane is not Lane.NONE)
