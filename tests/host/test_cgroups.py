"""Memory that the limit of a container leaves: of the process's own cgroup and of all above it, in both versions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from l2l_compile.devices.host import available_memory
from l2l_compile.memory.cgroups import room_in_cgroups
from memory_cgroup import memory_cgroup

MIB = 1 << 20


def group(folder, limit, used, cached, names):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize("parent, expected", [("max", 350), (500, 350), (300, 200)])
def test_the_narrowest_limit_holds_and_cached_files_are_free(parent, expected, tmp_path):
    group(tmp_path / "job", parent, 110, 10, V2)
    group(tmp_path / "job" / "step", 400, 100, 50, V2)
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    assert room_in_cgroups(tmp_path, own) == expected


def test_a_container_finds_its_cgroup_as_the_root(tmp_path):
    """Version 1: the path is that of the host, and the container's own cgroup is the root that it sees."""
    group(tmp_path / "memory", 1000, 700, 0, V1)
    own = tmp_path / "own"
    own.write_text("5:cpu:/docker/1\n4:memory:/docker/1\n0::/\n")
    assert room_in_cgroups(tmp_path, own) == 300


def test_a_cgroup_that_is_full_leaves_nothing(tmp_path):
    group(tmp_path, 1000, 1200, 0, V2)
    own = tmp_path / "own"
    own.write_text("0::/\n")
    assert room_in_cgroups(tmp_path, own) == 0


def test_a_system_without_cgroups_sets_no_limit(tmp_path):
    assert room_in_cgroups(tmp_path, tmp_path / "absent") is None
    own = tmp_path / "own"
    own.write_text("0::/job\nnonsense\n")
    assert room_in_cgroups(tmp_path, own) is None
    assert available_memory() > 0


@pytest.fixture
def cgroup():
    yield from memory_cgroup(f"l2l_room_{os.getpid()}", 700 * MIB)


def test_a_real_limit_bounds_the_available_memory(cgroup):
    code = (
        f"import os; open({str(cgroup / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "held = bytearray(b'1') * (200 << 20)\n"
        "from l2l_compile.devices.host import available_memory\n"
        "print(available_memory())\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    assert 100 * MIB < int(found.stdout) < 500 * MIB
