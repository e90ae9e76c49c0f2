"""Shared by all loops: compiles a model in place, follows its steps, and refuses settings that do not work with streaming."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from l2l_compile.errors import OptionError
from l2l_compile.host.step.closures import check_needs_no_closure
from l2l_compile.host.step.trial import check_steps_on_the_host
from l2l_compile.host.updates.asked_by_the_loop import loop_clips
from l2l_compile.inspection.programs import stats, synchronize
from l2l_compile.options import Options
from l2l_compile.session import session_of
from l2l_compile.update_modes import MODES

_OF_THE_LOOP = ("optimizer", "accumulate", "max_grad_norm")


def check_is(given: Any, kind: type, usage: str) -> None:
    """Raise `OptionError` unless `stream` got an object of this kind; `usage` shows the right calls."""
    if not isinstance(given, kind):
        what = f"a {type(given).__name__}" if not isinstance(given, type) else f"the class {given.__name__}"
        raise OptionError(
            f"stream takes the {kind.__name__} of your loop, got {what}: {usage}. A loop of your own compiles the model: "
            "torch.compile(model, backend='l2l')"
        )


def options_for(options: Mapping[str, Any], mixed_precision: str) -> tuple[dict[str, Any], str]:
    """The options of a loop without `update`, and the value of `update`. `mixed_precision` of the loop: "no", "bf16", "fp16".

    Raises `OptionError` for options that the loop sets itself, and for invalid options.
    """
    for name in _OF_THE_LOOP:
        if name in options:
            raise OptionError(f"the training loop sets the option {name!r}: leave it out")
    chosen = dict(options)
    if chosen.get("precision") is None:
        chosen["precision"] = {"no": "fp32"}.get(mixed_precision, mixed_precision)
    update = chosen.pop("update", "at_step")
    Options.build(chosen)
    if update not in tuple(MODES):  # it may be of a type without a hash
        Options.build({"update": update})
    if not MODES[update].sees_all and chosen["precision"] == "fp16":
        raise OptionError(f"precision='fp16' and {update=} do not go together: use update='in_forward'")
    return chosen, update


def compile_in_place(model: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """`model(...)` streams from now on; the model keeps its class, its signature and the names of its `state_dict`."""
    model.compile(backend="l2l", options=dict(options))


def refuse_clipping(update: str, max_norm: float | None, setting: str) -> None:
    """Raise `OptionError` if a loop clips and `update` begins before all gradients are there. `setting` is the loop's name for `max_norm`."""
    if not MODES[update].sees_all and max_norm:
        raise OptionError(
            f"{setting}={max_norm} needs the norm of all gradients before the first update, which {update=} does not wait "
            f"for. Use update='in_forward', or {setting}={0.0}"
        )


def refuse_readers_of_gradients(model: torch.nn.Module, update: str, readers: Iterable[str] = ()) -> None:
    """Raise `OptionError` if hooks or `readers` of the loop read `p.grad`, where gradients never arrive with this `update`."""
    if not MODES[update].is_overlapped:
        return
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    found = [*readers, *(["gradient hooks of " + ", ".join(hooked[:3]) + " …" * (len(hooked) > 3)] if hooked else [])]
    if found:
        raise OptionError(
            f"update={update!r} and {found[0]} do not go together: the gradients never come to p.grad. Use update='at_step'"
        )


class StreamedSteps:
    """A model that is compiled in place for training, and its steps: clipping, the norm of the gradients, skipped steps.

    `is_last` is called when a backward begins, and says whether it is the last backward of its step. `skipped` is called after
    each `optimizer.step()`, with True if the step changed nothing because a gradient was not finite (fp16). With `waits`, the
    weights are up to date when `optimizer.step()` returns. This is for loops that read weights there, since a user cannot call
    `synchronize` inside such a loop. With `looks_at_gradients`, the library's own code reads `p.grad` to choose how it clips.
    Raises `L2LError` for an optimizer that cannot update host tensors, and `OptionError` for readers of gradients.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        options: Mapping[str, Any],
        update: str,
        is_last: Callable[[], bool],
        skipped: Callable[[bool], None] = lambda _: None,
        readers: Iterable[str] = (),
        waits: bool = False,
        looks_at_gradients: bool = False,
    ):
        self.model, self.update = model, update
        self._skipped, self._skipped_before, self._waits = skipped, 0, waits
        self._norm = torch.zeros((), dtype=torch.float64)
        plain = _plain(optimizer)
        refuse_readers_of_gradients(model, update, readers)
        if looks_at_gradients:
            loop_clips(plain)
        check_needs_no_closure(plain, "this training loop")
        check_steps_on_the_host(plain)
        behind = {"update": update} | ({"accumulate": is_last} if MODES[update].is_overlapped else {})
        compile_in_place(model, {**options, **behind, "optimizer": plain})
        self._handle = plain.register_step_post_hook(self._stepped)

    @property
    def clips(self) -> bool:
        """Whether `clip` must replace the loop's own clipping, which would find no gradients in `p.grad`."""
        return MODES[self.update].is_overlapped

    def clip(self, parameters: Any, max_norm: float, norm_type: float = 2, **_: Any) -> torch.Tensor:
        """Replaces `clip_grad_norm_`. Returns a tensor that holds the norm before clipping after `optimizer.step()`.

        Raises `OptionError` for another norm than the 2-norm, and `L2LError` for in_backward, which has updated layers already.
        """
        if norm_type != 2:
            raise OptionError(f"update={self.update!r} clips by the 2-norm, not by norm_type={norm_type}. Use update='at_step'")
        self._norm = torch.full((), math.nan, dtype=torch.float64)
        session = session_of(self.model)
        if session is not None:
            session.server.updates.clip(float(max_norm))
        return self._norm

    def clip_values(self, *_: Any, **__: Any) -> None:
        """Replaces `clip_grad_value_`. Raises `OptionError`."""
        raise OptionError(f"update={self.update!r} clips by the norm of the gradients, not by their values. Use update='at_step'")

    def _stepped(self, *_: Any) -> None:
        if self._waits:
            synchronize(self.model)
        figures = stats(self.model)
        self._norm.fill_(figures.gradient_norm or 0.0)
        self._skipped(figures.skipped_steps > self._skipped_before)
        self._skipped_before = figures.skipped_steps

    def end(self) -> None:
        """Stop following the optimizer's steps: training is over. The model still streams."""
        self._handle.remove()


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of its wrappers."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
