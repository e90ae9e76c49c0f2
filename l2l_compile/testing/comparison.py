"""The result of a comparison: to ask, to print, to assert."""

from __future__ import annotations

from l2l_compile.testing import printing
from l2l_compile.testing.verdicts import Verdicts


class Comparison(Verdicts):
    """A streamed run beside the same run in eager. `print(comparison)` shows a table."""

    def check(self) -> Comparison:
        """Return self. Raises `AssertionError` with the failures and the table unless all differences pass."""
        if not self.passes:
            raise AssertionError(f"{printing.message(self)}\n\n{self.table()}")
        return self

    def table(self, rows: int | None = printing.SHOWN) -> str:
        """The loss and the largest relative errors, beside the error of eager itself: `rows` rows, or all with None."""
        return printing.table(self, rows)

    def __str__(self) -> str:
        return f"{printing.summary(self)}\n\n{self.table()}"
