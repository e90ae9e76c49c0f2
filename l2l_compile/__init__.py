"""l2l_compile: `torch.compile(model, backend="l2l")` trains models that do not fit on the accelerator.

Before training: `explain` reports the programs that would be compiled. `simulate` gives the time of a step on a machine.
`measure_machine` measures the figures of this machine. After a step: `programs` gives the compiled programs, `stats` the bytes
that the last step moved and held, `trace` a timeline of its work. `view` shows a compiled model as a page. Several ranks:
`shard` divides a model among them, `load_pretrained` fills it from a folder of weights.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from .integrations.pretrained import load_pretrained
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
    "load_pretrained",
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

# A module is imported when it, or one of its names, is first accessed: modules need TorchDynamo, whose import takes seconds.
_MODULES = {
    "devices.machine": ["Machine"],
    "errors": [name for name in __all__ if name.endswith("Error")],
    "inspection": ["programs", "stats", "synchronize"],
    "integrations.pretrained": ["load_pretrained"],
    "ir.program": ["Program"],
    "ir.segments": ["Block", "Segment"],
    "options": ["Options"],
    "ranks.sharded": ["shard"],
    "report": ["Report", "explain"],
    "runtime.step": ["Stats"],
    "simulation.measure": ["measure_machine"],
    "simulation.result": ["Simulation"],
    "simulation.simulate": ["simulate"],
    "timeline": ["Timeline"],
    "tracing": ["Trace", "trace"],
    "viewing": ["view"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
