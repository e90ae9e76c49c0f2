"""`save_pretrained`: the folder that the ranks of a pipeline write together is that of one process, and none has half a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pipelines import MODELS, Case
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import l2l_compile
from l2l_compile import L2LError


def staged(name: str, world: int, wrap=lambda model: model) -> nn.Module:
    """A model in two stages, each of them sharded if there are more than two ranks."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "pp"))
    model = l2l_compile.pipeline(wrap(MODELS[name]()), mesh["pp"], Case(name).batch(0), loops=1)
    return l2l_compile.shard(model, mesh["dp"]) if world > 2 else model


def saves(rank, world, name, folder, size):
    l2l_compile.save_pretrained(staged(name, world), folder, size)
    return sorted(file.name for file in Path(folder).iterdir())  # complete when the call returns


@pytest.mark.parametrize(("name", "world"), [("llama", 2), ("gpt2", 2), ("mixtral", 2), ("llama", 4), ("gpt2", 4)], ids=str)
def test_the_folder_of_all_ranks_is_that_of_one(ranks, tmp_path, name, world):
    torch.manual_seed(0)
    whole = MODELS[name]()
    whole.save_pretrained(tmp_path / "one")
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "model.safetensors").write_bytes(b"of an earlier run")
    files, *others = ranks.run(saves, name, str(tmp_path / "all"), "10KB", world=world)
    assert all(found == files for found in others)
    weights = [file for file in files if file.endswith(".safetensors")]
    assert len(weights) > 2 and weights[-1] == f"model-{len(weights):05}-of-{len(weights):05}.safetensors"
    loaded = type(whole).from_pretrained(tmp_path / "all")
    assert loaded.state_dict().keys() == whole.state_dict().keys()
    assert all(torch.equal(tensor, loaded.state_dict()[key]) for key, tensor in whole.state_dict().items())
    assert sorted(stored(tmp_path / "all")) == sorted(stored(tmp_path / "one"))
    assert (tmp_path / "all" / "config.json").read_text() == (tmp_path / "one" / "config.json").read_text()
    assert sorted(set(files) - {*weights, "model.safetensors.index.json"}) == sorted(
        file.name for file in (tmp_path / "one").iterdir() if file.suffix != ".safetensors"
    )


def stored(folder: Path) -> list[str]:
    """The names of the tensors in all files of a folder."""
    names: list[str] = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names += opened.keys()
    return names


def saves_in_flight(rank, world, folder):
    """A call without a flush has turns in flight when the folder is written."""
    model, case = staged("llama", world), Case("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"device": "cpu", "micro_batches": 3, "block_compiler": "eager", "outputs": "loss", "optimizer": optimizer}
    options |= {"schedule": "1f1b", "update": "in_forward", "delay": 1}
    compiled = torch.compile(model, backend="l2l", fullgraph=True, options=options)
    for step in range(3):
        compiled(**case.batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    l2l_compile.save_pretrained(compiled, folder)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def test_a_folder_has_the_weights_behind_the_last_step(ranks, tmp_path):
    parts = ranks.run(saves_in_flight, str(tmp_path))
    torch.manual_seed(0)
    before = MODELS["llama"]()
    found = type(before).from_pretrained(tmp_path).state_dict()
    for name, weight in {name: weight for part in parts for name, weight in part.items()}.items():
        assert torch.equal(found[name], torch.from_numpy(weight)), name
    assert not torch.equal(found["lm_head.weight"], before.lm_head.weight)


def test_a_folder_of_one_rank_is_a_single_file(tmp_path):
    model = MODELS["llama"]()
    l2l_compile.save_pretrained(model, tmp_path)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert set(stored(tmp_path)) == set(model.state_dict())


def saves_half(rank, world, folder):
    model = staged("llama", world)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for given in (whole, None):
        with pytest.raises(L2LError, match="would leave out .* other ranks .*l2l_compile.save_pretrained"):
            model.save_pretrained(folder, state_dict=given)
    assert not Path(folder).exists()
    dist.barrier()
    parts = [{} for _ in range(world)]
    dist.all_gather_object(parts, {name: tensor.detach() for name, tensor in model.state_dict().items()})
    if rank == 0:
        model.save_pretrained(folder, state_dict={name: tensor for part in parts for name, tensor in part.items()})
        assert set(stored(Path(folder))) == set(MODELS["llama"]().state_dict())


def test_half_a_model_is_not_saved(ranks, tmp_path):
    ranks.run(saves_half, str(tmp_path / "half"))


def cannot_save(rank, world, folder):
    with pytest.raises(L2LError, match="rank 0 could not write its weights to .*: .*Error"):
        l2l_compile.save_pretrained(staged("llama", world), folder)
    assert not list(Path(folder).parent.glob("**/.rank-*"))
    with pytest.raises(L2LError, match="writes models of transformers, and UShape is none"):
        l2l_compile.save_pretrained(staged("u_shape", world), folder)


def test_all_ranks_raise_where_a_folder_cannot_be_written(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    ranks.run(cannot_save, str(tmp_path / "file"))


def with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


def saves_adapters(rank, world, folder):
    model = staged("llama", world, with_lora)
    with pytest.raises(L2LError, match="would leave out"):
        model.save_pretrained(f"{folder}-{rank}")
    l2l_compile.save_pretrained(model, folder)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about what PEFT calls
def test_adapters_of_all_ranks_are_saved(ranks, tmp_path):
    pytest.importorskip("peft")
    torch.manual_seed(0)
    with_lora(MODELS["llama"]()).save_pretrained(tmp_path / "one")
    ranks.run(saves_adapters, str(tmp_path / "all"))
    assert sorted(stored(tmp_path / "all")) == sorted(stored(tmp_path / "one"))
    with (
        safe_open(tmp_path / "one" / "adapter_model.safetensors", framework="pt") as one,
        safe_open(tmp_path / "all" / "adapter_model.safetensors", framework="pt") as found,
    ):
        assert all(torch.equal(one.get_tensor(name), found.get_tensor(name)) for name in stored(tmp_path / "one"))
