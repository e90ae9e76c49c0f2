"""Scripts that run in processes of their own, which are forked from one that has imported everything and compiled a model.

The imports take four seconds, and the first compilation of a process four times as long as the next one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# A child leaves the loop and runs its script as the rest of this one, so that Python ends as it does after a script.
_LAUNCHER = """
import json, os, signal, sys
import networkx, sympy, torch._dynamo, torch._functorch.aot_autograd, torch._inductor.compile_fx
import l2l_compile.backend
sys.path.append({folder!r})
import lean
lean.settle()
lean.warm()
sys.path.pop()
for line in sys.stdin:
    script, seconds, *files = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(seconds)
        for number, file in enumerate(files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    raise SystemExit
exec(script)
"""
_LEAKS = re.compile(r"^(nanobind: .*\n( - .*\n)*|See https://nanobind.*\n?)", re.MULTILINE)  # Triton's, where Python ends


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Launcher:
    """Runs one script after the other. `folder` is for what they print."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _LAUNCHER.format(folder=str(Path(__file__).parent))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, seconds: int = 50) -> Done:
        """Run a script to its end; a signal ends it after this time."""
        self.count += 1
        files = [self.folder / f"{self.count}.{name}" for name in ("stdout", "stderr")]
        print(json.dumps([script, seconds, *map(str, files)]), file=self.process.stdin, flush=True)
        code = int(self.process.stdout.readline())
        stdout, stderr = (file.read_text() for file in files)
        return Done(code, stdout, _LEAKS.sub("", stderr))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)
