"""The options of the backend: one frozen dataclass, built from `torch.compile(..., options={...})`."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from l2l_compile.devices.host import HOST
from l2l_compile.devices.registry import KINDS, default_device
from l2l_compile.errors import OptionError, ScheduleError
from l2l_compile.ir.schedule import Schedule
from l2l_compile.units import format_bytes
from l2l_compile.update_modes import MODES, UpdateMode, UpdatePlace

_LEAST_PINNED = 1 << 20  # bytes: the staging ring needs some
AUTO = "auto"
_PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Options:
    """The options of the backend.

    micro_batches   number of slices of the batch that go through a layer before the next layer is fetched (u in the
                    L2L paper). A batch with fewer rows has fewer slices; rows that cannot be divided evenly give two slice
                    sizes.
    device          where the layers run; without it, or with None, the accelerator if there is one, else the host.
    stash           where forward keeps the inputs of a layer for backward: "host", "device", or "disk", in a file in the folder `disk`.
    keep            bytes of device memory for what forward computes inside of layers, so that backward need not compute it again:
                    bytes, or "20GB"; "auto" what the device has free; 0 keeps nothing but the inputs of layers.
    keep_on_host    as `keep`, bytes of host memory: they go to the host in forward, and come back in backward. "auto": what the link
                    carries while the device computes, and half of the host's free memory has room for.
    prefetch        how many layers ahead weights and stashes are fetched; also the number of extra weight slabs.
    outputs         "all", or "loss": a program that makes a loss (an output without the batch dimension that takes a gradient)
                    makes only outputs without the batch dimension. Other outputs are returned on "meta", as shapes.
    check           whether to test every inner-looped block when it first runs: on the rows of two micro-batches together
                    and apart, raising an error if the results differ. Also watches memory accesses for races.
    block_compiler  "inductor" compiles each block once; "eager" runs its ATen graph as traced.
    precision       "fp32" computes in the dtype of the parameters; "bf16" and "fp16" keep fp32 parameters on the host and
                    send, compute and stash in 16 bits (CMP).
    gradient_wire   the precision in which gradients of weights cross the link; None takes the precision of the weights. On
                    the device they are summed over the micro-batches in fp32.
    optimizer       the `torch.optim.Optimizer` of the training loop, for overlapped updates and for fp16.
    update          "at_step" leaves updates to `optimizer.step()`; "in_backward" updates each layer as soon as its
                    gradient is on the host; "in_forward" after the last gradient is there, while the next forward runs.
    max_grad_norm   clips the global norm of the gradients (in_forward only), as `clip_grad_norm_` does.
    delay           1: a step computes gradients at the weights of the step before, so that the host has a whole step to update
                    (in_forward only); 0: at the current weights.
    accumulate      number of backward calls in a step (in_backward and in_forward), or a function that says, when a backward
                    begins, whether it is the last one of the step.
    pinned_memory   the limit for page-locked host memory (cuda): bytes, or "8GB", "512MiB"; None sets no limit. Beyond
                    it, weights go through a ring of staging buffers, and returned tensors are not pinned.
    device_cache    the limit for inputs that stay on the device from call to call without gradients, such as the attention cache
                    of a text that is being generated: bytes, or "20GB"; 0 keeps none, None what the device has free.
    resident        the limit for weights that stay on the device, from forward to backward or, without gradients, from call to
                    call: bytes, or "20GB"; 0 keeps none. None keeps none in training, and without gradients what the device
                    has free beside what a call needs.
    schedule        the order of a training step. "breadth_first": all micro-batches go through a segment before the next one; "1f1b":
                    each micro-batch goes back as soon as it can, and the weights stay on the device for the step. In a pipeline, it
                    may be a file with an order of one's own, or a `Schedule`.
    plan            "auto": the first training step decides on the options of a planner that are not given (`l2l_compile.plan`), from its
                    batch, the figures of this machine and the memory that is free.
    passes          passes of the user (`l2l_compile.passes.compilation.Pass`), run and verified after the backend's passes.
    batch_scope     what the batch of a call is, if the model is sharded over ranks (`l2l_compile.shard`). "per_rank": each
                    rank's own, and gradients are the mean over the ranks. "global": a rank's rows of one batch of all ranks.
    disk            a folder for parameters and optimizer state that do not fit into `host_memory` (in_backward and in_forward), and
                    for the inputs of layers with stash="disk"; or several, on different disks, over which they are striped. The
                    files have no names, and are gone with the process. Each rank has files of its own.
    resumable       whether the file in `disk` outlives the process, with the last complete step: `l2l_compile.resume` continues from it after a
                    kill. All large parameters and their state are on disk then, each in two places. Each rank has a folder of its own there.
    host_memory     the bound for parameters, optimizer state, copies that cross the link, and gradients in host memory, with `disk`:
                    bytes, or "24GB", of each rank; None takes 0.8 of what the system has available at the first step, divided by
                    the ranks of this host (LOCAL_WORLD_SIZE).
    compile_update  whether overlapped updates are compiled into one pass over memory where the optimizer is
                    elementwise; False runs the optimizer's own step on each layer.
    """

    micro_batches: int = 1
    device: torch.device = HOST
    stash: str = "host"
    keep: int | str = 0
    keep_on_host: int | str = 0
    prefetch: int = 1
    outputs: str = "all"
    check: bool = False
    block_compiler: str = "inductor"
    precision: str = "fp32"
    gradient_wire: str | None = None
    optimizer: torch.optim.Optimizer | None = None
    update: str = "at_step"
    max_grad_norm: float | None = None
    delay: int = 0
    accumulate: int | Callable[[], bool] = 1
    compile_update: bool = True
    pinned_memory: int | None = None
    batch_scope: str = "per_rank"
    disk: tuple[str, ...] | None = None
    resumable: bool = False
    host_memory: int | None = None
    device_cache: int | None = None
    resident: int | None = None
    schedule: str | Schedule = "breadth_first"
    plan: str | None = None
    passes: tuple[Any, ...] = ()

    @property
    def mode(self) -> UpdateMode:
        """What the value of `update` means."""
        return MODES[self.update]

    @property
    def goes_by_turns(self) -> bool:
        """Whether a micro-batch goes back before all others have gone forward."""
        return self.schedule != "breadth_first"

    @property
    def stores_parameters(self) -> bool:
        """Whether parameters and optimizer state may be on disk: not where `optimizer.step()` touches them all."""
        return self.disk is not None and self.mode.is_overlapped

    @property
    def disks(self) -> int:
        """Folders over which what is on disk is striped; 1 without the option `disk`."""
        return len(self.disk or ("",))

    @property
    def keeps_activations(self) -> bool:
        """Whether forward may keep what it computes inside of layers."""
        return self.keep != 0 or self.keep_on_host != 0

    def check_folders(self) -> None:
        """Raise `OptionError` if a folder of the option `disk` does not exist: on this host, where a program is to run."""
        for folder in self.disk or ():
            if not os.path.isdir(folder):
                raise OptionError(f"option 'disk' must be a folder that exists, got {folder!r}: make it, or give another one")

    def check_decided(self, what: str) -> None:
        """Raise `OptionError` if the first training step has still to decide on options. `what` is that which needs them."""
        if self.plan is not None:
            raise OptionError(
                f"option plan={self.plan!r} leaves options to the first training step of a model from torch.compile(model, backend='l2l'), and "
                f"{what} needs them before: leave out 'plan', pass the compiled model behind that step, or give the options of "
                "l2l_compile.plan(model, machine)(**batch).best.options"
            )

    @property
    def gradients_on_link(self) -> str | None:
        """The precision in which gradients of matrices cross the link; None for the dtype of the weights."""
        return self.gradient_wire or (self.precision if self.precision != "fp32" else None)

    @classmethod
    def build(cls, options: Mapping[str, Any] | None = None) -> Options:
        """Options from a mapping.

        Raises `OptionError` (a `ValueError`) for an unknown name, with the known names and the nearest one, and for
        a value of the wrong type or out of range.
        """
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(
                f"options of backend 'l2l' must be a dictionary, such as {{'micro_batches': 8}}, got {type(options).__name__}"
            )
        settings = dict(options or {})
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                raise OptionError(
                    f"unknown option {name!r} of backend 'l2l'; known options: {', '.join(known)}.{_nearest(name, known)}"
                )
        _check_int(settings, "micro_batches", 1)
        _check_int(settings, "prefetch", 0)
        _check_choice(settings, "stash", ("device", "host", "disk"))
        _check_choice(settings, "outputs", ("all", "loss"))
        _check_choice(settings, "check", (False, True))
        _check_choice(settings, "block_compiler", ("inductor", "eager"))
        _check_choice(settings, "precision", _PRECISIONS)
        _check_choice(settings, "gradient_wire", (None, *_PRECISIONS))
        _check_choice(settings, "update", tuple(MODES))
        _check_accumulate(settings)
        _check_choice(settings, "delay", (0, 1))
        _check_choice(settings, "batch_scope", ("per_rank", "global"))
        _check_choice(settings, "compile_update", (True, False))
        _check_choice(settings, "resumable", (False, True))
        _check_choice(settings, "plan", (None, AUTO))
        if settings.get("plan") and any(settings.get(name, default) != default for name, default in _OF_LATER_UPDATES):
            settings.setdefault("update", "in_forward")  # the plan has no other choice
        _check_optimizer(settings)
        settings["passes"] = _passes(settings.get("passes", ()))
        settings["pinned_memory"] = _bytes(settings, "pinned_memory", _LEAST_PINNED)
        settings["device_cache"] = _bytes(settings, "device_cache", 0)
        for name in ("keep", "keep_on_host"):
            settings[name] = _bytes(settings, name, 0, AUTO) or 0
        settings["resident"] = _bytes(settings, "resident", 0)
        settings["host_memory"] = _bytes(settings, "host_memory", _LEAST_PINNED)
        settings["disk"] = folders_of(settings["disk"], "option 'disk'") if settings.get("disk") is not None else None
        settings["device"] = _device(settings.get("device"))
        settings["schedule"] = _schedule(settings.get("schedule", _SCHEDULES[0]))
        _check_turns(settings)
        _check_disk(settings)
        _check_plan(settings)
        return cls(**settings)


_OF_LATER_UPDATES = (("accumulate", 1), ("max_grad_norm", None), ("delay", 0))


_NOT_BY_TURNS = (
    ("keep", 0, "the activations of a turn are computed again when it goes back"),
    ("keep_on_host", 0, "the activations of a turn are computed again when it goes back"),
    ("batch_scope", "per_rank", "the rows of all ranks are not known in a turn"),
)


_SCHEDULES = ("breadth_first", "1f1b")


def _schedule(value: Any) -> str | Schedule:
    """A schedule by its name, or that of a file. Raises `OptionError`, and `ScheduleError` for one that cannot run."""
    if isinstance(value, Schedule) or isinstance(value, str) and value in _SCHEDULES:
        return value
    if isinstance(value, str) and _TURNS.match(value):
        raise OptionError(
            f"option 'schedule' is a text of turns, {value.strip()[:20]!r}...: a str names a schedule or a file. Give "
            "l2l_compile.Schedule.parse(text)"
        )
    try:
        if isinstance(value, Path) or isinstance(value, str) and _names_a_file(value):
            return Schedule.parse(Path(value).read_text())
    except FileNotFoundError as error:
        raise OptionError(f"option 'schedule' names a file that does not exist: {str(value)!r}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"option 'schedule' names a file that cannot be read: {error}") from error
    raise OptionError(
        f"option 'schedule' must be one of {', '.join(map(repr, _SCHEDULES))}, a file with the turns of each rank, or a Schedule, got "
        f"{value!r}.{_nearest(value, list(_SCHEDULES))}"
    )


_TURNS = re.compile(r"\s*\d+[A-Z]\d+(@-\d+)?\s*(,|\n|$)")  # how a text of turns begins


def _names_a_file(value: str) -> bool:
    """Whether a str is the path of a file, also of one that does not exist: a path has a folder or a suffix."""
    path = Path(value)
    return path.name != value or path.suffix != "" or path.is_file()


def _check_turns(settings: dict) -> None:
    """Raise `OptionError` for options that do not go with a schedule of turns."""
    schedule = settings["schedule"]
    if schedule == _SCHEDULES[0]:
        return
    said = f"schedule={schedule!r}" if isinstance(schedule, str) else "a schedule of one's own"
    for name, default, why in _NOT_BY_TURNS:
        if settings.get(name, default) != default:
            raise OptionError(f"option {name!r} does not go with {said}: {why}. Leave one of them out")
    if settings.get("update") == "in_backward":
        raise OptionError(
            f"update='in_backward' does not go with {said}: gradients are there before loss.backward() is called. Use 'in_forward' or 'at_step'"
        )
    if not isinstance(schedule, Schedule):
        return
    if settings.get("micro_batches", 1) != schedule.turns:
        raise OptionError(
            f"the schedule is for {schedule.turns} micro-batches, and option 'micro_batches' is {settings.get('micro_batches', 1)}: set it to "
            f"{schedule.turns}"
        )
    if not schedule.flushes and not settings.get("delay"):
        late = next((rank, action) for rank, order in enumerate(schedule.orders) for action in order if action.call)
        raise ScheduleError(
            "version", *late, "goes back in the next call, when the weights are newer: that needs delay=1, where they are kept"
        )


def _check_int(settings: dict, name: str, least: int) -> None:
    value = settings.get(name, least)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"option {name!r} must be an int of at least {least}, got {value!r}")


def _check_accumulate(settings: dict) -> None:
    function = settings.get("accumulate")
    if not callable(function):
        _check_int(settings, "accumulate", 1)
        return
    if isinstance(function, type) or not _takes_no_arguments(function):
        raise OptionError(
            f"option 'accumulate' must be an int of at least 1 or a function without arguments that returns a bool, got {function!r}"
        )


def _takes_no_arguments(function: Callable) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # a function in C whose signature is not known
        return True
    return True


def _check_choice(settings: dict, name: str, choices: Sequence[str | bool | int | None]) -> None:
    value = settings.get(name, choices[0])
    if not any(type(value) is type(choice) and value == choice for choice in choices):  # True and 1.0 equal 1
        hint = _nearest(value, [choice for choice in choices if isinstance(choice, str)])
        raise OptionError(f"option {name!r} must be one of {', '.join(map(repr, choices))}, got {value!r}.{hint}")


_ELSEWHERE = {  # names of other libraries
    "gradient_accumulation_steps": "accumulate",
    "accumulate_grad_batches": "accumulate",
    "accumulation_steps": "accumulate",
    "gradient_clip_val": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "dtype": "precision",
    "mixed_precision": "precision",
    "bf16": "precision",
    "fp16": "precision",
    "chunks": "micro_batches",
    "num_microbatches": "micro_batches",
    "pin_memory": "pinned_memory",
}


def _nearest(value: Any, known: Sequence[str]) -> str:
    elsewhere = _ELSEWHERE.get(value) if isinstance(value, str) else None
    if elsewhere in known:
        return f" Did you mean {elsewhere!r}?"
    near = difflib.get_close_matches(str(value).removeprefix("torch."), known, n=1, cutoff=0.4)
    return f" Did you mean {near[0]!r}?" if near else ""


def _check_optimizer(settings: dict) -> None:
    optimizer, update = settings.get("optimizer"), settings.get("update", "at_step")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            f"option 'optimizer' must be a torch.optim.Optimizer that is already built, got {type(optimizer).__name__}"
        )
    mode = MODES[update]
    if mode.is_overlapped and optimizer is None:
        raise OptionError(f"option update={update!r} needs the option 'optimizer', the one of the training loop")
    if not mode.is_overlapped and settings.get("accumulate", 1) != 1:
        raise OptionError("option 'accumulate' is for update='in_backward' and 'in_forward'; at_step accumulates as PyTorch does")
    if settings.get("delay") and mode.place is not UpdatePlace.BEFORE_FETCH:
        raise OptionError(
            f"option delay=1 puts updates off to the next step, which update={update!r} does not. Use update='in_forward'"
        )
    if not mode.sees_all and settings.get("precision") == "fp16":
        raise OptionError(
            f"option precision='fp16' skips a step when a gradient overflows, which {update=} cannot: its layers "
            "are updated before the last gradient is there. Use update='in_forward'"
        )
    norm = settings.get("max_grad_norm")
    if norm is None:
        return
    if isinstance(norm, bool) or not isinstance(norm, (int, float)) or not norm > 0:
        raise OptionError(f"option 'max_grad_norm' must be a number above 0, got {norm!r}")
    if not mode.sees_all:
        raise OptionError(
            f"option 'max_grad_norm' needs the norm of all gradients before the first update, which {update=} does "
            "not wait for. Use update='in_forward'"
        )
    if not mode.is_overlapped:
        raise OptionError(
            "option 'max_grad_norm' is for update='in_forward'; at_step, call torch.nn.utils.clip_grad_norm_ as usual"
        )


def _passes(value: Any) -> tuple[Any, ...]:
    found = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (None,)
    for step in found:
        if isinstance(step, type) or not all(hasattr(step, name) for name in ("name", "requires", "provides", "apply")):
            raise OptionError(
                f"option 'passes' must be a sequence of passes, objects with name, requires, provides and apply(compilation), got {value!r}"
            )
    return found


def folders_of(value: Any, what: str) -> tuple[str, ...]:
    """A folder, or several of which none is there twice, wherever the process goes (`os.chdir`). Raises `OptionError`, which says `what` it is."""
    given = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not given or not all(isinstance(each, (str, Path)) for each in given):
        raise OptionError(f"{what} must be a folder or a list of folders, got {value!r}")
    folders = tuple(str(Path(each).absolute()) for each in given)
    places = [os.path.realpath(folder) for folder in folders]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise OptionError(
                f"{what} has {str(given[places.index(place)])!r} twice, the second time as {str(given[number])!r}: give it one folder on each disk"
            )
    return folders


def _check_disk(settings: dict) -> None:
    """Raise `OptionError` for options that do not go with `disk`."""
    if settings["disk"] is None:
        if settings.get("stash") == "disk":
            raise OptionError("option stash='disk' keeps the inputs of layers in a file: give the option 'disk' a folder")
        if settings["host_memory"] is not None:
            raise OptionError("option 'host_memory' says how much stays in memory beside the option 'disk': give 'disk' a folder")
        if settings.get("resumable"):
            raise OptionError("option 'resumable' keeps the file of the option 'disk': give 'disk' a folder")
        return
    _check_stashes_on_disk(settings)


def _check_stashes_on_disk(settings: dict) -> None:
    """Raise `OptionError` for options that do not go with `disk`, for stashes or with updates by the loop."""
    stashes = settings.get("stash") == "disk"
    if stashes and settings["schedule"] != _SCHEDULES[0]:
        raise OptionError(
            "option stash='disk' does not go with a schedule of turns, in which a stash goes back soon and stays on the device: leave one of "
            "them out"
        )
    if MODES[settings.get("update", "at_step")].is_overlapped:
        return
    if not stashes:
        raise OptionError(
            "option 'disk' needs update='in_backward' or 'in_forward', and the option 'optimizer': with 'at_step', optimizer.step() touches all "
            "parameters and their state at once, which would bring them all into memory. With stash='disk', the inputs of layers alone are "
            "on disk"
        )
    for name in ("host_memory", "resumable"):
        if settings.get(name):
            raise OptionError(
                f"option {name!r} is for parameters and optimizer state on disk, which update='at_step' keeps in memory: leave it out, or use "
                "update='in_backward' or 'in_forward'"
            )


def _check_plan(settings: dict) -> None:
    """Raise `OptionError` for options with which a planner cannot time a step."""
    for name, why in _NOT_PLANNED if settings.get("plan") else ():
        if settings[name] is not None:
            raise OptionError(f"option plan={settings['plan']!r} does not go with {name!r}, {why}: leave one of them out")


_NOT_PLANNED = (("disk", "since the speed of the disk is not measured"), ("pinned_memory", "with which a step is not timed"))


_UNITS = {f"{prefix}{i}B": base**power for base, i in ((1000, ""), (1024, "i")) for power, prefix in enumerate("KMGT", 1)}


def _bytes(settings: dict, name: str, least: int, *words: str) -> Any:
    """A number of bytes from an int or a string like "8GB" (10^9), "8GiB" (2^30) or "0"; or one of the words."""
    value = settings.get(name)
    if isinstance(value, str) and value in words:
        return value
    if isinstance(value, str) and value == "0" and least == 0:
        return 0
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        return value
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]*)?)\s*([KMGT]i?B)\s*", value) if isinstance(value, str) else None
    size = int(float(found[1]) * _UNITS[found[2]]) if found else -1
    if size < least:
        raise OptionError(
            f"option {name!r} must be bytes, or a size such as '8GB' or '512MiB'{''.join(f', or {word!r}' for word in words)}, of at "
            f"least {format_bytes(least)}, got {value!r}"
        )
    return size


def _device(value: Any) -> torch.device:
    try:
        device = torch.device(value) if value is not None else default_device()
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"option 'device' must name a device such as 'cuda' or 'cpu', got {value!r}") from error
    kind = KINDS.get(device.type)
    if kind is None:
        raise OptionError(f"option 'device' must be a device of type {' or '.join(map(repr, KINDS))}, got {value!r}")
    if (complaint := kind.complaint()) is not None:
        raise OptionError(f"option 'device' is {device.type!r}, but {complaint}")
    return kind.resolve(device)
