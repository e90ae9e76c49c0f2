"""The most rows with which a step fits."""

from __future__ import annotations

from collections.abc import Callable

from l2l_compile.planner.fit import Fit

_MOST = 1 << 20


def most_rows(fit_of: Callable[[int], Fit], least: int = 1) -> int:
    """The most rows that fit, `least` or more; 0 if `least` rows do not fit. `fit_of` gives the needs of a step with so many rows."""
    if not fit_of(least).fits:
        return 0
    fits, too_many = least, 2 * least
    while too_many <= _MOST and fit_of(too_many).fits:
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if fit_of(middle).fits else (fits, middle)
    return fits
