"""First steps of an optimizer on pieces of a parameter, for state larger than memory: a later step has machine code for any range."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from l2l_compile.host.step.small_copies import Small, kind_of_group, with_fresh_state
from l2l_compile.host.step.torch_step import Hyperparameters, hyperparameters, step_on
from l2l_compile.host.step.trial import nothing_else_changes
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.sharded import attributes, is_sharded

PIECE = 2 << 20  # entries
_SIZE = 256  # of the first dimensions of a parameter on which a step is tried


def taken_in_pieces(optimizer: torch.optim.Optimizer) -> frozenset[torch.nn.Parameter]:
    """The parameters of which a first step on flat pieces leaves the bits of one on the whole: tried, on a small one of each kind.

    A kind is a kind of group, a number of dimensions, and attributes that the optimizer may look at.
    """
    tried: dict[tuple[str, int, str], bool] = {}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            kind = kind_of_group(group), parameter.dim(), str(_attributes(parameter))
            if kind not in tried:
                tried[kind] = _may_be_cut(optimizer, number, parameter)
            if tried[kind] and not is_sharded(parameter) and parameter.is_contiguous():
                found.append(parameter)
    return frozenset(found)


def _attributes(parameter: torch.nn.Parameter) -> dict[str, Any]:
    """Those that an optimizer may look at; none for a fake parameter of a simulation, which has its own of PyTorch."""
    return {} if isinstance(parameter, FakeTensor) else attributes(parameter)


def _may_be_cut(optimizer: torch.optim.Optimizer, group: int, parameter: torch.nn.Parameter) -> bool:
    shape = (_SIZE,) * min(2, parameter.dim()) + (2,) * (parameter.dim() - 2)
    try:
        with nothing_else_changes(optimizer):
            generator = torch.Generator().manual_seed(0)
            master, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
            whole = _stepped(optimizer, group, parameter, master, gradient)
            parts = zip(master.view(-1).tensor_split(3), gradient.view(-1).tensor_split(3), strict=True)
            pieces = [_stepped(optimizer, group, parameter, *part) for part in parts]
            if len(whole) == 1 or any(piece.keys() != whole.keys() for piece in pieces):  # without state, nothing is to be made
                return False
            return all(_is_joined(value, [piece[name] for piece in pieces], master.numel()) for name, value in whole.items())
    except Exception:  # noqa: BLE001  # any class may raise anything; a real step will raise it again
        return False


def _is_joined(whole: Any, pieces: list[Any], entries: int) -> bool:
    """Whether state, or a parameter, is what pieces are together; a value that belongs to no entry is that of each piece."""
    if not isinstance(whole, torch.Tensor):
        return all(type(piece) is type(whole) and piece == whole for piece in pieces)
    if not all(isinstance(piece, torch.Tensor) for piece in pieces):
        return False
    if whole.numel() == entries:
        return torch.equal(whole.reshape(-1), torch.cat([piece.reshape(-1) for piece in pieces]))
    return whole.dim() == 0 and all(piece.dim() == 0 and torch.equal(piece, whole) for piece in pieces)


def _stepped(
    optimizer: torch.optim.Optimizer, group: int, owner: torch.nn.Parameter, master: torch.Tensor, gradient: torch.Tensor
) -> dict[Any, Any]:
    """What a first step leaves on a parameter like `owner` with these entries: its state, and the parameter, as None."""
    chosen: list[list[Small]] = [[] for _ in optimizer.param_groups]
    chosen[group].append(Small(tuple(master.shape), owner if _attributes(owner) else None))
    trial = with_fresh_state(optimizer, chosen)
    (parameter,) = parameters_of(trial)
    with torch.no_grad():
        parameter.copy_(master)
    step_on(trial, hyperparameters(trial), {parameter: gradient.clone()})
    return {**trial.state[parameter], None: parameter.detach()}


def first_step_in_pieces(
    optimizer: torch.optim.Optimizer,
    shared: Hyperparameters,
    parameter: torch.nn.Parameter,
    read: Callable[[slice], tuple[torch.Tensor, torch.Tensor]],
    written: Callable[[slice, torch.Tensor, Mapping[Any, torch.Tensor]], None],
) -> Hyperparameters:
    """The step that makes the state of a parameter, as `step_on`. Leaves state without a tensor of the parameter's size in the optimizer.

    read     returns some entries of the flat parameter, in memory, and of its gradient
    written  gets these entries after the step, and those of the state's tensors that have an entry for each of them
    """
    left, shared_by_all = shared, {}
    for start in range(0, parameter.numel(), PIECE):
        part = slice(start, min(start + PIECE, parameter.numel()))
        piece, gradient = read(part)
        left = step_on(optimizer, shared, {parameter: gradient}, {parameter: piece})
        state = optimizer.state.pop(parameter)
        of_entries = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() and v.shape == piece.shape}
        shared_by_all = {k: v for k, v in state.items() if k not in of_entries}
        written(part, piece, of_entries)
    optimizer.state[parameter] = shared_by_all
    return left
