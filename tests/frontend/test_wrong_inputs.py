"""Calls that cannot be computed end with one sentence; PyTorch logs no traceback for traces that are expected to fail."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile import DeviceError, InputError, LoweringError, explain
from models import compiled

LONGEST = 400  # characters of a sentence


@pytest.fixture
def logged():
    """The records that PyTorch logs about fake tensors."""

    class Keeps(logging.Handler):
        def emit(self, record):
            found.append(record)

    found, handler, logger = [], Keeps(), logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(10, 8), nn.Linear(8, 8)

    def forward(self, ids=None, x=None):
        return self.layer(self.table(ids) if ids is not None else x)


def message_of(kind, **given) -> str:
    torch._dynamo.reset()
    with pytest.raises(kind) as caught:
        compiled(Words())(**given)
    text = str(caught.value)
    assert len(text) < LONGEST and "dynamo" not in text.lower()
    return text


@pytest.mark.parametrize(
    "name, given",
    [("ids", torch.rand(3, 4)), ("x", torch.ones(3, 7)), ("x", torch.ones(3, 7, dtype=torch.int64))],
    ids=["float_ids", "width", "int_width"],
)
def test_a_wrong_dtype_or_shape_names_the_input_and_the_line(name, given, logged):
    text = message_of(InputError, **{name: given})
    assert f"'{name}' is " in text and "torch" not in text.split(":")[0]
    in_the_kernel = torch.__version__ < (2, 13) and "while checking arguments for embedding" in text  # it has no line there
    assert __file__ in text or in_the_kernel
    assert not logged


@pytest.mark.parametrize("name, given", [("x", torch.ones(3, 8)), ("ids", torch.ones(3, 4).long())], ids=["x", "ids"])
def test_an_input_on_another_device_is_named(name, given):
    text = message_of(DeviceError, **{name: given.to("meta")})
    assert f"input '{name}' is on meta" in text and "to_empty" not in text


class Weighs(nn.Module):
    """Reads its input behind an operation, and another value whose width is wrong."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x * 2) @ torch.ones(5, 3)


class Moves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.func.jvp(self.layer, (x,), (x[:1],))[1]


def test_an_input_of_a_wrong_width_is_named_behind_an_operation():
    with pytest.raises(InputError, match=r"Input 'x' is float32\[3, 7\]: check"):
        compiled(Weighs())(torch.ones(3, 7))


@pytest.mark.parametrize("model", [Weighs, Moves])
def test_an_operation_that_fails_on_other_values_blames_no_input(model):
    error, told = LoweringError, "^the model cannot be traced at .*torch.compiler.disable.*inputs of the call are 'x' float"
    if model is Moves and torch.__version__ >= (2, 15):  # it leaves this line to Python, which raises PyTorch's error
        error, told = RuntimeError, "^Trying to set a forward gradient"
    with pytest.raises(error, match=told):
        compiled(model())(torch.ones(3, 8))


@pytest.mark.parametrize("block_compiler", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_input_of_another_float_dtype_is_named(dtype, block_compiler):
    """The same for the first call and for a later one; the traceback has no frames of Dynamo and of the runtime."""
    step = compiled(Words(), block_compiler=block_compiler)
    for _ in range(2):
        with pytest.raises(
            InputError, match=r"same dtype.*Input 'x' is \w+\[3, 8\], and the parameters are float32: conv"
        ) as caught:
            step(x=torch.ones(3, 8, dtype=dtype))
        assert str(dtype).removeprefix("torch.") in str(caught.value) and len(caught.traceback) < 8
        assert "segment 'layer'" in caught.value.__notes__[0]
        step(x=torch.ones(3, 8)).sum().backward()


def test_an_error_of_a_kernel_on_dtypes_of_the_model_stays():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8).double()

        def forward(self, x):
            return self.other(self.layer(x))

    with pytest.raises(RuntimeError, match="^mat1 and mat2 must have the same dtype") as caught:
        compiled(Mixed(), block_compiler="eager")(torch.ones(3, 8))
    assert "segment 'other'" in caught.value.__notes__[0]


class Folds(nn.Module):
    """Rows mix, and only an even number of rows can be computed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        r = self.first(x)
        return self.second(r[0::2] - r[1::2])


def test_a_probe_that_fails_logs_nothing(logged):
    report = explain(Folds(), {"micro_batches": 2})(torch.randn(8, 4))
    assert not logged
    assert "'sub' computes with a batch of 8 rows" in report.whole_batch[0].reason


def test_functions_that_wait_for_arguments_say_so():
    assert "call it with a batch" in repr(explain(Folds()))
    assert "call it with a batch" in repr(l2l_compile.simulate(Folds(), "h200"))


@pytest.mark.parametrize("library, kind", [("transformers", "Trainer"), ("accelerate", "Accelerator")])
@pytest.mark.parametrize("given", [Folds(), Folds, None, "model"], ids=["model", "class", "None", "text"])
def test_stream_takes_the_object_of_the_loop(library, kind, given):
    pytest.importorskip(library)
    stream = __import__(f"l2l_compile.integrations.{library}", fromlist=["stream"]).stream
    with pytest.raises(l2l_compile.OptionError, match=f"stream takes the {kind}"):
        stream(given)
