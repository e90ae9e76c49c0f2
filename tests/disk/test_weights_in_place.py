"""`load_pretrained(in_place=True)`: weights are read from the user's files, which nothing writes, and take no memory and no second copy."""

from __future__ import annotations

import copy
import errno
import gc
import hashlib
import io
import json
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import l2l_compile
from l2l_compile import DiskError, L2LError
from l2l_compile.devices.host import bytes_in_proc
from l2l_compile.disk import written_pages
from l2l_compile.disk.disk_file import PAGE
from l2l_compile.disk.disk_store import DiskStore, await_writes, has_place, is_in_place, place_of, range_of, whole_spans
from l2l_compile.disk.file_in_place import FileInPlace
from l2l_compile.disk.stored_entries import read_entries, read_in_order, some_entries
from l2l_compile.disk.stored_range import memory_at
from l2l_compile.disk.striped_file import BLOCK
from l2l_compile.host.disk_placement import SMALL
from l2l_compile.memory.pages import pages

SIZES = {"vocab_size": 900, "hidden_size": 768, "intermediate_size": 1000, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
TIED = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
MIXTRAL = transformers.MixtralConfig(**SIZES | {"num_hidden_layers": 1}, num_key_value_heads=2, num_local_experts=3)
WIDTH = 768


def on_meta(kind, config, dtype=torch.float32) -> nn.Module:
    with torch.device("meta"):
        return kind._from_config(config, dtype=dtype)


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    for tensors in (nn.Module.named_parameters, nn.Module.named_buffers):
        mine, expected = dict(tensors(ours)), dict(tensors(theirs))
        assert mine.keys() == expected.keys()
        assert all(mine[name].dtype == value.dtype and torch.equal(mine[name], value) for name, value in expected.items())


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}


def write_file(file: Path, tensors: dict[str, torch.Tensor], padding: int = 0) -> None:
    """A safetensors file in the order given, whose header ends with so many spaces."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        kind = {torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype]
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    with file.open("wb") as opened:
        opened.write(header_of(entries, padding))
        for tensor in tensors.values():
            opened.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def header_of(entries: dict[str, dict], padding: int = 0) -> bytes:
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8 + padding)
    return len(header).to_bytes(8, "little") + header


class Weights(nn.Module):
    """Parameters alone."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32):
        super().__init__()
        self.of = nn.ParameterList(nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes)


def weights(*shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"of.{number}": torch.randn(shape) for number, shape in enumerate(shapes)}


def in_place(folder: Path, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    model = Weights(shapes)
    l2l_compile.load_pretrained(model, folder, in_place=True)
    return [p.detach() for p in model.of]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two matrices, the second of which begins within a page and ends with the file."""
    save_file(weights((WIDTH, 700), (WIDTH, 801)), tmp_path / "model.safetensors")
    return tmp_path


SHAPES = (WIDTH, 700), (WIDTH, 801)


@pytest.mark.parametrize(("config", "dtype"), [(LLAMA, torch.float32), (TIED, torch.bfloat16)], ids=["several files", "tied"])
def test_weights_in_place_equal_those_of_from_pretrained(config, dtype, tmp_path):
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(tmp_path, max_shard_size="10MB")
    assert len(digest(tmp_path)) > 1
    model, before = on_meta(transformers.LlamaForCausalLM, config, dtype), digest(tmp_path)
    own = list(model.parameters())
    assert l2l_compile.load_pretrained(model, tmp_path, in_place=True) == ([], [])
    assert_equal(model, transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype))
    assert all(new is old for new, old in zip(model.parameters(), own, strict=True))
    assert all(is_in_place(p) == (p.nbytes >= SMALL) and not has_place(p) for p in model.parameters())
    assert not any(map(is_in_place, model.buffers())) and digest(tmp_path) == before
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (config is TIED)


@pytest.mark.parametrize("disk", [False, True], ids=["others in memory", "others on disk"])
def test_joined_experts_are_named_and_get_memory(disk, tmp_path):
    transformers.MixtralForCausalLM(MIXTRAL).save_pretrained(tmp_path)
    model = on_meta(transformers.MixtralForCausalLM, MIXTRAL)
    said = (
        r"in_place=True, but 2 of \d+ large parameters of MixtralForCausalLM .* 2, of 26.4 MiB, are joined from several tensors"
    )
    with pytest.warns(UserWarning, match=said):
        l2l_compile.load_pretrained(model, tmp_path, in_place=True, disk=tmp_path if disk else None)
    assert_equal(model, transformers.MixtralForCausalLM.from_pretrained(tmp_path))
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    assert len(experts) == 2 and not any(map(is_in_place, experts)) and all(has_place(p) == disk for p in experts)
    assert sum(map(is_in_place, model.parameters())) > 4
    if disk:
        assert range_of(experts[0]).store.file.size < 1.1 * sum(p.nbytes for p in experts), "no room is taken for the others"


@pytest.mark.parametrize("padding", [0, 4, 40, 2048, PAGE - 8, PAGE + 2052])
def test_entries_may_begin_anywhere_in_a_page(padding, tmp_path):
    """Through the mapping, in blocks past it, and a sample."""
    shapes = (513, 517), (1021, 1031), (7, 50021)
    expected = weights(*shapes)
    write_file(tmp_path / "model.safetensors", expected, padding)
    assert all(map(torch.equal, load_file(tmp_path / "model.safetensors").values(), expected.values())), "a file of the format"
    found = in_place(tmp_path, *shapes)
    assert all(map(is_in_place, found)) and range_of(found[-1]).shift
    for tensor, wanted in zip(found, expected.values(), strict=True):
        assert torch.equal(read_entries(tensor.view(-1), slice(None)), wanted.view(-1))
        assert torch.equal(read_entries(tensor.view(-1), slice(3001, 199_999)), wanted.view(-1)[3001:199_999])
        assert torch.equal(some_entries(tensor, 5), some_entries(wanted, 5))
        assert torch.equal(tensor, wanted)


def test_entries_across_two_words_are_not_read_in_place(tmp_path):
    expected = weights((600, 600), (600, 600))
    write_file(tmp_path / "model.safetensors", expected, padding=1)
    with pytest.raises(L2LError, match=r"2, of 2.7 MiB, are in the files where no entry may begin \(save the folder again"):
        in_place(tmp_path, (600, 600), (600, 600))


WRITES = {
    "none": slice(0, 0),
    "the first entry": slice(0, 1),
    "across pages": slice(5000, 7000),
    "the last entry": slice(-1, None),
    "all": slice(None),
}


@pytest.mark.parametrize("name", WRITES)
def test_reads_past_the_mapping_see_what_was_written(name, folder):
    before, tensors = digest(folder), in_place(folder, *SHAPES)
    expected = [t.clone() for t in weights(*SHAPES).values()]
    for tensor, wanted in zip(tensors, expected, strict=True):
        tensor.view(-1)[WRITES[name]] += 1.0
        wanted.view(-1)[WRITES[name]] += 1.0
    for tensor, wanted in zip(tensors, expected, strict=True):
        for size in (PAGE, 3 * PAGE, BLOCK):
            buffer, found = pages(size, "a block"), torch.empty_like(wanted).view(-1).view(torch.uint8)

            def take(block, start, found=found):
                found[start : start + block.numel()] = block

            read_in_order(tensor, lambda buffer=buffer: buffer, 1, take)
            assert torch.equal(found.view(torch.float32), wanted.view(-1)), f"blocks of {size} bytes"
        for generation in range(4):
            assert torch.equal(some_entries(tensor, generation), some_entries(wanted, generation))
    assert digest(folder) == before


def test_what_was_written_as_a_whole_is_not_read(folder, monkeypatch):
    tensors = in_place(folder, *SHAPES)
    found = range_of(tensors[0])
    assert found.bytes_to_read(0, found.size) == found.size
    tensors[0][3] = 1.0
    assert found.bytes_to_read(0, found.size) == found.size
    tensors[0].fill_(2.0)
    assert found.bytes_to_read(0, found.size) == 0
    monkeypatch.setattr(FileInPlace, "_preadv", lambda *_: pytest.fail("the file is read"))
    assert bool((read_entries(tensors[0].view(-1), slice(None)) == 2.0).all())


def cut_in_silence(file: Path) -> None:
    """The time of the last write is put back, as some tools do."""
    found = file.stat()
    os.truncate(file, found.st_size - 4)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


CHANGES = {
    "cut in silence": cut_in_silence,
    "written": lambda file: file.write_bytes(file.read_bytes()[:-4] + b"abcd"),
    "cut": lambda file: os.truncate(file, file.stat().st_size - 4096),
    "grown": lambda file: os.truncate(file, file.stat().st_size + 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_changes_is_an_error(name, folder, tmp_path):
    model = Weights(SHAPES)
    l2l_compile.load_pretrained(model, folder, in_place=True)
    first, second = (p.detach() for p in model.of)
    assert bool(some_entries(first, 0).isfinite().all())
    CHANGES[name](folder / "model.safetensors")
    (tmp_path / "others").mkdir()
    said = rf"{folder}/model.safetensors has changed since load_pretrained\(in_place=True\) opened it: build the model anew"
    reads = {
        "sample": lambda: some_entries(first, 0),
        "blocks": lambda: read_entries(second.view(-1), slice(None)),
        "before a computation": lambda: await_writes(first),
        "before a load": lambda: l2l_compile.load_pretrained(model, tmp_path / "others"),
    }
    save_file(weights(*SHAPES), (tmp_path / "others") / "model.safetensors")
    for read in reads.values():
        with pytest.raises(DiskError, match=said):
            read()


def test_a_file_that_changes_during_a_read_is_an_error(folder, monkeypatch):
    """Then the bytes may be of both."""
    tensor = in_place(folder, *SHAPES)[0]
    read = FileInPlace._preadv

    def changed_meanwhile(self, buffer, offset):
        count = read(self, buffer, offset)
        CHANGES["written"](self.path)
        return count

    monkeypatch.setattr(FileInPlace, "_preadv", changed_meanwhile)
    buffer = pages(PAGE, "a page")
    with pytest.raises(DiskError, match="has changed since"):
        range_of(tensor).read(memory_at(buffer, 0, PAGE), 0)


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_is_removed_stays_readable(how, folder):
    tensors, file = in_place(folder, *SHAPES), folder / "model.safetensors"
    if how == "removed":
        file.unlink()
    else:
        save_file({name: tensor + 1.0 for name, tensor in weights(*SHAPES).items()}, folder / "new")
        (folder / "new").rename(file)
    for tensor, wanted in zip(tensors, weights(*SHAPES).values(), strict=True):
        assert torch.equal(read_entries(tensor.view(-1), slice(None)), wanted.view(-1)) and torch.equal(tensor, wanted)


def in_memory(folder: Path) -> nn.Module:
    model = Weights(SHAPES)
    l2l_compile.load_pretrained(model, folder)
    return model


REFUSED = {
    "dtype": (
        lambda folder: Weights(SHAPES, torch.bfloat16),
        r"2, of 2.2 MiB, are torch.bfloat16 in the model and torch.float32 in the files \(build the model in torch.float32\)",
    ),
    "in memory": (in_memory, r"2, of 4.4 MiB, are in memory already \(build the model under torch\.device\('meta'\)\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_of_which_nothing_can_be_in_place(name, folder):
    make, said = REFUSED[name]
    model = make(folder)
    before = [p.is_meta for p in model.parameters()]
    said = rf"no parameter of Weights can be read from {folder} in place: {said}\. Or leave out in_place=True$"
    with pytest.raises(L2LError, match=said):
        l2l_compile.load_pretrained(model, folder, in_place=True)
    assert [p.is_meta for p in model.parameters()] == before, "the model is as it was"


def test_a_model_without_large_parameters_is_refused(tmp_path):
    save_file(weights((5, 5)), tmp_path / "model.safetensors")
    with pytest.raises(
        L2LError, match=r"in_place=True is for parameters of 1.0 MiB and more, and Weights has none: leave it out"
    ):
        in_place(tmp_path, (5, 5))


@pytest.mark.parametrize("refuses", ["open", "read"])
def test_a_file_system_without_direct_transfers_is_named(refuses, folder, monkeypatch):
    opened, read = os.open, FileInPlace._preadv

    def open_buffered(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *mode)

    def read_buffered(self, buffer, offset):
        if self._is_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return read(self, buffer, offset)

    if refuses == "open":
        monkeypatch.setattr(os, "open", open_buffered)
    else:
        monkeypatch.setattr(FileInPlace, "_preadv", read_buffered)
    with pytest.warns(UserWarning, match=f"the file system of {folder}/model.safetensors takes the page cache"):
        tensors = in_place(folder, *SHAPES)
    for tensor, wanted in zip(tensors, weights(*SHAPES).values(), strict=True):
        assert torch.equal(read_entries(tensor.view(-1), slice(None)), wanted.view(-1))


def test_transfers_that_are_cut_short_go_on(folder, monkeypatch):
    read = FileInPlace._preadv
    monkeypatch.setattr(FileInPlace, "_preadv", lambda self, buffer, offset: read(self, buffer[:PAGE], offset))
    for tensor, wanted in zip(in_place(folder, *SHAPES), weights(*SHAPES).values(), strict=True):
        assert torch.equal(read_entries(tensor.view(-1), slice(None)), wanted.view(-1))


@pytest.mark.parametrize("fails", ["error", "end"])
def test_a_disk_that_fails_is_named_with_its_bytes(fails, folder, monkeypatch):
    tensor = in_place(folder, *SHAPES)[0]

    def failing(self, buffer, offset):
        if fails == "end":
            return 0
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    said = "Input/output error while" if fails == "error" else r"0 of \d+ bytes at byte 0 were read in place: the disk fails"
    said = f"^{folder}/model.safetensors: {said}"
    with monkeypatch.context() as patched:
        patched.setattr(FileInPlace, "_preadv", failing)
        with pytest.raises(DiskError, match=said):
            read_entries(tensor.view(-1), slice(None))
    with pytest.raises(DiskError, match=said):  # a file that has failed is not trusted again
        read_entries(tensor.view(-1), slice(None))


def test_a_system_that_hides_its_pages_is_refused(folder, monkeypatch):
    monkeypatch.setattr(written_pages, "_PATH", "/proc/self/no_such_file")
    model = Weights(SHAPES)
    with pytest.raises(
        DiskError, match=r"No such file or directory while writes into weights in place were looked for: leave out"
    ):
        l2l_compile.load_pretrained(model, folder, in_place=True)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("entry", [0, 1 << 63 | 1 << 61, 1 << 63], ids=["nothing", "all of files", "all written"])
def test_a_system_that_does_not_say_what_is_written_is_refused(entry, folder, monkeypatch):
    """Writes would be missed in silence."""
    monkeypatch.setattr(written_pages.os, "pread", lambda _, size, __: entry.to_bytes(8, "little") * (size // 8))
    model = Weights(SHAPES)
    with pytest.raises(DiskError, match="does not show a write into a page: no answer while writes into weights in place"):
        l2l_compile.load_pretrained(model, folder, in_place=True)
    assert all(p.is_meta for p in model.parameters())


def test_a_file_in_place_cannot_be_written(folder, tmp_path):
    """By a transfer of another store, as of one that trains; nor through the descriptor."""
    tensor = in_place(folder, *SHAPES)[0]
    spans, size = whole_spans([tensor])
    store, buffer = DiskStore(str(tmp_path)), pages(size, "a buffer")
    assert place_of(tensor) is None
    for each in (store, range_of(tensor).store):
        with pytest.raises(AssertionError, match="a write into files that are only read"):
            each.write(spans, buffer)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(range_of(tensor).store.file._descriptor, b"x", 0)


def test_weights_in_place_are_ordinary_tensors(folder):
    """Copies, files of `torch.save`, shared memory and other dtypes: none of them is in place."""
    model, wanted = Weights(SHAPES), weights(*SHAPES)
    l2l_compile.load_pretrained(model, folder, in_place=True)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() < 1.1 * sum(t.nbytes for t in wanted.values())
    file.seek(0)
    made = {
        "state_dict": model.state_dict(),
        "save": torch.load(file),
        "deepcopy": copy.deepcopy(model).state_dict(),
        "to": copy.deepcopy(model).to(torch.float64).state_dict(),
    }
    for how, found in made.items():
        assert all(torch.equal(found[name], value.to(found[name].dtype)) for name, value in wanted.items()), how
        assert all(is_in_place(t) == (how == "state_dict") for t in found.values()), how
    model.share_memory()
    assert not any(map(is_in_place, model.parameters())) and all(map(torch.equal, model.parameters(), wanted.values()))


def test_a_forked_process_reads_weights_in_place(folder):
    """Also what was written before; what it writes is its own."""
    tensor, other = in_place(folder, *SHAPES)
    wanted = next(iter(weights(*SHAPES).values()))
    tensor[5], wanted[5] = 3.0, 3.0
    child = os.fork()
    if child == 0:
        is_right = bool((tensor == wanted).all())
        tensor[7] = 1.0
        os._exit(0 if is_right and bool(tensor[7].eq(1.0).all()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(read_entries(tensor.view(-1), slice(None)), wanted.view(-1)) and other is not None


def test_weights_that_are_loaded_again_are_in_memory(folder, tmp_path):
    """Their file stays as it is."""
    model, others, before = Weights(SHAPES), tmp_path / "others", digest(folder)
    l2l_compile.load_pretrained(model, folder, in_place=True)
    others.mkdir()
    changed = {name: tensor + 1.0 for name, tensor in weights(*SHAPES).items()}
    save_file(changed, others / "model.safetensors")
    l2l_compile.load_pretrained(model, others)
    assert all(
        torch.equal(read_entries(p.view(-1), slice(None)), t.view(-1)) for p, t in zip(model.of, changed.values(), strict=True)
    )
    assert digest(folder) == before


def test_a_file_is_open_as_long_as_a_tensor_of_it(folder):
    def uses() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count(str(folder))

    tensors = in_place(folder, *SHAPES)
    store = weakref.ref(range_of(tensors[0]).store)
    descriptor, part = store().file._descriptor, tensors[1][3:5]
    assert uses() == 2
    del tensors
    assert uses() == 1 and store() is not None and torch.equal(part, weights(*SHAPES)["of.1"][3:5])
    del part
    assert uses() == 0 and store() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_load_in_place_takes_no_memory_and_writes_nothing(tmp_path):
    """Of a gigabyte. The file is sparse: nothing is read of it either."""
    rows, count = 2048, 64  # 16 MiB each
    size = rows * 2048 * 4
    offsets = {
        f"of.{n}": {"dtype": "F32", "shape": [rows, 2048], "data_offsets": [n * size, n * size + size]} for n in range(count)
    }
    header = header_of(offsets)
    (tmp_path / "model.safetensors").write_bytes(header)
    os.truncate(tmp_path / "model.safetensors", len(header) + count * size)
    in_place(tmp_path, *[(rows, 2048)] * count)  # imports
    most, over = [own_memory()], threading.Event()
    before, written = most[0], written_bytes()

    def look() -> None:
        while not over.wait(0.0005):
            most[0] = max(most[0], own_memory())

    watcher = threading.Thread(target=look)
    watcher.start()
    tensors = in_place(tmp_path, *[(rows, 2048)] * count)
    over.set()
    watcher.join()
    print(f"{(most[0] - before) / 2**20:.1f} MiB of {count * size / 2**20:.0f}")
    assert most[0] - before < 16 << 20 and written_bytes() - written < 1 << 20  # other code of the process may write
    assert all(float(t[-1, -1]) == 0.0 for t in tensors) and all(map(is_in_place, tensors))


def own_memory() -> int:
    return bytes_in_proc("self/status", "RssAnon", "RssShmem") or 0


def written_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("\nwrite_bytes: ")[1].split("\n")[0])
