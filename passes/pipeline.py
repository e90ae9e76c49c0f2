"""The passes in order, and the runner, which checks the facts that a pass requires and verifies the program after each pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..errors import L2LError, VerifyError
from .batching.prove_row_independence import ProveRowIndependence
from .batching.split_regions import SplitRegions
from .compilation import Compilation, Fact, Pass
from .preparation.drop_outputs import DropOutputs
from .preparation.loss_terms import GatherLossTerms
from .preparation.narrow import Narrow
from .segmentation.cut_segments import CutSegments
from .segmentation.find_blocks import FindBlocks
from .segmentation.granularity import MeasureGranularity
from .segmentation.sequence_operations import SequenceOperations
from .streaming.differentiate import Differentiate
from .streaming.place_ranks import PlaceRanks
from .streaming.place_rows import PlaceRows
from .streaming.place_stash import PlaceStash
from .streaming.place_updates import PlaceUpdates
from .streaming.prefetch import Prefetch
from .streaming.release import Release
from .streaming.stream import Stream
from .verify import verify

PREPARATION: tuple[Pass, ...] = (DropOutputs(), GatherLossTerms(), Narrow(), SequenceOperations())
SEGMENTATION: tuple[Pass, ...] = (FindBlocks(), CutSegments(), SplitRegions(), ProveRowIndependence(), MeasureGranularity())
STREAMING: tuple[Pass, ...] = (
    Differentiate(),
    Stream(),
    PlaceStash(),
    Prefetch(),
    PlaceRows(),
    PlaceRanks(),
    Release(),
    PlaceUpdates(),
)
PIPELINE: tuple[Pass, ...] = PREPARATION + SEGMENTATION + STREAMING

After = Callable[[Pass, Compilation, float], None]  # called after a pass with the seconds of the pass and its verification


def check_order(passes: Sequence[Pass], known: frozenset[Fact] = frozenset()) -> None:
    """Raise `L2LError` if a pass requires a fact that no earlier pass provides. `run` calls this before the first pass."""
    facts = set(known)
    for step in passes:
        missing = step.requires - facts
        if missing:
            raise L2LError(f"pass '{step.name}' requires {', '.join(sorted(missing))}, which no pass before it provides")
        facts |= step.provides


def run(
    compilation: Compilation, passes: Sequence[Pass] = PIPELINE, known: frozenset[Fact] = frozenset(), after: After | None = None
) -> None:
    """Run passes over a compilation, and verify it after each pass. `known` are facts that hold already."""
    check_order(passes, known)
    facts = set(known)
    for step in passes:
        start = time.perf_counter()
        _apply(step, compilation)
        facts |= step.provides
        try:
            verify(compilation, frozenset(facts))
        except VerifyError as error:
            raise VerifyError(
                error.rule, error.node, f"{error.finding}; before pass '{step.name}' the program was legal"
            ) from None
        if after is not None:
            after(step, compilation, time.perf_counter() - start)


def _apply(step: Pass, compilation: Compilation) -> None:
    try:
        step.apply(compilation)
    except L2LError:
        raise
    except Exception as error:
        raise L2LError(f"pass '{step.name}' failed: {type(error).__name__}: {error}") from error
