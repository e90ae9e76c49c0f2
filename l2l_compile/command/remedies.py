"""Changes with which a step fits on a machine. Each one that is told was tried by the computation of the report itself.

First come changes that leave the numbers of training as they are, one after another, until the step fits. If they are not enough,
changes of the training are tried, each by itself on top of them: another optimizer, one backward call in a step, fewer rows, shorter
rows, adapters. From what fits, every change that is not needed is taken back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from l2l_compile.command.asked import Asked, Settings
from l2l_compile.errors import L2LError
from l2l_compile.planner.fit import Fit
from l2l_compile.update_modes import MODES, UpdateMode

_DISK = "/disk"  # a folder of the machine
_RANK = 16  # of the adapters that are tried
_LEAST_LENGTH = 64  # tokens
_NOTES = {
    "update": "in_backward clips no gradients",
    "disk": "parameters and optimizer state in a folder of the machine",
    "optimizer": "sgd has no state",
    "batch": "fewer rows in a step",
    "accumulate": "a step for each backward call",
    "lora": "adapters of a frozen model are trained",
}


def _updating(mode: UpdateMode, s: Settings) -> Settings | None:
    """The settings with a mode whose updates run while the device computes. None if that saves no memory."""
    now = MODES[s.update]
    if not mode.is_overlapped or mode is now or (mode.sees_all and now.is_overlapped):
        return None
    return replace(s, update=mode.name) if mode.sees_all else replace(s, update=mode.name, delay=0, max_grad_norm=None)


def _stashes_on_disk(s: Settings) -> Settings | None:
    return replace(s, stash="disk") if s.disk is not None and s.stash != "disk" else None


@dataclass(frozen=True)
class Trial:
    """Settings that were tried, and the memory that they need."""

    settings: Settings
    fit: Fit

    def told(self, asked: Asked) -> str:
        """ "--prefetch 0: device 7.3 GiB, host 125.7 GiB"."""
        changed = [f.name for f in fields(Settings) if getattr(self.settings, f.name) != getattr(asked.settings, f.name)]
        notes = [_NOTES[name] for name in changed if name in _NOTES]
        said = f" ({'; '.join(notes)})" if notes else ""
        return f"{self.settings.flags(asked.settings)}: {self.fit.short}{said}"


class Remedies:
    """Tries changes of a step that does not fit. `progress` is told what is tried."""

    def __init__(self, asked: Asked, progress: Callable[[str], None]):
        assert asked.machine is not None
        self.asked, self.machine, self.progress = asked, asked.machine, progress
        self._tried: dict[Settings, Fit | None] = {}

    def found(self) -> tuple[list[Trial], Trial]:
        """The changes that fit, the smallest ones first, and the changes that come nearest if none fits."""
        nearest = self._same_training(self._trial(self.asked.settings))
        if nearest.fit.fits:
            return [self._smallest(nearest)], nearest
        others = [trial for change in self._other_training(nearest) if (trial := change()) is not None]
        fitting = [self._smallest(trial) for trial in others if trial.fit.fits]
        return fitting, min([nearest, *others], key=lambda trial: trial.fit.excess)

    # ---- changes that leave the training as it is --------------------------------------------------------------------

    def _same_training(self, trial: Trial) -> Trial:
        """Changes that each make the excess smaller, until the step fits or no change is left."""
        for changed in self._options_of(trial.settings):
            while not trial.fit.fits and (settings := changed(trial.settings)) is not None:
                after = self._try(settings)
                if after is None or after.fit.excess >= trial.fit.excess:
                    break
                trial = after
        return trial

    def _options_of(self, first: Settings) -> Iterator[Callable[[Settings], Settings | None]]:
        rows = self.asked.workload.rows

        def more_micro_batches(s: Settings) -> Settings | None:
            count = min(s.micro_batches, rows)
            return replace(s, micro_batches=min(2 * count, rows)) if count < rows else None

        def less_prefetch(s: Settings) -> Settings | None:
            return replace(s, prefetch=s.prefetch - 1) if s.prefetch else None

        yield lambda s: replace(s, keep=0, keep_on_host=0) if s.keep or s.keep_on_host else None
        yield lambda s: replace(s, resident=0) if s.resident else None
        yield more_micro_batches
        yield lambda s: replace(s, stash="host") if s.stash == "device" else None
        yield lambda s: replace(s, outputs="loss") if s.outputs == "all" else None
        yield less_prefetch
        yield lambda s: replace(s, delay=0) if s.delay else None
        yield from (functools.partial(_updating, mode) for mode in sorted(MODES.values(), key=lambda mode: not mode.sees_all))
        yield lambda s: replace(s, stash="device") if s.stash == "host" else None
        yield _stashes_on_disk

    # ---- changes of the training -------------------------------------------------------------------------------------

    def _other_training(self, trial: Trial) -> Iterator[Callable[[], Trial | None]]:
        settings, workload = trial.settings, self.asked.workload
        if settings.precision == "fp32":
            yield lambda: self._try(replace(settings, precision="bf16"))
        if settings.disk is None and MODES[settings.update].is_overlapped and trial.fit.too_large("host"):
            yield lambda: self._with_what_it_takes(replace(settings, disk=_DISK))
        if settings.optimizer != "sgd" and trial.fit.too_large("host"):
            yield lambda: self._try(replace(settings, optimizer="sgd"))
        if settings.accumulate != 1 and trial.fit.too_large("host"):
            yield lambda: self._with_what_it_takes(replace(settings, accumulate=1))
        if workload.rows > 1:
            yield lambda: self._fewer_rows(settings)
        if workload.tokens is not None and trial.fit.too_large("device"):
            yield lambda: self._shorter(trial)
        if workload.can_adapt and settings.lora is None:
            yield lambda: self._try(replace(settings, lora=_RANK))

    def _with_what_it_takes(self, settings: Settings) -> Trial | None:
        """These settings, with changes that leave the training as it is if those are needed too, such as stashes on a disk that is given now.

        One backward call in a step may need `update="in_backward"`, which keeps gradients only where several backward calls add to them.
        """
        trial = self._try(settings)
        return self._same_training(trial) if trial is not None else None

    def _fewer_rows(self, settings: Settings) -> Trial | None:
        rows, trial = self.asked.workload.rows, None
        while rows > 1:
            rows //= 2
            trial = self._try(replace(settings, batch=rows, micro_batches=min(settings.micro_batches, rows)))
            if trial is None or trial.fit.fits:
                break
        return trial

    def _shorter(self, trial: Trial) -> Trial | None:
        """Half of the tokens of a row, until that fits. Then the most that fit if bytes grow with tokens in proportion."""
        workload = self.asked.workload
        assert workload.tokens is not None
        long, length, half = trial, workload.tokens // workload.rows, None
        while length >= 2 * _LEAST_LENGTH:
            length //= 2
            half = self._try(replace(trial.settings, length=length))
            if half is None or half.fit.fits:
                break
            long = half
        if half is None or not half.fit.fits:
            return half
        room, short, more = (fit.needs[0] for fit in (half.fit, half.fit, long.fit))
        between = length + int(length * (room.room - short.bytes) / max(more.bytes - short.bytes, 1))
        between -= between % _LEAST_LENGTH
        longer = self._try(replace(trial.settings, length=between)) if length < between < 2 * length else None
        return longer if longer is not None and longer.fit.fits else half

    # ---- trials ------------------------------------------------------------------------------------------------------

    def _smallest(self, trial: Trial) -> Trial:
        """The trial with every change taken back that is not needed."""
        asked = self.asked.settings
        for name in (
            "keep",
            "keep_on_host",
            "resident",
            "stash",
            "outputs",
            "prefetch",
            "delay",
            "micro_batches",
            "update",
            "optimizer",
        ):
            before = getattr(asked, name)
            if getattr(trial.settings, name) == before:
                continue
            without = self._try(replace(trial.settings, **{name: before}))
            if without is not None and without.fit.fits:
                trial = without
        return trial

    def _trial(self, settings: Settings) -> Trial:
        return Trial(settings, Fit.of(self.asked.report_of(settings), self.machine))

    def _try(self, settings: Settings) -> Trial | None:
        """The trial of settings; None if they do not go together, or if the step cannot be traced with them."""
        if settings not in self._tried:
            self.progress(f"trying {settings.flags(self.asked.settings)}")
            try:
                self._tried[settings] = self._trial(settings).fit
            except L2LError:
                self._tried[settings] = None
        fit = self._tried[settings]
        return Trial(settings, fit) if fit is not None else None
