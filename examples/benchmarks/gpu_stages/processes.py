"""A stage from outside: its processes, their time, and the rows that they have written when they end, even by a crash.

Nothing here waits without a limit. A process is the leader of a session of its own, and the whole group is killed when its time
is over. So ignored signals, child processes or a flood of output cannot delay the other stages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .rows import RESTART, Row, read_journal

TAIL = 4000  # characters of output that are kept
WORTH_A_START = 8.0  # seconds: less is not worth another process
ENDING = 12.0  # seconds that a process may take to end after its last case


@dataclass(frozen=True)
class Stage:
    """A stage of the script.

    seconds   its share of the time, without the start of its process
    command   the command that runs it; `--journal`, `--go` and `--shard` are appended
    workers   processes at once, each with a share of the cases
    early     whether its processes may be started while the stage before it runs: they import their modules, and wait for
              the file `--go`, which has the end of their time
    """

    name: str
    seconds: float
    command: tuple[str, ...]
    workers: int = 1
    early: bool = False


@dataclass
class Process:
    """One of a stage's processes. It is started again while there are cases that have not begun.

    status   "waiting", "running", then "done", "crash", "hang" or "out of time"
    rows     the rows that it has written, and rows that are added for cases that it could not finish
    """

    stage: Stage
    index: int
    journal: Path
    until: float = 0.0
    status: str = "waiting"
    starts: int = 0
    rows: list[Row] = field(default_factory=list)
    _output: deque = field(default_factory=lambda: deque(maxlen=TAIL))
    _facts: int = 0
    _planned: list[str] = field(default_factory=list)
    _begun: dict[str, dict] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)
    _last: float = 0.0
    _told: int = 0
    _begun_at_start: int = 0

    def start(self) -> None:
        """Start the process, which waits for `go`."""
        shard = f"{self.index}/{self.stage.workers}"
        command = [*self.stage.command, "--journal", str(self.journal), "--go", str(self._go_file), "--shard", shard]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        os.set_blocking(self._process.stdout.fileno(), False)
        self.starts += 1

    @property
    def _go_file(self) -> Path:
        return self.journal.with_suffix(".go")

    def go(self, until: float) -> None:
        """Let the process begin, or continue after the last case that has begun. It must end before `until` (`time.time()`)."""
        if self.starts == 0:
            self.start()
        self.until, self.status = until, "running"
        self._last, self._begun_at_start = time.time(), len(self._begun)
        beside = self._go_file.with_suffix(".part")
        beside.write_text(f"{until - 1.0:.3f}")
        beside.rename(self._go_file)

    @property
    def tail(self) -> str:
        """The end of its output."""
        return bytes(self._output).decode("utf-8", errors="replace")

    def poll(self) -> None:
        """Read its new output and facts. End or restart the process if necessary."""
        if self.status != "running":
            return
        self._read()
        code = self._process.poll()
        if code is not None:
            self._read()
            self._finished(code)
        elif time.time() > self.until:
            self._overdue()
        elif self._hangs():
            self._kill()
            self._read()
            self._close_case("hang", "no result within its time")
            self._go_on("hang")

    def news(self) -> list[Row]:
        """The rows since the last call."""
        told, self._told = self._told, len(self.rows)
        return self.rows[told:]

    def stop(self) -> None:
        """Kill the process in any state."""
        if self.status == "running":
            self._overdue()
        elif self.status == "waiting" and self.starts:
            self._kill()
            self._process.stdout.close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError, ValueError):
            for _ in range(16):  # a flood is read a piece at a time
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    break
                self._output.extend(piece[-TAIL:])
        facts = read_journal(self.journal)
        for kind, content in facts[self._facts :]:
            self._last = time.time()
            if kind == "row":
                self.rows.append(content)
            elif kind == "plan":
                self._planned = content
            elif kind == "begin":
                self._begun[content["case"]] = content
            elif kind == "end":
                self._ended.add(content["case"])
        self._facts = len(facts)

    @property
    def _open(self) -> str | None:
        """The case that has begun and has not ended; None if there is none."""
        return next((name for name in self._begun if name not in self._ended), None)

    def _hangs(self) -> bool:
        name = self._open
        if name is None:  # it starts, or it ends
            all_done = bool(self._planned) and len(self._ended) == len(self._planned)
            return all_done and time.time() - self._last > ENDING
        limit = self._begun[name].get("seconds")
        return limit is not None and time.time() - self._begun[name]["at"] > limit

    def _finished(self, code: int) -> None:
        self._kill()  # kills child processes that still run
        if code == 0:
            self._settle("done")
        elif code == RESTART and len(self._begun) > self._begun_at_start:
            self._go_on("done")
        else:
            name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            self._close_case("crash", f"{name} | {self._last_lines()}")
            self._go_on("crash")

    def _overdue(self) -> None:
        """The time of the stage is over. An open case without a time limit hangs; one with a limit was begun too late."""
        self._kill()
        self._read()
        name = self._open
        if name is None and self._ended:
            return self._settle("out of time")
        verdict = "hang" if name is None or self._begun[name].get("seconds") is None else "out of time"
        self._close_case(verdict, f"the time of the stage was over | {self._last_lines()}")
        self._settle(verdict)

    def _close_case(self, verdict: str, note: str) -> None:
        """Add a row for the open case, or for the process if no case is open."""
        name = self._open
        if name is not None:
            self._ended.add(name)
        self.rows.append(Row(self.stage.name, name or "(no case)", "", None, "", "", verdict, note=note))

    def _go_on(self, status: str) -> None:
        """Start again if the last process has begun a case, cases are left, and there is time for a start."""
        progress = len(self._begun) > self._begun_at_start
        left = [name for name in self._planned if name not in self._begun]
        if progress and left and self.until - time.time() > WORTH_A_START:
            self._process.stdout.close()
            self.start()
            self.go(self.until)
        else:
            self._settle(status)

    def _settle(self, status: str) -> None:
        missed = [name for name in self._planned if name not in self._begun]
        if missed:
            shown = ", ".join(missed[:6]) + (", ..." if len(missed) > 6 else "")
            note = f"{len(missed)} of {len(self._planned)} cases: {shown}"
            self.rows.append(
                Row(self.stage.name, f"process {self.index}", "cases", len(missed), "", "", "not reached", note=note)
            )
            status = "out of time" if status == "done" else status
        self.status = status
        self._process.stdout.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)

    def _last_lines(self) -> str:
        return " / ".join(self.tail.strip().splitlines()[-4:])[-600:]


def processes_of(stage: Stage, folder: Path) -> list[Process]:
    """The processes of a stage. They are started at once if the stage is `early`."""
    found = [Process(stage, i, folder / f"{stage.name}.{i}.jsonl") for i in range(stage.workers)]
    for process in found if stage.early else ():
        process.start()
    return found


def run_stage(found: Sequence[Process], until: float, heard: Callable[[Sequence[Row]], None]) -> None:
    """Run the processes of a stage until they are done, at most until `until` (`time.time()`). All are ended then."""
    try:
        for process in found:
            process.go(until)
        while any(process.status == "running" for process in found):
            for process in found:
                process.poll()
                heard(process.news())
            time.sleep(0.1)
    finally:
        for process in found:
            process.stop()
            heard(process.news())
