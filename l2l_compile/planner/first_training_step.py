"""The option `plan`: before the first training step of a compiled model, decide on the options that are left open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from l2l_compile import user_line
from l2l_compile.devices.host import available_memory, bytes_in_proc, is_host, own_memory
from l2l_compile.errors import L2LError, OptionError
from l2l_compile.memory.address import memory_of
from l2l_compile.memory.cgroups import room_in_cgroups
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.planner.plan import Plan, plan
from l2l_compile.planner.search import DECIDED
from l2l_compile.ranks.ranks import anything_is_sharded
from l2l_compile.session import start_anew
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.measure import measure_machine
from l2l_compile.simulation.simulated_ranks import modules_of
from l2l_compile.torch_internals.calls import CompiledCall


def plan_first_step(owner: Any, call: CompiledCall) -> None:
    """Give the `torch.compile` call of `owner` the options of the best plan for a call that may train, and say which in a warning.

    A call without gradients leaves them open: it runs with the options that are given. Raises `OptionError` if no plan fits, if the call
    cannot be planned, and for a model that is divided among ranks.
    """
    model = call.function
    if not _trains(model):
        return
    with _guard:
        if owner.kwargs["options"].get("plan") is not None:  # another thread may have planned meanwhile
            _plan(owner, model, *call.arguments)


_guard = threading.RLock()


def _plan(owner: Any, model: Callable, arguments: tuple, named: dict[str, Any]) -> None:
    if anything_is_sharded():
        raise OptionError(
            "option plan='auto' is for one device: give the options of l2l_compile.plan(model, machine, devices=...), which also says how to "
            "divide the model"
        )
    given = {name: value for name, value in owner.kwargs["options"].items() if name != "plan"}
    options = Options.build(owner.kwargs["options"])
    begun = time.perf_counter()
    start_anew(owner, owner.kwargs["options"])  # the memory of an evaluation that came before is free
    machine = free_memory_of(measure_machine(options.device), model, options)
    fixed = given | ({"update": "at_step"} if "update" not in given and _needs_gradients(model) else {})
    try:
        best = plan(model, machine, fixed, reads_gradients=True, simulated=False)(*arguments, **named).best
    except L2LError:
        raise
    except Exception as error:
        raise OptionError(
            f"plan='auto' cannot plan this call, whose trace on zeros fails ({type(error).__name__}: {error}): leave out 'plan', or give the "
            "options of a plan for another batch"
        ) from error
    decided = {name: value for name, value in best.options.items() if name in DECIDED}
    start_anew(owner, {**given, **decided})
    left = {name: value for name, value in decided.items() if name not in given}
    user_line.warn(_said(best, left, time.perf_counter() - begun))


def _trains(model: Callable) -> bool:
    """Whether a call may have a backward."""
    modules = modules_of(model)
    return torch.is_grad_enabled() and (not modules or any(p.requires_grad for module in modules for p in module.parameters()))


def _needs_gradients(model: Callable) -> bool:
    """Whether gradients have to come to `p.grad` within backward: for hooks of the user, or for DistributedDataParallel."""
    parameters = [p for module in modules_of(model) for p in module.parameters()]
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return together or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)


def free_memory_of(machine: Machine, model: Callable, options: Options) -> Machine:
    """The machine with the memory that is free now, and that which a plan counts itself: tensors of the model and the optimizer."""
    held = _own_bytes(_held_by(model, options.optimizer))
    reserve = max(0, machine.host_memory - own_memory() - min(held, _not_counted_as_available()))
    if not machine.overlaps:
        return replace(machine, host_reserve=reserve, device_reserve=machine.device_memory - machine.host_memory + reserve)
    others = torch.cuda.memory_allocated(options.device) if options.device.type == "cuda" else 0
    return replace(machine, host_reserve=reserve, device_reserve=machine.device_reserve + others)


def _held_by(model: Callable, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    parameters = [p for module in modules_of(model) for p in module.parameters()]
    parameters += parameters_of(optimizer) if optimizer is not None else []
    for module in modules_of(model):
        yield from module.buffers()
    for parameter in parameters:
        yield from (t for t in (parameter, parameter.grad) if t is not None)
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _own_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the host memory of tensors, each counted once."""
    return sum({memory_of(t): t.untyped_storage().nbytes() for t in tensors if is_host(t.device)}.values())


def _not_counted_as_available() -> int:
    """Bytes of this process that new tensors cannot have. All bytes, where the system does not say.

    The system counts pages of mapped files as available, which the limit of a container does not.
    """
    of_files = ("RssFile",) if room_in_cgroups() == available_memory() else ()
    found = bytes_in_proc("self/status", "RssAnon", "RssShmem", *of_files)
    return found if found is not None else 1 << 62


def _said(best: Plan, decided: Mapping[str, Any], seconds: float) -> str:
    changed = {name: value for name, value in decided.items() if value != DECIDED[name]}
    own = "the library's own values of the options left open: leave out 'plan',"
    chosen = f"options {changed}, instead of plan='auto': give them," if changed else own
    return (
        f"backend 'l2l' has planned for {seconds:.0f} s and taken {chosen} and the next run plans nothing. A step of this batch takes about "
        f"{best.seconds:.3g} s, and {'; '.join(need.short for need in best.needs)}"
    )
