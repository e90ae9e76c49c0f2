"""The state of one `torch.compile` call: its device, its lowered blocks, its programs, its last step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from l2l_compile import user_line
from l2l_compile.devices.device import Device
from l2l_compile.devices.host import is_host
from l2l_compile.devices.registry import kind_of
from l2l_compile.devices.watched import watch
from l2l_compile.errors import L2LError, OptionError
from l2l_compile.frontend.dynamo import adapter, first_calls, kept_programs, limits, watched_frames
from l2l_compile.host.server import ParameterServer
from l2l_compile.host.watched_parameters import watch_compiled_code
from l2l_compile.host.worker import Worker
from l2l_compile.lowering.costs import Rates
from l2l_compile.lowering.faster import vector_instructions
from l2l_compile.lowering.lower import Lowering
from l2l_compile.lowering.savings import Savings
from l2l_compile.memory.finalizers import members
from l2l_compile.options import Options
from l2l_compile.param_groups import parameters_of
from l2l_compile.races import Unwatched
from l2l_compile.ranks.ranks import anything_is_sharded
from l2l_compile.row_check import RowCheck
from l2l_compile.runtime.activation_room import ActivationRoom
from l2l_compile.runtime.in_flight import InFlight
from l2l_compile.runtime.kept_inputs import KeptInputs
from l2l_compile.runtime.resident_weights import ResidentWeights
from l2l_compile.runtime.runner import Runner
from l2l_compile.runtime.set_apart import BuffersSetApart
from l2l_compile.runtime.stashes import StashQueue
from l2l_compile.runtime.stats import Stats
from l2l_compile.runtime.stored_stashes import StashesOnDisk
from l2l_compile.timeline import Timeline
from l2l_compile.torch_internals import calls


def open_device(options: Options) -> Device:
    """The device that runs programs under these options."""
    return kind_of(options.device).open(options.device, options.pinned_memory)


class Session:
    """Programs of one compiled model, with the device and the lowered blocks that they share."""

    def __init__(
        self,
        options: Options,
        device: Device | None = None,
        lowering: Lowering | None = None,
        rates: Rates | None = None,
        worker: Callable[[int, Unwatched, str], Worker] = Worker,
    ):
        self.options = options
        self.device = device or open_device(options)
        if options.check and not self.device.accesses.watches:
            watch(self.device)
        self.lowering = lowering or Lowering(self.device.torch_device, options.block_compiler)
        self.savings = Savings(self.lowering, options.block_compiler != "eager", rates)
        self.check = RowCheck(self.device.torch_device) if options.check else None
        self.server = ParameterServer(options, self.device, worker)
        self.kept_inputs = KeptInputs(self.device, options.device_cache)
        self.resident = ResidentWeights(self.device, options.resident)
        self.set_apart = BuffersSetApart()
        self.in_flight = InFlight()
        self.server.updates.drains_with(self.in_flight.drain)
        self.in_flight.settle = self.server.synchronize
        self.room = ActivationRoom(self.device, options.keep, options.keep_on_host)
        self.waiting = StashQueue(near=None) if options.stash == "device" else StashQueue()
        self.stashes_on_disk = (
            StashesOnDisk(options.disk, self.device, worker) if options.disk and options.stash == "disk" else None
        )
        self._runners: list[weakref.ref[Runner]] = []  # Dynamo owns them: a program that it forgets is gone here too
        self._runs: list[Stats] = []  # the runs of programs in the last step
        self._call = 0  # the call of the model in which the last step began
        watch_compiled_code()
        self._entries: weakref.WeakSet[kept_programs.Entry] = weakref.WeakSet()
        self._roots: list[weakref.ref[torch.nn.Module]] = []
        self._has_run = False
        self._warned: set[str] = set()
        self.timeline: Timeline | None = None  # of the last steps that were traced

    def __reduce__(self) -> tuple:
        """A copy of a compiled model has no session until it runs: threads and lowered code are not copied."""
        return type(None), ()

    def add(self, runner: Runner) -> None:
        """Add a program of this model. Warns, once for each segment, of segments that hold several layers."""
        self._runners.append(weakref.ref(runner))
        self.server.add(runner.program)
        for uncut in runner.program.uncut:
            if uncut.segment not in self._warned:
                self._warned.add(uncut.segment)
                warnings.warn(f"backend 'l2l': {uncut}", stacklevel=2)

    def entry(self, runner: Runner) -> kept_programs.Entry:
        """The callable that Dynamo holds for a program. `release` can empty it."""
        made = kept_programs.Entry(runner)
        self._entries.add(made)
        return made

    def release(self) -> None:
        """Release all programs: nothing can call them any more."""
        for entry in members(self._entries):
            entry.clear()

    @property
    def runners(self) -> list[Runner]:
        """The programs that Dynamo may still call, in the order in which they were captured."""
        return _alive(self._runners)

    def ends_with(self, owner: Any, modules: Sequence[torch.nn.Module]) -> None:
        """Release the `torch.compile` call of `owner` when all its modules are gone. Called after the capture of a program."""
        for module in modules:
            if not any(root() is module for root in self._roots):
                self._roots.append(weakref.ref(module))
                weakref.finalize(module, _module_is_gone, weakref.ref(owner), weakref.ref(self)).atexit = False

    @property
    def has_no_modules(self) -> bool:
        """Whether all modules for which programs were captured are gone."""
        return bool(self._roots) and not _alive(self._roots)

    def begin_forward(self) -> list[Stats]:
        """The runs of programs in the step to which a forward belongs: a new step, or the last one if its call still runs.

        A forward that follows a backward is of a new step in any case.
        """
        if not self._has_run:
            self._has_run = True
            _release_others(self)
        _serves(self, calls.backend_of_call())
        if not calls.is_running(self._call) or any(run.backward_seconds for run in self._runs):
            self._runs, self._call = [], calls.number_of_call()
        return self._runs

    def begin_backward(self, runs: list[Stats]) -> None:
        """Record that a backward begins. The step of its forward is the last one, although others may have begun since."""
        self._runs = runs

    @property
    def stats(self) -> Stats:
        """Figures of the last step: sums over its runs of programs, and the largest peak."""
        total = sum(self._runs, start=Stats())
        self.server.describe(total)
        return total


def frame_begins(backend: Any) -> None:
    """Called when Dynamo begins to trace a frame of ours. Starts preparations for the compilation of blocks meanwhile."""
    first_calls.prepare_while_tracing()
    if hasattr(getattr(backend, "compiler_fn", backend), "skipped"):  # `explain` compiles no block
        return
    try:
        options = Options.build(getattr(backend, "kwargs", {}).get("options"))
    except OptionError:  # the backend raises it
        return
    if is_host(options.device) and options.block_compiler == "inductor":
        vector_instructions.ask()


def frame_skipped(backend: Any, frame: watched_frames.SkippedFrame) -> None:
    """Called when Dynamo leaves a frame of ours uncompiled. The report of `explain` names it; a compiled model warns.

    Raises `L2LError` if a model is sharded over ranks.
    """
    explainer = getattr(backend, "compiler_fn", backend)
    if hasattr(explainer, "skipped"):
        if frame not in explainer.skipped:
            explainer.skipped.append(frame)
        return
    if anything_is_sharded():
        raise L2LError(
            f"{frame.function} is not compiled, since Dynamo cannot ({frame.reason}; {frame.file}:{frame.line}), and a model that is "
            "sharded over ranks would gather its weights there in an order that may differ between ranks: remove the cause"
        )
    said_before = getattr(backend, _SAID, False)
    setattr(backend, _SAID, True)
    remedy = (
        ". If it only prepares something in the first call, such as hooks, call the plain model once on a small batch before the "
        "compiled one. fullgraph=True makes this an error"
    )
    warnings.warn(
        f"backend 'l2l' does not run {frame.function}: Dynamo cannot compile it, so it runs uncompiled on the host "
        f"({frame.reason}; {frame.file}:{frame.line}){'' if said_before else remedy}",
        stacklevel=2,
    )


def function_recompiled(backend: Any, found: limits.Recompilations) -> None:
    """Warn that a function of ours is compiled more often than Dynamo allows by default. `explain` does not warn."""
    if hasattr(getattr(backend, "compiler_fn", backend), "skipped"):
        return
    warnings.warn(
        f"backend 'l2l' compiles {found.where} again: none of its {found.count} programs fits this call. "
        f"With {limits.LIMIT} programs, this becomes an error.\n{found}",
        stacklevel=2,
    )


def model_inlined(model: Any) -> None:
    """Warn that code of another backend takes the place of a compiled model or function."""
    plain = model if adapter.compiled_in_place(model) is not None else adapter.uncompiled(model)
    name = getattr(plain, "__name__", type(plain).__name__)
    user_line.warn(
        f"backend 'l2l': {name} is called within a function that another backend compiles. Dynamo traces into it there, so nothing of "
        "it is streamed, and all its weights are on the device of that function. Compile the model alone: leave the call out of the "
        "outer function, or put it into a function under torch.compiler.disable"
    )


def _alive(references: list[weakref.ref]) -> list:
    return [thing for reference in tuple(references) if (thing := reference()) is not None]


def _module_is_gone(owner: weakref.ref, session: weakref.ref[Session]) -> None:
    """Have Dynamo forget a call if this was its last module. If a step is still running, `_release_others` does it later."""
    found, call = session(), owner()
    if found is not None and found.has_no_modules and found.server.updates.is_idle:
        if call is not None:
            kept_programs.forget(call)
        found.release()


def _owner_is_gone(session: weakref.ref[Session]) -> None:
    """Release a session whose `torch.compile` call is gone."""
    found = session()
    if found is not None:
        found.release()


PLANS_FIRST = (
    "_l2l_plans_first"  # on the backend object of a call: a planner looks at each call, and leaves options open if none is needed
)
_SESSION = "_l2l_session"
_SERVICE = "_l2l_service"
_SAID = "_l2l_has_said_what_to_do_about_skipped_frames"


def session_for(owner: Any, options: Options) -> Session:
    """The session of the `torch.compile` call of `owner`, made if needed. Without an owner (a direct call), a new session."""
    session = getattr(owner, _SESSION, None)
    if session is None:
        session = Session(options)
        if owner is not None:
            setattr(owner, _SESSION, session)
            weakref.finalize(owner, _owner_is_gone, weakref.ref(session)).atexit = False
            _owners.append(weakref.ref(owner))
    return session


_owners: list[weakref.ref] = []


def _release_others(session: Session) -> None:
    """Release sessions that are no longer usable: their modules are gone, or `session` trains their parameters instead."""
    for owner in _alive(_owners):
        other: Session | None = getattr(owner, _SESSION, None)
        if other is None or other is session or not other.server.updates.is_idle:
            continue
        if other.has_no_modules or _is_replaced_by(owner, other, session):
            _end(owner, other)


def start_anew(owner: Any, options: Mapping[str, Any]) -> None:
    """Let a `torch.compile` call go on with other options. Its programs, if it has any, are compiled again."""
    session: Session | None = getattr(owner, _SESSION, None)
    if session is not None:
        _end(owner, session)
        delattr(owner, _SESSION)
    owner.kwargs["options"] = dict(options)


def _end(owner: Any, session: Session) -> None:
    session.server.synchronize()
    kept_programs.forget(owner)
    session.release()


def _is_replaced_by(owner: Any, session: Session, newer: Session) -> bool:
    """Whether a newer session trains parameters of a session with another optimizer, and the older model is not in use."""
    before, now = session.options.optimizer, newer.options.optimizer
    if before is None or now is None or before is now or kept_programs.in_use(owner):
        return False
    return not set(parameters_of(before)).isdisjoint(parameters_of(now))


class _Service:
    """The session that runs the calls of an owner, and functions to be called before another session does. It is not copied."""

    def __init__(self) -> None:
        self.session: weakref.ref[Session] | None = None
        self.waiting: list[Callable[[Session], None]] = []

    def __reduce__(self) -> tuple:
        return type(None), ()


def _service_of(owner: Any) -> _Service:
    service = getattr(owner, _SERVICE, None)
    if service is None:
        service = _Service()
        setattr(owner, _SERVICE, service)
    return service


def _serves(session: Session, owner: Any) -> None:
    """Note that a session runs a call of `owner`: its own, or that of an equal `torch.compile` call, whose code Dynamo uses again."""
    if owner is None or not calls.streams_layers(owner):  # a call by hand, or within a function of another backend
        return
    service = _service_of(owner)
    if service.session is None or service.session() is not session:
        service.session = weakref.ref(session)
        for called in tuple(service.waiting):
            called(session)


def session_of(compiled: Any) -> Session | None:
    """The session that runs a compiled module or function; None if it has not run yet. Raises `TypeError` for any other argument."""
    owner = _owner_of(compiled)
    service = getattr(owner, _SERVICE, None)
    if service is not None and service.session is not None:
        return service.session()
    return getattr(owner, _SESSION, None)


@contextmanager
def each_session_of(compiled: Any, called: Callable[[Session], None]) -> Iterator[None]:
    """Context manager in which `called` gets each session that runs a compiled module or function, before it runs a call.

    Raises `TypeError` as `session_of`.
    """
    waiting = _service_of(_owner_of(compiled)).waiting
    waiting.append(called)
    try:
        if (session := session_of(compiled)) is not None:
            called(session)
        yield
    finally:
        waiting.remove(called)


def _owner_of(compiled: Any) -> Any:
    owner = adapter.owner_of(compiled)
    if owner is None or not calls.streams_layers(owner):
        raise TypeError(f"expected a module or function from torch.compile(..., backend='l2l'), got {type(compiled).__name__}")
    return owner
