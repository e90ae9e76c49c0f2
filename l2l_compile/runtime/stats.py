"""Figures of a step."""

from __future__ import annotations

from dataclasses import dataclass, fields

_OF_OPTIONS = (
    *("kept_bytes", "kept_on_host_bytes", "sent_bytes", "received_bytes"),
    *("disk_fetched_bytes", "disk_read_bytes", "disk_written_bytes", "disk_wait_seconds"),
    *("disk_stash_bytes", "disk_stash_wait_seconds"),
)  # not shown where they are 0


@dataclass
class Stats:
    """Figures of the last step of a compiled model; bytes and seconds.

    `kept_bytes` and `kept_on_host_bytes` are what forward has kept of the inside of layers (the options `keep`, `keep_on_host`).
    `disk_fetched_bytes` is the part of `fetched_bytes` that was read from the disk, in whole pages: with the option `disk`, or of
    weights that `load_pretrained` has put there or left in place.
    `disk_read_bytes`, `disk_written_bytes` and `disk_wait_seconds` are those of the updates that were made last:
    with update="in_forward", of the step before.
    `disk_stash_bytes` is what forward has written of stashes to the disk (stash="disk"), in whole pages; backward reads as much.
    `disk_stash_wait_seconds` is how long forward and backward have waited for these transfers.
    `gradient_squares` is the sum of the squares of all gradients of parameters. It is None if it was not taken: it needs the
    option `optimizer`, and an `optimizer.step()` with overlapped updates. `skipped_steps` counts the steps since the
    start that did nothing because a gradient was not finite; `loss_scale` is the factor on the loss in fp16, 1.0 in other
    precisions.
    """

    peak_device_bytes: int = 0
    fetched_bytes: int = 0
    resident_bytes: int = 0
    pushed_bytes: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0
    kept_bytes: int = 0
    kept_on_host_bytes: int = 0
    disk_fetched_bytes: int = 0
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    disk_wait_seconds: float = 0.0
    disk_stash_bytes: int = 0
    disk_stash_wait_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    gradient_squares: float | None = None
    skipped_steps: int = 0
    loss_scale: float = 1.0

    def __add__(self, other: Stats) -> Stats:
        """The figures of two programs of one step: amounts add up, the larger peak counts."""
        amounts = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Stats) if f.name != "gradient_squares"}
        total = Stats(**amounts, gradient_squares=self.gradient_squares)
        total.add_squares(other.gradient_squares)
        total.peak_device_bytes = max(self.peak_device_bytes, other.peak_device_bytes)
        total.loss_scale = other.loss_scale
        return total

    def add_squares(self, squares: float | None) -> None:
        """Add the squares of further gradients; None if they were not taken."""
        if squares is not None:
            self.gradient_squares = (self.gradient_squares or 0.0) + squares

    @property
    def gradient_norm(self) -> float | None:
        """The global norm of the gradients, before clipping; None if it was not taken (see `gradient_squares`)."""
        return None if self.gradient_squares is None else self.gradient_squares**0.5

    @property
    def seconds(self) -> float:
        """Seconds in forward and backward programs, transfers of outputs and gradients included."""
        return self.forward_seconds + self.backward_seconds

    def __str__(self) -> str:
        """A figure a line, by the names that users read, without figures that were not taken, or of options that are not set."""
        parts = {"forward_seconds", "backward_seconds", "gradient_squares"}
        parts |= {name for name in _OF_OPTIONS if not getattr(self, name)}
        names = [f.name for f in fields(self) if f.name not in parts] + ["seconds", "gradient_norm"]
        values = {name: getattr(self, name) for name in names}
        return "\n".join(f"{name:18} {value:,.10g}" for name, value in values.items() if value is not None)
