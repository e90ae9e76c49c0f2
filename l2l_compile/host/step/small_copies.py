"""Optimizers over small parameters, on which a step can be tried: copies of the user's optimizer, which stays as it is."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_compile.host.hooks import step_of_a_copy
from l2l_compile.object_copies import copied, is_unchanging
from l2l_compile.param_groups import parameters_of
from l2l_compile.ranks.sharded import attributes, local

_MOST_SHAPES = 4  # parameters of different shapes in a group of a small copy
_MOST_IN_ORDER = 12  # parameters in a group of a small copy, where their order matters; a multiple of pairs, threes and fours
_LARGE, _LARGE_STEP = 1e6, 3  # how much larger the gradients of one step of a trial are
_SMALLEST_RATE = 1e-6  # of a small copy; the steps at a smaller one are rounded away in float32
_MOST_GROUPS = 6  # groups with parameters in a small copy; further groups are empty


@dataclass(frozen=True)
class Small:
    """A parameter of a small copy: its shape, and the parameter of the user that it stands for, if there is one."""

    shape: tuple[int, ...]
    owner: torch.Tensor | None = None


Chosen = Sequence[Sequence[Small]]  # for each param_group


def own_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step of the optimizer's class, without the hooks around it: they are for whole steps."""
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    return functools.partial(step_of_a_copy, step, optimizer)


def held_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer, without state, groups and hooks, and without wrappers around its methods.

    Its defaults are without those objects that are in a group as well: PyTorch puts the same tensor into every group.
    """
    kind = type(optimizer)
    held = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups")
        and not name.startswith("_optimizer_")
        and not callable(getattr(kind, name, None))
    }
    in_groups = {id(value) for group in optimizer.param_groups for value in group.values()}
    if "defaults" in held:
        held["defaults"] = {k: v for k, v in held["defaults"].items() if is_unchanging(v) or id(v) not in in_groups}
    return held


def class_values(optimizer: torch.optim.Optimizer) -> dict[tuple[type, str], Any]:
    """The values that the classes of an optimizer hold, and that a step could change."""
    kinds = [kind for kind in type(optimizer).__mro__ if kind not in torch.optim.Optimizer.__mro__]
    changing = (int, float, list, dict, set, torch.Tensor)
    return {
        (kind, name): value
        for kind in kinds
        for name, value in vars(kind).items()
        if isinstance(value, changing) and not name.startswith("__") and not name.startswith("_abc")
    }


def like_those_of(optimizer: torch.optim.Optimizer) -> Chosen:
    """Small parameters with the numbers of dimensions, and the order of the sizes, that the optimizer's parameters have.

    A group of the optimizer is represented if its settings, apart from numbers, differ from those of the groups before.
    """
    kinds: set[str] = set()
    chosen: list[list[Small]] = []
    for group in optimizer.param_groups:
        kind, represented = kind_of_group(group), sum(map(bool, chosen))
        is_new = kind not in kinds or represented < 2
        kinds.add(kind)
        chosen.append(_small_parameters(group["params"]) if is_new and represented < _MOST_GROUPS else [])
    held = [small for own in chosen for small in own]
    if len(held) == 1:  # a second one, on which a step could depend
        next(own for own in chosen if own).extend(held)
    return chosen


def in_order(optimizer: torch.optim.Optimizer) -> Chosen:
    """Small parameters for the first ones of each group, side by side as they are."""
    return [
        [Small(_small_shape(local(p).shape), p) for p in group["params"][:_MOST_IN_ORDER]] for group in optimizer.param_groups
    ]


def kind_of_group(group: dict[str, Any]) -> str:
    """The settings of a group as text, with numbers as zero or not zero."""
    settings = {k: v for k, v in group.items() if k not in ("params", "param_names", "lr") and not isinstance(v, torch.Tensor)}
    return repr({k: v != 0 if isinstance(v, (int, float)) and not isinstance(v, bool) else v for k, v in settings.items()})


def _small_parameters(parameters: Sequence[torch.Tensor]) -> list[Small]:
    """Two for each of the first kinds of parameters: some optimizers compute with all matrices of one shape at once."""
    found: dict[tuple, list[Small]] = {}
    for parameter in parameters:
        key = (_small_shape(local(parameter).shape), str(attributes(parameter)))
        if key in found and len(found[key]) < 2:
            found[key].append(Small(key[0], parameter))
        elif len(found) < _MOST_SHAPES:
            found.setdefault(key, [Small(key[0], parameter)])
    return [small for own in found.values() for small in own]


def _small_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Sizes of 8, 12, ... for vectors and matrices, of 3, 4, ... otherwise, in the order of the given sizes; a size of 1 stays."""
    ordered = sorted({size for size in shape if size > 1})
    first, further = (8, 4) if len(shape) <= 2 else (3, 1)
    return tuple(first + further * ordered.index(size) if size > 1 else 1 for size in shape)


def small_copy(optimizer: torch.optim.Optimizer, chosen: Chosen, seed: int = 0) -> torch.optim.Optimizer:
    """An optimizer with the same class, hyperparameters and attributes over small parameters, without state and hooks."""
    generator = torch.Generator().manual_seed(seed)
    small = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): small}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            memo[id(parameter)] = torch.zeros(_small_shape(parameter.shape), dtype=parameter.dtype, device="cpu")
    for name, value in held_attributes(optimizer).items():
        small.__dict__[name] = _copy_of_attribute(name, value, memo, type(optimizer).__name__)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        small.__dict__[name] = OrderedDict()
    small.state = defaultdict(dict)
    small.param_groups = [
        _small_group(optimizer, group, own, generator, memo) for group, own in zip(optimizer.param_groups, chosen, strict=True)
    ]
    return small


def _copy_of_attribute(name: str, value: Any, memo: dict[int, Any], owner: str) -> Any:
    try:
        return copied(value, memo)
    except TypeError as error:
        raise TypeError(
            f"the attribute {name!r} of {owner} is an iterator, of which steps apart cannot have copies ({error})"
        ) from error


def _small_group(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    own: Sequence[Small],
    generator: torch.Generator,
    memo: dict[int, Any],
) -> dict[str, Any]:
    settings = {k: copied(v, memo) for k, v in group.items() if k not in ("params", "param_names")}
    if "lr" in settings and _shows_nothing(settings["lr"]):
        settings["lr"] = _rate(optimizer, group)
    if "param_names" in group:
        numbers = {id(p): number for number, p in enumerate(group["params"])}
        settings["param_names"] = [
            group["param_names"][numbers[id(each.owner)]] if each.owner is not None else "small" for each in own
        ]
    return {**settings, "params": [_small_parameter(each, group["params"], generator) for each in own]}


def _shows_nothing(rate: Any) -> bool:
    """Whether steps at this learning rate may round to nothing: a schedule begins with a small one, or with 0."""
    return abs(float(rate)) < _SMALLEST_RATE


def _rate(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Any:
    rates = (group.get("initial_lr"), optimizer.defaults.get("lr"))
    rate = next((float(r) for r in rates if r is not None and not _shows_nothing(r)), 1e-3)
    return torch.full_like(group["lr"], rate) if isinstance(group["lr"], torch.Tensor) else rate


def _small_parameter(small: Small, of_group: Sequence[torch.Tensor], generator: torch.Generator) -> torch.nn.Parameter:
    owner = small.owner if small.owner is not None else next(iter(of_group), None)
    dtype = owner.dtype if owner is not None else torch.float32
    made = torch.nn.Parameter(torch.randn(small.shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype))
    if small.owner is not None:
        made.__dict__.update(copied(attributes(small.owner)))
    return made


def with_fresh_state(optimizer: torch.optim.Optimizer, chosen: Chosen) -> torch.optim.Optimizer:
    """A small copy that can step. Its state is that of an optimizer before its first step.

    Most optimizers make their state in their first step. For others, the class is built anew over the small parameters, and at
    last the state of the user's optimizer is made small. Raises the error of the step if the step fails with each of them.
    """
    first_error: Exception | None = None
    for give_state in (_no_state, _state_of_the_constructor, _state_of_the_user):
        small = small_copy(optimizer, chosen)
        try:
            give_state(small, optimizer, chosen)
            tried = copied(small)
            for number, parameter in enumerate(parameters_of(tried)):
                parameter.grad = gradient_for(parameter, 0, number)
            own_step(tried)()
        except Exception as error:  # noqa: BLE001  # any class may raise anything
            first_error = first_error or error
        else:
            return small
    assert first_error is not None
    raise first_error


def steps_only_with_a_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the first step of a small copy fails as it is, and succeeds with a closure that sets gradients and returns a loss."""
    return not _first_step_succeeds(optimizer, with_closure=False) and _first_step_succeeds(optimizer, with_closure=True)


def _first_step_succeeds(optimizer: torch.optim.Optimizer, with_closure: bool) -> bool:
    try:
        small = small_copy(optimizer, like_those_of(optimizer))

        def closure() -> torch.Tensor:
            for number, parameter in enumerate(parameters_of(small)):
                parameter.grad = gradient_for(parameter, 0, number)
            return torch.ones(())

        closure()
        own_step(small)(*[closure] if with_closure else [])
    except Exception:  # noqa: BLE001  # any class may raise anything, and some cannot be copied
        return False
    return True


def gradient_for(parameter: torch.Tensor, step: int, number: int) -> torch.Tensor:
    """A gradient whose magnitude depends on the number of the parameter. In one step it is large: a bound on a norm may be."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
    size = min(_LARGE, torch.finfo(parameter.dtype).max ** 0.25) if step == _LARGE_STEP else 1.0
    return (drawn * (10.0, 0.1, 1.0)[number % 3] * size).to(parameter.dtype)


def _no_state(small: torch.optim.Optimizer, optimizer: torch.optim.Optimizer, chosen: Chosen) -> None:
    """Leave the state empty."""


def _state_of_the_constructor(small: torch.optim.Optimizer, optimizer: torch.optim.Optimizer, chosen: Chosen) -> None:
    built = type(optimizer)([{**copied({**group, "params": None}), "params": group["params"]} for group in small.param_groups])  # type: ignore[call-arg]
    small.state = built.state


def _state_of_the_user(small: torch.optim.Optimizer, optimizer: torch.optim.Optimizer, chosen: Chosen) -> None:
    for name, value in optimizer.state.items():
        if not isinstance(name, torch.Tensor):
            small.state[name] = copied(value)
    owners = [each.owner for own in chosen for each in own]
    for parameter, owner in zip(parameters_of(small), owners, strict=True):
        if owner is None:
            owner = next((p for p in optimizer.state if isinstance(p, torch.Tensor) and p.dim()), None)
        if owner is not None and owner in optimizer.state:
            small.state[parameter] = dict(_state_like(optimizer.state[owner], local(owner), parameter))


def _state_like(value: Any, owner: torch.Tensor, parameter: torch.Tensor) -> Any:
    """State of a small parameter, with the first entry of each tensor in the user's state."""
    if isinstance(value, torch.Tensor) and value.dim():
        value = local(value)
        if value.shape != owner.shape:
            raise TypeError("a state with another shape than its parameter cannot be made small")
        first = value.flatten()[0].item() if value.numel() and not value.is_meta else 0.0
        return torch.full_like(parameter, first, dtype=parameter.dtype if value.dtype is owner.dtype else value.dtype)
    if isinstance(value, dict):
        return {name: _state_like(part, owner, parameter) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_state_like(part, owner, parameter) for part in value)
    return copied(value)


def whole_state(small: torch.optim.Optimizer) -> list[Any]:
    """The parameters, and the state of each (no copies)."""
    return [(p.detach(), dict(small.state.get(p, {}))) for p in parameters_of(small)]


def named_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Entries of `optimizer.state` that belong to no parameter: counts under a name."""
    entries = list(optimizer.state.items())  # in one step: an update on another thread may add some
    return {name: value for name, value in entries if not isinstance(name, torch.Tensor)}
