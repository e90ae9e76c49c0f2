"""Parity of what a single option adds: kept activations, weights that stay on the device, a step of delay, and generation."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from l2l_compile import profile
from l2l_compile.backend import l2l

from .cases import Case, Context, Report
from .settings import Setting
from .training import Compiled, device_options, distance, loss_of, moved, stand_in
from .zoo import LanguageModel, llama, own_norms, tokens

NEW_TOKENS = 12
KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "keep all": ("llama fp64 host in_forward 1", {"keep": "1GB"}),
    "keep all on the host": ("gpt2 fp64 device at_step 1", {"keep_on_host": "1GB"}),
    "keep some here, some there": ("t5 fp64 host in_backward 2", {"keep": "50KB", "keep_on_host": "50KB"}),
    "resident weights": ("llama fp64 host in_backward 1", {"resident": "1GB"}),
    "some resident weights, bf16": ("gpt2 bf16 host in_forward 1", {"resident": "100KB"}),
    "keep all, fp16": ("llama fp16 host in_forward 1", {"keep": "1GB"}),
}


def features(context: Context) -> list[Case]:
    """The cases, most important first."""
    bound = lambda work, *more: functools.partial(work, context, *more)  # noqa: E731
    return [
        *(Case(name, bound(kept, name)) for name in KEPT),
        *(Case(f"generate, {cache} cache, {where}", bound(generate, cache, where)) for cache, where in GENERATE),
        Case("delay=1", bound(delayed)),
        Case("profile", bound(profiled)),
    ]


GENERATE = (("dynamic", "weights stay"), ("static", "weights streamed"), ("dynamic", "weights streamed"))


def kept(context: Context, name: str, report: Report) -> None:
    """Three steps with the options of `KEPT`."""
    from .parity import compare

    setting, options = KEPT[name]
    model, precision, stash, update, prefetch = setting.split()
    compare(context, Setting(model, precision, stash, update, int(prefetch)), 0, report, **options)


def generate(context: Context, cache: str, where: str, report: Report) -> None:
    """Greedy tokens of `generate` for padded prompts, compared with plain PyTorch's on the device."""
    torch.manual_seed(0)
    model = llama().eval()
    plain = copy.deepcopy(model).to(context.device)
    ids = tokens(0)["input_ids"][:4]
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {**device_options(context), "micro_batches": 2, **({"resident": 0} if where == "weights streamed" else {})}
    model.compile(backend=l2l, options=options)
    more = {
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "use_cache": True,
        "disable_compile": True,
    }
    if cache == "static":
        more["cache_implementation"] = "static"
    ours = model.generate(ids, attention_mask=mask, **more)
    theirs = plain.generate(ids.to(context.device), attention_mask=mask.to(context.device), **more).cpu()
    again = model.generate(ids, attention_mask=mask, **more)
    report("tokens that differ", int((ours.cpu() != theirs).sum()), most=0, should=f"0 of {theirs.numel()}")
    report("tokens that differ between two calls", int((ours != again).sum()), most=0, should="0")


def delayed(context: Context, report: Report) -> None:
    """A step with delay=1 applies the gradient at the weights of the step before: the rule, written out in plain PyTorch."""
    torch.manual_seed(0)
    model = LanguageModel(own_norms(llama())).double().train()
    plain = copy.deepcopy(model).to(context.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**device_options(context), "micro_batches": 3, "optimizer": optimizer, "update": "in_forward", "delay": 1}
    compiled = Compiled(model, options, stand_in(context))
    before = [p.detach().clone() for p in plain.parameters()]
    older, newest = before, before
    for seed in range(4):
        inputs = tokens(seed)
        loss_of(compiled(**inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, value in zip(plain.parameters(), older, strict=True):
                parameter.copy_(value)
        loss_of(plain(**moved(inputs, context.device))).backward()
        older, newest = newest, [w - 0.1 * p.grad for w, p in zip(newest, plain.parameters(), strict=True)]
        plain.zero_grad()
    compiled.synchronize()
    moves = lambda now: [(a.detach().cpu() - b.cpu()) for a, b in zip(now, before, strict=True)]  # noqa: E731
    report("change of the parameters in 4 steps", distance(moves(model.parameters()), moves(newest)), most=1e-10)


def profiled(context: Context, report: Report) -> None:
    """A profile of one step has spans on the lanes that copy and compute, and leaves the numbers as they are."""
    torch.manual_seed(0)
    model, inputs = LanguageModel(own_norms(llama())).double().train(), tokens(0)
    compiled = Compiled(model, {**device_options(context), "micro_batches": 3}, stand_in(context))
    compiled(**inputs).backward()
    once = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with profile(compiled.called) as measured:
        compiled(**inputs).backward()
    lanes = {span.lane for span in measured.timeline.spans}
    report("lanes without a span", len({"compute", "h2d", "d2h"} - lanes), most=0, should="0", note=str(sorted(lanes)))
    report("negative spans", sum(span.seconds < 0 for span in measured.timeline.spans), most=0, should="0")
    changed = distance([p.grad for p in model.parameters()], once)
    report("difference of gradients under a profile", changed, most=1e-12, should="0, or rounding of sums without an order")
