"""The option `plan`: before the first training step of a compiled model, decide on the options that are left open."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from l2l_compile import user_line
from l2l_compile.devices.host import is_host
from l2l_compile.errors import OptionError
from l2l_compile.memory.address import memory_of
from l2l_compile.options import Options
from l2l_compile.planner.plan import Plan, plan
from l2l_compile.planner.search import DECIDED
from l2l_compile.ranks.ranks import anything_is_sharded
from l2l_compile.session import start_anew
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.measure import measure_machine
from l2l_compile.simulation.simulated_ranks import modules_of
from l2l_compile.torch_internals.calls import CompiledCall


def plan_first_step(owner: Any, call: CompiledCall) -> None:
    """Give the `torch.compile` call of `owner` the options of the best plan for a call that trains, and say which in a warning.

    A call without gradients leaves them open: it runs with the options that are given. Raises `OptionError` if no plan fits, and for a
    model that is divided among ranks.
    """
    model = call.function
    if not _trains(model):
        return
    if anything_is_sharded():
        raise OptionError(
            "option plan='auto' is for one device: give the options of l2l_compile.plan(model, machine, devices=...), which also says how to "
            "divide the model"
        )
    given = {name: value for name, value in owner.kwargs["options"].items() if name != "plan"}
    begun = time.perf_counter()
    options = Options.build(given)
    machine = free_memory_of(measure_machine(options.device), model, options.optimizer)
    arguments, named = call.arguments
    best = plan(model, machine, given, reads_gradients=True, simulated=False)(*arguments, **named).best
    decided = {name: value for name, value in best.options.items() if name in DECIDED}
    start_anew(owner, {**given, **decided})
    left = {name: value for name, value in decided.items() if name not in given}
    user_line.warn(_said(best, left, time.perf_counter() - begun))


def _trains(model: Callable) -> bool:
    """Whether a call may have a backward."""
    modules = modules_of(model)
    return torch.is_grad_enabled() and (not modules or any(p.requires_grad for module in modules for p in module.parameters()))


def free_memory_of(machine: Machine, model: Callable, optimizer: torch.optim.Optimizer | None) -> Machine:
    """The machine with a reserve of memory that is in use now, less what a plan counts itself: tensors of the model and the optimizer."""
    held = min(_own_bytes(_held_by(model, optimizer)), _anonymous_bytes())
    reserve = max(0, machine.host_reserve - held)
    return replace(machine, host_reserve=reserve, device_reserve=machine.device_reserve if machine.overlaps else reserve)


def _held_by(model: Callable, optimizer: torch.optim.Optimizer | None) -> Iterable[torch.Tensor]:
    for module in modules_of(model):
        yield from module.buffers()
        for parameter in module.parameters():
            yield from (t for t in (parameter, parameter.grad) if t is not None)
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _own_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the host memory of tensors, each counted once."""
    return sum({memory_of(t): t.untyped_storage().nbytes() for t in tensors if is_host(t.device)}.values())


def _anonymous_bytes() -> int:
    """Bytes of this process that no file holds: the system counts memory of mapped files as available. All, where it does not say."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.is_file() else []
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:"))}
    return sum(found.values()) if found else 1 << 62


def _said(best: Plan, decided: Mapping[str, Any], seconds: float) -> str:
    changed = {name: value for name, value in decided.items() if value != DECIDED[name]}
    chosen = (
        f"options {changed}, instead of plan='auto': give them," if changed else "the library's own options: leave out 'plan',"
    )
    return (
        f"backend 'l2l' has planned for {seconds:.0f} s and taken {chosen} and the next run plans nothing. A step of this batch takes about "
        f"{best.seconds:.3g} s, and {'; '.join(need.short for need in best.needs)}"
    )
