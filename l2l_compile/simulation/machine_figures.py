"""The figures of a machine: their units, and the values that each may have."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from l2l_compile.errors import OptionError
from l2l_compile.lanes import Lane

_BYTES, _BANDWIDTH, _FLOPS, _TIME = "a number of bytes", "a number of bytes per second", "FLOP/s", "a number of seconds"


@dataclass(frozen=True)
class Figure:
    """What a figure of a machine may be.

    unit         as an error names it
    zero         whether 0 is a value
    most         the largest value
    least        the smallest value in a file other than 0. A smaller one is in another unit, such as GB/s for bytes per second
    example      a value in this unit
    """

    unit: str
    zero: bool = False
    most: float = 1e30
    least: float = 0.0
    example: str = ""

    @property
    def rule(self) -> str:
        """The unit with the range and the example."""
        return f"{self.unit}, {'at least 0' if self.zero else 'above 0'}, such as {self.example}"


_SIZE = Figure(_BYTES, least=1e5, example="25757220864 for 24564 MiB")
_RATE = Figure(_BANDWIDTH, least=1e6, example="26e9 for 26 GB/s")
_RATES_OF_DTYPES = Figure(_FLOPS, least=1e6, example="165.2e12 for 165.2 TFLOP/s")
_SECONDS = Figure(_TIME, zero=True, most=1.0, example="8e-6 for 8 microseconds")
_SHARE = Figure("a share, at most 1", most=1.0, example="0.75")

FIGURES: dict[str, Figure] = {
    "memory_bandwidth": _RATE,
    "device_memory": _SIZE,
    "device_reserve": Figure(_BYTES, zero=True, least=1e5, example="1073741824 for 1 GiB"),
    Lane.H2D: _RATE,
    Lane.D2H: _RATE,
    "pageable": _RATE,
    "host_bandwidth": _RATE,
    "host_memory": _SIZE,
    "host_reserve": Figure(_BYTES, zero=True, least=1e5, example="4294967296 for 4 GiB"),
    "flops_share": _SHARE,
    "memory_share": _SHARE,
    "latency": _SECONDS,
    "launch": _SECONDS,
    "node": _SECONDS,
    "micro_batch": _SECONDS,
    "link": _RATE,
    "link_latency": _SECONDS,
    "network": _RATE,
    "network_latency": _SECONDS,
    "disk_read": _RATE,
    "disk_write": _RATE,
}
MAY_LACK = ("devices", "link", "link_latency", "network", "network_latency", "disk_read", "disk_write")  # None: not known
_DTYPES = tuple(str(d).removeprefix("torch.") for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64))


def check_names(given: Iterable[str], known: Iterable[str], needed: Iterable[str], where: str) -> None:
    """Raise `OptionError` for names of figures that are unknown or missing. `where` names the machine or its file."""
    given, known = set(given), sorted(known)
    if unknown := sorted(given - set(known)):
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise OptionError(f"{where}: unknown figures {', '.join(unknown)}{hint}; known are {', '.join(known)}")
    if missing := [name for name in needed if name not in given]:
        units = {name: figure.unit for name, figure in FIGURES.items()} | {"flops": _RATES_OF_DTYPES.unit + " by dtype"}
        shown = (f"{name} ({units[name]})" if name in units else name for name in missing)
        raise OptionError(f"{where}: these figures are missing: {', '.join(shown)}")


def check_values(figures: Mapping[str, Any], where: str, units: bool = False) -> None:
    """Raise `OptionError` for the first figure whose value is none of its unit.

    where  names the machine or its file
    units  whether values that are too small for their unit are refused, as in a file that a person has written
    """
    for name, value in figures.items():
        if value is None and name in MAY_LACK:
            continue
        if name in FIGURES:
            _check_number(name, value, FIGURES[name], where, units)
        else:
            _CHECKS[name](name, value, where, units)
    for memory, reserve in (("device_memory", "device_reserve"), ("host_memory", "host_reserve")):
        if figures.get(reserve, 0) >= figures[memory]:
            raise OptionError(
                f"{where}: '{reserve}' is {figures[reserve]:,} bytes, of '{memory}' {figures[memory]:,}: nothing is left"
            )


def _check_number(name: str, value: Any, figure: Figure, where: str, units: bool) -> None:
    rule = f"{where}: '{name}' must be {figure.rule}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionError(f"{rule}; got {_shown(value)}")
    in_range = 0 <= value < math.inf if figure.zero else 0 < value < math.inf  # NaN is in neither
    if not in_range:
        raise OptionError(f"{rule}; got {value}")
    if value > figure.most or (units and 0 < value < figure.least):
        raise OptionError(f"{rule}; got {value}, which seems to be in another unit")


def _check_flops(name: str, value: Any, where: str, units: bool) -> None:
    if not isinstance(value, Mapping) or not value:
        raise OptionError(
            f'{where}: \'{name}\' must hold FLOP/s by dtype, such as {{"float32": 82.6e12, "bfloat16": 165.2e12}}, got {_shown(value)}'
        )
    for dtype, rate in value.items():
        if dtype not in _DTYPES:
            raise OptionError(f"{where}: '{name}' has figures for {', '.join(_DTYPES)}, got the dtype {_shown(dtype)}")
        _check_number(f"{name}: {dtype}", rate, _RATES_OF_DTYPES, where, units)


def _check_devices(name: str, value: Any, where: str, units: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{where}: '{name}' must be a number of devices, a whole number of at least 1, got {_shown(value)}")


def _check_text(name: str, value: Any, where: str, units: bool) -> None:
    if not isinstance(value, str) or not value.strip():
        raise OptionError(f"{where}: '{name}' must be a text, got {_shown(value)}")


def _check_flag(name: str, value: Any, where: str, units: bool) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{where}: '{name}' must be true or false, got {_shown(value)}")


def _check_sources(name: str, value: Any, where: str, units: bool) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for pair in value.items() for text in pair):
        raise OptionError(f"{where}: '{name}' must hold a text for each figure, by the figure's name, got {_shown(value)}")


def _shown(value: Any) -> str:
    """A value as an error shows it, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_CHECKS: dict[str, Callable[[str, Any, str, bool], None]] = {
    "name": _check_text,
    "flops": _check_flops,
    "devices": _check_devices,
    "overlaps": _check_flag,
    "sources": _check_sources,
}
