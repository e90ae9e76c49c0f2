"""l2l_compile: `torch.compile(model, backend="l2l")` trains models that do not fit on the accelerator.

`explain` shows what would be compiled, `simulate` how long a step would take on a machine, `measure_machine` gives the figures of
this one, `programs` what was compiled, `stats` what the last step moved and held, `trace` what ran when. `view` shows a
compiled model as a page.
"""

from .devices.machine import Machine
from .errors import (
    CheckError,
    DeviceError,
    IndexRangeError,
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
from .ranks.sharded import shard
from .report import Report, explain
from .runtime.step import Stats
from .simulation.measure import measure_machine
from .simulation.result import Simulation
from .simulation.simulate import simulate
from .timeline import Timeline
from .tracing import Trace, trace
from .viewing import view

__all__ = [
    "Block",
    "CheckError",
    "DeviceError",
    "IndexRangeError",
    "L2LError",
    "LoweringError",
    "Machine",
    "OptionError",
    "Options",
    "ParseError",
    "Program",
    "RaceError",
    "RecompileLimitError",
    "Report",
    "Segment",
    "Simulation",
    "Stats",
    "Timeline",
    "Trace",
    "VerifyError",
    "explain",
    "measure_machine",
    "programs",
    "shard",
    "simulate",
    "stats",
    "synchronize",
    "trace",
    "view",
]
__version__ = "0.1.0"
