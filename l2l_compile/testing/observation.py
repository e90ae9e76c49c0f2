"""One run of a training step, and its effects: results, gradients, parameters, buffers and inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from l2l_compile.testing.difference import BUFFER, GRADIENT, INPUT, INPUT_GRADIENT, LOSS, OUTPUT, PARAMETER, Key
from l2l_compile.testing.leaves import inputs_of, leaves_of, own_copy
from l2l_compile.testing.step_loss import loss_of

Call = Callable[..., Any]
Step = Callable[
    ..., Any
]  # step(call, *args, **kwargs) trains one step with `call` in the place of the model, and returns results


@dataclass(frozen=True)
class Trained:
    """The result of a step with one loss."""

    outputs: Any
    loss: torch.Tensor


def step_with(loss: Callable[[Any], torch.Tensor] | None) -> Step:
    """A step of one call and one backward of its loss. With None, `loss_of` finds the loss."""
    find = loss_of if loss is None else loss

    def step(call: Call, *args: Any, **kwargs: Any) -> Trained:
        outputs = call(*args, **kwargs)
        found = find(outputs)
        if found.requires_grad:
            found.backward()
        return Trained(outputs, found)

    return step


State = dict[Key, torch.Tensor]


def tensors_of(module: Any) -> Iterator[tuple[Key, torch.Tensor]]:
    """The parameters and buffers of a module. A function has none."""
    if isinstance(module, nn.Module):
        yield from ((Key(PARAMETER, name), p) for name, p in module.named_parameters())
        yield from ((Key(BUFFER, name), b) for name, b in module.named_buffers())


def state_of(module: Any) -> State:
    return {key: tensor.detach().clone() for key, tensor in tensors_of(module)}


@torch.no_grad()
def restore(module: Any, state: Mapping[Key, Any]) -> None:
    for key, tensor in tensors_of(module):
        if not torch.equal(tensor, state[key]):
            tensor.copy_(state[key])


def put_back(module: Any, observed: Mapping[Key, Any]) -> None:
    """Restore state and gradients as they were observed after a step."""
    restore(module, observed)
    if isinstance(module, nn.Module):
        for name, parameter in module.named_parameters():
            parameter.grad = observed[Key(GRADIENT, name)]


def observe(module: Any, call: Call, step: Step, args: tuple, kwargs: Mapping[str, Any]) -> dict[Key, Any]:
    """Run a step, which begins without gradients. Returns results, gradients, parameters, buffers and inputs after it."""
    if isinstance(module, nn.Module):
        module.zero_grad(set_to_none=True)
    args, kwargs = own_copy((args, dict(kwargs)))
    result = step(call, *args, **kwargs)
    found = _results(result)
    for name, tensor in inputs_of(args, kwargs).items():
        if isinstance(tensor, torch.Tensor):
            found[Key(INPUT, name)] = tensor.detach()
            if tensor.requires_grad and tensor.is_leaf:  # no longer a leaf if the model wrote a value with a gradient into it
                found[Key(INPUT_GRADIENT, name)] = tensor.grad
    if isinstance(module, nn.Module):
        found |= {Key(GRADIENT, name): p.grad for name, p in module.named_parameters()}
        found |= state_of(module)
    return found


def _results(result: Any) -> dict[Key, Any]:
    if not isinstance(result, Trained):
        return {Key(OUTPUT, name): leaf for name, leaf in leaves_of(result).items()}
    outputs = {Key(OUTPUT, name): leaf for name, leaf in leaves_of(result.outputs).items() if leaf is not result.loss}
    return {Key(LOSS, ""): result.loss, **outputs}


@contextmanager
def random_state(state: torch.Tensor) -> Iterator[None]:
    """A context in which the host's random generator begins at `state`. Its own state is restored at the end."""
    with torch.random.fork_rng([]):
        torch.set_rng_state(state)
        yield
