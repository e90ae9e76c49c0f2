"""What an optimizer takes on a host: the state that its updates read and write, or the seconds of its own step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from l2l_compile.frontend.dynamo.meta_models import on_the_host
from l2l_compile.host.step.torch_step import hyperparameters, step_on
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.simulation.charges import Charges
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.simulate import state_bytes_of
from l2l_compile.simulation.simulated_device import open_simulated
from l2l_compile.simulation.simulated_stages import on_fakes

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OptimizerTimes:
    """An optimizer, as the updates of a step use it.

    state     bytes of state for each entry of a parameter, if overlapped updates are compiled; else None
    own_step  gives the seconds of its own step on all parameters that take a gradient
    of_shape  gives the seconds of its own step on a parameter of this shape alone
    """

    state: int | None
    own_step: Callable[[], float]
    of_shape: Callable[[Shape], float]


def optimizer_times(model: Callable, options: Options, machine: Machine) -> OptimizerTimes:
    """The times of the option `optimizer`, which has parameters of `model`. The optimizer and the model stay as they are."""
    own = _OwnStep(model, options.optimizer, machine)
    return OptimizerTimes(state_bytes_of(options), functools.cache(own.on_all), functools.cache(own.of_shape))


class _OwnStep:
    """The step of the optimizer's class on tensors without memory, with state that is there already."""

    def __init__(self, model: Callable, optimizer: torch.optim.Optimizer | None, machine: Machine):
        self._model, self._optimizer, self._machine = model, optimizer, machine

    def on_all(self) -> float:
        if self._optimizer is None:
            return 0.0
        with self._stand_in(self._optimizer) as stand_in:
            for parameter in parameters_of(stand_in):
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            return self._second(lambda: stand_in.step())

    def of_shape(self, shape: Shape) -> float:
        if self._optimizer is None:
            return 0.0
        with self._stand_in(self._optimizer) as stand_in:
            chosen = next((p for p in parameters_of(stand_in) if tuple(p.shape) == shape and p.requires_grad), None)
            if chosen is None:  # a parameter that no optimizer has
                return 0.0
            return self._second(lambda: step_on(stand_in, hyperparameters(stand_in), {chosen: torch.empty_like(chosen)}))

    @contextmanager
    def _stand_in(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
        with on_the_host(self._model, (), {}, all_fake=True) as call:
            yield on_fakes(optimizer, call.fake)

    def _second(self, step: Callable[[], object]) -> float:
        """Seconds of the second of two steps: the first one makes the state."""
        device = open_simulated(self._machine, None)
        with Charges(device), torch.no_grad():
            step()
            begun = device.now()
            step()
        return device.now() - begun
