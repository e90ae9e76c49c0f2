"""The passes, in order, and the runner that checks what each needs and verifies the program after each."""
from __future__ import annotations

from collections.abc import Sequence

from ..errors import L2LError
from .compilation import Compilation, Pass
from .cut_segments import CutSegments
from .differentiate import Differentiate
from .find_blocks import FindBlocks
from .place_stash import PlaceStash
from .place_updates import PlaceUpdates
from .prefetch import Prefetch
from .release import Release
from .stream import Stream
from .trace_batch import TraceBatch
from .verify import verify

SEGMENTATION: tuple[Pass, ...] = (FindBlocks(), CutSegments(), TraceBatch())
STREAMING: tuple[Pass, ...] = (Differentiate(), Stream(), PlaceStash(), Prefetch(), Release(), PlaceUpdates())
PIPELINE: tuple[Pass, ...] = SEGMENTATION + STREAMING


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
