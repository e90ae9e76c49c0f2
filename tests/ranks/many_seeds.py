"""The checks of `test_order.py` with more seeds than the suite has time for: no deadlock, and every gradient is right.

python tests/ranks/many_seeds.py 200
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from pool import Pool  # noqa: E402
from test_order import CASES, gradients_are_right, rows_of_all_ranks_are_right  # noqa: E402

SECONDS = 2.0  # a step of a seed takes a tenth of it; a deadlock does not end


def main(seeds: int) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pool = Pool(Path(folder))
        checks = [(gradients_are_right, 2, (case, seeds)) for case in CASES]
        checks += [(gradients_are_right, 3, (CASES[0], seeds)), (rows_of_all_ranks_are_right, 2, (seeds,))]
        for check, world, arguments in checks:
            begun = time.perf_counter()
            pool.run(check, *arguments, world=world, seconds=60 + round(SECONDS * seeds))
            print(f"{check.__name__}{arguments} on {world} ranks: {time.perf_counter() - begun:.0f} s", flush=True)
        pool.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
