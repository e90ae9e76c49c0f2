"""Compiled updates on disk: built once, found by the next process, whole or not loaded at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from l2l_compile import L2LError, cache_folder
from l2l_compile.host.compiled_step import library
from l2l_compile.lowering.faster import trace_cache

TEXT = "long answer(void) { return 42; }"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("L2L_CACHE", "1")
    monkeypatch.setattr(trace_cache, "cache_dir", lambda: str(tmp_path))
    monkeypatch.setattr(trace_cache, "_said", set())
    return tmp_path


@pytest.fixture
def compiled(monkeypatch):
    """The texts that a compiler was run for, in order."""
    texts, compile_text = [], library._compile
    monkeypatch.setattr(library, "_compile", lambda *args: texts.append(args[1]) or compile_text(*args))
    return texts


def kept(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_text_is_compiled_once(compiled, folder):
    assert [library.build(TEXT).answer() for _ in range(2)] == [42, 42]
    assert library.build(TEXT.replace("42", "43")).answer() == 43
    assert compiled == [TEXT, TEXT.replace("42", "43")] and len(kept(folder)) == 2


def test_another_compiler_or_machine_has_its_own(compiled, monkeypatch):
    library.build(TEXT)
    monkeypatch.setattr(library, "_identity", lambda compiler: ("-march=another",))
    library.build(TEXT)
    assert compiled == [TEXT] * 2


def test_a_machine_is_known_by_its_instructions():
    """Not by `-march=native`, which is the same text on all machines that share a disk."""
    assert "-m" in library._identity(library._compiler())[-1].replace("-march=native", "")


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-1], lambda content: b"\0" * len(content)])
def test_a_damaged_library_is_dropped_and_made_again(compiled, folder, damage):
    library.build(TEXT)
    (path,) = kept(folder)
    whole = path.read_bytes()
    path.unlink()  # this process may run it
    path.write_bytes(damage(whole))
    assert library.build(TEXT).answer() == 42
    assert compiled == [TEXT] * 2
    assert library.build(TEXT).answer() == 42
    assert compiled == [TEXT] * 2 and len(kept(folder)) == 1


def test_a_disk_that_cannot_be_written_to_costs_the_entry_alone(compiled, monkeypatch):
    def full(*paths, **folders):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_folder.os, "replace", full)
    with pytest.warns(UserWarning, match="No space left on device") as said:
        assert [library.build(TEXT).answer() for _ in range(2)] == [42, 42]
    assert compiled == [TEXT] * 2 and len(said) == 1


def test_nothing_is_kept_if_it_is_switched_off(compiled, folder, monkeypatch):
    monkeypatch.setenv("L2L_CACHE", "0")
    assert library.build(TEXT).answer() == 42
    assert not kept(folder)


def test_what_cannot_be_compiled_is_an_error_and_not_kept(folder):
    with pytest.raises(L2LError, match="(?s)cannot compile the update.*compile_update=False"):
        library.build("long answer(void) { return }")
    assert not kept(folder)
