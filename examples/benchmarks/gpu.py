"""Test and measure a GPU in ten minutes: correct numbers, memory, races, speed.

    python examples/benchmarks/gpu.py --minutes 9
    python examples/benchmarks/gpu.py --minutes 4 --only parity races

Stages run one after the other, each in processes of its own with a share of the time, so that a crash or a hang costs one
stage at most. Figures are printed and written as they come, to one JSON file that is valid at every moment. At the end, a
table, worst first, shows each figure with its expected value. Without a GPU, cases that a CPU can run do so at a small size;
the other cases report that they need a GPU. Nothing is downloaded, and the package need not be installed. The script ends
within `--minutes`, even if a stage hangs. With `--quick`, sizes are small on a GPU as well, to try the script: its figures of
speed and memory say nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from gpu_stages.processes import Stage  # noqa: E402
from gpu_stages.record import Record, run_stages  # noqa: E402
from gpu_stages.rows import HOST_GB, TRACES, Row  # noqa: E402
from gpu_stages.table import shown, table, value_of  # noqa: E402

CORES_A_WORKER = 3
# the cases of parity are small and many; in memory, the deepest model is captured while the other cases run
WORKERS = {"parity": 5, "memory": 2}

# seconds of nine minutes on a GPU, and of two on a CPU. The first import of PyTorch on a fresh machine may take half a minute.
# Time that a stage does not use goes to the later stages
SHARES = {"machine": 30, "parity": 65, "memory": 70, "races": 35, "copies": 25, "speed": 290, "faults": 30, "paper": 60}
ON_CPU = {"machine": 8, "parity": 20, "memory": 12, "races": 14, "copies": 3, "speed": 8, "faults": 14, "paper": 5}


def stages(names: list[str], device: str, quick: bool = False) -> list[Stage]:
    """The stages in their order, with the processes that the cores allow."""
    shares = SHARES if seems_to_have_gpu(device) else ON_CPU
    command = (sys.executable, "-u", "-m", "gpu_stages")
    most = max(1, len(os.sched_getaffinity(0)) // CORES_A_WORKER)
    return [
        Stage(
            name,
            shares[name],
            (*command, name, "--device", device, *(["--quick"] if quick else [])),
            min(most, WORKERS.get(name, 1)),
            early=True,
        )
        for name in shares
        if name in names
    ]


def seems_to_have_gpu(device: str) -> bool:
    """Whether there seems to be a GPU, to choose the shares of time. CUDA may hang, so only the stages' processes ask it."""
    return device.startswith("cuda") or device == "auto" and any(Path("/dev").glob("nvidia*"))


def default_path(record: Record, quick: bool = False) -> Path:
    """The path of the figures. For a GPU, it has date and device; figures of a CPU, or of small sizes, prove nothing and are overwritten."""
    if quick or record.fact("device type") != "cuda":
        return Path("runs") / "gpu.json"
    device = re.sub(r"[^a-z0-9]+", "-", str(record.fact("device")).lower()).strip("-")
    return HERE / "runs" / f"gpu-{record.date[:10]}-{device}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="the whole ends within it (default: 9)")
    parser.add_argument("--only", nargs="+", choices=list(SHARES), default=list(SHARES), metavar="STAGE", help=", ".join(SHARES))
    parser.add_argument("--device", default="auto", help="cpu or cuda; auto takes a GPU if there is one")
    places = "runs/gpu.json; of a GPU beside this script, runs/gpu-<date>-<device>.json"
    parser.add_argument("--json", type=Path, help=f"where the figures go (default: {places})")
    parser.add_argument("--quick", action="store_true", help="small sizes, on a GPU as well: to try the script")
    parser.add_argument("--host-gb", type=float, help="memory of the host, where it grows as it is used (default: what is free)")
    parser.add_argument("--traces", type=Path, help="a folder for Chrome traces of the steps that stage speed measures")
    options = parser.parse_args()
    if options.host_gb is not None:
        os.environ[HOST_GB] = str(options.host_gb)
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
        os.environ[TRACES] = str(options.traces.resolve())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the stages are ended on the way out

    record = Record(options.json or Path("runs") / "gpu.json", options.minutes)

    def ended(name: str, record: Record) -> None:
        entry = record.stages[name]
        print(f"---- {name}: {entry['status']} after {entry['seconds']:g} of {entry['allotted']:g} s", flush=True)
        if options.json is None and record.path != default_path(record, options.quick):
            record.move(default_path(record, options.quick))

    def heard(row: Row) -> None:
        print(shown(row), flush=True)

    run_stages(stages(options.only, options.device, options.quick), 60 * options.minutes, record, heard, ended)
    print("\nmachine: " + " | ".join(f"{row.figure} {value_of(row)}" for row in record.rows if row.stage == "machine"))
    print("\n" + table([row for row in record.rows if row.stage != "machine" or row.is_bad]))
    print(f"\nwritten to {record.path}")
    return int(any(row.is_bad for row in record.rows))


if __name__ == "__main__":
    sys.exit(main())
