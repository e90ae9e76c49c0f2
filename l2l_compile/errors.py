"""Errors of the compiler. A message names the part that failed, the rule that it broke, and a remedy."""

from __future__ import annotations

from torch._dynamo.exc import ShortenTraceback


class L2LError(ShortenTraceback):
    """The model, its inputs or the program cannot be compiled or run as asked.

    Deriving from Dynamo's `ShortenTraceback` lets the error reach the caller of the compiled model as itself,
    not wrapped into `BackendCompilerFailed`.
    """

    def __init__(self, message: str):
        super().__init__(message, first_useful_frame=None)
        self.message = message

    def __str__(self) -> str:
        """The message alone. Dynamo appends advice on debugging Dynamo to `args`, but the cause is not there."""
        return self.message


class OptionError(L2LError, ValueError):
    """An option is unknown or has an invalid value."""


class DeviceError(L2LError):
    """A parameter or an input is not where the backend needs it."""


class DiskError(L2LError):
    """The disk of the option `disk` cannot be written or read: no room, no permission, a device that fails."""


class InputError(L2LError):
    """An operation of the model cannot compute with the inputs of a call: a wrong dtype or shape."""


class LoweringError(L2LError):
    """An operation or a segment could not be traced, or not compiled for the device."""


class CheckError(L2LError):
    """A block gives different numbers for rows together than for the same rows apart (option `check`)."""


class RaceError(L2LError):
    """Two lanes or threads access the same memory, one of them to write, and neither waits for the other (option `check`)."""


class RecompileLimitError(L2LError):
    """A function would need more programs than it may have: something in its inputs changes in every call."""


class IndexRangeError(L2LError, IndexError):
    """An input leads to an index out of range in a look-up: a token that the vocabulary lacks, a label that is no class."""


class ReentryError(L2LError):
    """A signal handler, or another function that Python calls at any moment, has begun a call in the middle of a step."""


class ParseError(L2LError):
    """A text is not the text of a program. `line` is the number of the line with the error, from 1."""

    def __init__(self, line: int, message: str):
        super().__init__(f"line {line}: {message}")
        self.line = line


class VerifyError(L2LError):
    """A program breaks a rule of its vocabulary: `rule` is the rule's name, `node` the node's name, `finding` the violation."""

    def __init__(self, rule: str, node: str, message: str):
        super().__init__(f"{rule}: node '{node}' {message}")
        self.rule, self.node, self.finding = rule, node, message


class ScheduleError(L2LError, ValueError):
    """The order of a pipeline's turns cannot run: `rule` is the rule's name, `rank` the rank, and `turn` the turn, such as "0F3"."""

    def __init__(self, rule: str, rank: int, turn: object, message: str):
        super().__init__(f"{rule}: rank {rank}{'' if turn is None else f': {turn}'} {message}")
        self.rule, self.rank, self.turn = rule, rank, None if turn is None else str(turn)


class RankError(L2LError):
    """A rank has failed, has ended or does not answer, or its programs or steps differ from the other ranks'."""
