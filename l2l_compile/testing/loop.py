"""A training loop, the same for eager and for every value of `update`, and its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from l2l_compile.inspection.programs import synchronize
from l2l_compile.param_groups import parameters_of
from l2l_compile.testing.difference import LOSS, STATE, Key
from l2l_compile.testing.leaves import own_copy
from l2l_compile.testing.observation import Call, state_of
from l2l_compile.testing.reversal import Recorded
from l2l_compile.update_modes import MODES

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
CallWith = Callable[[nn.Module, torch.optim.Optimizer], Call]


@dataclass(frozen=True)
class Loop:
    """A training loop, the same for eager and for every value of `update`."""

    batches: Sequence[tuple[tuple, Mapping[str, Any]]]
    optimizer: MakeOptimizer
    scheduler: MakeScheduler | None
    loss: Callable[[Any], torch.Tensor]
    accumulate: int
    max_grad_norm: float | None

    def run(self, module: nn.Module, call_with: CallWith, update: str, wrap: Callable[[Call], Any]) -> Run:
        """Train a module. The loop calls `wrap(call_with(module, optimizer))` in the place of the module."""
        optimizer = self.optimizer(module.parameters())
        scheduler = self.scheduler(optimizer) if self.scheduler is not None else None
        call = call_with(module, optimizer)
        wrapped, found = wrap(call), dict[Key, Any]()
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        grouped = set(parameters_of(optimizer))
        held = [p for p in names if p in grouped]  # in the order of the module, in which their norm is summed
        for number, (args, kwargs) in enumerate(self.batches):
            args, kwargs = own_copy((args, kwargs))
            loss = self.loss(wrapped(*args, **kwargs))
            loss.backward()
            found[Key(LOSS, f"of batch {number}")] = loss.detach()
            if (number + 1) % self.accumulate == 0:
                if self.max_grad_norm is not None and not MODES[update].is_overlapped:
                    nn.utils.clip_grad_norm_(held, self.max_grad_norm)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
        if MODES[update].is_overlapped:
            synchronize(call)
        results = wrapped.results if isinstance(wrapped, Recorded) else []
        return Run({**found, **state_of(module), **_state_of(optimizer, names)}, call, results)


@dataclass(frozen=True)
class Run:
    """The results of a training.

    values   a loss for each batch, parameters and buffers, the state of the optimizer
    results  the outputs of each call
    """

    values: Mapping[Key, Any]
    call: Call = field(repr=False)
    results: Sequence[Any] = field(repr=False)


def _state_of(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> dict[Key, Any]:
    found: dict[Key, Any] = {}
    for owner, state in optimizer.state.items():
        if isinstance(owner, torch.Tensor):
            found |= {Key(STATE, f"{names[owner]}: {name}"): _own(value) for name, value in state.items()}
        else:  # a count of all parameters, for example
            found[Key(STATE, str(owner))] = _own(state)
    for number, group in enumerate(optimizer.param_groups):
        found |= {Key(STATE, f"group {number}: {name}"): _own(v) for name, v in group.items() if name != "params"}
    return found


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
