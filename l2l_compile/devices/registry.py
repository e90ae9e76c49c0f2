"""The kinds of devices by name. A new device needs a file in this folder and an entry here, and nothing else."""

from __future__ import annotations

import torch

from l2l_compile.devices.cpu import CPU
from l2l_compile.devices.cuda import CUDA
from l2l_compile.devices.device import DeviceKind
from l2l_compile.devices.host import HOST

KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in (CPU, CUDA)}
ACCELERATOR = torch.device(CUDA.name)  # the device of a machine that is not here


def kind_of(device: torch.device) -> DeviceKind:
    """The kind of a device."""
    return KINDS[device.type]


def traced_on(device: torch.device) -> torch.device:
    """Where blocks are traced for estimates: on this device if the machine has it, else on the host, whose kernels may differ."""
    return device if kind_of(device).complaint() is None else HOST


def is_absent(device: torch.device) -> bool:
    """Whether this machine lacks the device, so that blocks for it are traced on the host."""
    return traced_on(device) != device


def default_device() -> torch.device:
    """The accelerator of this machine if `KINDS` has its kind, else the host."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and found.type in KINDS else HOST
