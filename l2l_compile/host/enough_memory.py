"""Whether the host has memory for the first step of a training: a process that takes more is killed by the system, in the middle of it."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from l2l_compile.devices.host import bytes_in_proc, own_memory
from l2l_compile.disk.disk_store import is_in_place, range_of
from l2l_compile.errors import L2LError
from l2l_compile.host.disk_plan import copies_on_link, gradients_at_once
from l2l_compile.host.step.sharded_state import ranks_among
from l2l_compile.host.step.torch_step import with_state_of_trial
from l2l_compile.object_copies import tensors_within
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.sharded import local
from l2l_compile.units import format_bytes


def check_enough_memory(options: Options) -> None:
    """Raise `L2LError` if what a step of the option `optimizer` is sure to take exceeds the memory that is available, and swap space.

    These are optimizer state and gradients that are not there yet, copies that cross the link, and parameters in place, which an update
    brings into memory. Stashes and activations come on top,
    so a step may run out of memory all the same. Parameters of several ranks, and of a simulation, are not looked at.
    """
    optimizer = options.optimizer
    own = [p for p in parameters_of(optimizer) if p.requires_grad] if optimizer is not None else []
    if (
        optimizer is None
        or options.stores_parameters
        or any(isinstance(local(p), FakeTensor) for p in own)
        or ranks_among(own) is not None
    ):
        return
    needs = _needs(own, optimizer, options)
    total, available = sum(needs.values()), own_memory()
    if total > available + _swap_space():
        shown = ", ".join(f"{format_bytes(size)} of {name}" for name, size in needs.items() if size)
        remedy = (
            "give the option 'disk' a folder, which takes what does not fit"
            if options.mode.is_overlapped
            else "take update='in_backward' with the option 'disk', a folder that takes what does not fit"
        )
        raise L2LError(
            f"a step needs {format_bytes(total)} more of host memory ({shown}), and {format_bytes(available)} are available: {remedy}, "
            "an optimizer with less state, or fewer trained parameters. `l2l_compile.explain` shows what each purpose takes"
        )


def _needs(own: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, options: Options) -> dict[str, int]:
    """Bytes to be allocated in a step, by purpose."""
    entries = sum(p.numel() for p in own)
    states = (value for p in own for value in optimizer.state.get(p, {}).values())
    there = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
    needs = {
        "optimizer state": max(0, _state_of_an_entry(optimizer) * entries - there),
        "parameters that are read in place": sum(map(_read_in_place, own)),
    }
    if not options.mode.is_overlapped:  # the memory of copies takes gradients later
        return needs | {"gradients": sum(p.nbytes for p in own if p.grad is None)}
    return needs | {
        "gradients": gradients_at_once(entries, 0, options),
        "copies that cross the link": copies_on_link(entries, options),
    }


def _read_in_place(parameter: torch.nn.Parameter) -> int:
    """Bytes of a parameter that come into memory when an update writes it."""
    found = range_of(parameter) if is_in_place(parameter) else None
    return found.bytes_to_read(0, found.size) if found is not None else 0


def _state_of_an_entry(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer state for each entry of a large parameter; 0 if it cannot be known.

    From steps on two matrices: what grows with the rows of a matrix alone, as in factored and low-rank states, is left out.
    """
    try:
        small, large = (_state_of_trial(optimizer, rows) for rows in (_ROWS, 2 * _ROWS))
    except Exception:  # noqa: BLE001  # any class may raise anything; a real step will raise it again
        return 0
    return max(0, round((large - 2 * small) / (2 * _ROWS**2)))


def _state_of_trial(optimizer: torch.optim.Optimizer, rows: int) -> int:
    trial, parameter = with_state_of_trial(optimizer, rows)
    return sum(tensor.nbytes for tensor in tensors_within(trial.state[parameter]))


_ROWS = 128


def _swap_space() -> int:
    """Bytes of swap space that are free; 0 where the system does not say."""
    return bytes_in_proc("meminfo", "SwapFree") or 0
