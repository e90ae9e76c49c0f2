"""An optimizer's step as one pass over memory: elementwise ones are recorded, compiled, and write the wire as well.

What has no formula (norms of a tensor, factored state, the step that makes the state) takes the optimizer's own step.
"""
from __future__ import annotations

import weakref
from collections.abc import Mapping
import torch

from ..errors import L2LError
from .kernel import Launch, build, run_all, source
from .record import NotElementwise, Recipe, record, vectors
from .torch_step import Hyperparameters, hyperparameters, scaled, step_on, with_state_of_trial
from .wire import Wires
from .worker import Worker

Parameter = torch.nn.Parameter


class CompiledStep:
    """Steps of one optimizer on some of its parameters. Runs on the host lane, with `threads` threads."""

    def __init__(self, optimizer: torch.optim.Optimizer, wires: Wires, threads: int):
        self.optimizer, self.wires = optimizer, wires
        self._helpers = [Worker(1) for _ in range(threads - 1)]
        weakref.finalize(self, _close, self._helpers)
        self._groups: Hyperparameters | None = None
        self._recipes: dict[tuple, Recipe | None] = {}  # of this step: with these hyperparameters

    def on(self, groups: Hyperparameters, gradients: Mapping[Parameter, torch.Tensor], factor: float) -> Hyperparameters:
        """As `step_on` with gradients times `factor`. Raises `L2LError` if a wire was not the copy of its parameter."""
        if groups is not self._groups:
            self._groups, self._recipes = groups, {}
        launches: dict[Parameter, Launch] = {}
        after = groups
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter in gradients and (recipe := self._recipe(number, parameter, gradients[parameter])) is not None:
                    launches[parameter] = self._launch(recipe, parameter, gradients[parameter], factor)
                    after = recipe.groups
        run_all(list(launches.values()), self._helpers)
        for parameter in launches:
            torch.autograd.graph.increment_version(parameter)
        rest = {p: g for p, g in gradients.items() if p not in launches}
        if rest:
            after = step_on(self.optimizer, groups, scaled(rest, factor))
        for parameter, launch in launches.items():
            self._written(parameter, launch)
        return after

    def _recipe(self, group: int, parameter: Parameter, gradient: torch.Tensor) -> Recipe | None:
        state = self.optimizer.state.get(parameter, {})
        names = vectors(parameter, state)
        tensors = [parameter, gradient, *(state[name] for name in names)]
        if parameter.dtype not in (torch.float32, torch.float64) or not all(t.is_contiguous() for t in tensors):
            return None
        rest = {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in state.items() if k not in names}
        key = (group, parameter.shape, parameter.dtype, tuple(names), repr(rest), id(parameter) if parameter.__dict__ else 0)
        if key not in self._recipes:
            try:
                self._recipes[key] = record(self.optimizer, self._groups, group, parameter)
            except NotElementwise:
                self._recipes[key] = None
        return self._recipes[key]

    def _launch(self, recipe: Recipe, parameter: Parameter, gradient: torch.Tensor, factor: float) -> Launch:
        copy = self.wires.latest(parameter)
        wire = [copy.view] if copy is not None else []
        text = source(recipe, parameter.dtype, gradient.dtype, factor != 1.0, wire[0].dtype if wire else None)
        state = self.optimizer.state[parameter] if recipe.reads or recipe.state else {}
        scalars = torch.tensor([*recipe.scalars, factor], dtype=parameter.dtype)
        tensors = [gradient, parameter.detach(), *(state[name] for name in recipe.reads), *wire]
        for name, value in recipe.state.items():
            state[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return Launch(build(text), scalars, tensors, checked=copy is not None and copy.unchanged())

    def _written(self, parameter: Parameter, launch: Launch) -> None:
        self.wires.written(parameter)
        if launch.stale and launch.checked:
            raise L2LError(
                f"a parameter of shape {tuple(parameter.shape)} was written between the forward and its update in a way that "
                "PyTorch does not record (through .data): the step used old values for some entries. Write into the "
                "parameter itself under torch.no_grad(), after l2l_compile.synchronize(model)"
            )


def _close(helpers: list[Worker]) -> None:
    for helper in helpers:
        helper.close()


def why_not_compiled(optimizer: torch.optim.Optimizer) -> str | None:
    """Why updates of matrices take the optimizer's own step; None if they are compiled."""
    trial, parameter = with_state_of_trial(optimizer)
    try:
        record(trial, hyperparameters(optimizer)[:1], 0, parameter)
    except NotElementwise as reason:
        return str(reason)
    return None
