"""Frozen weights in 4 and 8 bits with LoRA adapters: they stream as they are, and the gradients are those of eager."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import l2l_compile
from l2l_compile import L2LError

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install '.[quantized]'")
quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed: pip install '.[quantized]'")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo, of bitsandbytes
]

SIZES = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2}


def llama(layers):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, num_hidden_layers=layers))


def qwen(layers):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, num_hidden_layers=layers, head_dim=32))


def mistral(layers):
    return transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED, num_hidden_layers=layers, sliding_window=8))


def t5(layers):
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": layers, "num_decoder_layers": layers, "num_heads": 4}
    config = transformers.T5Config(vocab_size=256, **sizes, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def mixtral(layers):
    config = transformers.MixtralConfig(**GROUPED, num_hidden_layers=layers, num_local_experts=4, sliding_window=None)
    return transformers.MixtralForCausalLM(config)


def gpt_neox(layers):
    """Its linear layers have biases."""
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES, num_hidden_layers=layers))


def is_quantized(module, name):
    """As transformers does it: not the head, and of T5 not `wo`, to whose dtype the model converts what comes before."""
    return type(module) is torch.nn.Linear and not name.endswith(("lm_head", "embed_out", ".wo"))


def nf4(model, double=True):
    for name, module in list(model.named_modules()):
        if is_quantized(module, name):
            made = bitsandbytes.nn.Linear4bit(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                quant_type="nf4",
                compute_dtype=torch.float32,
                compress_statistics=double,
            )
            made.weight = bitsandbytes.nn.Params4bit(
                module.weight.data.clone(), requires_grad=False, quant_type="nf4", compress_statistics=double
            )
            made.bias = module.bias
            model.set_submodule(name, made.to("cpu"))
    return model


def single_nf4(model):
    return nf4(model, double=False)


def of_torchao(config):
    def quantized(model):
        quantization.quantize_(model, config(), filter_fn=is_quantized)
        return model

    return quantized


KINDS = {
    "nf4": nf4,
    "single_nf4": single_nf4,
    "int8": of_torchao(quantization.Int8WeightOnlyConfig),
    "int4": of_torchao(lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(32))),
    "float8": of_torchao(quantization.Float8WeightOnlyConfig),
}
MODELS = [llama, qwen, mistral, t5, mixtral, gpt_neox]
ADAPTED = {t5: ["q", "v"], gpt_neox: ["query_key_value"]}
PAIRS = [(llama, kind) for kind in KINDS] + [
    (build, kind) for build in MODELS[1:] for kind in ("nf4", "int4") if (build, kind) != (t5, "int4")
]
DEEPER = [(llama, "nf4"), (llama, "int4"), (mixtral, "int4")]
OPTIONS = {"device": "cpu", "micro_batches": 2, "block_compiler": "eager"}


def names(pairs):
    return [f"{build.__name__}-{kind}" for build, kind in pairs]


def adapted(build, kind, layers=3):
    torch.manual_seed(0)
    model = KINDS[kind](build(layers).eval().requires_grad_(False))
    config = peft.LoraConfig(r=4, target_modules=ADAPTED.get(build, ["q_proj", "v_proj"]), init_lora_weights=False)
    return peft.get_peft_model(model, config)


def batch(seed=1):
    tokens = torch.randint(1, 256, (4, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def gradients(model, call):
    model.zero_grad()
    loss = call(**batch()).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def in_float64(build, kind):
    """The gradients of the same model with its frozen weights taken out of their quantized form, in float64."""
    model = adapted(build, kind)
    for name, module in list(model.named_modules()):
        weight = getattr(module, "weight", None)
        if type(module) is bitsandbytes.nn.Linear4bit:
            weight = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        elif type(module) is torch.nn.Linear and is_traceable_wrapper_subclass(weight):
            weight = weight.dequantize()
        else:
            continue
        plain = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
        plain.weight, plain.bias = torch.nn.Parameter(weight, requires_grad=False), module.bias
        model.set_submodule(name, plain)
    if build is mixtral:
        model.base_model.model.set_experts_implementation("eager")  # the others do not know float64
    return gradients(model.double(), model)[1]


def distance(found, expected):
    """By how much the gradients differ as one vector, relative to its length."""
    differences = [found[name].double() - gradient.double() for name, gradient in expected.items()]
    lengths = [torch.cat([t.flatten() for t in ts]).norm() for ts in (differences, expected.values())]
    return float(lengths[0] / lengths[1])


def stored_bytes(tensor):
    if is_traceable_wrapper_subclass(tensor):
        return sum(stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


def streamed(build, kind, layers=3, **options):
    """A step: the model, its losses and gradients in eager and streamed, and the compiled model."""
    model = adapted(build, kind, layers)
    expected = gradients(model, model)
    step = torch.compile(model, backend="l2l", options={**OPTIONS, **options})
    return model, expected, gradients(model, step), step


def layers_of(step):
    (program,) = l2l_compile.programs(step)
    return [s for s in program.segments if any(p.isdigit() for p in s.name.split("."))]


@pytest.mark.slow(but=["llama-nf4", "llama-int8", "t5-nf4", "mixtral-int4"])
@pytest.mark.parametrize(("build", "kind"), PAIRS, ids=names(PAIRS))
def test_adapters_get_the_gradients_of_eager(build, kind):
    """They are as near to float64 as eager's are: the form is taken apart as it was put together."""
    _, (loss, expected), (ours, found), step = streamed(build, kind)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    assert found.keys() == expected.keys() and len(found) >= 6
    exact = in_float64(build, kind)
    assert distance(found, expected) <= 1e-6
    assert distance(found, exact) <= max(1e-6, 1.5 * distance(expected, exact))
    assert all(segment.block.inner_looped is True for segment in layers_of(step))
    assert len(layers_of(step)) == (6 if build is t5 else 3)


@pytest.mark.slow(but=["llama-nf4", "llama-int4"])
@pytest.mark.parametrize(("build", "kind"), DEEPER, ids=names(DEEPER))
def test_depth_adds_neither_blocks_nor_device_memory(build, kind):
    shallow, deep = (streamed(build, kind, layers)[3] for layers in (3, 5))
    assert [len(layers_of(step)) for step in (shallow, deep)] == [3, 5]
    blocks = [{id(s.block) for s in l2l_compile.programs(step)[0].segments} for step in (shallow, deep)]
    assert len(blocks[1]) == len(blocks[0])
    assert l2l_compile.stats(deep).peak_device_bytes <= 1.01 * l2l_compile.stats(shallow).peak_device_bytes


@pytest.mark.slow(but=["nf4", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_cross_the_link_as_they_are_stored(kind):
    """A step fetches each layer twice; the last ones stay on the device between forward and backward."""
    model, *_, step = streamed(llama, kind, 6)
    stored = sum(map(stored_bytes, model.parameters()))
    assert l2l_compile.stats(step).fetched_bytes <= 1.05 * 2 * stored
    assert stored < 0.45 * sum(p.nbytes for p in llama(6).parameters())


class Packing(bitsandbytes.nn.Linear4bit):
    """A layer on a host with AVX512-BF16, which packs its weight when it first runs in eval mode."""

    def __init__(self, *sizes, **settings):
        super().__init__(*sizes, **settings)
        self.support_avx512bf16_for_cpu = True


@pytest.fixture
def packing(monkeypatch):
    monkeypatch.setattr(bitsandbytes.nn, "Linear4bit", Packing)


def test_weights_are_not_packed_for_the_host(packing):
    model = adapted(llama, "nf4").eval()
    step = torch.compile(model, backend="l2l", fullgraph=True, options=OPTIONS)
    _, found = gradients(model, step)
    packed = [m for m in model.modules() if getattr(getattr(m, "weight", None), "quant_state", None) is not None]
    assert found and packed and not any(getattr(m.weight.quant_state, "packing_format_for_cpu", False) for m in packed)


def test_packed_weights_do_not_go_to_another_device(stand_in):
    model = adapted(llama, "nf4").eval()
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.weight.quant_state.packing_format_for_cpu = True  # as after a call in eager
    step = torch.compile(model, backend="l2l", options={**OPTIONS, "device": stand_in})
    with pytest.raises(L2LError, match="'.*q_proj.base_layer' is packed for this host.*Load the model anew"):
        step(**batch())


@pytest.mark.slow(but=["nf4", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_stay_on_the_device(threaded, kind):
    model = adapted(llama, kind)
    step = torch.compile(model, backend="l2l", options={**OPTIONS, "resident": 1 << 30})
    for change in (0, 1):
        for _ in range(2):
            with torch.no_grad():
                expected, found = (call(**batch()).logits for call in (model, step))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert l2l_compile.stats(step).fetched_bytes == 0
        model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj.lora_A.default").weight.data += change + 1


@pytest.mark.slow(but=["at_step-int4", "in_forward-nf4", "in_backward-int8"])
@pytest.mark.parametrize("kind", ["nf4", "int8", "int4"])
@pytest.mark.parametrize("update", ["at_step", "in_backward", "in_forward"])
def test_training_ends_with_the_adapters_of_eager(update, kind):
    models = [adapted(llama, kind) for _ in range(2)]
    for model, is_streamed in zip(models, (False, True), strict=True):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        options = {**OPTIONS, "update": update} | ({"optimizer": optimizer} if update != "at_step" else {})
        call = torch.compile(model, backend="l2l", options=options) if is_streamed else model
        for seed in range(3):
            call(**batch(seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    l2l_compile.synchronize(call)
    for (name, p), q in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        if p.requires_grad:
            assert (p - q).norm() <= 1e-5 * q.norm(), name


@pytest.mark.parametrize("kind", ["nf4", "int8", "int4"])
def test_scales_are_not_narrowed_by_cmp(kind):
    """The frozen weights are the same numbers in 16-bit compute; the rest is within the error of bf16."""
    _, (loss, expected), (ours, found), step = streamed(llama, kind, precision="bf16")
    torch.testing.assert_close(ours, loss, rtol=5e-3, atol=0)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 0.05 * gradient.norm(), name
    weights = [(w, spec) for s in layers_of(step) for w, spec in zip(s.weights, s.block.weights, strict=True)]
    inner = [spec for w, spec in weights if w.inner is not None and spec.dtype.is_floating_point]
    assert all(spec.dtype is torch.float32 for spec in inner if spec.dtype.itemsize > 1) and bool(inner) == (kind != "nf4")


@pytest.mark.slow
def test_blocks_of_quantized_layers_are_compiled():
    _, (_, expected), (_, found), _ = streamed(llama, "int4", block_compiler="inductor")
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_wrapped_weights_are_exact_in_float64():
    """torchao quantizes float64 to 8-bit floats, so the limit is that of any other model."""
    torch.manual_seed(0)
    model = KINDS["float8"](llama(3).double().eval().requires_grad_(False))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).double()
    _, expected = gradients(model, model)
    _, found = gradients(model, torch.compile(model, backend="l2l", options=OPTIONS))
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-10 * gradient.norm(), name


def test_a_step_is_simulated():
    model = adapted(llama, "nf4")
    step = l2l_compile.simulate(model, "h200", {"micro_batches": 2})(**batch())
    assert step.seconds > 0


def test_a_quantized_folder_is_not_read_as_a_plain_one(tmp_path):
    """transformers makes the modules, and its model streams."""
    llama(3).save_pretrained(tmp_path / "plain")
    chosen = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "plain", quantization_config=chosen, device_map={"": "cpu"})
    model.save_pretrained(tmp_path / "quantized")
    with torch.device("meta"):
        empty = llama(3)
    with pytest.raises(L2LError, match=r"'torchao' has quantized.*from_pretrained"):
        l2l_compile.load_pretrained(empty, tmp_path / "quantized")
    with pytest.raises(L2LError, match="is a Int8Tensor, a quantized weight: fill the model first"):
        l2l_compile.load_pretrained(model, tmp_path / "plain")
    with torch.no_grad():
        found = torch.compile(model.eval(), backend="l2l", options=OPTIONS)(**batch()).logits
        torch.testing.assert_close(found, model(**batch()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "name"), [("nf4", "Params4bit"), ("int8", "Int8Tensor")])
def test_quantized_weights_are_not_sharded(kind, name):
    model = KINDS[kind](llama(1).requires_grad_(False))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        with pytest.raises(L2LError, match=rf"_proj.weight' is a {name}, .*cannot be sharded"):
            l2l_compile.shard(model, mesh)
    finally:
        torch.distributed.destroy_process_group()


def test_weights_that_are_quantized_anew_are_seen():
    model = adapted(llama, "int8")
    step = torch.compile(model, backend="l2l", options=OPTIONS)
    with torch.no_grad():
        before = step(**batch()).logits
        linear = model.get_submodule("base_model.model.model.layers.1.mlp.up_proj")
        linear.weight.qdata = -linear.weight.qdata  # in new memory
        now, expected = step(**batch()).logits, model(**batch()).logits
    assert not torch.allclose(now, before)
    torch.testing.assert_close(now, expected, rtol=1e-5, atol=1e-6)


def test_a_trained_tensor_subclass_is_an_error():
    model = adapted(llama, "int8")
    model.get_submodule("base_model.model.model.layers.1.mlp.up_proj").weight.requires_grad_(True)
    step = torch.compile(model, backend="l2l", options=OPTIONS)
    with pytest.raises(L2LError, match=r"up_proj\.weight' is a Int8Tensor.*requires a gradient.*Freeze it"):
        step(**batch())


def test_a_tensor_subclass_as_an_input_is_an_error():
    weight = torch.nn.Linear(64, 64, bias=False)
    quantization.quantize_(weight, quantization.Int8WeightOnlyConfig())
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))

    class Given(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x, w):
            return torch.nn.functional.linear(self.layers(x), w)

    step = torch.compile(Given(), backend="l2l", options=OPTIONS)
    with pytest.raises(L2LError, match=r"input 'w' is a Int8Tensor.*pass a plain tensor"):
        step(torch.randn(4, 64), weight.weight.data)


@pytest.mark.slow(but="plain")
@pytest.mark.parametrize("given", [[], ["--trainer"]], ids=["plain", "trainer"])
def test_the_example_learns(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    losses = importlib.import_module("qlora").main(["--steps", "12", *given])
    assert losses[-1] < losses[0] - 0.5
