"""The host: the model, its inputs and the tensors of traces are on it, and it may be the device as well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from l2l_compile.memory.cgroups import room_in_cgroups

HOST = torch.device("cpu")


def is_host(device: torch.device) -> bool:
    """Whether a device is the host itself."""
    return device.type == HOST.type


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Context manager without the user's autocast, of the device and of the host: code that runs inside contains its casts already."""
    with torch.autocast(HOST.type, enabled=False), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Context manager without the user's `torch.inference_mode()`; gradients are not recorded there either.

    A tensor that is made under inference mode can never be written outside of it again. So whatever is kept from call to call
    (wires, buffers, versions of weights, code with constants) is made in this context.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():  # the first alone would switch the recording of gradients on
        yield


def cores() -> int:
    """How many cores this process may use: a batch system or a container may leave it a part of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_beside_a_device() -> int:
    """How many cores the host's own work may take beside a device: one submits work, an eighth loads data."""
    return max(1, cores() - max(1, cores() // 8))


def half_of_the_cores() -> int:
    """Threads for the host's own work where the lanes of a device compute on the host as well."""
    return max(1, cores() // 2)


def physical_memory() -> int:
    """Bytes of the host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def own_memory() -> int:
    """Bytes of `available_memory` that this process may take: its part, if torchrun has started several here."""
    return available_memory() // max(1, int(os.environ.get(_PROCESSES_HERE, 1)))


def knows_own_memory() -> bool:
    """Whether it is known how many processes share this host: torchrun says it."""
    return _PROCESSES_HERE in os.environ


_PROCESSES_HERE = "LOCAL_WORLD_SIZE"


def available_memory() -> int:
    """Bytes of the host's memory that new tensors can have, by the operating system's estimate and within the limit of a container.

    All of it where the system gives no estimate.
    """
    found = bytes_in_proc("meminfo", "MemAvailable"), room_in_cgroups()
    return min((size for size in found if size is not None), default=physical_memory())


def bytes_in_proc(file: str, *names: str) -> int | None:
    """The sum of figures with these names in a file of Linux's `/proc`; None where it has none of them."""
    path = Path("/proc") / file
    lines = path.read_text().splitlines() if path.is_file() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.partition(":")[0] in names]
    return sum(found) if found else None
