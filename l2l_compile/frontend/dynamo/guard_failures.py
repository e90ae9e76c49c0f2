"""Dynamo's reasons why no program fits a call, in plain words: the change between the calls, and a remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_CHANGES, _MOST_VALUES, _LONGEST = 3, 3, 60  # the most that is printed: changes, values of a change, characters of a value


@dataclass(frozen=True)
class Change:
    """A difference between a call and the earlier calls that programs were compiled for.

    what      the thing that differs, such as `mode` or `size 1 of x`
    values    its values in the earlier calls, the last call first; empty where Dynamo does not tell them
    programs  the number of programs that were compiled for other values
    remedy    advice for the user
    """

    what: str
    values: tuple[str, ...]
    programs: int
    remedy: str

    def __str__(self) -> str:
        if not self.values:
            return f"{self.what} ({self.programs} program{'s' * (self.programs != 1)})"
        more = len(self.values) - _MOST_VALUES
        shown = ", ".join(v if len(v) <= _LONGEST else v[:_LONGEST] + "…" for v in self.values[:_MOST_VALUES])
        return f"{self.what} was {shown}" + (f" and {more} other values" if more > 0 else "")


@dataclass(frozen=True)
class _Kind:
    """A kind of guard. Groups of `pattern` fill `what` and `remedy`; its group `value` is the value that the guard expected."""

    pattern: str
    what: str
    remedy: str


_CONSTANT = "hold {name} constant, or let it take a few values only"
_SIZE = "pad {name} to a few sizes, or call torch._dynamo.mark_dynamic({name}, {dim}) before the model"
_MODES = "call the model under the same modes (no_grad, autocast, default dtype, threads) each time"
_KINDS = (  # the first kind that matches is used
    _Kind(
        r"tensor '(?P<name>.+)' size mismatch .* expected (?P<value>\d+), .* on a parameter.*", "the size of {name}", _CONSTANT
    ),
    _Kind(
        r"tensor '(?P<name>.+)' size mismatch at index (?P<dim>\d+)\. expected (?P<value>\d+).*", "size {dim} of {name}", _SIZE
    ),
    _Kind(r"(?P<name>.+)\.size\(\)\[(?P<dim>\d+)\] == (?P<value>\d+)", "size {dim} of {name}", _SIZE),
    _Kind(
        r"tensor '(?P<name>.+)' (?P<property>\w+) mismatch.*?\. expected (?:\w+=)?(?P<value>[^,.]+).*",
        "{property} of {name}",
        _CONSTANT,
    ),
    _Kind(r"expected type of '(?P<name>.+)' to be .*", "{name} was of another type", _CONSTANT),
    _Kind(r"___check_type_id\((?P<name>.+), \d+\).*", "{name} was of another type", _CONSTANT),
    _Kind(r"___check_obj_id\((?P<name>.+), \d+\).*", "{name} was another object", "give the same {name} in each call"),
    _Kind(r"(?P<name>len\(.+\)) == (?P<value>\d+)", "{name}", _CONSTANT),
    _Kind(
        r"(?P<name>.+?) == (?P<value>-?[\d.]+(?:e[+-]?\d+)?)",
        "{name}",
        "give {name} as a tensor if the model computes with it, or else hold it constant or let it take a few values only",
    ),
    _Kind(r"(?P<name>.+?) == (?P<value>.+)", "{name}", _CONSTANT),
    _Kind(r"BACKEND_MATCH.*", "another call of torch.compile", "compile a model once, and keep what torch.compile returns"),
    _Kind(r"GLOBAL_STATE changed: (?P<name>.*)", "torch's global state was another: {name}", _MODES),
    _Kind(r"(?P<name>.+)", "`{name}` holds no longer", "hold constant what this depends on"),
)
_UNKNOWN = "Unexpected recompilation"
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def changes(reasons: Sequence[str]) -> tuple[Change, ...]:
    """The most frequent changes. Changes of modes come last: training and evaluation have different programs in any case."""
    found: dict[tuple[str, str], list[str | None]] = {}
    for reason in reasons:
        text = _condition(reason)
        if text and not text.startswith(_UNKNOWN):
            what, remedy, value = _read(text)
            found.setdefault((what, remedy), []).append(value)
    ordered = sorted(found.items(), key=lambda item: (item[0][1] == _MODES, -len(item[1])))
    return tuple(
        Change(what, tuple(dict.fromkeys(v for v in values if v is not None)), len(values), remedy)
        for (what, remedy), values in ordered[:_MOST_CHANGES]
    )


def _condition(reason: str) -> str:
    """`0/7: L.depth == 3   # for layer in …` → `L.depth == 3`, with modules and parameters named as in Python."""
    first = reason.strip().split("\n")[0].split("  #")[0]
    return _MEMBER.sub(r".\1", re.sub(r"^\S*\d+/\d+: ", "", first)).strip()


def _read(text: str) -> tuple[str, str, str | None]:
    """The change, the remedy, and the value that the guard expected (None if its text has none)."""
    for kind in _KINDS:
        if (match := re.fullmatch(kind.pattern, text)) is not None:
            groups = match.groupdict()
            value = groups.pop("value", None)
            return kind.what.format(**groups), kind.remedy.format(**groups), value
    raise AssertionError(f"the last pattern matches every text, but not {text!r}")
