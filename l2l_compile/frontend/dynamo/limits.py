"""The limit for programs of a function: higher than Dynamo's 8, and beyond it an error instead of an uncompiled run.

An adapter to private Dynamo, like `dynamo.py`. Dynamo counts the programs of a code object. At `recompile_limit`, it
runs each call that fits none of them uncompiled: the whole model would run on the host, and one line in a log would say so.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list, innermost_backend
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch._dynamo.guards import get_guard_fail_reason

from l2l_compile.errors import RecompileLimitError
from l2l_compile.frontend.dynamo.guard_failures import Change, changes

# Programs of one function. A program holds about 1 MiB of host memory per layer; guards that fail cost 1 µs. The deepest
# language models have 126 layers. Where the graph breaks within a loop over layers, each layer may need a program of its own.
LIMIT = 128


@dataclass(frozen=True)
class Recompilations:
    """A function with many programs, none of which fits the current call; `str()` gives the reasons and the remedies.

    count     the number of its programs
    changes   the differences between this call and the calls that the programs were compiled for, the most frequent first
    others    whether some of the programs belong to other `torch.compile` calls
    """

    function: str
    file: str
    line: int
    count: int
    changes: tuple[Change, ...]
    others: bool

    def __str__(self) -> str:
        found = [f"  - {change}" for change in self.changes] or ["  - Dynamo gives no reason"]
        remedies = list(dict.fromkeys(change.remedy for change in self.changes))
        if self.others:
            remedies.append("torch._dynamo.reset() forgets the programs of other models of this class")
        return "\n".join(["What changed from call to call:", *found, "What to do:", *(f"  - {r}" for r in remedies)])

    @property
    def where(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@contextmanager
def raised(converter: Any, frame: Any, recompiled: Callable[[Any, Recompilations], None]) -> Iterator[None]:
    """Context manager in which Dynamo's `converter` gives the function of `frame` up to `LIMIT` programs, or the user's own limit.

    Raises `RecompileLimitError` if the function has as many already: a large model would be too slow on the host. Dynamo is not
    told to skip the function or the functions that it calls, so calls that fit one of the programs (for example evaluation)
    still run it. `recompiled` is called when a function passes Dynamo's default limit.
    """
    with _lifted(converter, frame, recompiled):
        try:
            yield
        except (FailOnRecompileLimitHit, Unsupported) as error:
            hit = _LIMIT_HIT.search(str(error.__cause__ or error))
            if hit is None:
                raise
            ours = _limit_error(converter, frame, hit["name"], int(hit["value"]))
            ours.first_useful_frame = inspect.currentframe()  # Dynamo leaves its own frames out of the traceback
            raise ours from None


_LIMIT_HIT = re.compile(r"exceeding the (?P<name>\w+) cache size limit \(currently set to (?P<value>\d+)\)")


def _lifted(converter: Any, frame: Any, recompiled: Callable[[Any, Recompilations], None]) -> AbstractContextManager:
    """A context in which the limit is `LIMIT`, unless the user has set a limit."""
    config: Any = torch._dynamo.config  # a module that PyTorch makes an object at run time
    default = config._config["recompile_limit"].default
    if config.recompile_limit != default or _limit_of_call(converter) is not None:
        return nullcontext()
    owner = innermost_backend(converter._torchdynamo_orig_backend)
    own = [entry for entry in _debug_get_cache_entry_list(frame.f_code) if entry.backend is owner]
    if len(own) == default:
        recompiled(owner, _recompilations(frame, own, owner))
    return config.patch(recompile_limit=LIMIT)


def _limit_of_call(converter: Any) -> int | None:
    """The argument of `torch.compile(..., recompile_limit=)`, from PyTorch 2.13 on; None if it was not given."""
    return getattr(converter, "_recompile_limit", None)


def _limit_error(converter: Any, frame: Any, name: str, value: int) -> RecompileLimitError:
    owner = innermost_backend(converter._torchdynamo_orig_backend)
    found = _recompilations(frame, _debug_get_cache_entry_list(frame.f_code), owner)
    if name == "recompile_limit" and _limit_of_call(converter) is not None:
        line = f"torch.compile(..., recompile_limit={2 * value})"
    else:
        line = f"torch._dynamo.config.{name} = {2 * value}"
    return RecompileLimitError(
        f"backend 'l2l' does not compile {found.where} again: no program fits this call, and {value} have been compiled, which is "
        f"the limit. Uncompiled, it would run on the host.\n{found}\n  - if the model needs more programs: {line}"
    )


def _recompilations(frame: Any, entries: Sequence[Any], owner: Any) -> Recompilations:
    """The reasons why none of these programs fits a frame. `entries` has the program that was used last first."""
    reasons = [
        get_guard_fail_reason(e.guard_manager, e.code, frame.f_locals, e.compile_id, owner, skip_logging=True) for e in entries
    ]
    code = frame.f_code
    others = any(entry.backend is not owner for entry in entries)
    return Recompilations(code.co_qualname, code.co_filename, code.co_firstlineno, len(entries), changes(reasons), others)
