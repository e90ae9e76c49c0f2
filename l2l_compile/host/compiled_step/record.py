"""Record an optimizer's own step on a parameter, as straight-line C for one element.

The step runs on stand-ins without data (meta tensors) of the parameter, its gradient and the state of its shape, while
numbers (hyperparameters, counters, bias corrections) are computed by the optimizer's own Python. They become operands
`s[0], s[1], …`, so the text is the same in every step that takes the same path through the code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from l2l_compile.errors import L2LError
from l2l_compile.host.compiled_step.formulas import COMPARISONS, IGNORED, formula_of
from l2l_compile.host.step.sharded_state import own_state
from l2l_compile.host.step.torch_step import Hyperparameters, left_by, shadow_of
from l2l_compile.object_copies import tensors_within
from l2l_compile.ranks.sharded import attributes, local


class NotElementwise(Exception):
    """The step of an optimizer cannot be written as one formula for every element; its message says why."""


@dataclass(frozen=True)
class Formula:
    """The computation of a step for every element of a parameter `p` with a gradient `g`.

    lines     C statements that compute the new values
    states    number of state tensors `x0`, `x1`, … of the parameter's shape
    scalars   number of operands `s[0]`, `s[1]`, …
    writes    C variable of the new value of each tensor that changes: "p" for the parameter, "x0", …
    """

    lines: tuple[str, ...]
    states: int
    scalars: int
    writes: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Recipe:
    """An optimizer's step on one parameter, in one step of the training.

    scalars   the values of `s[0]`, `s[1]`, …
    reads     the names of the state tensors
    state     the other entries of the parameter's state after the step
    shared    the hyperparameters after the step
    any_shape whether the step looked at no size, so that the recipe fits every parameter in the same state
    """

    formula: Formula
    scalars: tuple[float, ...]
    reads: tuple[str, ...]
    state: dict[str, Any]
    shared: Hyperparameters
    any_shape: bool


def vectors(parameter: torch.Tensor, state: dict[str, Any]) -> list[str]:
    """Names of the state tensors that have an element for each one of the parameter."""
    return [k for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == parameter.shape and v.dim()]


def has_simple_state(state: dict[str, Any]) -> bool:
    """Whether a state holds tensors and numbers alone. The step on another one, with lists of tensors, is not recorded."""
    return all(map(_is_simple, state.values()))


def record(optimizer: torch.optim.Optimizer, shared: Hyperparameters, group: int, parameter: torch.Tensor) -> Recipe:
    """The step of `optimizer` on `parameter`, which is in the param_group of this number. Changes nothing.

    A step that calls operations on lists of tensors may round otherwise than one with an operation for each tensor, so it is
    recorded as it is. If it has no formula, such as a norm of a list, the other one is recorded.

    Raises `NotElementwise`, and `L2LError` if the step fails on stand-ins, as it does if it compiles a function.
    """
    try:
        return _recorded(optimizer, shared, group, parameter, plain=("fused",))
    except (NotElementwise, L2LError):
        if not any("foreach" in each for each in shared.groups):
            raise
    return _recorded(optimizer, shared, group, parameter, plain=("fused", "foreach"))


def _recorded(
    optimizer: torch.optim.Optimizer, shared: Hyperparameters, group: int, parameter: torch.Tensor, plain: Sequence[str]
) -> Recipe:
    """As `record`, with the settings `plain` of all groups switched off."""
    state = own_state(optimizer.state.get(parameter, {}), parameter)
    special, parameter = attributes(parameter), local(parameter)
    names = vectors(parameter, state)
    if parameter.dim() == 0:
        raise NotElementwise("a parameter without dimensions")
    stand_in = _without_data(parameter).requires_grad_()
    stand_in.__dict__.update(special)
    stand_in.grad = _without_data(parameter)
    held = {name: _stand_in_of_state(name, state[name], name in names, parameter) for name in state}
    shadow, step = shadow_of(
        optimizer, _without(plain, shared), [[stand_in] if i == group else [] for i in range(len(shared.groups))]
    )
    if "param_names" in shadow.param_groups[group]:
        shadow.param_groups[group]["param_names"] = _Names()
    if state:
        shadow.state[stand_in] = held
    known = {"p": stand_in, "g": stand_in.grad} | {f"x{i}": held[name] for i, name in enumerate(names)}
    recorder = _Recorder(stand_in, known)
    with recorder, _Questions() as questions:
        try:
            step()
        except RuntimeError as error:
            raise L2LError(
                f"the step of {type(optimizer).__name__} fails where it is recorded, to be compiled: {str(error).strip().splitlines()[0]}. "
                "The option compile_update=False runs the optimizer's own step"
            ) from error
    after = shadow.state.get(stand_in, {})
    rest = _state_without_vectors(after, known, names)
    if gone := held.keys() - after.keys():
        raise NotElementwise(f"the step removes the state {gone.pop()!r}")
    writes = tuple((name, v) for name in known if name != "g" and (v := recorder.values[_memory(known[name])]) != name)
    left = left_by(shadow)
    for given, settings in zip(shared.groups, left.groups, strict=True):
        settings.update({name: given[name] for name in (*plain, "param_names") if name in given})
    if any(t.is_meta for t in tensors_within((left.groups, left.named))):
        raise NotElementwise("the step keeps a tensor of the parameter's shape outside of the parameter's state")
    formula = Formula(tuple(recorder.lines), len(names), len(recorder.scalars), writes)
    return Recipe(formula, tuple(recorder.scalars), tuple(names), rest, left, not questions.of_shape)


class _Names(list):
    """Stands for the names of a group's parameters. A step that reads them is not the same for all parameters."""

    def __iter__(self) -> Iterator[str]:
        raise NotElementwise("the step looks at names of parameters")

    def __getitem__(self, key: Any) -> Any:
        return iter(self)

    def __contains__(self, name: object) -> bool:
        return any(name == each for each in self)


def _without(settings: Sequence[str], shared: Hyperparameters) -> Hyperparameters:
    """Hyperparameters in which these settings are False."""
    groups = [{name: False if name in settings else value for name, value in group.items()} for group in shared.groups]
    return Hyperparameters(groups, shared.named)


def _state_without_vectors(after: dict[str, Any], known: dict[str, torch.Tensor], names: list[str]) -> dict[str, Any]:
    """The entries of a state that are no vectors. Raises `NotElementwise` if another entry than the vectors is without data."""
    rest = {}
    for name, value in after.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            if name not in names or _memory(value) != _memory(known[f"x{names.index(name)}"]):
                raise NotElementwise(f"the step makes the state {name!r} anew")
        elif not _is_simple(value):
            raise NotElementwise(f"the state {name!r} is a {type(value).__name__}")
        else:
            rest[name] = value
    return rest


def _is_simple(value: Any) -> bool:
    """Whether an entry of a state is a tensor, or a value that can be an operand or part of a key."""
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, str))


def _stand_in_of_state(name: str, value: Any, is_vector: bool, parameter: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        if not _is_simple(value):
            raise NotElementwise(f"the state {name!r} is a {type(value).__name__}")
        return value
    if is_vector:
        if value.dtype is not parameter.dtype:
            raise NotElementwise(f"the state {name!r} is {value.dtype}")
        return _without_data(value)
    if value.dim():
        raise NotElementwise(f"the state {name!r} has another shape than its parameter")
    return value.clone()


def _without_data(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(like.shape, dtype=dtype or like.dtype, device="meta")


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Questions(TorchFunctionMode):
    """Sets `of_shape` when code asks a tensor for anything other than tensors and properties such as its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.of_shape = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = (
            result if isinstance(result, (list, tuple)) and getattr(func, "__name__", "").startswith(_OF_LISTS) else [result]
        )
        if not all(isinstance(each, _NO_SHAPES) for each in results) and func not in _NOT_OF_SHAPE:
            self.of_shape = True
        return result


_NO_SHAPES = (type(None), torch.Tensor, torch.dtype, torch.device, torch.layout)
_NOT_OF_SHAPE = frozenset({
    torch.is_complex, torch.Tensor.is_complex, torch.is_floating_point, torch.Tensor.is_floating_point, torch.Tensor.__hash__,
    *(getattr(torch.Tensor, name).__get__ for name in ("is_sparse", "requires_grad", "is_cuda", "is_cpu")),
    torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__bool__, torch.Tensor.__int__,
})  # fmt: skip  # the last four read numbers of real tensors: a stand-in has none


_FACTORS = ("alpha", "value")
_OF_LISTS = "_foreach_"


def _entry(argument: Any, number: int) -> Any:
    """The operand of one operation, from an argument of an operation on lists: a list, a vector of factors, or the same for all."""
    if isinstance(argument, (list, tuple)):
        return argument[number]
    return argument[number].item() if isinstance(argument, torch.Tensor) and argument.dim() else argument


class _Recorder(TorchDispatchMode):
    """Writes a C statement for every operation on tensors without data. `values`: the C variable in each tensor's memory."""

    def __init__(self, like: torch.Tensor, known: dict[str, torch.Tensor]):
        super().__init__()
        self.like = like
        self.lines: list[str] = []
        self.scalars: list[float] = []
        self.values = {_memory(t): name for name, t in known.items()}
        self._alive: list[torch.Tensor] = list(known.values())  # kept alive, so that no new memory gets the identity of another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(map(_has_stand_in, (*args, *kwargs.values()))):
            if _is_meta(kwargs.get("device")):
                kwargs = {**kwargs, "device": "cpu"}  # a number beside the parameter: its value is known
                result = func(*args, **kwargs)
                made = result.dim() > 0
            else:
                result = func(*args, **kwargs)
                made = _has_stand_in(result)
            if made:
                raise NotElementwise(f"{func} makes a tensor")
            return result
        name = func.overloadpacket.__name__
        if name.startswith(_OF_LISTS):
            return self._one_by_one(func, name.removeprefix(_OF_LISTS), args, kwargs)
        if (found := formula_of(name, args)) is None:
            raise NotElementwise(f"{func} is not elementwise, or has no formula")
        formula, operands = found
        name = name.removesuffix("_")
        try:
            named = {k: self._operand(v) for k, v in kwargs.items() if k not in IGNORED and not (k in _FACTORS and v == 1)}
            expression = formula(*map(self._operand, operands), **named)
            if name != "where" and any(_is_stand_in(o) and o.dtype is not self.like.dtype for o in operands):
                raise NotElementwise("an operand of another dtype")
        except (NotElementwise, TypeError) as error:
            raise NotElementwise(f"{func}: {error}") from None
        result = self._result(func, name, args, kwargs)
        variable = f"t{len(self.lines)}"
        self.lines.append(f"{'int' if name in COMPARISONS else 'real'} {variable} = {expression};")
        self.values[_memory(result)] = variable
        return result

    def _one_by_one(self, func: Any, name: str, args: tuple, kwargs: dict) -> list[torch.Tensor] | None:
        """An operation on lists as operations on their tensors, one after another, as PyTorch's kernels of the host do it."""
        each = getattr(torch.ops.aten, name, None)
        if each is None:
            raise NotElementwise(f"{func} is not elementwise, or has no formula")
        if name.removesuffix("_") in ("addcmul", "addcdiv") and len(args) == 4:
            kwargs, args = {"value": args[3]}, args[:3]
        count = len(next(a for a in args if isinstance(a, (list, tuple))))
        with self:
            results = [each(*(_entry(a, i) for a in args), **{k: _entry(a, i) for k, a in kwargs.items()}) for i in range(count)]
        return None if func._schema.is_mutable else results

    def _result(self, func: Any, name: str, args: tuple, kwargs: dict) -> torch.Tensor:
        """The result of an operation. All operands have one shape and dtype, so nothing has to be computed."""
        dtype = kwargs.get("dtype") or (torch.bool if name in COMPARISONS else self.like.dtype)
        written = args[0] if func._schema.is_mutable else None
        written = kwargs.get("out", written)
        if dtype is not (torch.bool if name in COMPARISONS else self.like.dtype) or (
            written is not None and written.dtype is not dtype
        ):
            raise NotElementwise(f"{func} gives {dtype}")
        if name in ("detach", "alias"):
            return func(*args)
        if written is None:
            written = _without_data(self.like, dtype)
            self._alive.append(written)
        return written

    def _operand(self, value: Any) -> str | None:
        if value is None:
            return None
        if _is_stand_in(value):
            if value.shape != self.like.shape or _memory(value) not in self.values:
                raise NotElementwise("a tensor of another shape")
            return self.values[_memory(value)]
        if isinstance(value, torch.Tensor):
            if value.dim():
                raise NotElementwise("a tensor that is not a state of the parameter")
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise NotElementwise(f"an operand of type {type(value).__name__}")
        self.scalars.append(float(value))
        return f"s[{len(self.scalars) - 1}]"


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _is_stand_in(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _has_stand_in(value: Any) -> bool:
    return _is_stand_in(value) or (isinstance(value, (list, tuple)) and any(map(_is_stand_in, value)))
