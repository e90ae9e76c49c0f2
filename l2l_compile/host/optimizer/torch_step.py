"""An optimizer's own step, on some of its parameters."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ...errors import L2LError
from ...memory.heap import apart_from_the_heap
from ...ranks.sharded import attributes, is_divided, local
from ..gradients import GradientMemory
from .divided import check_pieces_are_independent, kept_state, own_state

Hyperparameters = list[dict[str, Any]]
_stateless: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # their steps were seen to make no state


def hyperparameters(optimizer: torch.optim.Optimizer) -> Hyperparameters:
    """The entries of each param_group except its parameters, as they are now (tensors are copied)."""
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def shadow_of(
    optimizer: torch.optim.Optimizer, groups: Hyperparameters, parameters: Sequence[Sequence[torch.Tensor]]
) -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
    """An optimizer of the same class over other parameters, a list for each param_group, without state; and its step.

    Its step runs none of the optimizer's hooks: they are for whole steps.
    """
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.state = defaultdict(dict)
    shadow.param_groups = [{**group, "params": list(own)} for group, own in zip(groups, parameters, strict=True)]
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # nor global hooks
    return shadow, lambda: step(shadow)


def step_on(
    optimizer: torch.optim.Optimizer, groups: Hyperparameters, gradients: Mapping[torch.nn.Parameter, torch.Tensor]
) -> Hyperparameters:
    """Run the class's own `step` on the parameters in `gradients` alone, with the hyperparameters in `groups`.

    Parameters and `optimizer.state` change as in the optimizer's own step; `param_groups`, hooks and `p.grad` do not.
    Returns the hyperparameters after the step: some optimizers count steps there.
    """
    chosen = [[p for p in group["params"] if p in gradients] for group in optimizer.param_groups]
    stand_ins = {p: _stand_in(p, gradients[p]) for own in chosen for p in own}
    shadow, step = shadow_of(optimizer, groups, [[stand_ins[p] for p in own] for own in chosen])
    for parameter, stand_in in stand_ins.items():
        if parameter in optimizer.state:
            shadow.state[stand_in] = own_state(optimizer.state[parameter], parameter)
    makes_state = optimizer not in _stateless and any(p not in optimizer.state for p in stand_ins)
    with apart_from_the_heap() if makes_state else nullcontext():
        step()
    if makes_state and not any(s in shadow.state for s in stand_ins.values()):
        _stateless.add(optimizer)
    for parameter, stand_in in stand_ins.items():
        if stand_in in shadow.state:
            before = optimizer.state.get(parameter, {})
            optimizer.state[parameter] = kept_state(shadow.state[stand_in], parameter, before, lambda: names_of_trial(optimizer))
        if is_divided(parameter):
            torch.autograd.graph.increment_version(parameter)  # the step wrote its piece
    return [{k: v for k, v in group.items() if k != "params"} for group in shadow.param_groups]


def scaled(
    gradients: Mapping[torch.nn.Parameter, torch.Tensor], factor: float, memory: GradientMemory
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Gradients in the dtype of their parameters, times a factor. May overwrite the given gradients."""
    wide = {p: memory.widened(g, p.dtype) for p, g in gradients.items()}
    return wide if factor == 1.0 else {p: g.mul_(factor) for p, g in wide.items()}


class TorchStep:
    """Steps of one optimizer on some of its parameters, by its own code."""

    def __init__(self, optimizer: torch.optim.Optimizer, memory: GradientMemory):
        self.optimizer, self._memory = optimizer, memory

    def on(self, groups: Hyperparameters, gradients: Mapping[torch.nn.Parameter, torch.Tensor], factor: float) -> Hyperparameters:
        """As `step_on`, with gradients times `factor`; may overwrite them."""
        return step_on(self.optimizer, groups, scaled(gradients, factor, self._memory))


def _stand_in(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    stand_in = local(parameter).detach().requires_grad_()
    stand_in.__dict__.update(attributes(parameter))
    stand_in.grad = gradient
    return stand_in


def check_layers_are_independent(optimizer: torch.optim.Optimizer) -> None:
    """Raise `L2LError` if an optimizer's step on all parameters differs from steps on one parameter after another.

    Tries three steps on small tensors, with the optimizer's class and hyperparameters and gradients of different magnitudes. An
    optimizer that calls the step of another one is refused: that step would be on the other optimizer's parameters.
    """
    if (inner := _wrapped(optimizer)) is not None:
        name, within = type(optimizer).__name__, type(inner).__name__
        raise L2LError(
            f"{name} holds another optimizer ({within}), whose step it calls for all parameters: it cannot update layer by layer. Give the "
            f"option 'optimizer' the {within}, if {name} only hands calls on, or use update='at_step'"
        )
    with _tried(optimizer):
        joint, counts = _trial(optimizer, together=True)
        apart, counts_apart = _trial(optimizer, together=False)
    if counts != counts_apart or not all(torch.equal(a, b) for a, b in zip(joint, apart, strict=True)):
        raise L2LError(
            f"{type(optimizer).__name__} does not update parameters independently of each other (a norm over all of them, "
            "or a count of its own), so it cannot update layer by layer: use update='at_step'"
        )
    with _tried(optimizer):
        remembers, writes_on = _trial_of_whole_steps(optimizer)
    name = type(optimizer).__name__
    if remembers:
        raise L2LError(
            f"a step of {name} changes its attribute '{remembers[0]}', and layers are stepped by copies of it, which do not share that. "
            "Keep it in param_groups or in the state of each parameter, or use update='at_step'"
        )
    if writes_on:
        raise L2LError(
            f"a step of {name} changes parameters, or their state, that have no gradient. Behind the steps of the layers its own step runs as "
            "well, and finds no gradients, so it would do that twice: use update='at_step'"
        )
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    check_pieces_are_independent(optimizer, functools.partial(_trial_in_pieces, optimizer), trained)


@contextmanager
def _tried(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context in which an optimizer steps on small tensors. Raises `L2LError` if a step fails."""
    try:
        yield
    except Exception as error:
        raise L2LError(
            f"a step of {type(optimizer).__name__} on small tensors failed, so it cannot update layer by layer: "
            f"{type(error).__name__}: {str(error).rstrip('.')}. Use update='at_step', or an optimizer that takes dense gradients of host tensors"
        ) from error


def _wrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The optimizer that another one holds; None if it holds none."""
    held = itertools.chain.from_iterable(v if isinstance(v, (list, tuple)) else [v] for v in vars(optimizer).values())
    return next((each for each in held if isinstance(each, torch.optim.Optimizer)), None)


def check_steps_on_the_host(optimizer: torch.optim.Optimizer) -> None:
    """Raise `L2LError` if an optimizer's step on a small tensor of the host fails: some libraries have kernels for a GPU alone."""
    try:
        _trial(optimizer, together=True)
    except Exception as error:
        raise L2LError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} cannot update parameters on the host, where they stay: "
            f"{type(error).__name__}: {str(error).strip().rstrip('.')}. Use an optimizer that can, such as torch.optim.AdamW(fused=True)"
        ) from error


def with_state_of_trial(optimizer: torch.optim.Optimizer, entries: int = 128) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    """A new optimizer with the class and hyperparameters of `optimizer`, after a step on a square matrix; and the matrix."""
    parameter = torch.nn.Parameter(torch.zeros(entries, entries))
    trial = _small_copy(optimizer, [parameter])
    step_on(trial, hyperparameters(optimizer)[:1], {parameter: torch.ones(entries, entries)})
    return trial, parameter


def names_of_trial(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the state with one entry for each entry of a parameter, from a step on a small matrix."""
    trial, parameter = with_state_of_trial(optimizer, entries=2)
    return [k for k, v in trial.state[parameter].items() if isinstance(v, torch.Tensor) and v.shape == parameter.shape]


def state_bytes_of_trial(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer state for each entry of a parameter, from a step on a small matrix."""
    trial, parameter = with_state_of_trial(optimizer)
    held = [v for v in trial.state[parameter].values() if isinstance(v, torch.Tensor)]
    return round(sum(v.numel() * v.element_size() for v in held) / parameter.numel())


def _small_copy(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the same class and first hyperparameters, over other parameters."""
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    trial.param_groups = [{**hyperparameters(optimizer)[0], "params": parameters}]
    trial.state = defaultdict(dict)
    for p in parameters:
        if state := _state_like(optimizer, p):
            trial.state[p] = state
    return trial


def _trial(optimizer: torch.optim.Optimizer, together: bool) -> tuple[list[torch.Tensor], list[dict]]:
    """Two small parameters after three steps, and the hyperparameters after every step, without tensors."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 4, generator=generator)) for _ in range(2)]
    trial, groups = _small_copy(optimizer, parameters), hyperparameters(optimizer)[:1]
    left: list[dict] = []
    for _ in range(3):
        gradients = {p: torch.randn(3, 4, generator=generator) * size for p, size in zip(parameters, (10.0, 0.1), strict=True)}
        if together:
            after = [step_on(trial, groups, gradients)] * 2
        else:
            after = [step_on(trial, groups, {p: g}) for p, g in gradients.items()]
        left += [{k: v for k, v in a[0].items() if not isinstance(v, torch.Tensor)} for a in after]
        groups = after[-1]
    return [p.detach() for p in parameters], left


def _trial_of_whole_steps(optimizer: torch.optim.Optimizer) -> tuple[list[str], bool]:
    """The attributes that the class's own step changes, and whether it changes parameters or state without a gradient."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 4, generator=generator)) for _ in range(2)]
    trial = _small_copy(optimizer, parameters)
    shadow, step = shadow_of(trial, hyperparameters(optimizer)[:1], [parameters])
    shadow.state = trial.state
    before = _remembered(shadow)
    for p in parameters:
        p.grad = torch.randn(3, 4, generator=generator)
    step()
    changed = sorted(name for name, value in _remembered(shadow).items() if value != before.get(name))
    for p in parameters:
        p.grad = None
    left = _written(shadow, parameters)
    step()
    return changed, _written(shadow, parameters) != left


def _remembered(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The attributes of an optimizer that can hold a count, as text, without flags: these note which warnings were given."""
    kept = {
        k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "defaults") and not isinstance(v, bool)
    }
    return {k: repr(v) for k, v in kept.items() if isinstance(v, (int, float, torch.Tensor, list, dict, set, deque))}


def _written(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> str:
    """Parameters and their state, as text."""
    return repr(
        [(p.tolist(), {k: getattr(v, "tolist", lambda v=v: v)() for k, v in optimizer.state[p].items()}) for p in parameters]
    )


def _trial_in_pieces(optimizer: torch.optim.Optimizer, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """A small matrix after three steps, in pieces of `sizes` rows (`dim` 0) or columns."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(p.contiguous()) for p in torch.randn(6, 6, generator=generator).split(list(sizes), dim)]
    trial, groups = _small_copy(optimizer, parameters), hyperparameters(optimizer)[:1]
    for _ in range(3):
        gradients = [g.contiguous() for g in torch.randn(6, 6, generator=generator).split(list(sizes), dim)]
        groups = step_on(trial, groups, dict(zip(parameters, gradients, strict=True)))
    return torch.cat([p.detach() for p in parameters], dim)


def _state_like(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """State for a small parameter, with values from a real one: Adagrad and other optimizers make state when built."""
    for owner, state in optimizer.state.items():
        if not owner.dim():
            continue  # its state does not show which tensors have one entry for each entry
        made = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                if value.shape != owner.shape:
                    return {}  # the step makes it, or fails and names the missing state
                entries = local(value).flatten()
                dtype = parameter.dtype if value.dtype is owner.dtype else value.dtype
                value = torch.full_like(parameter, entries[0].item() if len(entries) else 0.0, dtype=dtype)
            made[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return made
    return {}
