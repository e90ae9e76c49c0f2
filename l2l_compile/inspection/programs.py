"""Inspection of a compiled model by the user: its programs and figures."""

from __future__ import annotations

from typing import Any

from l2l_compile.ir.program import Program
from l2l_compile.reentry import check, whole
from l2l_compile.runtime.stats import Stats
from l2l_compile.session import session_of


def programs(compiled: Any) -> tuple[Program, ...]:
    """The programs compiled so far for a module or function that `torch.compile(..., backend="l2l")` returned.

    One per captured graph: a graph break makes several, and so do training and evaluation. Empty before the first
    call. Raises `TypeError` for any other argument.
    """
    session = session_of(compiled)
    return tuple(r.program for r in session.runners) if session is not None else ()


@whole("synchronize()")
def synchronize(compiled: Any) -> None:
    """Block until every update that the backend has put off can be seen in the parameters and the optimizer's state.

    `state_dict` of the model and of the optimizer, and `optimizer.step()`, also wait; reading a parameter does not.
    Raises the error of an update that failed, and `ReentryError` if a signal handler calls it in the middle of a step.
    """
    check()
    session = session_of(compiled)
    if session is not None:
        session.server.synchronize()


@whole("stats()")
def stats(compiled: Any) -> Stats:
    """Bytes moved and held, and seconds, of the last step (forward, and backward if it ran) of a compiled model.

    Raises `ReentryError` if a signal handler calls it in the middle of a step.
    """
    check()
    session = session_of(compiled)
    return session.stats if session is not None else Stats()
