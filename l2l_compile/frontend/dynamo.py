"""The adapter to the private side of TorchDynamo and autograd. docs/private_names.md lists every private name in use, and why.

Two things are not possible with public names:

* A dimension is symbolic only if it is marked before Dynamo looks at the tensor, but a backend is called after that.
  Therefore `mark_batches` marks dimension 0 of every user input when Dynamo wraps it, and removes the mark again. It does
  so only in frames that are compiled by this backend.
* A backend does not know which `torch.compile` call it serves. `current_owner` and `owner_of` find the backend object that
  `torch.compile` made for that call, so that programs can be looked up by the compiled model.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sysconfig
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.eval_frame import innermost_backend, set_code_exec_strategy
from torch._dynamo.exc import ObservedException, TensorifyScalarRestartAnalysis, Unsupported, UserError
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy
from torch._dynamo.utils import counters
from torch._dynamo.variables import ConstantVariable, builder, misc
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.nn.modules import rnn

from . import collection, limits
from .frames import with_room
from .kept_programs import note_code
from .patches import is_replaced, replace
from .readiness import check_ready

_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")
_ANY_MARK = (*_MARKS, "_dynamo_dynamic_indices", "_dynamo_static_indices", "_dynamo_unbacked_indices")


def apart_from_compilation() -> AbstractContextManager:
    """Within it, no other thread compiles, so `torch.compiler.is_compiling()`, one flag for all threads, is False.

    Waits until a running compilation ends. A thread that compiles must not wait for a thread that waits here.
    """
    return convert_frame.compile_lock


def compiles_here() -> bool:
    """Whether this thread compiles. If so, it must not wait for a thread that enters `apart_from_compilation`."""
    return convert_frame.compile_lock._is_owned()  # type: ignore[attr-defined]  # an RLock


def unseen_by_saved_tensors_hooks() -> AbstractContextManager:
    """Within it, saved-tensors hooks of the user (`torch.utils.checkpoint`, `save_on_cpu`) are not called.

    These hooks expect the tensors that a step saves, the same in every call. Compiling and tracing happen in the first call
    only.
    """
    return dynamo_utils._disable_saved_tensors_hooks_during_tracing()


def look_at_calls(is_ours: Callable[[Any], bool], called: Callable[[Any], None]) -> None:
    """From now on, a `torch.compile` call with a backend that `is_ours` calls `called` with the backend object of the call.

    An error of `called` is raised by the `torch.compile` call. The backend itself is called only with the first graph, which
    may be much later.
    """
    original = eval_frame.get_compiler_fn
    if is_replaced(original):
        return

    @functools.wraps(original)
    def get_compiler_fn(compiler_fn):
        if is_ours(compiler_fn):
            called(compiler_fn)
        return original(compiler_fn)

    replace(eval_frame, "get_compiler_fn", get_compiler_fn)


def mark_batches(is_ours: Callable[[Any], bool]) -> None:
    """From now on, frames whose backend `is_ours` see dimension 0 of tensor inputs (or the one of `trace_again`) as symbolic.

    Parameters, buffers and other tensors of modules stay static. A tensor that the user marked keeps the user's marks.
    """
    original = builder._automatic_dynamic
    if is_replaced(original):
        return

    @functools.wraps(original)
    def automatic_dynamic(e, tx, source, static_shapes, *args, **kwargs):
        marks = (
            not static_shapes
            and isinstance(e, torch.Tensor)
            and e.dim() > 0
            and not isinstance(e, torch.nn.Parameter)
            and not any(hasattr(e, mark) for mark in _ANY_MARK)
            and is_ours(innermost_backend(tx.output.compiler_fn))
        )
        if not marks:
            return original(e, tx, source, static_shapes, *args, **kwargs)
        dimension = _batch_dimension(tx, source)
        if dimension is None:
            return original(e, tx, source, static_shapes, *args, **kwargs)
        torch._dynamo.maybe_mark_dynamic(e, dimension)
        try:
            return original(e, tx, source, static_shapes, *args, **kwargs)
        finally:
            for mark in _MARKS:
                if hasattr(e, mark):
                    delattr(e, mark)

    replace(builder, "_automatic_dynamic", automatic_dynamic)


_CHOICES = "_l2l_batch_dimensions"  # on the backend object of a call: choices of `trace_again` by code object


def _batch_dimension(tx: Any, source: Any) -> int | None:
    return _dimension_in(_choice_for(tx.output), source.name)


def _choice_for(output: Any) -> Any:
    return getattr(innermost_backend(output.compiler_fn), _CHOICES, {}).get(output.root_tx.f_code)


def _translator_at_work() -> Any:
    """Dynamo's translator of the frame that is being compiled; None if the backend was called by hand."""
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:
        return None


def _dimension_in(choice: Any, name: str) -> int | None:
    return 0 if choice is None or choice.dimensions is None else choice.dimensions.get(name)


def batch_dimension_of(placeholder: torch.fx.Node) -> int | None:
    """The batch dimension of an input of the frame that is being compiled (see `trace_again`); None if it has no rows."""
    return _dimension_in(batch_choice(), source_name(placeholder))


def sizes_are_fixed() -> bool:
    """Whether the frame is compiled with `dynamic=False`, so that each size has a program of its own."""
    return torch._dynamo.config.assume_static_by_default and not torch._dynamo.config.automatic_dynamic_shapes


def batch_choice() -> Any:
    """The choice that `trace_again` got for the frame that is being compiled; None if it was not called."""
    tx = _translator_at_work()
    return _choice_for(tx.output) if tx is not None else None


def trace_again(choice: Any, reason: str) -> None:
    """Make Dynamo trace the frame that is being compiled again, with the batch in the dimensions `choice.dimensions`.

    Does not return, unless Dynamo is not tracing (the backend was called by hand).
    """
    tx = _translator_at_work()
    if tx is None:
        return
    owner = innermost_backend(tx.output.compiler_fn)
    if not hasattr(owner, _CHOICES):
        setattr(owner, _CHOICES, {})
    getattr(owner, _CHOICES)[tx.output.root_tx.f_code] = choice
    tx.speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason=reason)


@dataclass(frozen=True)
class SkippedFrame:
    """A function that Dynamo cannot compile: it runs uncompiled, on the host. Functions that it calls may still be compiled."""

    function: str
    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line}): {self.reason}"


# The cache of fake tensors takes more time than it saves: a result with symbolic sizes is made a second time for the cache, and
# `propagation.py` reuses repeated operations without it. Without guards on hooks, a hook that is added later is not called.
_SETTINGS = {"allow_rnn": True, "fake_tensor_cache_enabled": False, "skip_nnmodule_hook_guards": False}


# A function that raises in this many calls in a row does so on purpose, and is left uncompiled.
_MISTAKES = 8
_RUN_THIS_CALL_UNCOMPILED = ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False)
_mistaken: weakref.WeakKeyDictionary[types.CodeType, int] = weakref.WeakKeyDictionary()  # calls in a row that raised


def watch_frames(
    is_ours: Callable[[Any], bool],
    skipped: Callable[[Any, SkippedFrame], None],
    recompiled: Callable[[Any, limits.Recompilations], None],
    begun: Callable[[Any], None],
) -> None:
    """From now on, frames with a backend that `is_ours` are compiled under `limits.raised` and with recurrent layers.

    `begun` is called for each frame before Dynamo looks at it, `skipped` for a frame that Dynamo leaves uncompiled, and
    `recompiled` for a function with many programs.

    A call that raises (for example by a wrong keyword) runs uncompiled, and later calls of the function are still compiled.
    Dynamo would leave the function, and all functions that it calls, uncompiled from then on.
    """
    original = convert_frame.ConvertFrameAssert.__call__
    if is_replaced(original):
        return

    @functools.wraps(original)
    def convert(self, frame, *args, **kwargs):
        if not is_ours(self._torchdynamo_orig_backend):
            return original(self, frame, *args, **kwargs)
        _seen.append(Counter(counters["unimplemented"]))
        begun(owner := innermost_backend(self._torchdynamo_orig_backend))
        note_code(owner, frame.f_code)
        try:
            check_ready(frame.f_locals.values())
            settings = torch._dynamo.config.patch(_SETTINGS)
            lazy = _use_lazy_graph_module(True)  # Dynamo's graph is never run, so no Python code is written for it
            with collection.rests(), limits.raised(self, frame, recompiled), settings, lazy:
                compiled = with_room(original, self, frame, *args, **kwargs)
            _mistaken.pop(frame.f_code, None)
            return compiled
        except (Unsupported, UserError) as error:
            if not (self._one_graph or self._box.error_on_graph_break):  # otherwise the user gets the error itself
                code, where = frame.f_code, getattr(error, "real_stack", None) or ()
                line = next((s.lineno for s in where if s.filename == code.co_filename), code.co_firstlineno)
                reason = SkippedFrame(code.co_qualname, code.co_filename, line, str(error).strip().split("\n")[0])
                mistaken = isinstance(error.__cause__, ObservedException)
                _mistaken[code] = _mistaken.get(code, 0) + mistaken
                if not _is_of_python(code) and not (mistaken and _mistaken[code] == 1):
                    skipped(innermost_backend(self._torchdynamo_orig_backend), reason)
                if mistaken and _mistaken[code] < _MISTAKES:
                    return _RUN_THIS_CALL_UNCOMPILED
                _skipped_codes.add(code)
            raise
        finally:
            _seen.pop()

    replace(convert_frame.ConvertFrameAssert, "__call__", convert)


def _is_of_python(code: types.CodeType) -> bool:
    """Whether a function is in Python's standard library, which has no layers. Functions that it calls are looked at alone."""
    path = code.co_filename
    return path.startswith("<frozen ") or path.startswith(_LIBRARY) and "-packages" not in path


_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def in_data_parallel() -> bool:
    """Whether a forward of `DistributedDataParallel` is running: it averages the gradients that arrive at `p.grad`."""
    return torch.distributed.is_available() and torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


def keep_graphs_whole(is_ours: Callable[[Any], bool]) -> None:
    """From now on, frames with a backend that `is_ours` are captured as one graph under `DistributedDataParallel` as well.

    Dynamo would cut them at the borders of its gradient buckets, and pass them to another backend that calls this one. A
    program returns all its gradients at its end, so the buckets would overlap no communication with the backward.
    """
    original = convert_frame.CatchErrorsWrapper.__call__
    if is_replaced(original):
        return

    @functools.wraps(original)
    def look_at(self, *args, **kwargs):
        backend = getattr(self._torchdynamo_orig_backend, "_torchdynamo_orig_backend", None)
        if dynamo_utils.get_optimize_ddp_mode() == "ddp_optimizer" and is_ours(backend):
            with torch._dynamo.config.patch(optimize_ddp=False):
                return original(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    replace(convert_frame.CatchErrorsWrapper, "__call__", look_at)


def watch_packed(is_ours: Callable[[Any], bool], skipped: Callable[[Any, SkippedFrame], None]) -> None:
    """From now on, `skipped` is called for recurrent layers that Dynamo leaves uncompiled, if the frame's backend `is_ours`.

    A recurrent layer that gets a packed sequence breaks the graph within its own forward. Nothing else reports this: Dynamo
    leaves one call uncompiled, and does not compile a graph that has no operation before that call.
    """
    original = InstructionTranslatorBase.log_graph_break
    if is_replaced(original):
        return

    @functools.wraps(original)
    def log_graph_break(self, code_options, reason, exc):
        stack = list(getattr(exc, "real_stack", None) or ())
        inside = next((i for i, s in enumerate(stack) if s.filename == rnn.__file__), None)
        backend = self.output.compiler_fn
        if inside and is_ours(backend):
            caller = stack[inside - 1]
            why = f"{_PACKED} ({str(exc).strip().splitlines()[0]})"
            skipped(innermost_backend(backend), SkippedFrame("a recurrent layer", caller.filename, caller.lineno, why))
        return original(self, code_options, reason, exc)

    replace(InstructionTranslatorBase, "log_graph_break", log_graph_break)


def log_while_tracing(is_ours: Callable[[Any], bool]) -> None:
    """From now on, log calls in frames with a backend that `is_ours` run while Dynamo traces, and do not break the graph.

    A message with a value that Dynamo does not know at that time still breaks the graph, so that every call logs it.
    """
    original = misc.LoggingLoggerVariable.call_method
    if is_replaced(original):
        return

    @functools.wraps(original)
    def call_method(self, tx, name, args, kwargs):
        known = all(value.is_python_constant() for value in (*args, *kwargs.values()))
        method = getattr(self.value, name, None)
        if not (known and callable(method) and is_ours(innermost_backend(tx.output.compiler_fn))):
            return original(self, tx, name, args, kwargs)
        method(*(a.as_python_constant() for a in args), **{key: value.as_python_constant() for key, value in kwargs.items()})
        return ConstantVariable.create(None)

    replace(misc.LoggingLoggerVariable, "call_method", call_method)


_PACKED = "Dynamo traces no packed sequences, whose sizes depend on lengths"


def retry_skipped() -> None:
    """Make Dynamo try the frames that it has skipped again: it remembers them, and gives no reason the second time.

    Code that is compiled for such a frame, for a model with which it could be compiled, stays.
    """
    for code in list(_skipped_codes):
        set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


_skipped_codes: weakref.WeakSet[types.CodeType] = weakref.WeakSet()
_seen: list[Counter] = []  # for each nested frame, the graph-break reasons counted before it began


def current_owner() -> Any:
    """The backend object that `torch.compile` made for the call being compiled now; None outside of a compilation."""
    tx = _translator_at_work()
    return innermost_backend(tx.output.compiler_fn) if tx is not None else None


def modules_in_frame() -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """The modules that the frame being compiled can reach: by a local name or a decorator's `*args`, and by a global name."""
    tx = _translator_at_work()
    if tx is None:
        return [], []
    values = list(tx.output.local_scope.values())
    packed = [inner for value in values if isinstance(value, tuple) for inner in value]
    local = [v for v in (*values, *packed) if isinstance(v, torch.nn.Module)]
    return local, [v for v in tx.output.global_scope.values() if isinstance(v, torch.nn.Module)]


def owner_of(compiled: Any) -> Any:
    """The backend object behind a compiled module or function; None if `torch.compile` did not make it."""
    compiled = compiled_in_place(compiled) or compiled
    if isinstance(compiled, torch._dynamo.OptimizedModule):
        callback: Any = compiled.dynamo_ctx.callback
        return innermost_backend(callback)
    function = getattr(compiled, "__func__", compiled)
    if not callable(function) or not hasattr(function, "_torchdynamo_orig_callable"):
        return None
    context = inspect.getclosurevars(function).nonlocals.get("self")
    return innermost_backend(context.callback) if context is not None else None


def compiled_in_place(module: Any) -> Any:
    """The function that runs in the place of a module after `module.compile(...)`; None for any other object."""
    return getattr(module, "_compiled_call_impl", None) if isinstance(module, torch.nn.Module) else None


def uncompiled(model: Any) -> Any:
    """The module or function behind the result of `torch.compile`; an object that is not compiled is returned unchanged."""
    plain = getattr(model, "_orig_mod", model)
    plain = plain._call_impl if compiled_in_place(plain) is not None else plain
    return getattr(plain, "_torchdynamo_orig_callable", plain)


def options_of(compiled: Any) -> Any:
    """The `options=` of the `torch.compile` call behind a compiled module or function; None if there are none."""
    return getattr(owner_of(compiled), "kwargs", {}).get("options")


_SKIPPED_FUNCTION = re.compile(r"marked as skipped[\s\S]*qualname: (\w+)")


def graph_break(gm: torch.fx.GraphModule) -> str | None:
    """Why Dynamo ended this graph before the end of its function; None if it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    text = str(reason.reason).strip().split("\n")[0]
    if text == "step_unsupported" and _seen:  # Dynamo's text for "somewhere in this statement"
        text = next(reversed(counters["unimplemented"] - _seen[-1]), text).strip().split("\n")[0]
    if (skipped := _SKIPPED_FUNCTION.search(str(reason.reason))) is not None:
        text += f" ({skipped[1]})"
    where = f" at {reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno}" if reason.user_stack else ""
    return text + where


def source_name(placeholder: torch.fx.Node) -> str:
    """Dynamo's expression for a graph input, such as `L['self']._modules['head']._parameters['weight']`."""
    if "source_name" in placeholder.meta:
        return placeholder.meta["source_name"]
    source = getattr(placeholder, "_dynamo_source", None)
    return source.name if source is not None else placeholder.name


def name_the_owner_self(graph: torch.fx.Graph) -> None:
    """Give modules in a method that a decorator wraps in `wrapper(*args)` the names that they have without the decorator.

    In such a frame, Dynamo names the owner of the method `L['args'][0]`. If several arguments are modules, the names stay.
    """
    tx = _translator_at_work()
    prefix = _owner_among_arguments(tx.output.root_tx) if tx is not None else None
    if prefix is None:
        return
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        if any(name.startswith(prefix) for name, _ in stack.values()):
            node.meta["nn_module_stack"] = {key: (_with_self(name, prefix), kind) for key, (name, kind) in stack.items()}
        if node.op == "placeholder":
            node.meta["source_name"] = _with_self(source_name(node), prefix)


def _owner_among_arguments(root: Any) -> str | None:
    """Dynamo's expression for the first argument of a frame with `*args` alone, if it is the only module; None otherwise."""
    code = root.f_code
    if code.co_argcount or not code.co_flags & inspect.CO_VARARGS:
        return None
    name = code.co_varnames[code.co_kwonlyargcount]
    given = root.f_locals.get(name, ())
    modules = [isinstance(value, torch.nn.Module) for value in given]
    return f"L['{name}'][0]" if modules[:1] == [True] and sum(modules) == 1 else None


def _with_self(name: str, prefix: str) -> str:
    return "L['self']" + name.removeprefix(prefix) if name.startswith(prefix) else name


def is_module_attribute(placeholder: torch.fx.Node) -> bool:
    """Whether a graph input is read from a module: a parameter, a buffer or a plain tensor attribute."""
    source = getattr(placeholder, "_dynamo_source", None)
    return source is not None and (
        source.guard_source.is_unspecialized_nn_module() or source.guard_source.is_specialized_nn_module()
    )


def graph_is_kept() -> bool:
    """Inside of an autograd Function's backward: whether the user asked for `retain_graph=True`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def accumulates(node: Any, arguments: Sequence[object], parameters: Collection[object]) -> bool:
    """Inside of an autograd Function's backward: whether this backward call accumulates into `.grad` of the parameters.

    `node` is the autograd node of the Function, `arguments` are its arguments. False if only gradients of other tensors are
    asked for: `torch.autograd.grad(loss, x)`, `backward(inputs=[x])`. Raises `ValueError` if only some of the parameters are
    asked for, or if their gradients are to be returned (`torch.autograd.grad(loss, parameters)`).
    """
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    asked_for = set()
    for tensor, (accumulator, _) in zip(tensors, node.next_functions, strict=True):
        if accumulator is not None and tensor in parameters:
            try:
                asked_for.add(torch._C._will_engine_execute_node(accumulator))
            except RuntimeError:
                raise ValueError("torch.autograd.grad() of parameters") from None
    if len(asked_for) > 1:
        raise ValueError("backward(inputs=...) with some of the parameters")
    return asked_for != {False}


@contextmanager
def recording_gradients() -> Iterator[None]:
    """Within it, autograd records operations, also in an operator's kernel, which Inductor calls below the autograd keys."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
