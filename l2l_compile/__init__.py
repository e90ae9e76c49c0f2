"""l2l_compile: `torch.compile(model, backend="l2l")` trains models that do not fit on the accelerator.

`explain` shows what would be compiled, `programs` what was, `stats` what the last step moved and held.
"""

from .errors import (
    CheckError,
    DeviceError,
    L2LError,
    LoweringError,
    OptionError,
    ParseError,
    RaceError,
    RecompileLimitError,
    VerifyError,
)
from .inspection import programs, stats, synchronize
from .ir.program import Program
from .ir.segments import Block, Segment
from .options import Options
from .report import Report, explain
from .runtime.step import Stats

__all__ = [
    "Block",
    "CheckError",
    "DeviceError",
    "L2LError",
    "LoweringError",
    "OptionError",
    "Options",
    "ParseError",
    "Program",
    "RaceError",
    "RecompileLimitError",
    "Report",
    "Segment",
    "Stats",
    "VerifyError",
    "explain",
    "programs",
    "stats",
    "synchronize",
]
__version__ = "0.1.0"
