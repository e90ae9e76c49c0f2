"""The adapter to the frames that Dynamo compiles: settings of theirs, and those that it leaves uncompiled, with its reasons."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sysconfig
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import convert_frame
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.eval_frame import innermost_backend, set_code_exec_strategy
from torch._dynamo.exc import ObservedException, TorchRuntimeError, Unsupported, UserError
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy
from torch._dynamo.utils import counters
from torch._dynamo.variables import ConstantVariable, builder, misc
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.nn.modules import container, rnn

from l2l_compile import reentry
from l2l_compile.frontend.dynamo import limits, wrong_inputs
from l2l_compile.frontend.dynamo.adapter import owner_of
from l2l_compile.frontend.dynamo.kept_programs import note_code
from l2l_compile.frontend.dynamo.readiness import check_ready
from l2l_compile.memory.finalizers import members
from l2l_compile.torch_internals import gc_pause
from l2l_compile.torch_internals.frame_memory import with_room
from l2l_compile.torch_internals.patches import is_replaced, replace
from l2l_compile.torch_internals.threads import apart_from_compilation


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
    """Install a hook: frames with a backend that `is_ours` are compiled under `limits.raised` and with recurrent layers.

    `begun` is called for each frame before Dynamo looks at it, `skipped` for a frame that Dynamo leaves uncompiled, and
    `recompiled` for a function with many programs.

    A call that raises (for example by a wrong keyword) runs uncompiled, and later calls of the function are still compiled.
    Dynamo would leave the function, and all functions that it calls, uncompiled from then on.
    """
    original = convert_frame.ConvertFrameAssert.__call__
    if is_replaced(original):
        return

    @functools.wraps(original)
    def convert(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self._torchdynamo_orig_backend):
            return original(self, frame, *args, **kwargs)
        _seen.append(Counter(counters["unimplemented"]))
        begun(owner := innermost_backend(self._torchdynamo_orig_backend))
        note_code(owner, frame.f_code)
        try:
            check_ready(frame.f_locals.values())
            settings = torch._dynamo.config.patch(_SETTINGS)
            lazy = _use_lazy_graph_module(True)  # Dynamo's graph is never run, so no Python code is written for it
            with (
                gc_pause.paused_gc(),
                limits.raised(self, frame, recompiled),
                settings,
                lazy,
                _not_saved(frame),
                wrong_inputs.without_log(),
            ):
                compiled = with_room(original, self, frame, *args, **kwargs)
            _mistaken.pop(frame.f_code, None)
            return compiled
        except TorchRuntimeError as error:
            ours = wrong_inputs.error_for(error, frame.f_locals)
            ours.first_useful_frame = inspect.currentframe()  # Dynamo leaves its own frames out of the traceback
            raise ours from None
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


def _is_made(module: torch.nn.Module) -> bool:
    """Whether the `__init__` of a module has run: Dynamo compiles modules that a forward makes."""
    return "_state_dict_pre_hooks" in module.__dict__


@contextmanager
def _not_saved(frame: Any) -> Iterator[None]:
    """Context manager in which `state_dict` of the frame's modules is refused: a signal handler that calls it would get fake tensors."""
    modules = [value for value in frame.f_locals.values() if isinstance(value, torch.nn.Module) and _is_made(value)]
    handles = [module.register_state_dict_pre_hook(_refuse_to_save) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@reentry.whole("state_dict()")
def _refuse_to_save(*_: Any) -> None:
    reentry.check()


def _is_of_python(code: types.CodeType) -> bool:
    """Whether a function is in Python's standard library, which has no layers. Functions that it calls are looked at alone."""
    path = code.co_filename
    return path.startswith("<frozen ") or path.startswith(_LIBRARY) and "-packages" not in path


_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def keep_graphs_whole(is_ours: Callable[[Any], bool]) -> None:
    """Install a hook: frames with a backend that `is_ours` are captured as one graph under `DistributedDataParallel` as well.

    Dynamo would cut them at the borders of its gradient buckets, and pass them to another backend that calls this one. A
    program returns all its gradients at its end, so the buckets would overlap no communication with the backward.
    """
    original = convert_frame.CatchErrorsWrapper.__call__
    if is_replaced(original):
        return

    @functools.wraps(original)
    def look_at(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend = getattr(self._torchdynamo_orig_backend, "_torchdynamo_orig_backend", None)
        if not is_ours(backend):
            return original(self, *args, **kwargs)
        reentry.check()
        with apart_from_compilation():  # Dynamo leaves a frame uncompiled while another thread traces
            if dynamo_utils.get_optimize_ddp_mode() == "ddp_optimizer":
                with torch._dynamo.config.patch(optimize_ddp=False):
                    return original(self, *args, **kwargs)
            return original(self, *args, **kwargs)

    reentry.whole(reentry.COMPILATION)(look_at)
    replace(convert_frame.CatchErrorsWrapper, "__call__", look_at)


def watch_packed(is_ours: Callable[[Any], bool], skipped: Callable[[Any, SkippedFrame], None]) -> None:
    """Install a hook: `skipped` is called for PyTorch's own modules that Dynamo leaves uncompiled, if the frame's backend `is_ours`.

    A recurrent layer that gets a packed sequence breaks the graph within its own forward; a layer with a backward hook does so
    within `nn.Sequential`. Nothing else reports this: Dynamo leaves one call uncompiled, and does not compile a graph that has no
    operation before that call, or functions of PyTorch that are called by themselves.
    """
    original = InstructionTranslatorBase.log_graph_break
    if is_replaced(original):
        return

    @functools.wraps(original)
    def log_graph_break(self: Any, code_options: Any, reason: Any, exc: Any) -> Any:
        stack = list(getattr(exc, "real_stack", None) or ())
        inside = next((i for i, s in enumerate(stack) if s.filename in _UNCOMPILED), None)
        backend = self.output.compiler_fn
        if inside and is_ours(backend):
            caller, cause = stack[inside - 1], str(exc).strip().splitlines()[0]
            packed = stack[inside].filename == rnn.__file__
            what, why = (
                ("a recurrent layer", f"{_PACKED} ({cause})") if packed else (f"nn.Sequential.{stack[inside].name}", cause)
            )
            skipped(innermost_backend(backend), SkippedFrame(what, caller.filename, caller.lineno, why))
        return original(self, code_options, reason, exc)

    replace(InstructionTranslatorBase, "log_graph_break", log_graph_break)


def log_while_tracing(is_ours: Callable[[Any], bool]) -> None:
    """Install a hook: log calls in frames with a backend that `is_ours` run while Dynamo traces, and do not break the graph.

    A message with a value that Dynamo does not know at that time still breaks the graph, so that every call logs it.
    """
    original = misc.LoggingLoggerVariable.call_method
    if is_replaced(original):
        return

    @functools.wraps(original)
    def call_method(self: Any, tx: Any, name: Any, args: Any, kwargs: Any) -> Any:
        known = all(value.is_python_constant() for value in (*args, *kwargs.values()))
        method = getattr(self.value, name, None)
        if not (known and callable(method) and is_ours(innermost_backend(tx.output.compiler_fn))):
            return original(self, tx, name, args, kwargs)
        method(*(a.as_python_constant() for a in args), **{key: value.as_python_constant() for key, value in kwargs.items()})
        return ConstantVariable.create(None)

    replace(misc.LoggingLoggerVariable, "call_method", call_method)


_UNCOMPILED = {rnn.__file__, container.__file__}


_PACKED = "Dynamo traces no packed sequences, whose sizes depend on lengths"


def retry_skipped() -> None:
    """Make Dynamo try the frames that it has skipped again: it remembers them, and gives no reason the second time.

    Code that is compiled for such a frame, for a model with which it could be compiled, stays.
    """
    for code in members(_skipped_codes):
        set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


_skipped_codes: weakref.WeakSet[types.CodeType] = weakref.WeakSet()


_seen: list[Counter] = []  # for each nested frame, the graph-break reasons counted before it began


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


def watch_inlined(is_ours: Callable[[Any], bool], inlined: Callable[[Any], None]) -> None:
    """Install a hook: `inlined` is called with a compiled model or function, whose backend `is_ours`, that another backend compiles.

    Dynamo does so where a compiled function calls another one: the outer backend gets the operations of both.
    """
    original = builder.VariableBuilder._wrap
    if is_replaced(original):
        return

    @functools.wraps(original)
    def wrap(self: Any, value: Any) -> Any:
        if isinstance(value, (torch.nn.Module, types.FunctionType)) and not is_ours(
            innermost_backend(self.tx.output.compiler_fn)
        ):
            owner = owner_of(value)
            if owner is not None and is_ours(owner):
                inlined(value)
        return original(self, value)

    replace(builder.VariableBuilder, "_wrap", wrap)
