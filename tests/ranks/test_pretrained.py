"""`load_pretrained`: folders of `save_pretrained`, read by each rank as far as they are its own, bit-equal to `from_pretrained`."""

from __future__ import annotations

import copy
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import l2l_compile
from l2l_compile.disk.disk_store import is_in_place, range_of
from l2l_compile.errors import L2LError
from l2l_compile.host.disk_placement import SMALL

SIZES = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(**changes) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**SIZES, num_key_value_heads=1, **changes)


def mixtral(**changes) -> transformers.MixtralConfig:
    return transformers.MixtralConfig(**SIZES, num_key_value_heads=1, num_local_experts=3, **changes)


def bert(**changes) -> transformers.BertConfig:
    return transformers.BertConfig(**SIZES, **changes)


def on_meta(kind, config, **options) -> nn.Module:
    with torch.device("meta"):
        return kind._from_config(config, **options)


def assert_equal(ours: nn.Module, theirs: nn.Module, rank: int = 0, world: int = 1) -> None:
    """Parameters and buffers, also those that are not saved; of what is sharded, the rows of this rank."""
    mine, expected = ({**dict(m.named_parameters(remove_duplicate=False)), **dict(m.named_buffers())} for m in (ours, theirs))
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        found = mine[name]
        if hasattr(found, "to_local"):
            rows = -(-len(value) // world)
            found, value = found.to_local(), value[rank * rows : (rank + 1) * rows]
        assert found.dtype == value.dtype and torch.equal(found, value), name


KINDS = {
    "tied": (transformers.LlamaForCausalLM, llama, {"tie_word_embeddings": True}),
    "experts": (transformers.MixtralForCausalLM, mixtral, {}),
    "bert": (transformers.BertForMaskedLM, bert, {}),
}


def loads(rank, world, folder, name, dtype):
    """On ranks, the shards of what `from_pretrained` gives."""
    kind, config, changes = KINDS[name]
    model = on_meta(kind, config(**changes), dtype=dtype)
    if world > 1:
        l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
    before = list(model.parameters())
    assert l2l_compile.load_pretrained(model, folder) == ([], [])
    assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
    assert world == 1 or all(hasattr(p, "to_local") for p in before)
    assert_equal(model, kind.from_pretrained(folder, dtype=dtype), rank, world)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", ["5GB", "6KB"])  # one file, and several with an index
@pytest.mark.slow(but=("6KB-tied", "6KB-experts", "5GB-bert"))
def test_shards_equal_from_pretrained(ranks, tmp_path, name, size):
    kind, config, changes = KINDS[name]
    kind(config(**changes)).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size=size)
    assert (size == "5GB") == (tmp_path / "model.safetensors").exists()
    loads(0, 1, tmp_path, name, torch.bfloat16)
    for world in (2, 3):
        ranks.run(loads, tmp_path, name, torch.float32, world=world)


def loads_a_new_head(rank, world, folder):
    """The head is rank 0's, and what `from_pretrained` draws with its seed."""
    config = bert(num_labels=5)
    model = on_meta(transformers.BertForSequenceClassification, config)
    if world > 1:
        l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
    torch.manual_seed(7 + rank)
    missing, unexpected = l2l_compile.load_pretrained(model, folder, strict=False)
    assert {"classifier.weight", "classifier.bias"} <= set(missing) and all(name.startswith("cls.") for name in unexpected)
    torch.manual_seed(7)
    assert_equal(model, transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=5), rank, world)


def test_a_head_that_the_folder_lacks(ranks, tmp_path):
    transformers.BertForMaskedLM(bert()).save_pretrained(tmp_path)
    loads_a_new_head(0, 1, tmp_path)
    ranks.run(loads_a_new_head, tmp_path)


def test_with_and_without_the_prefix_of_the_base_model(tmp_path):
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM(llama(tie_word_embeddings=True))
    whole.save_pretrained(tmp_path / "whole")
    whole.model.save_pretrained(tmp_path / "base")
    for kind, folder in ((transformers.LlamaForCausalLM, "base"), (transformers.LlamaModel, "whole")):
        model = on_meta(kind, llama(tie_word_embeddings=True))
        assert l2l_compile.load_pretrained(model, tmp_path / folder) == ([], [])
        assert_equal(model, whole if kind is transformers.LlamaForCausalLM else whole.model)


@contextmanager
def private_bytes():
    """The most private memory that this process has within it, beyond what it had before: a list of one number, once it is over."""

    def now() -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) << 10

    most, over = [now()], threading.Event()

    def look() -> None:
        while not over.wait(0.0005):
            most[0] = max(most[0], now())

    watcher, before = threading.Thread(target=look), most[0]
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()
        most[0] = max(most[0], now()) - before


def stack(layers: int, size: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers)))


def loads_with_little_memory(rank, world, folder, layers, size):
    for count, width in ((1, 4), (layers, size)):  # the first one imports
        model = stack(count, width)
        l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
        with private_bytes() as most:
            l2l_compile.load_pretrained(model, folder / str(count))
    return most[0]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_no_rank_has_the_whole_model(ranks, tmp_path):

    layers, size = 24, 1024  # 4 MiB each
    for count, width in ((1, 4), (layers, size)):
        (tmp_path / str(count)).mkdir()
        weights = {f"{n}.weight": torch.full((width, width), float(n)) for n in range(count)}
        save_file(weights, tmp_path / str(count) / "model.safetensors")
    whole, one = layers * size * size * 4, size * size * 4
    for most in ranks.run(loads_with_little_memory, tmp_path, layers, size):
        print(f"{most / 2**20:.1f} MiB of {whole / 2**20:.0f}")
        assert most < whole / 2 + 2 * one


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def test_a_model_of_another_library(tmp_path):

    plain = Plain()
    plain.norm(torch.randn(4, 3))
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    there = Plain()
    assert l2l_compile.load_pretrained(there, tmp_path) == ([], [])
    assert_equal(there, plain)
    with torch.device("meta"):
        there = Plain()
    with pytest.raises(L2LError, match="table of Plain: on the meta device, in no file"):
        l2l_compile.load_pretrained(there, tmp_path)
    assert there.norm.weight.is_meta  # nothing has been touched
    there.table = torch.arange(3.0)
    l2l_compile.load_pretrained(there, tmp_path)
    assert_equal(there, plain)


def edited(folder: Path, edit) -> Path:
    """A folder whose tensors somebody has edited."""

    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def quantize(tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)


@pytest.mark.parametrize(
    "edit, sentence",
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks model\.norm\.weight: strict=False"),
        (lambda t: t.update(more=torch.ones(1)), "has tensors that the model lacks: more: strict=False"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"'model\.norm\.weight' of .* has the shape \[3\].*\[16\]"),
        (quantize, r"'model\.norm\.weight' of .* is torch\.int8.*quantized weights are not read"),
        (lambda t: t.update({"lm_head.weight": torch.ones(37, 16)}), "is tied, but .* has other numbers in"),
    ],
    ids=["missing", "unexpected", "shape", "dtype", "tied"],
)
def test_tensors_that_do_not_fit(tmp_path, edit, sentence):
    transformers.LlamaForCausalLM(llama(tie_word_embeddings=True)).save_pretrained(tmp_path)
    with pytest.raises(L2LError, match=sentence):
        l2l_compile.load_pretrained(
            on_meta(transformers.LlamaForCausalLM, llama(tie_word_embeddings=True)), edited(tmp_path, edit)
        )


def test_a_tied_tensor_may_be_there_twice(tmp_path):
    model = transformers.LlamaForCausalLM(llama(tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    edited(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    found = on_meta(transformers.LlamaForCausalLM, llama(tie_word_embeddings=True))
    l2l_compile.load_pretrained(found, tmp_path)
    assert_equal(found, model)


def test_files_that_do_not_fit(tmp_path):
    model = transformers.LlamaForCausalLM(llama())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(L2LError, match=r"has no \*\.safetensors: .* save_pretrained"):
        l2l_compile.load_pretrained(model, tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="6KB")
    first, *_ = sorted(tmp_path.glob("*.safetensors"))
    first.rename(tmp_path / "first")
    with pytest.raises(L2LError, match="lacks model-00001-of-.*, which model.safetensors.index.json names"):
        l2l_compile.load_pretrained(model, tmp_path)
    (tmp_path / "first").rename(first)
    (tmp_path / "copy.safetensors").write_bytes(first.read_bytes())
    with pytest.raises(L2LError, match="in several files: leave one of them there"):
        l2l_compile.load_pretrained(copy.deepcopy(model), tmp_path)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)


def loads_parallel_layers(rank, world, folder):
    """Rows of rows, and columns, of layers that are sharded twice."""
    with torch.device("meta"):
        model = Pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    l2l_compile.shard(model, mesh)
    l2l_compile.load_pretrained(model, folder)
    expected, (data, part) = load_file(folder / "model.safetensors"), mesh.get_coordinate()
    rows, columns = slice(4 * part + 2 * data, 4 * part + 2 * data + 2), slice(4 * part, 4 * part + 4)
    own = {"up.weight": rows, "up.bias": rows, "down.bias": slice(3 * data, 3 * data + 3)}
    own["down.weight"] = (own["down.bias"], columns)
    for name, found in model.named_parameters():
        assert torch.equal(found.to_local(), expected[name][own[name]]), name


def test_parallel_layers(ranks, tmp_path):
    save_file(Pair().state_dict(), tmp_path / "model.safetensors")
    ranks.run(loads_parallel_layers, tmp_path, world=4)


LARGE = {"vocab_size": 600, "hidden_size": 512, "intermediate_size": 800, "num_hidden_layers": 2, "num_attention_heads": 4}


def refuses_shards_on_disk(rank, world, folder):
    model = on_meta(transformers.LlamaForCausalLM, transformers.LlamaConfig(**LARGE))
    l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
    with pytest.raises(L2LError, match="divided among several: leave out 'disk', or leave out shard"):
        l2l_compile.load_pretrained(model, folder, disk=folder)
    assert all(p.to_local().is_meta for p in model.parameters())


def loads_its_stage_to_disk(rank, world, folder):
    """A rank without the folder keeps all from loading."""
    batch = {"input_ids": torch.arange(8).view(2, 4), "labels": torch.arange(8).view(2, 4)}
    model = on_meta(transformers.LlamaForCausalLM, transformers.LlamaConfig(**LARGE))
    l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), batch)
    with pytest.raises(L2LError, match="nowhere: No such file or directory"):
        l2l_compile.load_pretrained(model, folder, disk=folder / "nowhere" if rank else folder)
    assert all(p.is_meta for p in model.parameters())
    l2l_compile.load_pretrained(model, folder, disk=folder)
    expected = dict(transformers.LlamaForCausalLM.from_pretrained(folder).named_parameters())
    assert model.state_dict() and all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    assert all((range_of(p) is not None) == (p.nbytes >= SMALL) for p in model.parameters())


def leaves_its_stage_in_place(rank, world, folder):
    batch = {"input_ids": torch.arange(8).view(2, 4), "labels": torch.arange(8).view(2, 4)}
    model = on_meta(transformers.LlamaForCausalLM, transformers.LlamaConfig(**LARGE))
    l2l_compile.pipeline(model, init_device_mesh("cpu", (world,)), batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # parameters of other ranks are none that cannot be in place
        l2l_compile.load_pretrained(model, folder, in_place=True)
    expected = dict(transformers.LlamaForCausalLM.from_pretrained(folder).named_parameters())
    assert model.state_dict() and all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    assert all(is_in_place(p) == (p.nbytes >= SMALL) for p in model.parameters())


def refuses_shards_in_place(rank, world, folder):
    model = on_meta(transformers.LlamaForCausalLM, transformers.LlamaConfig(**LARGE))
    l2l_compile.shard(model, init_device_mesh("cpu", (world,)))
    with pytest.raises(L2LError, match=r"are divided among ranks \(leave out shard\(\)\)"):
        l2l_compile.load_pretrained(model, folder, in_place=True)
    assert all(p.to_local().is_meta for p in model.parameters())


@pytest.mark.parametrize("loads_in_place", [refuses_shards_in_place, leaves_its_stage_in_place], ids=["shards", "stages"])
def test_stages_are_left_in_place_and_shards_are_not(ranks, tmp_path, loads_in_place):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LARGE)).save_pretrained(tmp_path)
    ranks.run(loads_in_place, tmp_path)


@pytest.mark.parametrize("loads_on_disk", [refuses_shards_on_disk, loads_its_stage_to_disk], ids=["shards", "stages"])
def test_stages_are_loaded_to_disk_and_shards_are_not(ranks, tmp_path, loads_on_disk):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LARGE)).save_pretrained(tmp_path)
    ranks.run(loads_on_disk, tmp_path)
