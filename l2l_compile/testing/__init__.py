"""Tests that a streamed model computes the same as eager: in one training step, in several steps, and on random models.

`assert_equivalent` and `training_equivalent` assert it, `compare` shows it as a table. `options`, `batches` and `stacks` are
strategies of Hypothesis. docs/testing.md shows them all.
"""

from l2l_compile.testing.comparison import Comparison
from l2l_compile.testing.difference import Difference
from l2l_compile.testing.equivalence import assert_equivalent, compare
from l2l_compile.testing.pair import Pair
from l2l_compile.testing.strategies import batches, options, stacks
from l2l_compile.testing.training import TrainingComparison, training_equivalent
from l2l_compile.testing.verdicts import Verdict

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
