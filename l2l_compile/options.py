"""The options of the backend: one frozen dataclass, built from `torch.compile(..., options={...})`."""
from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from .errors import OptionError


@dataclass(frozen=True)
class Options:
    """What a user may set.

    micro_batches   number of slices of the batch that go through a layer before the next layer is fetched (u in the
                    L2L paper). A batch with fewer rows uses fewer; one that it does not divide gets two slice sizes.
    device          where the layers run; None takes the accelerator if there is one, else "cpu".
    stash           where forward keeps the inputs of a layer for backward: "host" or "device".
    prefetch        how many layers ahead weights and stashes are fetched; also the number of extra weight slabs.
    block_compiler  "inductor" compiles each block once; "eager" runs its ATen graph as traced.
    """

    micro_batches: int = 1
    device: torch.device | None = None
    stash: str = "host"
    prefetch: int = 1
    block_compiler: str = "inductor"

    @classmethod
    def build(cls, options: Mapping[str, Any] | None = None) -> Options:
        """Options from a mapping.

        Raises `OptionError` (a `ValueError`) for an unknown name, with the known names and the nearest one, and for
        a value of the wrong type or out of range.
        """
        given = dict(options or {})
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise OptionError(f"unknown option {name!r} of backend 'l2l'; known options: {', '.join(known)}.{hint}")
        _check_int(given, "micro_batches", 1)
        _check_int(given, "prefetch", 0)
        _check_choice(given, "stash", ("device", "host"))
        _check_choice(given, "block_compiler", ("inductor", "eager"))
        given["device"] = _device(given.get("device"))
        return cls(**given)


def _check_int(given: dict, name: str, least: int) -> None:
    value = given.get(name, least)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"option {name!r} must be an int of at least {least}, got {value!r}")


def _check_choice(given: dict, name: str, choices: tuple[str, ...]) -> None:
    value = given.get(name, choices[0])
    if value not in choices:
        raise OptionError(f"option {name!r} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _device(value: Any) -> torch.device:
    if value is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        value = found if found is not None and found.type == "cuda" else "cpu"
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"option 'device' must name a device such as 'cuda' or 'cpu', got {value!r}") from error
    if device.type not in ("cuda", "cpu"):
        raise OptionError(f"option 'device' must be a cuda device or 'cpu', got {value!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("option 'device' is 'cuda', but torch.cuda.is_available() is False on this machine")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
