"""The errors for a call that PyTorch cannot compute: an input of a wrong dtype or shape, or on another device.

Dynamo reports such a call on 20 lines, with advice about Dynamo. The cause is one sentence of PyTorch's. An input is called the
cause only if the operation that failed reads it as it was given; other operations may fail whatever the inputs are.

PyTorch's fake tensors do not check every dtype: `error_of_dtypes` is for a call that fails when a kernel runs.
"""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from l2l_compile.devices.host import is_host
from l2l_compile.errors import DeviceError, InputError, L2LError, LoweringError
from l2l_compile.user_line import OURS

_CAUSE = re.compile(r"got \w+\((?P<quote>[\"'])(?P<text>.*?)(?P=quote)\)\s*$", re.MULTILINE | re.DOTALL)
_OPERATION = re.compile(r"call_(?:function|method) (?:<(?:built-in )?(?:function|method) )?(?P<name>[\w.]+)")
_EXPLANATION = re.compile(r"Explanation: (?P<text>.*)")
_OF_TORCH = os.path.dirname(torch.__file__) + os.sep
_ON_DTYPES = re.compile(r"\bd?types?\b")
_ON_INTEGERS = re.compile(r"scalar types?:? Long, Int")
_MOST = 6  # inputs that are listed
_fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")


def error_for(error: Any, given: Mapping[str, Any]) -> L2LError:
    """The error for a call that Dynamo cannot trace. `error` is Dynamo's, `given` are the local variables of the frame."""
    tensors = list(_inputs(given))
    elsewhere = next(((name, t) for name, t in tensors if not is_host(t.device)), None)
    if elsewhere is not None:
        name, tensor = elsewhere
        return DeviceError(
            f"input '{name}' is on {tensor.device}, and the model is on the host. Leave the model and its inputs on the host: the option "
            "'device' says where the layers run"
        )
    what = f"{_where(error)}: {_operation(error)}{_cause(error)}"
    read = _read(error)
    causes = [f"'{name}' is {_described(tensor)}" for name, tensor in tensors if any(_may_be(fake, tensor) for fake in read)]
    if causes:
        listed = ", ".join(causes[:_MOST])
        return InputError(f"the model cannot compute with its inputs{what}. Input {listed}: check dtypes and shapes")
    listed = ", ".join(f"'{name}' {_described(tensor)}" for name, tensor in tensors[:_MOST])
    return LoweringError(
        f"the model cannot be traced{what}. If the plain model computes this call, keep the operation out of the compiled part "
        f"(torch.compiler.disable){f'. The inputs of the call are {listed}' if listed else ''}"
    )


def error_of_dtypes(
    error: BaseException, inputs: Iterable[tuple[str, torch.Tensor]], parameters: Iterable[torch.Tensor]
) -> InputError | None:
    """The error for a kernel that failed on dtypes, if an input has another floating-point dtype than all parameters.

    Where the kernel takes integers, such as indices of a lookup, every input of floating point counts.
    """
    if not isinstance(error, RuntimeError) or not _ON_DTYPES.search(str(error)):
        return None
    expected, takes_integers = {p.dtype for p in parameters if p.is_floating_point()}, _ON_INTEGERS.search(str(error)) is not None
    wrong = [(name, t) for name, t in inputs if t.is_floating_point() and (takes_integers or t.dtype not in expected)]
    if not expected or not wrong:
        return None
    listed = ", ".join(f"'{name}' is {_described(tensor)}" for name, tensor in wrong[:_MOST])
    dtypes = sorted(map(str, expected))
    remedy = (
        ": convert the input (x.long())"
        if takes_integers
        else f", and the parameters are {' and '.join(dtype.removeprefix('torch.') for dtype in dtypes)}: convert the input "
        f"(x.to({dtypes[0]})), or the model"
    )
    cause = " ".join(str(error).split()).rstrip(".")
    return InputError(f"the model cannot compute with its inputs: {cause}. Input {listed}{remedy}")


def _inputs(given: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the arguments of a frame, by name; not those of modules."""
    for name, value in given.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter):
                inner = pytree.keystr(path)
                keyword = re.fullmatch(r"\['(\w+)'\]", inner) if name == "kwargs" else None
                yield (keyword[1] if keyword else name + inner), leaf


def noting_operands(node: fx.Node, run: Callable[[], Any]) -> Any:
    """`run`, a call in Dynamo's graph. If it fails, the variable `read` stays in the traceback: Dynamo clears the graph."""
    try:
        return run()
    except Exception:
        read = _given_to(node)  # noqa: F841 - for `_read`
        raise


def _read(error: BaseException | None) -> list[torch.Tensor]:
    """What the call in Dynamo's graph that failed reads.

    Up to PyTorch 2.13, a variable of the function of Dynamo that made the call has its node. PyTorch 2.15 clears the graph first, and
    raises another error, which has that of the call as its context: there it is noted by `noting_operands`.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame in reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]):
            if frame.f_code is noting_operands.__code__:
                return frame.f_locals["read"]
            node = frame.f_locals.get("node") if frame.f_code.co_filename.startswith(_OF_TORCH) else None
            if isinstance(node, fx.Node) and node.all_input_nodes:
                return _given_to(node)
        error = error.__cause__ or error.__context__
    return []


def _given_to(node: fx.Node) -> list[torch.Tensor]:
    """Fake tensors of the arguments that a call reads as they were given, or behind operations on one tensor that keep dtype and shape.

    None for PyTorch's own functions that the user has not called, such as those of `torch.func.jvp`.
    """
    if getattr(node.target, "__name__", "").startswith("_"):
        return []
    return [given for value in node.all_input_nodes if (given := _given(value)) is not None]


def _given(value: fx.Node) -> torch.Tensor | None:
    """The fake tensor of the argument that a value is, but for its entries; None if it is none, or a parameter."""
    while value.op != "placeholder":
        operands = [other for other in value.all_input_nodes if isinstance(other.meta.get("example_value"), torch.Tensor)]
        if len(operands) != 1 or not _alike(value.meta.get("example_value"), operands[0].meta["example_value"]):
            return None
        (value,) = operands
    fake = value.meta.get("example_value")
    return fake if isinstance(fake, torch.Tensor) and not isinstance(fake, torch.nn.Parameter) else None


def _may_be(fake: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether a fake tensor may be that of a given one: dtype and sizes are the same. Dynamo no longer says which it is."""
    sizes = zip(fake.shape, given.shape, strict=False)
    return (
        fake.dtype == given.dtype and fake.dim() == given.dim() and all(isinstance(s, torch.SymInt) or s == t for s, t in sizes)
    )


def _alike(one: object, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and one.dtype == other.dtype and str(one.shape) == str(other.shape)  # symbols: no guards


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _where(error: Any) -> str:
    """The user's line, such as ` at model.py:12`."""
    frames = [f for f in getattr(error, "real_stack", None) or () if not f.filename.startswith((_OF_TORCH, OURS))]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _operation(error: Any) -> str:
    """The function of PyTorch that failed, such as `linear: `."""
    found = _OPERATION.search(str(error))
    return f"{found['name'].rpartition('.')[2]}: " if found else ""


def _cause(error: Any) -> str:
    text = str(error)
    found = _CAUSE.search(text) or _EXPLANATION.search(text)
    cause = (found["text"] if found else text).strip()
    return re.split(r"\\n|\n", cause)[0].strip().rstrip(".")  # what follows is a stack of C++


@contextmanager
def without_log() -> Iterator[None]:
    """Context manager in which PyTorch does not log the traceback of an operation that fails on fake tensors: the failure is expected."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")

    _fake_tensors.addFilter(is_other)
    try:
        yield
    finally:
        _fake_tensors.removeFilter(is_other)
