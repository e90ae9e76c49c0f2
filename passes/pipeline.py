"""The passes, in order, and the runner that checks what each needs and verifies the program after each."""
from __future__ import annotations

from collections.abc import Sequence

from ..capture import Captured, drop_outputs
from ..errors import L2LError
from ..options import Options
from ..precision import narrow
from .compilation import Compilation, Pass
from .cut_segments import CutSegments
from .differentiate import Differentiate
from .find_blocks import FindBlocks
from .granularity import MeasureGranularity
from .line import Line
from .loss_terms import gather_loss_terms
from .place_stash import PlaceStash
from .place_updates import PlaceUpdates
from .prefetch import Prefetch
from .release import Release
from .split_regions import SplitRegions
from .stream import Stream
from .trace_batch import TraceBatch
from .verify import verify

SEGMENTATION: tuple[Pass, ...] = (FindBlocks(), CutSegments(), SplitRegions(), TraceBatch(), MeasureGranularity())
STREAMING: tuple[Pass, ...] = (Differentiate(), Stream(), PlaceStash(), Prefetch(), Release(), PlaceUpdates())
PIPELINE: tuple[Pass, ...] = SEGMENTATION + STREAMING


def begin(captured: Captured, options: Options) -> Compilation:
    """A captured graph, ready for the passes: losses written row by row, specs narrowed to the precision."""
    if options.outputs == "loss":
        drop_outputs(captured)
    if options.micro_batches > 1:
        gather_loss_terms(captured, only_largest=options.precision != "fp32")
    if options.precision != "fp32":
        narrow(captured, options.precision)
    return Compilation(captured, options, Line(captured))


def check_order(passes: Sequence[Pass], given: frozenset[str] = frozenset()) -> None:
    """Raise `L2LError` when a pass needs a fact that no pass before it provides; nothing has run then."""
    facts = set(given)
    for step in passes:
        missing = step.requires - facts
        if missing:
            raise L2LError(f"pass '{step.name}' requires {', '.join(sorted(missing))}, which no pass before it provides")
        facts |= step.provides


def run(compilation: Compilation, passes: Sequence[Pass] = PIPELINE, given: frozenset[str] = frozenset()) -> None:
    """Run passes over a compilation. `given` are facts that it has already."""
    check_order(passes, given)
    facts = set(given)
    for step in passes:
        step.apply(compilation)
        facts |= step.provides
        verify(compilation, frozenset(facts))
