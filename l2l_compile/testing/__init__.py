"""Tests that a streamed model computes the same as eager: in one training step, in several steps, and on random models.

`assert_equivalent` and `training_equivalent` assert it, `compare` shows it as a table. `options`, `batches` and `stacks` are
strategies of Hypothesis. docs/testing.md shows them all.
"""

from .comparison import Comparison
from .difference import Difference
from .equivalence import assert_equivalent, compare
from .pair import Pair
from .strategies import batches, options, stacks
from .training import TrainingComparison, training_equivalent
from .verdicts import Verdict

__all__ = [
    "Comparison",
    "Difference",
    "Pair",
    "TrainingComparison",
    "Verdict",
    "assert_equivalent",
    "batches",
    "compare",
    "options",
    "stacks",
    "training_equivalent",
]
