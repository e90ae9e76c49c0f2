"""Single tests of parity: kinds of attention, dropout, ties, frozen parts, outputs, losses outside, constants, Inductor."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .cases import Case, Context, Report, Unfit
from .parity_features import features
from .question_models import MAKERS, AttentionStack, Maker, Masks, sequences
from .training import Batch, Compiled, device_options, distance, loss_of, moved, relative, stand_in
from .zoo import LENGTH, ROWS, VOCABULARY, WIDTH, LanguageModel, llama, own_norms, tokens

MOST = {torch.float64: 1e-10, torch.float32: 1e-4}
MOST_RATIO = 1.5
ATTENTION = ("causal", "masked", "grouped")
INDUCTOR = ("llama fp32 at_step", "gpt2 bf16 in_backward", "batchnorm fp64 at_step")


def questions(context: Context) -> list[Case]:
    """Most important first."""
    bound = lambda work, *more, **named: functools.partial(work, context, *more, **named)  # noqa: E731
    found = [
        Case("dropout: masks in recompute", bound(dropout, False)),
        *features(context),
        *(Case(name, bound(maker, make)) for name, make in MAKERS.items()),
        Case("inductor: " + INDUCTOR[0], bound(inductor, INDUCTOR[0])),
        *(Case(f"attention {kind} {_name(dtype)}", bound(attention, kind, dtype)) for kind in ATTENTION for dtype in MOST),
        Case("dropout inside of attention, fp32", bound(dropout, True)),
        Case("dropout inside of attention, bf16", bound(dropout, True, precision="bf16")),
        Case("retain_graph", bound(retain_graph)),
        Case('outputs="loss"', bound(outputs, "loss")),
        Case('outputs="all"', bound(outputs, "all")),
        Case("a loss outside of the model", bound(loss_outside)),
        Case("tied embeddings", bound(language, tied)),
        Case("frozen parts", bound(language, frozen)),
        Case("check=True", bound(language, lambda: own_norms(llama()), check=True)),
        Case("inductor: " + INDUCTOR[1], bound(inductor, INDUCTOR[1])),
        *(Case(f"attention {kind} bf16", bound(attention_narrow, kind)) for kind in ATTENTION),
        Case("llama as transformers has it, fp64", bound(language, llama)),
        Case("inductor: " + INDUCTOR[2], bound(inductor, INDUCTOR[2])),
    ]
    seconds = 60 if context.on_gpu else 180
    return [Case(case.name, case.work, 110 if case.name.startswith("inductor") else seconds) for case in found]


def _name(dtype: torch.dtype) -> str:
    return {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def difference(
    context: Context,
    model: nn.Module,
    inputs: Batch,
    loss: Callable[[Any], torch.Tensor] = loss_of,
    reference: torch.device | None = None,
    **options: Any,
) -> tuple[float, str]:
    """The largest relative difference of loss and gradients from plain PyTorch, in one step on the device or on `reference`."""
    from .parity import worst, worst_gradient

    place = reference or context.device
    plain = copy.deepcopy(model).to(place)
    compiled = Compiled(model, {**device_options(context), "micro_batches": 3, **options}, stand_in(context))
    found, expected = loss(compiled(**inputs)), loss(plain(**moved(inputs, place)))
    found.backward()
    expected.backward()
    return worst([(relative(found, expected), "loss"), worst_gradient(model, plain, "one step")])


def maker(context: Context, make: Callable[[int], torch.Tensor], report: Report) -> None:
    """Compare a `Maker` with plain PyTorch on the host, since plain PyTorch cannot run it on a GPU."""
    torch.manual_seed(0)
    value, where = difference(context, Maker(make).double(), sequences(torch.float64), reference=torch.device("cpu"))
    report("worst difference from the host", value, most=1e-10, note=where)


def attention(context: Context, kind: str, dtype: torch.dtype, report: Report) -> None:
    torch.manual_seed(0)
    value, where = difference(context, AttentionStack(kind).to(dtype), sequences(dtype))
    report("worst difference", value, most=MOST[dtype], note=where)


def attention_narrow(context: Context, kind: str, report: Report) -> None:
    """The error of bf16 against float32, relative to the error of autocast: the mean of three draws."""
    found = expected = 0.0
    for seed in range(3):
        torch._dynamo.reset()
        torch.manual_seed(seed)
        model, inputs = AttentionStack(kind), sequences(torch.float32)
        exact, amp = (copy.deepcopy(model).to(context.device) for _ in range(2))
        options = {**device_options(context), "micro_batches": 3, "precision": "bf16"}
        Compiled(model, options, stand_in(context))(**inputs).backward()
        there = moved(inputs, context.device)
        exact(**there).backward()
        with torch.autocast(context.device.type, dtype=torch.bfloat16):
            loss = amp(**there)
        loss.backward()
        grads = [[p.grad for p in m.parameters()] for m in (model, amp, exact)]
        found, expected = found + distance(grads[0], grads[2]), expected + distance(grads[1], grads[2])
    report(
        "error over that of autocast",
        found / expected,
        most=MOST_RATIO,
        note=f"mean error {found / 3:.1e}, of autocast {expected / 3:.1e}",
    )


def dropout(context: Context, inside: bool, report: Report, precision: str = "fp32") -> None:
    """The same seed gives the same bits, another seed gives different bits, and recompute uses the masks of forward."""
    x = torch.rand(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    found = []
    for seed in (0, 0, 1):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Masks(inside)
        options = {**device_options(context), "micro_batches": 3, "precision": precision}
        compiled = Compiled(model, options, stand_in(context))
        torch.manual_seed(seed)
        output = compiled(x)
        output.sum().backward()
        found.append((output.detach(), [w.grad for w in model.weights]))
    (first, grads), (second, again), (other, _) = found
    same = torch.equal(first, second) and all(map(torch.equal, grads, again))
    report("bits that differ with one seed", float(not same), most=0, should="0: the same seed gives the same bits")
    report("bits that are the same with two", float(torch.equal(first, other)), most=0, should="0: another seed, other masks")
    columns = first.double().sum((0, 1))
    each = [relative(g.double() * w.detach().double(), columns) for g, w in zip(grads, model.weights, strict=True)]
    wrong = torch.tensor(each).max().item()  # NaN if any is
    report(
        "gradients from other masks",
        wrong,
        most=1e-4 if precision == "fp32" else 3e-2,
        should="rounding: recompute sees forward's masks",
    )


def inductor(context: Context, name: str, report: Report) -> None:
    from .parity import compare

    if not context.on_gpu:
        raise Unfit("the tests cover Inductor on a CPU")
    from .settings import Setting

    model, precision, update = name.split()
    compare(context, Setting(model, precision, "host", update, 1), 0, report, block_compiler="inductor")


def tied() -> nn.Module:
    return own_norms(llama(tied=True))


def frozen() -> nn.Module:
    """The embedding and the first layer are not trained."""
    model = own_norms(llama())
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    return model


def language(context: Context, make: Callable[[], nn.Module], report: Report, **options: Any) -> None:
    """A language model in float64."""
    torch.manual_seed(0)
    value, where = difference(context, LanguageModel(make()).double().train(), tokens(0), **options)
    report("worst difference", value, most=1e-10, note=where)


class WithLogits(nn.Module):
    """Loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = own_norms(llama())

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(input_ids=input_ids).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def outputs(context: Context, which: str, report: Report) -> None:
    """With "loss", the logits are shapes on the meta device; with "all", they equal the logits of plain PyTorch."""
    torch.manual_seed(0)
    model = WithLogits().double().train()
    kept = []
    value, where = difference(
        context, model, tokens(0), loss=lambda made: kept.append(made[1].detach()) or made[0], outputs=which
    )
    report("worst difference", value, most=1e-10, note=where)
    ours, theirs = kept
    if which == "loss":
        there = ours.device.type != "meta" or ours.shape != theirs.shape
        report("logits that were made", float(there), most=0, should="0: shape and dtype only")
    else:
        report("difference of the logits", relative(ours, theirs), most=1e-10)


def loss_outside(context: Context, report: Report) -> None:
    """The model returns logits, and the loss is computed from them outside of the model, with labels that it does not see."""
    torch.manual_seed(0)
    inputs = tokens(0)
    labels = inputs.pop("labels")

    def loss(output: Any) -> torch.Tensor:
        logits = output.logits
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.flatten().to(logits.device))

    value, where = difference(context, own_norms(llama()).double().train(), inputs, loss=loss)
    report("worst difference", value, most=1e-10, note=where)


def retain_graph(context: Context, report: Report) -> None:
    """Two backward calls after one forward give twice the gradients: stashes on host and device survive the first call."""
    for stash in ("host", "device"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, inputs = LanguageModel(own_norms(llama())).double().train(), tokens(0)
        compiled = Compiled(model, {**device_options(context), "micro_batches": 3, "stash": stash}, stand_in(context))
        loss = compiled(**inputs)
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters()]
        loss.backward()
        twice = [p.grad for p in model.parameters()]
        report(f"difference from twice the gradients, stash={stash}", distance(twice, [2 * g for g in once]), most=1e-14)
