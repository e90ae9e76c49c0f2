"""The passes in order, and the runner, which checks the facts that a pass requires and verifies the program after each pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from l2l_compile.errors import L2LError, VerifyError
from l2l_compile.passes.batching.prove_row_independence import ProveRowIndependence
from l2l_compile.passes.batching.split_regions import SplitRegions
from l2l_compile.passes.compilation import Compilation, Fact, Pass
from l2l_compile.passes.preparation.drop_outputs import DropOutputs
from l2l_compile.passes.preparation.loss_terms import GatherLossTerms
from l2l_compile.passes.preparation.narrow import Narrow
from l2l_compile.passes.segmentation.cut_segments import CutSegments
from l2l_compile.passes.segmentation.find_blocks import FindBlocks
from l2l_compile.passes.segmentation.granularity import MeasureGranularity
from l2l_compile.passes.segmentation.sequence_operations import SequenceOperations
from l2l_compile.passes.streaming.differentiate import Differentiate
from l2l_compile.passes.streaming.keep_activations import KeepActivations
from l2l_compile.passes.streaming.keep_weights import KeepWeights
from l2l_compile.passes.streaming.place_ranks import PlaceRanks
from l2l_compile.passes.streaming.place_rows import PlaceRows
from l2l_compile.passes.streaming.place_stages import PlaceStages
from l2l_compile.passes.streaming.place_stash import PlaceStash
from l2l_compile.passes.streaming.place_updates import PlaceUpdates
from l2l_compile.passes.streaming.prefetch import Prefetch
from l2l_compile.passes.streaming.release import Release
from l2l_compile.passes.streaming.stream import Stream
from l2l_compile.passes.streaming.write_turns import WriteTurns
from l2l_compile.passes.verify import verify

PREPARATION: tuple[Pass, ...] = (DropOutputs(), GatherLossTerms(), Narrow(), SequenceOperations())
SEGMENTATION: tuple[Pass, ...] = (FindBlocks(), CutSegments(), SplitRegions(), ProveRowIndependence(), MeasureGranularity())
STREAMING: tuple[Pass, ...] = (
    Differentiate(),
    PlaceStages(),
    Stream(),
    WriteTurns(),
    KeepActivations(),
    KeepWeights(),
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
