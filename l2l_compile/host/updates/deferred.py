"""Parameters whose update was put off: no code may write into them before it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from l2l_compile.disk.disk_store import range_of
from l2l_compile.disk.stored_entries import samples
from l2l_compile.errors import L2LError
from l2l_compile.host.updates.gradient_ledger import Parameter
from l2l_compile.host.wire import identity
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.sharded import local

_ENTRIES = 1024  # of each parameter, that are compared


class DeferredWriteGuard:
    """Parameters of an optimizer as they are now.

    PyTorch records writes into a parameter, but not writes through `.data` (`p.data.mul_()`, `vector_to_parameters`). These are
    found by comparing some entries, so a write that changes few entries may be missed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Parameter]):
        self._optimizer = optimizer
        entries = _some_entries(parameters)
        self._before = {p: (identity(p), found, optimizer.state.get(p)) for p, found in entries.items()}

    def check(self, parameters: Iterable[Parameter]) -> None:
        """Raise `L2LError` if one of these was written since, has new state, or was taken out of the optimizer."""
        there = set(parameters_of(self._optimizer))
        for parameter, now in _some_entries(parameters).items():
            if parameter not in there:
                raise L2LError(
                    f"a parameter of shape {tuple(parameter.shape)} was taken out of the optimizer while its update was still to come: "
                    "call l2l_compile.synchronize(model) before you change param_groups"
                )
            known, entries, state = self._before[parameter]
            if self._optimizer.state.get(parameter) is not state:
                raise L2LError(
                    f"the optimizer's state of a parameter of shape {tuple(parameter.shape)} was replaced while its update was still to "
                    "come: call l2l_compile.synchronize(model) before you change optimizer.state"
                )
            if identity(parameter) != known or not torch.equal(now, entries):
                raise L2LError(
                    f"a parameter of shape {tuple(parameter.shape)} was written while its update was still to come: "
                    "call l2l_compile.synchronize(model) before you write into parameters"
                )


def _some_entries(parameters: Iterable[Parameter]) -> dict[Parameter, torch.Tensor]:
    """The bytes of some entries of each, an odd number apart: from many rows and columns. Of those on disk, the first page, read at a time."""
    given = list(parameters)
    on_disk = [p for p in given if range_of(local(p)) is not None]
    read = dict(zip(on_disk, samples([[local(p)] for p in on_disk], 0, runs=1), strict=True))
    return {p: (read[p][1][0] if p in read else _spread(p)).view(torch.uint8) for p in given}


def _spread(parameter: Parameter) -> torch.Tensor:
    entries = local(parameter).detach().reshape(-1)
    return entries[:: entries.numel() // _ENTRIES | 1].clone()
