"""A file that is striped over folders: where its bytes are, that disks work together, and which folder an error names."""

from __future__ import annotations

import errno
import itertools
import os
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from l2l_compile import DiskError
from l2l_compile.disk import striped_file
from l2l_compile.disk.disk_file import PAGE
from l2l_compile.disk.disk_store import DiskStore, StoredSpan, range_of, whole_spans
from l2l_compile.disk.stored_entries import moved_to_disk, read_entries, some_entries, write_entries
from l2l_compile.disk.striped_file import BLOCK, StripedFile
from l2l_compile.memory.pages import pages
from slow_disk import Faults, slow_disk

MIB = 1 << 20
pytestmark = pytest.mark.filterwarnings("ignore:.*are on one device")


@pytest.fixture(params=[2, 3])
def folders(request, tmp_path):
    made = [tmp_path / f"disk{number}" for number in range(request.param)]
    for folder in made:
        folder.mkdir()
    return [str(folder) for folder in made]


class InMemory:
    """Takes the place of a file: what was allocated there, and nothing else."""

    def __init__(self, folder, name):
        self.size = 0

    def probe(self):
        pass

    def extend(self, size, remedy=""):
        self.size = max(size, self.size)


@settings(deadline=None)
@given(
    count=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    data=st.data(),
)
def test_every_byte_has_a_place_of_its_own(count, sizes, data):
    """Extents of odd sizes. A part of the file lies within what was allocated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(striped_file, "DiskFile", InMemory)
        patch.setattr(striped_file, "_warn_of_one_device", lambda folders: None)
        made = StripedFile([f"/{n}" for n in range(count)], header=PAGE)
        for size in itertools.accumulate(sizes):
            made.extend(size * PAGE)
    whole = list(made.parts(0, made.size))
    taken = sorted((part.number, part.offset, part.offset + part.size) for part in whole)
    assert all(number != n or end <= start for (number, _, end), (n, start, _) in itertools.pairwise(taken))
    assert all(start >= PAGE and end <= made.files[number].size for number, start, end in taken)
    start = data.draw(st.integers(0, made.size // PAGE - 1)) * PAGE
    size = data.draw(st.integers(1, made.size // PAGE - start // PAGE)) * PAGE
    assert pages_of(made.parts(start, size)) == pages_of(whole)[start // PAGE : (start + size) // PAGE]


def pages_of(parts):
    return [(part.number, part.offset + at) for part in parts for at in range(0, part.size, PAGE)]


@pytest.mark.parametrize(
    ("size", "count", "stripe"),
    [
        (9 * MIB, 2, MIB),
        (63 * MIB, 2, MIB),
        (64 * MIB, 2, 2 * MIB),
        (1 << 30, 4, 8 * MIB),
        (128 << 30, 2, 8 * MIB),
        (913 << 30, 2, 64 * MIB),
    ],
)
def test_stripes_grow_with_what_is_allocated(size, count, stripe):
    """At least 16 in each folder if there is 1 MiB for each, of one transfer, and no more than a process may map."""
    assert striped_file._stripe(size, count) == stripe
    assert stripe == MIB or 16 * count * stripe <= size
    assert size / stripe <= 1 << 14


@pytest.mark.parametrize("way", [lambda t: t.clone(), lambda t: read_entries(t.view(-1), slice(None)).view(t.shape)])
def test_a_tensor_that_is_striped_is_an_ordinary_one(way, folders):
    """Read through its mapping, and past it; written into by its user. Every folder has a part of it."""
    store, given = DiskStore(*folders), torch.randn(3, 700, 1201)
    store.reserve(2 * given.nbytes)
    moved_to_disk(store, torch.zeros(1000))  # the next one begins within a stripe
    made = moved_to_disk(store, given)
    assert torch.equal(way(made), given)
    made[1].mul_(2.0)
    given[1].mul_(2.0)
    assert torch.equal(way(made), given)
    write_entries(made.view(-1), PAGE, torch.ones(MIB))
    given.view(-1)[PAGE : PAGE + MIB] = 1.0
    assert torch.equal(way(made), given)
    assert {folder for folder, _, _ in store.file.blocks(range_of(made).start, range_of(made).size)} == set(range(len(folders)))
    assert all(os.listdir(folder) == [] for folder in folders), "files without names"


def test_a_sample_is_of_the_entries_where_they_are(folders):
    store, given = DiskStore(*folders), torch.randn(3 * MIB)
    made = moved_to_disk(store, given)
    for generation in range(4):
        assert torch.equal(some_entries(made, generation), some_entries(given, generation))


def seconds_to_write_and_read(store):
    tensor = store.empty(torch.Size([4 * MIB]), torch.float32)
    spans, size = whole_spans([tensor])
    buffer = pages(size, "a test").fill_(7)
    start = time.perf_counter()
    store.write(spans, buffer).wait()
    store.read(spans, buffer.zero_()).wait()
    assert bool((buffer == 7).all())
    return time.perf_counter() - start


def test_the_rates_of_folders_add_up(folders):
    """Of 16 stripes, a third of the folders has 6."""
    with slow_disk(Faults(rate=20e6)):
        alone, together = (seconds_to_write_and_read(DiskStore(*given)) for given in (folders[:1], folders))
    assert alone > 2 * 16 * MIB / 20e6 and together < 1.4 * alone / len(folders)


def test_a_slow_folder_keeps_no_other_waiting(folders):
    """Blocks of the other folders are done while the first one has moved a tenth of its own."""
    with slow_disk(Faults(), {folders[0]: Faults(rate=4e6)}) as faults:
        store = DiskStore(*folders)
        tensor = store.empty(torch.Size([4 * MIB]), torch.float32)
        spans, size = whole_spans([tensor])
        transfer = store.write(spans, pages(size, "a test"))
        deadline = time.monotonic() + 30
        others = size // MIB // len(folders) * MIB  # of whole stripes
        while any(file._moved["write"] < others for file in faults.files) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not transfer.is_done
        transfer.wait()


@pytest.mark.parametrize("way", ["read_fails", "write_fails"])
def test_a_transfer_that_fails_names_its_folder(way, folders):
    with slow_disk(Faults(), {folders[1]: Faults(**{way: (errno.EIO, 0)})}):
        store = DiskStore(*folders)
        tensor = store.empty(torch.Size([MIB * len(folders)]), torch.float32)
        spans, size = whole_spans([tensor])
        move = store.read if way == "read_fails" else store.write
        with pytest.raises(DiskError, match=f"^{folders[1]}: Input/output error while"):
            move(spans, pages(size, "a test")).wait()
        with pytest.raises(DiskError, match=f"^{folders[1]}: Input/output error while"):
            store.check()


def test_too_little_room_names_the_folder_that_lacks_it(folders):
    """The same share is allocated in each: what the fullest one has room for counts."""
    with slow_disk(Faults(), {folders[-1]: Faults(room=2 * MIB)}):
        store = DiskStore(*folders)
        store.reserve(2 * MIB * len(folders))
        store = DiskStore(*folders)
        with pytest.raises(DiskError, match=f"^{folders[-1]}: No space left on device while 2.9 MiB were allocated there"):
            store.reserve(3 * MIB * len(folders))


def test_a_folder_that_cannot_be_opened_is_named(folders):
    os.rmdir(folders[1])
    with pytest.raises(DiskError, match=f"^{folders[1]}: No such file or directory while a file was opened there"):
        DiskStore(*folders)


@pytest.mark.parametrize("count", [1, None])
def test_no_transfer_is_longer_than_a_block(count, folders):
    """Also in one folder, where a stripe is all that was allocated together."""
    store = DiskStore(*folders[:count])
    store.reserve(600 * MIB)
    blocks = list(store.file.blocks(3 * PAGE, 300 * MIB))
    assert max(size for _, _, size in blocks) == BLOCK and sum(size for _, _, size in blocks) == 300 * MIB
    assert [first for _, first, _ in blocks] == list(itertools.accumulate((size for _, _, size in blocks[:-1]), initial=0))


def test_a_mapping_that_is_refused_names_the_limit(folders, monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    store = DiskStore(*folders)
    monkeypatch.setattr(striped_file, "map_part", refused)
    with pytest.raises(DiskError, match=f"^{folders[0]}: Cannot allocate memory while .* were mapped: raise vm.max_map_count"):
        store.empty(torch.Size([MIB]), torch.float32)


@pytest.mark.filterwarnings("default:.*are on one device")
def test_folders_of_one_device_are_warned_of(folders):
    with pytest.warns(UserWarning, match=f"{folders[0]} and {folders[1]}.* are on one device, so that their rates do not add up"):
        DiskStore(*folders)


def test_folders_of_several_devices_are_not_warned_of(folders, monkeypatch, recwarn):
    monkeypatch.setattr(striped_file, "_device_of", folders.index)
    DiskStore(*folders)
    assert not [warning for warning in recwarn if "one device" in str(warning.message)]


def test_memory_of_a_store_that_is_gone_is_unmapped(folders):
    store = DiskStore(*folders)
    made = moved_to_disk(store, torch.zeros(4 * MIB))
    assert mapped_in(folders) > 2 * len(folders) - 1
    del store
    assert made.sum() == 0
    span = StoredSpan(range_of(made), 0, made.nbytes, 0)
    del made, span
    assert mapped_in(folders) == 0


def mapped_in(folders):
    with open("/proc/self/maps") as file:
        return sum(any(folder in line for folder in folders) for line in file)
