"""The host: the model, its inputs and the tensors of traces are on it, and it may be the device as well."""

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


def half_of_the_cores() -> int:
    """Threads for the host's own work where the lanes of a device compute on the host as well."""
    return max(1, cores() // 2)
