"""l2l_compile: `torch.compile(model, backend="l2l")` trains models that do not fit on the accelerator.

Before training: `explain` reports the programs that would be compiled. `simulate` gives the time of a step on a machine.
`measure_machine` measures the figures of this machine. After a step: `programs` gives the compiled programs, `stats` the bytes
that the last step moved and held, `profile` a timeline of its work. `view` shows a compiled model as a page. Several ranks:
`shard` and `pipeline` divide a model among them, `load_pretrained` fills it from a folder of weights, and `save_pretrained` writes one.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from l2l_compile.errors import (
        CheckError,
        DeviceError,
        DiskError,
        IndexRangeError,
        InputError,
        L2LError,
        LoweringError,
        OptionError,
        ParseError,
        RaceError,
        RankError,
        RecompileLimitError,
        ReentryError,
        ScheduleError,
        VerifyError,
    )
    from l2l_compile.inspection.profile import Profile, profile
    from l2l_compile.inspection.programs import programs, stats, synchronize
    from l2l_compile.integrations.pipelines import pipeline
    from l2l_compile.integrations.pretrained import load_pretrained
    from l2l_compile.integrations.resume import KeptVersion, commit, drop_version, resume, versions
    from l2l_compile.integrations.saved_folders import save_pretrained
    from l2l_compile.ir.program import Program
    from l2l_compile.ir.schedule import Schedule
    from l2l_compile.ir.segments import Block, Segment
    from l2l_compile.options import Options
    from l2l_compile.planner.plan import Plan, Plans, plan
    from l2l_compile.ranks.sharded import shard
    from l2l_compile.report.explain import Report, explain
    from l2l_compile.report.view import view
    from l2l_compile.runtime.stats import Stats
    from l2l_compile.simulation.machine import Machine
    from l2l_compile.simulation.measure import measure_machine
    from l2l_compile.simulation.result import Simulation
    from l2l_compile.simulation.simulate import simulate
    from l2l_compile.timeline import Timeline

__all__ = [
    "Block",
    "CheckError",
    "DeviceError",
    "DiskError",
    "IndexRangeError",
    "InputError",
    "KeptVersion",
    "L2LError",
    "LoweringError",
    "Machine",
    "OptionError",
    "Options",
    "ParseError",
    "Plan",
    "Plans",
    "Profile",
    "Program",
    "RaceError",
    "RankError",
    "RecompileLimitError",
    "ReentryError",
    "Report",
    "Schedule",
    "ScheduleError",
    "Segment",
    "Simulation",
    "Stats",
    "Timeline",
    "VerifyError",
    "commit",
    "drop_version",
    "explain",
    "load_pretrained",
    "measure_machine",
    "pipeline",
    "plan",
    "profile",
    "programs",
    "resume",
    "save_pretrained",
    "shard",
    "simulate",
    "stats",
    "synchronize",
    "versions",
    "view",
]
__version__ = "0.1.0"

# A module is imported when it, or one of its names, is first accessed: modules need TorchDynamo, whose import takes seconds.
_MODULES = {
    "simulation.machine": ["Machine"],
    "errors": [name for name in __all__ if name.endswith("Error")],
    "inspection.programs": ["programs", "stats", "synchronize"],
    "integrations.pipelines": ["pipeline"],
    "integrations.pretrained": ["load_pretrained"],
    "integrations.resume": ["KeptVersion", "commit", "drop_version", "resume", "versions"],
    "integrations.saved_folders": ["save_pretrained"],
    "ir.program": ["Program"],
    "ir.schedule": ["Schedule"],
    "ir.segments": ["Block", "Segment"],
    "options": ["Options"],
    "ranks.sharded": ["shard"],
    "planner.plan": ["Plan", "Plans", "plan"],
    "report.explain": ["Report", "explain"],
    "runtime.stats": ["Stats"],
    "simulation.measure": ["measure_machine"],
    "simulation.result": ["Simulation"],
    "simulation.simulate": ["simulate"],
    "timeline": ["Timeline"],
    "inspection.profile": ["Profile", "profile"],
    "report.view": ["view"],
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
