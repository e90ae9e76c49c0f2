"""The host as a place: the model, its inputs and what is traced are there, and it may be the device as well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

HOST = torch.device("cpu")


def is_host(device: torch.device) -> bool:
    """Whether a device is the host itself."""
    return device.type == HOST.type


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """The user's autocast, of a device or of the host, casts nothing: what runs inside has its casts already."""
    with torch.autocast(HOST.type, enabled=False), torch.autocast(device.type, enabled=False):
        yield


def half_of_the_cores() -> int:
    """Threads for the host's own work where the lanes of a device compute on the host as well."""
    return max(1, (os.cpu_count() or 1) // 2)
