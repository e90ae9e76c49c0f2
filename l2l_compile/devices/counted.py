"""Devices without an allocator's figure: a ledger counts the bytes of their memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from l2l_compile.devices.device import Device
from l2l_compile.devices.ledger import Ledger


class Counted(Device):
    """`ledger` counts the bytes that values of programs hold."""

    ledger: Ledger

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        self.ledger.hold(tensors)

    def free(self, tensors: Sequence[torch.Tensor]) -> None:
        self.ledger.drop(tensors)

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        self.ledger.forget(tensors)

    def use_workspace(self, size: int) -> None:
        self.ledger.touch(size)

    def start_peak(self) -> None:
        self.ledger.start_peak()

    def peak_bytes(self) -> int:
        return self.ledger.peak
