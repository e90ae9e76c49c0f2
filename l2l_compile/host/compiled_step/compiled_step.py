"""An optimizer's step as one pass over memory: an elementwise step is recorded and compiled, and writes the wire as well.

A step without a formula (norms of a tensor, factored state, the step that makes the state) falls back to the optimizer's own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from l2l_compile.errors import L2LError
from l2l_compile.host.compiled_step.kernel import Launch, UpdateKernel, address_of, run_all
from l2l_compile.host.compiled_step.record import NotElementwise, Recipe, has_simple_state, record, vectors
from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.step.sharded_state import own_state
from l2l_compile.host.step.torch_step import Hyperparameters, hyperparameters, scaled, step_on, with_state_of_trial
from l2l_compile.host.wire import Wires
from l2l_compile.ranks.sharded import attributes, local

Parameter = torch.nn.Parameter
_WIDTHS = (torch.float32, torch.float64)


class CompiledStep:
    """Steps of one optimizer on some of its parameters. Runs on the host lane, with `threads` threads."""

    def __init__(self, optimizer: torch.optim.Optimizer, wires: Wires, threads: int, memory: GradientMemory):
        self.optimizer, self.wires, self.threads, self._memory = optimizer, wires, threads, memory
        self._shared = Hyperparameters()  # of the step that the recipes are for
        self._recipes: dict[tuple, Recipe | None] = {}  # of this step: with these hyperparameters
        self._kernels: dict[tuple, tuple] = {}

    def on(self, shared: Hyperparameters, gradients: Mapping[Parameter, torch.Tensor], factor: float) -> Hyperparameters:
        """As `step_on` with gradients times `factor`; may overwrite them. Raises `L2LError` if a wire was not up to date."""
        if shared is not self._shared:
            self._shared, self._recipes, self._kernels = shared, {}, {}
        compiled: dict[Parameter, Launch] = {}
        left: dict[int, Hyperparameters] = {}  # by the number of the group
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter in gradients and (recipe := self._recipe(number, parameter, gradients[parameter])) is not None:
                    left[number] = recipe.shared
                    compiled[parameter] = self._launch(recipe, parameter, gradients[parameter], factor)
        self._run(compiled)
        rest = {p: g for p, g in gradients.items() if p not in compiled}
        after = [self._own_step(shared, rest, factor)] if rest else []
        torch.autograd.graph.increment_version(gradients)  # fused steps do not do it
        for parameter, launch in compiled.items():
            self._written(parameter, launch)
        return functools.reduce(Hyperparameters.joined, [*left.values(), *after], shared)

    def _run(self, launches: Mapping[Parameter, Launch]) -> None:
        run_all(list(launches.values()), self.threads)

    def _own_step(self, shared: Hyperparameters, gradients: Mapping[Parameter, torch.Tensor], factor: float) -> Hyperparameters:
        """The optimizer's own step, on parameters for which there is no machine code."""
        return step_on(self.optimizer, shared, scaled(gradients, factor, self._memory))

    def _recipe(self, group: int, parameter: Parameter, gradient: torch.Tensor) -> Recipe | None:
        state, shard = own_state(self.optimizer.state.get(parameter, {}), parameter), local(parameter)
        if not has_simple_state(state):
            return None
        names = vectors(shard, state)
        if shard.dtype not in _WIDTHS or not all(t.is_contiguous() for t in (shard, gradient, *map(state.get, names))):
            return None
        rest = tuple(
            v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in state.items() if k not in names
        )
        special = id(parameter) if attributes(parameter) else 0  # attributes that the optimizer may look at
        key = (group, parameter.dtype, tuple(state), str(rest), special)
        for place in ((*key, "any shape"), (*key, shard.shape)):
            if place in self._recipes:
                return self._recipes[place]
        try:
            recipe = record(self.optimizer, self._shared, group, parameter)
        except NotElementwise:
            recipe = None
        self._recipes[*key, "any shape" if recipe is not None and recipe.any_shape else shard.shape] = recipe
        return recipe

    def _launch(self, recipe: Recipe, parameter: Parameter, gradient: torch.Tensor, factor: float) -> Launch:
        copy = self.wires.latest(parameter)
        function, scalars = self._kernel(
            recipe, parameter.dtype, gradient.dtype, copy.view.dtype if copy is not None else None, factor
        )
        state = self.optimizer.state[parameter] if recipe.reads or recipe.state else {}
        for name, value in recipe.state.items():
            assert not (isinstance(value, torch.Tensor) and value.is_meta), f"the state {name!r} would lose its values"
            state[name] = value.clone() if isinstance(value, torch.Tensor) else value
        tensors = [gradient, local(parameter), *map(own_state(state, parameter).get, recipe.reads)]
        if copy is None:
            return Launch(function, scalars, tensors)
        return Launch(function, scalars, [*tensors, copy.view], checked=copy.unchanged())

    def _kernel(self, recipe: Recipe, real: torch.dtype, gradient: torch.dtype, wire: torch.dtype | None, factor: float) -> tuple:
        """The address of a recipe's machine code, and its scalars."""
        key = id(recipe), gradient, wire, factor
        if key not in self._kernels:
            function = address_of(UpdateKernel(recipe.formula, real, gradient, wire, factor != 1.0))
            self._kernels[key] = function, torch.tensor([*recipe.scalars, factor], dtype=real)
        return self._kernels[key]

    def _written(self, parameter: Parameter, launch: Launch) -> None:
        self.wires.written(parameter)
        if launch.stale and launch.checked:
            raise L2LError(
                f"a parameter of shape {tuple(parameter.shape)} was written between the forward and its update in a way that "
                "PyTorch does not record (through .data): the step used old values for some entries. Write into the "
                "parameter itself under torch.no_grad(), after l2l_compile.synchronize(model)"
            )


def why_not_compiled(optimizer: torch.optim.Optimizer) -> str | None:
    """Why updates of matrices take the optimizer's own step; None if they are compiled."""
    trial, parameter = with_state_of_trial(optimizer)
    if parameter.dtype not in _WIDTHS:
        return f"parameters are {parameter.dtype}"
    number = next(number for number, group in enumerate(trial.param_groups) if group["params"])
    try:
        record(trial, hyperparameters(trial), number, parameter)
    except NotElementwise as reason:
        return str(reason)
    return None
