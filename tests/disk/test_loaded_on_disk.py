"""`load_pretrained(disk=...)`: weights in a file in place of memory, bit-equal to `from_pretrained`, and what becomes of them."""

from __future__ import annotations

import errno
import gc
import io
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import l2l_compile
from l2l_compile import DiskError, L2LError, OptionError
from l2l_compile.devices.host import bytes_in_proc
from l2l_compile.disk.disk_store import range_of
from l2l_compile.disk.striped_file import BLOCK
from l2l_compile.host.disk_placement import SMALL
from l2l_compile.simulation.machine import Machine
from models import compiled
from slow_disk import Faults, slow_disk

SIZES = {"vocab_size": 900, "hidden_size": 768, "intermediate_size": 1000, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
TIED = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
MIXTRAL = transformers.MixtralConfig(**SIZES | {"num_hidden_layers": 1}, num_key_value_heads=2, num_local_experts=3)
KINDS = {
    "llama": (transformers.LlamaForCausalLM, LLAMA),
    "tied": (transformers.LlamaForCausalLM, TIED),
    "experts": (transformers.MixtralForCausalLM, MIXTRAL),
}


def on_meta(kind, config, dtype=torch.float32) -> nn.Module:
    with torch.device("meta"):
        return kind._from_config(config, dtype=dtype)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    mine, expected = tensors_of(ours), tensors_of(theirs)
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        assert mine[name].dtype == value.dtype and torch.equal(mine[name], value), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The weights of `LLAMA`, in several files."""
    made = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(LLAMA).save_pretrained(made, max_shard_size="20MB")
    return made


def loaded(folder: Path, disk: Path | None, dtype=torch.float32) -> nn.Module:
    model = on_meta(transformers.LlamaForCausalLM, LLAMA, dtype)
    l2l_compile.load_pretrained(model, folder, disk=disk)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.slow(but=("tied-stored0-dtype1", "experts-stored1-dtype0", "llama-stored0-dtype0"))
def test_weights_on_disk_equal_those_of_from_pretrained(name, stored, dtype, tmp_path):
    """Also where the disk is slow: what is not written yet would be missing."""
    kind, config = KINDS[name]
    kind(config).to(stored).save_pretrained(tmp_path, max_shard_size="10MB")
    model = on_meta(kind, config, dtype)
    before = list(model.parameters())
    with slow_disk(Faults(rate=3e8)):
        assert l2l_compile.load_pretrained(model, tmp_path, disk=tmp_path) == ([], [])
        assert_equal(model, kind.from_pretrained(tmp_path, dtype=dtype))
    assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
    assert all((range_of(p) is not None) == (p.nbytes >= SMALL) for p in model.parameters())
    assert all(range_of(b) is None for b in model.buffers())


@pytest.mark.filterwarnings("ignore:.*are on one device")
def test_weights_are_striped_over_several_folders(folder, tmp_path):
    """And trained where they are, with the optimizer's state in stripes of another file."""
    disks = [tmp_path / name for name in ("a", "b")]
    for disk in disks:
        disk.mkdir()
    with slow_disk(Faults(rate=3e8)) as faults:
        model = loaded(folder, disks)
        assert_equal(model, transformers.LlamaForCausalLM.from_pretrained(folder))
    stored = sum(p.nbytes for p in model.parameters() if range_of(p) is not None)
    assert [file._moved["write"] / stored for file in faults.files] == pytest.approx([0.5, 0.5], abs=0.1)


def test_a_disk_that_is_full_is_named_by_its_folder(folder, tmp_path):
    disks = [tmp_path / name for name in ("a", "b")]
    for disk in disks:
        disk.mkdir()
    model = on_meta(transformers.LlamaForCausalLM, LLAMA)
    with slow_disk(Faults(), {disks[1]: Faults(room=1 << 20)}), pytest.raises(DiskError, match=f"^{disks[1]}: No space left"):
        l2l_compile.load_pretrained(model, folder, disk=disks)
    assert all(p.is_meta for p in model.parameters()), "the model is as it was"
    with pytest.raises(OptionError, match="'disk' has .* twice"):
        l2l_compile.load_pretrained(model, folder, disk=[disks[0], f"{disks[0]}/"])


def test_missing_parameters_are_initialised_on_disk(folder, tmp_path):
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    kept = {key: value for tensors in files for key, value in tensors.items() if key != "lm_head.weight"}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = on_meta(transformers.LlamaForCausalLM, LLAMA)
    torch.manual_seed(7)
    found = l2l_compile.load_pretrained(model, tmp_path, strict=False, disk=tmp_path)
    assert found == (["lm_head.weight"], []) and range_of(model.lm_head.weight) is not None
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.manual_seed(7)
    assert_equal(model, transformers.LlamaForCausalLM.from_pretrained(tmp_path))


def stack(layers: int, width: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def own_memory() -> int:
    return bytes_in_proc("self/status", "RssAnon", "RssShmem") or 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_load_to_the_disk_takes_the_memory_of_a_block(tmp_path):
    layers, width = 12, 1536  # 9 MiB each
    for count in (1, layers):
        (tmp_path / str(count)).mkdir()
        weights = {f"{n}.weight": torch.full((width, width), float(n)) for n in range(count)}
        save_file(weights, tmp_path / str(count) / "model.safetensors")
    del weights
    l2l_compile.load_pretrained(stack(1, width), tmp_path / "1", disk=tmp_path)  # imports
    model, most, over = stack(layers, width), [own_memory()], threading.Event()
    before = most[0]

    def look() -> None:
        while not over.wait(0.0005):
            most[0] = max(most[0], own_memory())

    watcher = threading.Thread(target=look)
    watcher.start()
    l2l_compile.load_pretrained(model, tmp_path / str(layers), disk=tmp_path)
    over.set()
    watcher.join()
    grown, whole = most[0] - before, sum(p.nbytes for p in model.parameters())
    print(f"{grown / 2**20:.1f} MiB of {whole / 2**20:.0f}")
    assert grown < 2 * BLOCK < whole / 6
    assert [float(p.detach()[-1, -1]) for p in model.parameters()] == list(range(layers))


def test_weights_on_disk_can_be_loaded_again(folder, tmp_path):
    """Through the file and not through the mapping. The compiled model computes with them."""
    others = tmp_path / "others"
    changed = transformers.LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        changed.lm_head.weight[3, 5] += 1.0
    changed.save_pretrained(others)
    x = torch.arange(6).view(2, 3)
    with slow_disk(Faults(rate=3e8)), torch.no_grad():
        model = loaded(folder, tmp_path)
        call = compiled(model, precision="bf16")
        places = [p.data_ptr() for p in model.parameters()]
        before = call(x).logits.clone()
        l2l_compile.load_pretrained(model, others)
        after = call(x).logits.clone()
        assert places == [p.data_ptr() for p in model.parameters()]
        assert torch.equal(after, compiled(loaded(others, None), precision="bf16")(x).logits)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_generation_from_the_disk_gives_equal_tokens(precision, folder, tmp_path):
    found, dtype = [], torch.float32 if precision == "fp32" else torch.bfloat16
    for disk in (None, tmp_path):
        torch._dynamo.reset()
        model = loaded(folder, disk, dtype)
        call = compiled(model, precision=precision)
        with torch.no_grad():
            logits = call(torch.arange(8).view(2, 4)).logits.clone()
        model.forward = call
        found.append((logits, model.generate(torch.arange(8).view(2, 4), max_new_tokens=5, do_sample=False)))
    assert all(map(torch.equal, *found))


def test_explain_counts_weights_on_disk_as_no_memory(folder, tmp_path):
    x = torch.arange(8).view(2, 4)
    with torch.no_grad():
        reports = [l2l_compile.explain(loaded(folder, disk), {})(x) for disk in (None, tmp_path)]
    in_memory, on_disk = (report.host_memory for report in reports)
    stored = sum(p.nbytes for p in loaded(folder, tmp_path).parameters() if range_of(p) is not None)
    assert on_disk.stored == stored and on_disk.master == in_memory.master - stored and in_memory.stored == 0
    pinned = [report.on(Machine.load("h200")).host_memory.pinned for report in reports]
    assert pinned[1] < pinned[0] - stored * 0.9, "the pages of a file are not page-locked"
    assert "on disk beside these: " in str(on_disk) and "on disk" not in str(in_memory)


def test_what_is_saved_from_the_disk_is_what_was_loaded(folder, tmp_path):
    model, expected = loaded(folder, tmp_path), transformers.LlamaForCausalLM.from_pretrained(folder)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() < 1.1 * sum(p.nbytes for p in model.parameters())
    file.seek(0)
    found = torch.load(file)
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())
    model.save_pretrained(tmp_path / "saved")
    assert_equal(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved"), expected)


def test_the_file_is_there_as_long_as_a_tensor_of_it(folder, tmp_path):
    def descriptors() -> int:
        gc.collect()
        return sum(
            "(deleted)" in os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if is_open(number)
        )

    def is_open(number: str) -> bool:
        return os.path.islink(f"/proc/self/fd/{number}")

    before, model = descriptors(), loaded(folder, tmp_path)
    assert os.listdir(tmp_path) == [], "the file has no name"
    store = weakref.ref(range_of(model.lm_head.weight).store)
    part, expected = model.lm_head.weight.detach()[3:5], load_head(folder)[3:5]
    del model
    gc.collect()
    assert store() is not None and descriptors() > before and torch.equal(part, expected)
    del part
    assert descriptors() == before and store() is None


def load_head(folder: Path) -> torch.Tensor:
    return transformers.LlamaForCausalLM.from_pretrained(folder).lm_head.weight.detach()


def test_a_forked_process_reads_the_weights(folder, tmp_path):
    model, expected = loaded(folder, tmp_path), load_head(folder)
    child = os.fork()
    if child == 0:
        os._exit(0 if bool((model.lm_head.weight == expected).all()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def refused(monkeypatch, error):
    def opened(path, flags, *mode):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "missing",
            "nowhere: No such file or directory while a file was opened there.* give the option 'disk' a folder that exists",
        ),
        ("read-only", "Read-only file system while a file was opened there"),
        (
            "full",
            r"No space left on device while [0-9.]+ MiB were allocated there .* free some space, or give 'disk' another folder$",
        ),
    ],
)
def test_a_folder_for_the_disk_that_does_not_do(fault, said, folder, tmp_path, monkeypatch):
    model = on_meta(transformers.LlamaForCausalLM, LLAMA)
    if fault == "read-only":
        refused(monkeypatch, errno.EROFS)
    with slow_disk(Faults(room=20 << 20 if fault == "full" else None)), pytest.raises(DiskError, match=said) as raised:
        l2l_compile.load_pretrained(model, folder, disk=tmp_path / "nowhere" if fault == "missing" else tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert all(p.is_meta for p in model.parameters())


def test_a_disk_that_fails_half_way_is_named_with_its_bytes(folder, tmp_path):
    model = on_meta(transformers.LlamaForCausalLM, LLAMA)
    said = f"{folder} was not read to its end: {tmp_path}: Input/output error while [0-9]+ bytes at byte [0-9]+ .* were written"
    with slow_disk(Faults(write_fails=(errno.EIO, 9 << 20))) as faults:
        with pytest.raises(DiskError, match=said):
            l2l_compile.load_pretrained(model, folder, disk=tmp_path)
        faults.write_fails = None
        with pytest.raises(DiskError, match=said):  # a file that has failed is not trusted again
            l2l_compile.load_pretrained(model, folder)


def test_a_model_in_memory_is_not_moved_in_silence(folder, tmp_path):
    model = transformers.LlamaForCausalLM(LLAMA)
    with pytest.raises(L2LError, match=r"is for parameters on the meta device.*build the model under torch\.device\('meta'\)"):
        l2l_compile.load_pretrained(model, folder, disk=tmp_path)
    with pytest.raises(OptionError, match="'disk' must be a folder or a list of folders, got 3"):
        l2l_compile.load_pretrained(model, folder, disk=3)
