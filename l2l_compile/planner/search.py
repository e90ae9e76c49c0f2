"""Which option sets are tried: the numbers of micro-batches, each with the ways to use free memory, and then neighbours of the best.

All of these options leave the numbers of training as they are. Those that do not (`precision`, and
`delay` unless it is allowed) are decided by the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from l2l_compile.errors import L2LError
from l2l_compile.estimate.balanced_stages import most_loops
from l2l_compile.ir.rank_layout import Layout
from l2l_compile.options import AUTO
from l2l_compile.planner.divisions import rows_of, with_loops
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
    "schedule": "breadth_first",
}  # with the values that cost least memory, or that are the library's
_STARTS = 3  # of the descent
_SLOW = 1.3  # times the fastest step so far: with as many micro-batches, no use of memory makes up for it
_LAYOUTS = 6  # numbers of micro-batches on several devices, of which each use of memory is tried
_DIGITS = 2  # of a number of bytes
_SHARES = (0.5, 1.0)  # of the free memory of the device, for weights that stay there


def modes_with(given: Mapping[str, Any]) -> list[str]:
    """The values of `update` that go with options that are given; the last one goes with whatever else is given."""
    if "update" in given:
        return [given["update"]]
    if given.get("optimizer") is None:
        return ["at_step"]
    many = given.get("accumulate", 1) != 1 or given.get("disk") is not None
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

    def __init__(
        self, trials: Trials, delay: bool = False, layouts: Sequence[Layout] = (Layout(),), reads_gradients: bool = False
    ):
        self.trials, self.layouts, given = trials, layouts, trials.given
        self._modes = modes_with(given)
        if reads_gradients and "update" not in given:
            self._modes = [mode for mode in self._modes if MODES[mode].sees_all]
        if any(layout.ranks > 1 for layout in layouts):  # whose steps with updates at the end are not timed
            self._modes = [mode for mode in self._modes if MODES[mode].is_overlapped] or self._modes
        self.delays = (0, 1) if delay and any(MODES[mode].keeps_gradients for mode in self._modes) else ()
        self.overlaps = trials.machine.overlaps
        self._fixed = {name: given[name] for name in DECIDED if name in given}
        self._base = {**DECIDED, "update": self._modes[-1]} | ({"delay": self.delays[-1]} if self.delays else {}) | self._fixed

    def run(self) -> list[OptionTrial]:
        """Everything that was tried, the best first."""
        bases = [
            base for layout in self._placed() for schedule in self._schedules(layout) for base in self._bases(layout, schedule)
        ]
        for base in sorted(bases, key=lambda trial: trial.rank)[: self._most_bases(bases)]:
            if base.fits and base.seconds > _SLOW * self._fastest():
                continue
            for use in self._uses(base):
                self._of(base.layout, **{**base.options, **use})
        for start in self.trials.all[:_STARTS]:
            self._descend(start)
        return self.trials.all

    def _most_bases(self, bases: Sequence[OptionTrial]) -> int:
        """How many numbers of micro-batches, and divisions among devices, are tried with each use of memory."""
        return len(bases) if len(self.layouts) == 1 else _LAYOUTS

    def _of(self, layout: Layout, **changes: Any) -> OptionTrial:
        return self.trials.of(layout, **{**self._base, **changes, **self._fixed})

    def _fastest(self) -> float:
        return min((trial.seconds for trial in self.trials.all), default=float("inf"))

    def _descend(self, trial: OptionTrial) -> None:
        """Go to the best neighbour until none is better. Of a step that does not fit, the one that has least too much."""
        while trial.fit is not None:
            changed = [self._of(trial.layout, **{**trial.options, **changes}) for changes in self._neighbours(trial)]
            changed += [self._of(layout, **trial.options) for layout in self._other_loops(trial)]
            best = min(changed, key=lambda t: t.rank)
            if best.rank >= trial.rank:
                return
            trial = best

    # ---- divisions among devices ------------------------------------------------------------------------------------------

    def _placed(self) -> Iterator[Layout]:
        """The layouts, of a pipeline with the most stages a rank and with one."""
        for layout in self.layouts:
            loops = self._loops(layout)
            yield from dict.fromkeys((loops[-1], loops[0]))

    def _loops(self, layout: Layout) -> list[Layout]:
        """The layout with the numbers of stages a rank; as it is for a model that no pipeline can divide, which a trial tells."""
        try:
            return list(with_loops(layout, most_loops(self.trials.unsplit, layout.depth) if layout.depth > 1 else 1))
        except L2LError:
            return [layout]

    def _other_loops(self, trial: OptionTrial) -> list[Layout]:
        if trial.options["schedule"] != "breadth_first":
            return []
        return [layout for layout in self._loops(trial.layout) if layout != trial.layout]

    def _schedules(self, layout: Layout) -> Iterator[dict[str, Any]]:
        yield {}
        if self._goes_by_turns(layout):
            yield {"schedule": "1f1b"}
            if self.delays:  # with a flush as well
                yield {"schedule": "1f1b", "delay": 0}

    def _bases(self, layout: Layout, schedule: Mapping[str, Any]) -> Iterator[OptionTrial]:
        """Numbers of micro-batches, without a use of free memory: more and more, until they are far slower than fewer of them."""
        fastest = float("inf")
        for count in self._counts(layout):
            if schedule and count == 1:
                continue
            trial = self._of(layout, micro_batches=count, **schedule)
            yield trial
            fastest = min(fastest, trial.seconds)
            if trial.fits and trial.seconds > _SLOW * fastest:
                return

    def _goes_by_turns(self, layout: Layout) -> bool:
        """Whether a micro-batch may go back before others have gone forward: with one stage on each rank of a pipeline."""
        return layout.depth > 1 and layout.loops == 1 and "schedule" not in self._fixed

    # ---- values of options ----------------------------------------------------------------------------------------------

    def _rows(self, layout: Layout) -> int:
        """The rows of a rank; 0 if the batch cannot be divided evenly."""
        return rows_of(layout, self.trials.rows) or 0

    def _counts(self, layout: Layout) -> list[int]:
        """Numbers of micro-batches: powers of two, and the rows. One takes another trace, and is tried where two are best."""
        if "micro_batches" in self._fixed:
            return [self._fixed["micro_batches"]]
        rows = self._rows(layout)
        powers = [1 << power for power in range(1, rows.bit_length())]
        return list(dict.fromkeys([*(count for count in powers if count <= rows), *([rows] if rows else [])]))

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
        if base.options["schedule"] != "breadth_first":  # weights and stashes stay there, and blocks run again
            return
        yield {"stash": "device"}
        yield from ({"keep": AUTO}, {"keep_on_host": AUTO}, {"keep": AUTO, "keep_on_host": AUTO})
        yield {"stash": "device", "keep": AUTO}
        for resident in self._residents(base):
            yield {"resident": resident}
            yield {"resident": resident, "keep_on_host": AUTO}
        yield {"prefetch": 0}

    def _residents(self, trial: OptionTrial) -> list[int]:
        """Bytes for weights that stay on the device: shares of what is free there. Weights of shards do not stay."""
        if trial.fit is None or self.trials.last is None or "resident" in self._fixed or trial.layout.shards > 1:
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
            if 1 <= count <= self._rows(trial.layout):
                yield {"micro_batches": count}
        yield from self._updates(now)
        if now["schedule"] != "breadth_first":
            return
        if not self.overlaps:
            yield {"keep": 0 if now["keep"] else AUTO}
            return
        yield from ({"prefetch": ahead} for ahead in (0, 1, 2) if ahead != now["prefetch"])
        yield from ({"stash": place} for place in self._other_places(trial))
        for name in ("keep", "keep_on_host"):
            yield {name: 0 if now[name] else AUTO}
        for size in (None, *self._residents(trial)):
            if size != now["resident"]:
                yield {"resident": size}
                yield {"resident": size, "keep": 0 if now["keep"] else AUTO}

    def _other_places(self, trial: OptionTrial) -> Iterator[str]:
        """Where stashes may wait instead. A disk wears out: it is tried where a step does not fit otherwise."""
        places = ["host", "device", *(["disk"] if self.trials.given.get("disk") is not None and not trial.fits else [])]
        return (place for place in places if place != trial.options["stash"])


def _rounded(size: int, up: bool = False) -> int:
    """A number of bytes that is easy to read: no larger, or no smaller."""
    unit = 10 ** max(0, len(str(size)) - _DIGITS)
    return (-(-size // unit) if up else size // unit) * unit
