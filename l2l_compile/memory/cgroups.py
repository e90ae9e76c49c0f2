"""What the limit of a container or a batch job leaves of the host's memory: the memory cgroups (v1, v2) that this process is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT, _OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def room_in_cgroups(root: Path = _ROOT, of_process: Path = _OF_PROCESS) -> int | None:
    """Bytes that this process may still take below the limits of its memory cgroups; None if none has a limit.

    Pages of files that were not read lately count as free: the kernel drops them first (docs.kernel.org, "Control Group v2").
    """
    rooms = [room for folder, names in _cgroups(root, of_process) if (room := _room(folder, *names)) is not None]
    return max(0, min(rooms)) if rooms else None


def _cgroups(root: Path, of_process: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The cgroup of this process and all above it, whose limits hold as well, with the names of their files."""
    try:
        lines = of_process.read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = (root / "memory", _V1) if controllers else (root, _V2)
        own = top / path.lstrip("/")  # a container may see the path of the host, and its own cgroup as the root
        for folder in (own, *own.parents):
            if folder.is_relative_to(top) and folder.is_dir():
                yield folder, names


def _room(folder: Path, limit: str, usage: str, cached: str) -> int | None:
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        if most == "max":
            return None
        counted = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(most) - used + int(counted.get(cached, 0))
    except (OSError, ValueError):  # no limit can be set there, or not by this process's view
        return None
