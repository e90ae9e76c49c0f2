"""Which option sets are tried: the numbers of micro-batches, each with the ways to use free memory, and then neighbours of the best.

All of these options leave the numbers of training as they are. Those that do not (`precision`, and
`delay` unless it is allowed) are decided by the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from l2l_compile.options import AUTO
from l2l_compile.planner.trials import OptionTrial, Trials
from l2l_compile.update_modes import MODES

DECIDED: dict[str, Any] = {
    "micro_batches": 1,
    "update": "at_step",
    "prefetch": 1,
    "stash": "host",
    "keep": 0,
    "keep_on_host": 0,
    "resident": None,
}  # with the values that cost least memory, or that are the library's
_STARTS = 3  # of the descent
_SLOW = 1.3  # times the fastest step so far: with as many micro-batches, no use of memory makes up for it
_DIGITS = 2  # of a number of bytes
_SHARES = (0.5, 1.0)  # of the free memory of the device, for weights that stay there


def modes_with(given: Mapping[str, Any]) -> list[str]:
    """The values of `update` that go with options that are given; the last one goes with whatever else is given."""
    if "update" in given:
        return [given["update"]]
    if given.get("optimizer") is None:
        return ["at_step"]
    many = given.get("accumulate", 1) != 1
    clips = given.get("max_grad_norm") is not None or given.get("delay", 0)
    return [
        mode.name
        for mode in MODES.values()
        if not (many and not mode.is_overlapped)
        and not (clips and not mode.keeps_gradients)
        and not (given.get("precision") == "fp16" and not mode.sees_all)
    ]


class Search:
    """Tries option sets until no neighbour of the best is faster."""

    def __init__(self, trials: Trials, rows: int, delay: bool = False):
        self.trials, self.rows, given = trials, rows, trials.given
        self._modes = modes_with(given)
        self.delays = (0, 1) if delay and any(MODES[mode].keeps_gradients for mode in self._modes) else ()
        self.overlaps = trials.machine.overlaps
        self._least = 1 if trials.rows is None else 2
        self._fixed = {name: given[name] for name in DECIDED if name in given}
        self._base = {**DECIDED, "update": self._modes[-1]} | ({"delay": self.delays[-1]} if self.delays else {}) | self._fixed

    def run(self) -> list[OptionTrial]:
        """Everything that was tried, the best first."""
        counts = self._counts()
        bases = {count: self._of(micro_batches=count) for count in counts}
        for count in counts:
            if bases[count].fits and bases[count].seconds > _SLOW * self._fastest():
                continue
            for use in self._uses(bases[count]):
                self._of(micro_batches=count, **use)
        for start in self.trials.all[:_STARTS]:
            self._descend(start)
        return self.trials.all

    def _of(self, **changes: Any) -> OptionTrial:
        return self.trials.of(**{**self._base, **changes, **self._fixed})

    def _fastest(self) -> float:
        return min((trial.seconds for trial in self.trials.all), default=float("inf"))

    def _descend(self, trial: OptionTrial) -> None:
        """Go to the best neighbour until none is better. Of a step that does not fit, the one that has least too much."""
        while trial.fit is not None:
            best = min((self._of(**{**trial.options, **changes}) for changes in self._neighbours(trial)), key=lambda t: t.rank)
            if best.rank >= trial.rank:
                return
            trial = best

    # ---- values of options ----------------------------------------------------------------------------------------------

    def _counts(self) -> list[int]:
        """Numbers of micro-batches: powers of two, and the rows. One takes another trace, and is tried where two are best."""
        if "micro_batches" in self._fixed:
            return [self._fixed["micro_batches"]]
        powers = [1 << power for power in range(1, self.rows.bit_length())]
        return list(dict.fromkeys([*(count for count in powers if count <= self.rows), self.rows]))

    def _updates(self, now: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Other times at which parameters are updated."""
        before = {name: now[name] for name in ("update", "delay") if name in now}
        for mode in self._modes:
            for delay in (self.delays if MODES[mode].keeps_gradients else self.delays[:1]) or (None,):
                changes = {"update": mode} | ({"delay": delay} if delay is not None else {})
                if changes != before:
                    yield changes

    def _uses(self, base: OptionTrial) -> Iterator[dict[str, Any]]:
        """Ways to use the memory that is free."""
        if not self.overlaps:
            yield {"keep": AUTO}
            return
        yield {"stash": "device"}
        yield from ({"keep": AUTO}, {"keep_on_host": AUTO}, {"keep": AUTO, "keep_on_host": AUTO})
        yield {"stash": "device", "keep": AUTO}
        for resident in self._residents(base):
            yield {"resident": resident}
            yield {"resident": resident, "keep_on_host": AUTO}
        yield {"prefetch": 0}

    def _residents(self, trial: OptionTrial) -> list[int]:
        """Bytes for weights that stay on the device: shares of what is free there."""
        if trial.fit is None or self.trials.last is None or "resident" in self._fixed:
            return []
        device = trial.fit.needs[0]
        free = max(0, device.room - device.bytes) + (trial.options["resident"] or 0)
        weights = sum(s.block.weight_bytes(p.bindings) for p in self.trials.last.programs for s in p.segments)
        most = min(free, _rounded(weights, up=True))
        return list(dict.fromkeys(size for share in _SHARES if (size := _rounded(int(most * share)))))

    def _neighbours(self, trial: OptionTrial) -> Iterator[dict[str, Any]]:
        """Changes of one option, and of two that share a memory."""
        now = trial.options
        for count in (now["micro_batches"] * 2, now["micro_batches"] // 2):
            if self._least <= count <= self.rows:
                yield {"micro_batches": count}
        yield from self._updates(now)
        if not self.overlaps:
            yield {"keep": 0 if now["keep"] else AUTO}
            return
        yield from ({"prefetch": ahead} for ahead in (0, 1, 2) if ahead != now["prefetch"])
        yield {"stash": "host" if now["stash"] == "device" else "device"}
        for name in ("keep", "keep_on_host"):
            yield {name: 0 if now[name] else AUTO}
        for size in (None, *self._residents(trial)):
            if size != now["resident"]:
                yield {"resident": size}
                yield {"resident": size, "keep": 0 if now["keep"] else AUTO}


def _rounded(size: int, up: bool = False) -> int:
    """A number of bytes that is easy to read: no larger, or no smaller."""
    unit = 10 ** max(0, len(str(size)) - _DIGITS)
    return (-(-size // unit) if up else size // unit) * unit
