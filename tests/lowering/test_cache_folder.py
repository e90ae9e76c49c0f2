"""The folder on disk: used only if nobody else can write into it, never larger than its limit, never the end of training."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import resource
import shutil
import stat
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

from l2l_compile import L2LError, cache_folder
from l2l_compile.cache_folder import CacheFolder, FolderRefused
from l2l_compile.command.main import main
from l2l_compile.host.compiled_step import library
from l2l_compile.lowering import inductor_folder
from l2l_compile.lowering.faster import trace_cache

DIGEST = "ab" + "0" * 62
TEXT = "long answer(void) { return 42; }"
PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void planted(void) { fclose(fopen("MADE", "w")); }
long answer(void) { return 43; }
"""


@pytest.fixture(autouse=True)
def base(monkeypatch, tmp_path):
    monkeypatch.setenv("L2L_CACHE", "1")
    monkeypatch.delenv("L2L_CACHE_SIZE", raising=False)
    monkeypatch.setattr(trace_cache, "cache_dir", lambda: str(tmp_path / "cache"))
    monkeypatch.setattr(trace_cache, "_said", set())
    monkeypatch.setattr(trace_cache, "_unchecked", None)
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@contextmanager
def said(times: int):
    """Within it, this many warnings about the folder are given."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found
    assert [str(w.message).startswith("backend 'l2l'") for w in found] == [True] * times, [str(w.message) for w in found]


def entries() -> list:
    return [entry for entry, _ in trace_cache.read(DIGEST)]


# ---- who may write ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> tuple[bytes, Path]:
    """A library that makes a file when it is loaded, and the file."""
    folder = tmp_path_factory.mktemp("planted")
    mark = folder / "loaded"
    return library._compiled(library._compiler(), PLANTED.replace("MADE", str(mark))), mark


def plant(content: bytes) -> Path:
    """A library in the place where the one of `TEXT` belongs, with the right checksum. Returns its path."""
    folder = trace_cache._folder().path
    name = library._digest(TEXT, *library._identity(library._compiler()))
    place = folder / name[:2] / name
    place.mkdir(parents=True)
    for each in (place, place.parent, folder):
        each.chmod(0o700)
    checksum = hashlib.sha256(content).hexdigest()
    path = place / f"{checksum[:16]}.so"
    path.write_bytes(f"{checksum}\n".encode() + content)
    path.chmod(0o600)
    return path


def of_another_user(path, monkeypatch):
    """The user has another number than the owner of the files."""
    user = os.geteuid() + 1
    monkeypatch.setattr(cache_folder.os, "geteuid", lambda: user)
    path.parents[2].rename(trace_cache._folder().path)


def moved_behind_a_link(index):
    def move(path, monkeypatch):
        found = [path, *path.parents][index]
        elsewhere = trace_cache._folder().path.parent.parent / "elsewhere"
        shutil.move(found, elsewhere)
        found.symlink_to(elsewhere)

    return move


def writable(index, mode):
    return lambda path, monkeypatch: [path, *path.parents][index].chmod(mode)


def a_pipe(path, monkeypatch):
    path.unlink()
    os.mkfifo(path, 0o600)


PLANTINGS = {
    "another owner": of_another_user,
    "a folder that all may write into": writable(3, 0o777),
    "a folder that the group may write into": writable(3, 0o770),
    "an inner folder that all may write into": writable(2, 0o703),
    "a folder of entries that the group may write into": writable(1, 0o720),
    "a file that all may write into": writable(0, 0o622),
    "a link in place of the folder": moved_behind_a_link(3),
    "a link in place of an inner folder": moved_behind_a_link(2),
    "a link in place of the folder of entries": moved_behind_a_link(1),
    "a link in place of the file": moved_behind_a_link(0),
    "a pipe in place of the file": a_pipe,
}


@pytest.mark.parametrize("kind", PLANTINGS)
def test_a_planted_library_is_not_loaded(kind, planted, monkeypatch):
    content, mark = planted
    PLANTINGS[kind](plant(content), monkeypatch)
    with said(1) as found:
        assert library.build(TEXT).answer() == 42
        assert library.build(TEXT).answer() == 42
    assert not mark.exists()
    assert "Training goes on" in str(found[0].message) and "TORCHINDUCTOR_CACHE_DIR" in str(found[0].message)
    assert found[0].filename == __file__


def test_a_library_of_this_user_is_loaded(planted):
    """So that the test above says something."""
    content, mark = planted
    plant(content)
    try:
        assert library.build(TEXT).answer() == 43 and mark.exists()
    finally:
        mark.unlink(missing_ok=True)


@pytest.mark.parametrize("kind", [kind for kind in PLANTINGS if "pipe" not in kind])
def test_a_planted_proof_is_not_read(kind, monkeypatch):
    trace_cache.write(DIGEST, {"reason": "planted"})
    (path,) = trace_cache._folder().path.rglob("*.json")
    PLANTINGS[kind](path, monkeypatch)
    with said(1):
        assert entries() == []
        trace_cache.write(DIGEST, {"reason": None})


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_nobody_else_may_read_or_write_with_any_umask(mask, base):
    before = os.umask(mask)
    try:
        trace_cache.write(DIGEST, 1)
    finally:
        os.umask(before)
    assert entries() == [1]
    for path in (base / f"l2l_compile_{os.geteuid()}").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_each_user_of_a_shared_folder_has_a_folder_of_their_own(monkeypatch, base):
    base.chmod(0o2770)
    trace_cache.write(DIGEST, "mine")
    user = os.geteuid() + 1
    with monkeypatch.context() as other:
        other.setattr(cache_folder.os, "geteuid", lambda: user)
        assert entries() == []
    assert entries() == ["mine"]


# ---- where code may run -----------------------------------------------------------------------------------------------


@pytest.fixture
def noexec(monkeypatch):
    """Libraries in files cannot be loaded, as from a folder that is mounted noexec. Returns the paths that were tried."""
    tried, load = [], ctypes.CDLL

    def refuse(path):
        tried.append(path)
        if not path.startswith("/proc/self/fd/"):
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(library.ctypes, "CDLL", refuse)
    return tried


def test_a_library_is_loaded_from_memory_where_no_file_may_run(noexec):
    other = TEXT.replace("42", "44")
    assert [library.build(text).answer() for text in (TEXT, other, TEXT)] == [42, 44, 42]
    assert len({path for path in noexec if path.startswith("/proc/")}) == 3, "the linker knows a library by its path"


def test_a_library_that_may_run_nowhere_is_an_error(noexec, monkeypatch):
    monkeypatch.delattr(library.os, "memfd_create")
    with pytest.raises(L2LError, match=r"(?s)cannot be loaded: .*noexec, set TMPDIR.*compile_update=False"):
        library.build(TEXT)


def test_a_temporary_folder_that_cannot_be_made_is_an_error(monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(library.tempfile, "TemporaryDirectory", full)
    with pytest.raises(L2LError, match=r"No space left on device. Set TMPDIR.*compile_update=False"):
        library.build(TEXT)


# ---- a disk that refuses ----------------------------------------------------------------------------------------------

CALLS = ("open", "mkdir", "listdir", "fstat", "fdopen", "replace", "unlink", "stat", "utime", "rmdir", "dup", "close")
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ENOENT, errno.EMFILE)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_an_error_of_the_disk_costs_entries_alone(call, error, monkeypatch):
    """At the first use of the call, at the second, and so on, until none of them fails."""
    real = getattr(os, call)
    for failing in range(1, 40):
        used = 0

        def fails(*args, failing=failing, **kwargs):
            nonlocal used
            used += 1
            if used == failing and call != "close":
                raise OSError(error, os.strerror(error))
            if used == failing:
                real(*args, **kwargs)
            return real(*args, **kwargs) if used != failing else None

        with monkeypatch.context() as broken, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            broken.setattr(trace_cache, "_unchecked", None)
            broken.setattr(cache_folder.os, call, fails)
            trace_cache.write(DIGEST, failing)
            list(trace_cache.read(DIGEST))
            for _, drop in trace_cache.read(DIGEST):
                drop("it is not needed")
        if used < failing:
            break
    trace_cache.write(DIGEST, "whole")
    assert "whole" in entries()
    assert not list(trace_cache._folder().path.rglob("tmp-*")) or call in ("unlink", "open", "fdopen")


def test_a_disk_without_room_keeps_no_temporary_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # Python ignores the signal, and the write raises
    try:
        with said(1):
            for _ in range(3):
                trace_cache.write(DIGEST, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(trace_cache._folder().path.rglob("*.*"))


def a_file(base):
    shutil.rmtree(base)
    base.write_text("")


def a_file_inside(base):
    trace_cache._folder().path.write_text("")


@pytest.mark.parametrize("place", [a_file, a_file_inside])
def test_a_file_in_place_of_the_folder_is_said_once(place, base, monkeypatch):
    place(base)
    monkeypatch.setattr(trace_cache, "cache_dir", lambda: (os.makedirs(base, exist_ok=True), str(base))[1])
    with said(1):
        for _ in range(2):
            trace_cache.write(DIGEST, 1)
            assert entries() == []
        assert library.build(TEXT).answer() == 42


def test_a_folder_that_is_deleted_is_made_again(base):
    trace_cache.write(DIGEST, 1)
    shutil.rmtree(trace_cache._folder().path)
    with said(0):
        assert entries() == []
        trace_cache.write(DIGEST, 2)
        assert entries() == [2]


# ---- how much is kept -------------------------------------------------------------------------------------------------


def fill(folder: CacheFolder, count: int, size: int = 1000) -> list[str]:
    """Entries of other digests, each used a minute before the next one. Returns the digests in this order."""
    digests = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(count)]
    for age, digest in zip(range(count, 0, -1), digests, strict=True):
        folder.write(digest, "a.json", bytes(size))
        used = time.time() - 86_400 - 60 * age
        os.utime(folder.path / digest[:2] / digest / "a.json", (used, used))
    return digests


def test_entries_that_were_used_longest_ago_are_deleted_first(monkeypatch):
    folder = trace_cache._folder()
    digests = fill(folder, 20)
    folder.read(digests[0], "a.json")  # it was the oldest
    monkeypatch.setenv("L2L_CACHE_SIZE", "10kB")
    trace_cache.write(DIGEST, 1)
    left = [digest for digest in digests if folder.names(digest, ".json")]
    assert left == [digests[0], *digests[-len(left) + 1 :]] and 5 < len(left) < 9
    assert folder.usage().bytes <= 10_000 and entries() == [1]
    assert len(list(folder.path.glob("*/*"))) == len(left) + 1, "no empty folders are left"


def test_a_process_looks_again_after_it_has_written_much(monkeypatch):
    monkeypatch.setenv("L2L_CACHE_SIZE", "16kB")
    for number in range(100):
        trace_cache.write(DIGEST, f"{number}" + "x" * 500)
    assert trace_cache.size()[1].bytes <= 17_000


def test_temporary_files_of_killed_processes_are_deleted():
    folder = trace_cache._folder()
    folder.write(DIGEST, "a.json", b"")
    for name, age in (("tmp-old", 7200), ("tmp-new", 0)):
        path = folder.path / DIGEST[:2] / DIGEST / name
        path.write_text("")
        os.utime(path, (time.time() - age,) * 2)
    folder.prune(1 << 30)
    assert {path.name for path in folder.path.rglob("*") if path.is_file()} == {"a.json", "tmp-new"}


def test_threads_that_write_and_delete_at_once_raise_nothing(base):
    """As ranks of one host do. Other processes have no more in common than the disk."""
    folder, errors = CacheFolder(base), []

    def work(number: int) -> None:
        try:
            for turn in range(40):
                digest = hashlib.sha256(str((number + turn) % 7).encode()).hexdigest()
                folder.write(digest, f"{number}.json", bytes(3000))
                folder.prune(20_000)
                for name in folder.names(digest, ".json"):
                    try:
                        assert folder.read(digest, name) in (b"", bytes(3000))
                    except FileNotFoundError:
                        pass
                if turn % 10 == 9:
                    folder.clear()
        except Exception as error:  # noqa: BLE001 - the test shows it
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors, errors
    folder.prune(20_000)
    assert folder.usage().bytes <= 20_000


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("500MB", 500_000_000),
        ("2 GiB", 2 << 30),
        ("1.5kb", 1500),
        ("", 2 << 30),
        ("0B", 0),
        ("much", 2 << 30),
        ("9" * 400 + "B", 2 << 30),
    ],
)
def test_the_limit_of_the_folder(written, size, monkeypatch):
    monkeypatch.setenv("L2L_CACHE_SIZE", written)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert [trace_cache.limit(), trace_cache.limit()] == [size, size]
    assert len(found) == (size == 2 << 30 and written not in ("", "2 GiB"))


def test_size_and_clear():
    assert trace_cache.size()[1].entries == 0
    trace_cache.write(DIGEST, 1)
    path, found = trace_cache.size()
    assert path == trace_cache._folder().path and found.entries == 1 and found.bytes > 60
    assert trace_cache.clear()[1] == found and trace_cache.size()[1].entries == 0 and entries() == []
    path.chmod(0o777)
    with pytest.raises(FolderRefused, match="others may write into"):
        trace_cache.clear()


# ---- Inductor's own files ---------------------------------------------------------------------------------------------


@pytest.fixture
def inductor_in(monkeypatch):
    def use(folder: Path) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        inductor_folder._ensure.cache_clear()

    return use


def test_inductor_has_a_temporary_folder_without_its_cache(inductor_in, tmp_path):
    (tmp_path / "file").write_text("")
    inductor_in(tmp_path / "file" / "cache")
    with said(1) as found:
        inductor_folder.ensure_writable()
        inductor_folder.ensure_writable()
    used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert used.is_dir() and stat.S_IMODE(used.stat().st_mode) == 0o700
    assert "Not a directory" in str(found[0].message) and found[0].filename == __file__
    used.rmdir()


def test_inductor_keeps_a_cache_that_can_be_written_to(inductor_in, tmp_path):
    inductor_in(tmp_path / "own")
    with said(0):
        inductor_folder.ensure_writable()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "own") and not list((tmp_path / "own").iterdir())


def test_a_full_disk_is_a_cache_that_cannot_be_written_to(inductor_in, tmp_path, monkeypatch):
    inductor_in(tmp_path / "own")
    write_into = inductor_folder._write_into

    def full(folder):
        if folder == str(tmp_path / "own"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_into(folder)

    monkeypatch.setattr(inductor_folder, "_write_into", full)
    with said(1):
        inductor_folder.ensure_writable()
    used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert used != tmp_path / "own"
    used.rmdir()


def test_the_command_shows_and_clears_the_folder(capsys):
    trace_cache.write(DIGEST, 1)
    path = trace_cache._folder().path
    assert main(["cache"]) == 0 and f"{path}: 1 entry, 66 B, of at most 2.0 GiB" in capsys.readouterr().out
    assert main(["cache", "--clear"]) == 0 and "deleted 1 entry" in capsys.readouterr().out
    assert main(["cache"]) == 0 and ": 0 entries, 0 B" in capsys.readouterr().out
    path.chmod(0o777)
    assert main(["cache"]) == 2 and "others may write into" in capsys.readouterr().err
