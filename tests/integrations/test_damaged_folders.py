"""`load_pretrained` of folders that are damaged: one sentence that names the file, and a model that is as it was."""

from __future__ import annotations

import json
import os
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import l2l_compile
from l2l_compile.errors import L2LError

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


class Model(nn.Module):
    """Two layers and a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(7, 4), nn.Linear(4, 6), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))


def one_file(folder):
    save_file({name: t.clone() for name, t in Model().state_dict().items()}, folder / ONE)
    return folder / ONE


def two_files(folder):
    tensors = {name: t.clone() for name, t in Model().state_dict().items()}
    parts = {FIRST: ["embed.weight", "head.weight"], SECOND: ["up.weight", "up.bias", "count"]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def edited(change):
    """One file with other tensors."""

    def damage(folder):
        path = one_file(folder)
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


def with_header(change):
    """One file with another header; `change` gets it as JSON and may return bytes in its place."""

    def damage(folder):
        path = one_file(folder)
        whole = path.read_bytes()
        (length,) = struct.unpack("<Q", whole[:8])
        header = json.loads(whole[8 : 8 + length])
        text = change(header) or json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])

    return damage


def with_bytes(change):
    def damage(folder):
        path = one_file(folder)
        path.write_bytes(change(path.read_bytes()))

    return damage


def with_index(change):
    """Two files with another index; `change` gets the weight map and returns the text, or None if it has changed the map."""

    def damage(folder):
        weight_map = two_files(folder)
        text = change(weight_map)
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}) if text is None else text)

    return damage


def second(change):
    def damage(folder):
        two_files(folder)
        change(folder / SECOND)

    return damage


def overlapping(header):
    header["up.bias"]["data_offsets"] = header["up.weight"]["data_offsets"]


def missing_permission(path):
    path.unlink()
    path.symlink_to(path)  # a loop: unreadable for root as well


def duplicate(path):
    tensors = load_file(path)
    save_file({**tensors, "embed.weight": torch.zeros(7, 4)}, path)


DAMAGE = {
    "no folder": (lambda folder: folder.rmdir(), "is not there"),
    "a file": (lambda folder: (folder.rmdir(), folder.write_text("")), "is a file: load_pretrained takes a folder"),
    "empty folder": (lambda folder: None, r"has no \*\.safetensors"),
    "bin only": (lambda folder: torch.save(Model().state_dict(), folder / "pytorch_model.bin"), r"has no \*\.safetensors"),
    "index only": (
        lambda folder: (two_files(folder), (folder / FIRST).unlink(), (folder / SECOND).unlink()),
        "lacks model-00001",
    ),
    "missing shard": (second(lambda path: path.unlink()), f"lacks {SECOND}, which {INDEX} names"),
    "broken link": (second(lambda path: (path.unlink(), path.symlink_to("nowhere"))), f"{SECOND} cannot be opened"),
    "unreadable": (second(missing_permission), f"{SECOND} cannot be opened"),
    "a folder as a file": (second(lambda path: (path.unlink(), path.mkdir())), f"{SECOND} (cannot be opened|is damaged)"),
    "truncated": (with_bytes(lambda b: b[:-5]), f"{ONE} is damaged"),
    "truncated in the header": (with_bytes(lambda b: b[:40]), f"{ONE} is damaged"),
    "truncated in the length": (with_bytes(lambda b: b[:5]), f"{ONE} is damaged"),
    "no bytes": (with_bytes(lambda b: b""), f"{ONE} is damaged"),
    "more bytes": (with_bytes(lambda b: b + b"more"), f"{ONE} is damaged"),
    "zeros": (with_bytes(lambda b: bytes(len(b))), f"{ONE} is damaged"),
    "text": (with_bytes(lambda b: b"<html>404 not found</html>"), f"{ONE} is damaged"),
    "a git lfs pointer": (
        with_bytes(lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "is damaged",
    ),
    "length absurd": (with_bytes(lambda b: struct.pack("<Q", 1 << 62) + b[8:]), f"{ONE} is damaged"),
    "length zero": (with_bytes(lambda b: bytes(8) + b[8:]), f"{ONE} is damaged"),
    "header no json": (with_header(lambda h: b"{" * 64), f"{ONE} is damaged"),
    "header no utf-8": (with_header(lambda h: b'{"\xff": 1}'), f"{ONE} is damaged"),
    "header a list": (with_header(lambda h: b"[1, 2, 3]"), f"{ONE} is damaged"),
    "header deep": (with_header(lambda h: b"[" * 5000), f"{ONE} is damaged"),
    "offsets overlap": (with_header(overlapping), f"{ONE} is damaged"),
    "offsets backwards": (with_header(lambda h: h["up.bias"]["data_offsets"].reverse()), f"{ONE} is damaged"),
    "offsets beyond": (with_header(lambda h: h["up.bias"].update(data_offsets=[0, 1 << 40])), f"{ONE} is damaged"),
    "offsets missing": (with_header(lambda h: h["up.bias"].pop("data_offsets") and None), f"{ONE} is damaged"),
    "shape and bytes differ": (with_header(lambda h: h["up.bias"].update(shape=[7])), f"{ONE} is damaged"),
    "shape negative": (with_header(lambda h: h["up.bias"].update(shape=[-6])), f"{ONE} is damaged"),
    "unknown dtype": (with_header(lambda h: h["up.bias"].update(dtype="F31")), f"{ONE} (is damaged|has the dtype)"),
    "index no json": (with_index(lambda m: '{"weight_map": '), f"{INDEX} cannot be read as JSON"),
    "index deep": (with_index(lambda m: "[" * 100_000), f"{INDEX} cannot be read as JSON"),
    "index a list": (with_index(lambda m: "[]"), f"{INDEX} has no 'weight_map'"),
    "index without a map": (with_index(lambda m: "{}"), f"{INDEX} has no 'weight_map'"),
    "index of numbers": (with_index(lambda m: m.update({"up.bias": 3})), f"{INDEX} has no 'weight_map'"),
    "index outside": (with_index(lambda m: m.update({"up.bias": "../other.safetensors"})), "only files in the folder itself"),
    "index absolute": (with_index(lambda m: m.update({"up.bias": "/etc/passwd"})), "only files in the folder itself"),
    "index of another tensor": (with_index(lambda m: m.update(more=SECOND)), "lacks the tensors more"),
    "index of another file": (
        with_index(lambda m: m.update({"up.bias": FIRST})),
        f"names {FIRST} for 'up.bias', which is in {SECOND}",
    ),
    "index lacks a tensor": (with_index(lambda m: m.pop("up.bias") and None), "lacks up.bias: strict=False"),
    "a tensor twice": (second(duplicate), "has 'embed.weight' in several files"),
    "tensor missing": (edited(lambda t: t.pop("up.bias")), "lacks up.bias: strict=False"),
    "tensor unexpected": (edited(lambda t: t.update(more=torch.ones(1))), "has tensors that the model lacks: more"),
    "wrong shape": (edited(lambda t: t.update({"up.bias": torch.ones(7)})), r"'up.bias' of .* has the shape \[7\]"),
    "whole numbers": (edited(lambda t: t.update({"up.bias": torch.ones(6, dtype=torch.int8)})), "quantized weights are not read"),
    "8 bits": (edited(lambda t: t.update({"up.bias": torch.ones(6).to(torch.float8_e4m3fn)})), "quantized weights are not read"),
    "tied, unequal": (edited(lambda t: t["head.weight"][2, 1].add_(1)), "is tied, but .* has other numbers"),
    "tied, one not a number": (edited(lambda t: t["head.weight"][2, 1].fill_(float("nan"))), "is tied, but .* has other numbers"),
}


@pytest.mark.parametrize(("damage", "sentence"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_leaves_the_model_as_it_was(tmp_path, damage, sentence):
    folder = tmp_path / "folder"
    folder.mkdir()
    damage(folder)
    model = Model()
    before = {name: (t, t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    with pytest.raises(L2LError, match=sentence) as raised:
        l2l_compile.load_pretrained(model, folder)
    assert str(folder) in str(raised.value) and len(str(raised.value)) < 600 + len(str(folder)) * 3
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is t and torch.equal(t, copied) for name, (t, copied) in before.items())
    with torch.device("meta"):
        on_meta = Model()
    with pytest.raises(L2LError):
        l2l_compile.load_pretrained(on_meta, folder)
    assert all(t.is_meta for t in on_meta.state_dict().values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_loaded(tmp_path, value):
    def change(tensors):
        for name in ("embed.weight", "head.weight"):
            tensors[name][2, 1] = value
        tensors["up.bias"][0] = value

    edited(change)(tmp_path)
    model = Model()
    l2l_compile.load_pretrained(model, tmp_path)
    expected = load_file(tmp_path / ONE)
    assert all(torch.equal(t.nan_to_num(7.0), expected[name].nan_to_num(7.0)) for name, t in model.state_dict().items())


def test_links_to_files_elsewhere_are_read(tmp_path):
    """The cache of a hub has links to its blobs."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir(), folder.mkdir()
    two_files(blobs)
    for name in os.listdir(blobs):
        (folder / name).symlink_to(blobs / name)
    l2l_compile.load_pretrained(model := Model(), folder)
    assert torch.equal(model.up.weight, load_file(blobs / SECOND)["up.weight"])


def test_a_disk_failure_half_way_tells_the_state_of_the_model(tmp_path, monkeypatch):
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    two_files(tmp_path)
    read, done = HuggingFaceStorageReader._process_read_request, []

    def fail(self, *arguments):
        done.append(1)
        if len(done) > 2:
            raise OSError(5, "Input/output error")
        return read(self, *arguments)

    monkeypatch.setattr(HuggingFaceStorageReader, "_process_read_request", fail)
    with pytest.raises(
        L2LError, match="not read to its end: .*Input/output error.* partly those of the folder now: load it again"
    ):
        l2l_compile.load_pretrained(Model(), tmp_path)
