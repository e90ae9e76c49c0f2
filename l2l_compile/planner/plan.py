"""`plan`: the options with which a training step of a model is fastest on a machine, among those with which it fits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from l2l_compile.errors import OptionError
from l2l_compile.frontend.dynamo import adapter
from l2l_compile.host.step.closures import check_needs_no_closure
from l2l_compile.ir.rank_layout import Layout
from l2l_compile.lanes import AT_WORK
from l2l_compile.options import Options
from l2l_compile.planner.divisions import Devices, lines_of
from l2l_compile.planner.fit import Need
from l2l_compile.planner.search import DECIDED, Search, modes_with
from l2l_compile.planner.trials import Choice, OptionTrial, Traces, Trials
from l2l_compile.report.explain import Report, explain
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.simulate import simulate
from l2l_compile.simulation.simulated_disk import budget_of
from l2l_compile.simulation.simulated_loop import Loss
from l2l_compile.simulation.simulated_ranks import modules_of
from l2l_compile.torch_internals.fresh_code import WithoutArguments
from l2l_compile.units import format_bytes
from l2l_compile.update_modes import MODES

_TOP = 10
_EQUAL = 1.003  # times the fastest step: then the plan with fewer changes, and with less memory, is the better one


@dataclass(frozen=True)
class Plan:
    """Options with which a step fits, and what it needs and takes.

    options  for `torch.compile(model, backend="l2l", options=...)`; the option `optimizer` is the one that was given
    layout   how ranks divide the model
    seconds  of a step, in virtual time
    tokens   of the batch; None for a model that takes no tokens
    limit    what bounds the step, and the share of the step that it is at work
    needs    each memory: bytes, and its room
    """

    options: Choice
    layout: Layout
    seconds: float
    tokens: int | None
    limit: str
    needs: tuple[Need, ...]

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.tokens is not None else None

    @property
    def code(self) -> str:
        """The lines to paste, for a loop that has `model`: options that are not those of the library. Objects, such as the optimizer, have
        the names of their options.
        """
        ours = {field.name: field.default for field in fields(Options)}
        shown = {name: value for name, value in self.options.items() if value != ours[name]}
        lines = [f"    {json.dumps(name)}: {_literal(name, value)}," for name, value in shown.items()]
        divided = lines_of(self.layout)
        if divided and "optimizer" in shown:
            divided.append("optimizer = ...  # made from model.parameters() here, behind these lines")
        made = [*divided, "options = {", *lines, "}", 'model = torch.compile(model, backend="l2l", options=options)']
        return "\n".join(made)

    @property
    def caveats(self) -> list[str]:
        """What a training loop has to know of these options."""
        mode, found = MODES[self.options["update"]], []
        if not mode.sees_all:
            said = f"update='{mode.name}' updates each layer in backward"
            found.append(f"{said}: no gradient can be clipped or read behind it (update='in_forward' can)")
        if self.options.get("delay"):
            found.append("delay=1 computes gradients at the weights of the step before")
        return found


@dataclass(frozen=True)
class Plans:
    """What a planner has found; `print` shows it.

    plans      those that fit, the best first; each is faster than the others, needs less of a memory, or updates in another way
    tried      everything that was tried, the best first
    headline   the model and the batch
    simulated  seconds of the best plan by `simulate`; None if that was not asked for
    """

    machine: Machine
    plans: tuple[Plan, ...]
    tried: Sequence[OptionTrial] = field(repr=False)
    headline: str = ""
    simulated: float | None = None

    @property
    def best(self) -> Plan:
        """The best plan. Raises `OptionError` if nothing fits, with the bytes that are too much."""
        if not self.plans:
            raise OptionError(self._nothing())
        return self.plans[0]

    @property
    def nearest(self) -> OptionTrial | None:
        """If nothing fits, what comes nearest."""
        there = [trial for trial in self.tried if trial.fit is not None]
        return None if self.plans else min(there, key=lambda trial: trial.fit.excess if trial.fit else 0, default=None)

    @property
    def lacking(self) -> dict[str, int]:
        """If nothing fits, the bytes of each memory, such as "host", with which what comes nearest would."""
        nearest = self.nearest
        needs = nearest.fit.needs if nearest is not None and nearest.fit is not None else ()
        return {need.memory.split()[0]: need.bytes + need.reserve[0] for need in needs if need.excess}

    def __str__(self) -> str:
        fits = sum(trial.fits for trial in self.tried)
        head = f"{self.headline}on {self.machine.name}: {len(self.tried)} option sets tried, {fits} fit"
        if not self.plans:
            return f"{head}\n{self._nothing()}"
        return "\n".join([head, *self._table(), *self._best(), *self._out()])

    def _nothing(self) -> str:
        nearest = self.nearest
        if nearest is None or nearest.fit is None:
            whys = dict.fromkeys(trial.why_not for trial in self.tried)
            return f"no option set can be tried: {'; '.join(whys)}"
        needs = "; ".join(str(need) for need in nearest.fit.needs if need.excess)
        return f"nothing fits. The nearest, {_of(nearest)}: {needs}"

    def _table(self) -> list[str]:
        rows = []
        for plan in self.plans[:_TOP]:
            rate = plan.tokens_per_second
            rows.append(
                [
                    f"{plan.seconds:.4g} s",
                    *([f"{rate:,.0f} tokens/s"] if rate is not None else []),
                    *(need.short for need in plan.needs),
                    plan.limit,
                    _shown(plan.options, plan.layout),
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

    def _best(self) -> list[str]:
        said = [f"  note: {caveat}" for caveat in self.best.caveats]
        if self.simulated is not None:
            apart = self.simulated / self.best.seconds - 1
            said.insert(0, f"the first one by `simulate`: {self.simulated:.4g} s ({apart:+.1%})")
        return said

    def _out(self) -> list[str]:
        """Why others are out: for each memory, how many do not fit, and the least that is too much."""
        lacking: Counter[str] = Counter()
        least: dict[str, tuple[int, OptionTrial]] = {}
        for trial in self.tried:
            for need in trial.fit.needs if trial.fit is not None and not trial.fits else ():
                if need.excess:
                    lacking[need.memory] += 1
                    if need.memory not in least or need.excess < least[need.memory][0]:
                        least[need.memory] = need.excess, trial
        lines = [
            f"out: {count} for want of {memory}, by {format_bytes(least[memory][0])} at least ({_of(least[memory][1])})"
            for memory, count in lacking.items()
        ]
        refused = Counter(trial.why_not for trial in self.tried if trial.why_not)
        return lines + [f"out: {count}, {why}" for why, count in refused.items()]


def plan(
    model: Callable,
    machine: str | Path | Machine,
    options: Mapping[str, Any] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    rows: int | None = None,
    devices: int = 1,
    hosts: int = 1,
    delay: bool = False,
    reads_gradients: bool = False,
    simulated: bool = True,
    loss: Loss | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Callable[..., Plans]:
    """`plan(model, "h200", optimizer=optimizer)(**batch)`: the options with which a step is fastest on a machine.

    model      a module or a function, compiled or not; its tensors may be on the meta device
    machine    as in `simulate`
    options    options of the backend that are fixed, such as `precision` and `max_grad_norm`; by default those of a compiled model,
               but for what is decided: micro_batches, update, prefetch, stash, keep, keep_on_host, resident and schedule, none of
               which changes numbers
    optimizer  of the training loop; without one, updates are its own and their time is not counted
    rows       of the batch, on all devices together; None for those of the arguments
    devices    how many there are in all, among which the plan divides the model: shards, replicas, stages of a pipeline
    hosts      how many hosts these are on, as many on each
    delay      whether `delay=1`, with which gradients are a step late, may be chosen
    reads_gradients  whether the loop clips gradients or reads `p.grad` behind the backward: then `update="in_backward"` is not chosen
    simulated  whether the best plan is simulated as well
    loss       as in `simulate`
    progress   is told what is tried

    Each option set is streamed anew from one trace. Its memory is that of `explain`, its seconds are those of an interpreter over the
    nodes of its program (`estimate/step_time.py`). Nothing is computed, and the model and the optimizer stay as they are. Raises the errors
    that compilation would raise, and `OptionError` for a machine that lacks a figure. The machine's host memory is that of each host.
    """
    there_are = Devices(devices, hosts)
    figures = there_are.of(machine if isinstance(machine, Machine) else Machine.load(machine))
    own = {name: value for name, value in (adapter.options_of(model) or {}).items() if name not in (*DECIDED, "delay", "plan")}
    given = dict(options if options is not None else own)
    if optimizer is not None:
        given["optimizer"] = optimizer
    given = {name: value for name, value in given.items() if name not in ("device", "check", "plan")}
    _check(model, given, figures, devices, delay)

    def run(*args: Any, **kwargs: Any) -> Plans:
        there = _rows(args, kwargs)
        if there == 0:
            raise OptionError("a batch without rows cannot be planned")

        def trace(chosen: Choice) -> Report:
            return explain(model, {**chosen, "device": "cpu"})(*args, **kwargs)

        def trace_row(chosen: Choice) -> Report:
            first, named = _first_row((args, kwargs), there)
            return explain(model, {**chosen, "device": "cpu"})(*first, **named)

        plain, layouts = adapter.uncompiled(model), there_are.layouts()
        trials = Trials(plain, Traces(trace, trace_row), given, figures, there, rows or there, progress)
        tried = Search(trials, delay, layouts, reads_gradients).run()
        plans = tuple(_plan_of(trial, given, trials.tokens) for trial in _ordered(tried))
        found = Plans(figures, plans, tried, _headline(trials.last, rows or there, trials.tokens, there_are))
        if not plans or not simulated or devices > 1 or (rows is not None and rows != there):
            return found
        progress("simulating a step of the best plan")
        step = simulate(model, figures, plans[0].options, loss=loss)(*args, **kwargs)
        return replace(found, simulated=step.seconds)

    return WithoutArguments(run, "plan(model, machine)")


def _check(model: Callable, given: dict[str, Any], machine: Machine, devices: int, delay: bool) -> None:
    """Raise `L2LError` for options that cannot be planned. Adds the budget that a machine with a disk gives."""
    if given.get("disk") is not None and devices > 1:
        raise OptionError(
            "a plan for several devices does not know how much of the model each rank has on disk: plan one device with the option 'disk', or "
            "several without it"
        )
    if given.get("disk") is not None:
        given.setdefault("host_memory", budget_of(machine))
    Options.build({**given, "update": modes_with(given)[-1], "device": "cpu"})
    if given.get("optimizer") is not None:
        check_needs_no_closure(given["optimizer"], "a plan")
    if devices > 1 and not modules_of(adapter.uncompiled(model)):
        raise OptionError(
            "several devices divide a model that is a module, and this is a function: plan its module, or one device"
        )
    if delay and given.get("optimizer") is None:
        raise OptionError(
            "delay=True puts updates off, which needs the optimizer of the training loop: plan(..., optimizer=optimizer)"
        )


def _first_row(call: tuple[tuple, dict[str, Any]], rows: int) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call with the first row of each tensor that has so many."""

    def first(value: Any) -> Any:
        return value[:1] if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows else value

    return tree_map(first, call)


def _rows(args: tuple, kwargs: dict[str, Any]) -> int:
    """Rows of a batch: the first size of its first tensor."""
    return next((t.shape[0] for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()), 1)


def _ordered(tried: Sequence[OptionTrial]) -> list[OptionTrial]:
    """The trials that fit, the best first: of those that are as fast as the fastest, the one that needs least.

    A trial is left out if another one with the same updates is as fast and needs no more of any memory.
    """
    fitting = [trial for trial in tried if trial.fits]
    if not fitting:
        return []
    limit = _EQUAL * fitting[0].seconds
    best = min((trial for trial in fitting if trial.seconds <= limit), key=_cost)
    found = [best]
    for trial in sorted(fitting, key=lambda trial: (trial.seconds, _cost(trial))):
        if not any(_is_no_worse(other, trial) for other in found):
            found.append(trial)
    return found


def _is_no_worse(one: OptionTrial, other: OptionTrial) -> bool:
    """Whether a trial is as good as another one in all that a user may ask for."""
    assert one.fit is not None and other.fit is not None
    same = one.layout == other.layout and all(one.options.get(name) == other.options.get(name) for name in ("update", "delay"))
    needs = zip(one.fit.needs, other.fit.needs, strict=True)
    return same and one.seconds <= _EQUAL * other.seconds and all(a.bytes <= b.bytes for a, b in needs)


def _cost(trial: OptionTrial) -> tuple:
    changed = sum(trial.options[name] != default for name, default in DECIDED.items() if name in trial.options)
    return changed, trial.fit.needs[0].bytes if trial.fit is not None else 0, trial.seconds


def _plan_of(trial: OptionTrial, given: Choice, tokens: int | None) -> Plan:
    assert trial.time is not None and trial.fit is not None
    timeline = trial.time.timeline
    lane = max(AT_WORK, key=timeline.busy)
    limit = f"{lane.work} {timeline.busy(lane) / timeline.seconds:.0%}"
    return Plan({**given, **trial.options}, trial.layout, timeline.seconds, tokens, limit, trial.fit.needs)


def _literal(name: str, value: Any) -> str:
    """A value as code; an object has the name of its option."""
    if isinstance(value, str) or isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
        return json.dumps(value)
    return repr(value) if isinstance(value, (bool, int, float, NoneType)) else name


def _headline(report: Report | None, rows: int, tokens: int | None, devices: Devices) -> str:
    size = f"{rows} x {tokens // rows} tokens" if tokens is not None else f"{rows} rows"
    on = f"on {devices.count} devices" + (f" of {devices.hosts} hosts" if devices.hosts > 1 else "") + ", each "
    return f"{report.model}, {size}, {on if devices.count > 1 else ''}" if report is not None else ""


def _of(trial: OptionTrial) -> str:
    return _shown(trial.options, trial.layout)


def _shown(options: Choice, layout: Layout) -> str:
    """The layout of several ranks, and the options that are not those of the library."""
    defaults = {**DECIDED, "micro_batches": None, "delay": 0}
    changed = [f"{name}={options[name]}" for name, default in defaults.items() if options.get(name, default) != default]
    return " ".join([*([f"{layout}:"] if layout.ranks > 1 else []), *changed])
