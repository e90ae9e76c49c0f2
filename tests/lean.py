"""Settings of PyTorch and Python for processes that run one test after another."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def settle() -> None:
    """Compilations without what takes long in them and shows nothing; collections that look at what is made from now on.

    After each compilation, Dynamo collects garbage and measures its guards with a cold cache: a twentieth of the time of all tests.
    """
    torch.set_num_threads(1)
    torch._dynamo.config.run_gc_after_compile = False
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    freeze()
    gc.set_threshold(50_000, 20, 50)


def warm() -> None:
    """Processes that are forked from this one have what a first compilation imports and makes, and no thread runs.

    They leave alone what is there: to look at it, or to take it apart where Python ends, would copy its pages into each of them.
    A backward is left out where PyTorch is built for GPUs: its autograd starts threads then, and refuses to work in a forked process.
    """
    import tqdm

    import l2l_compile
    from l2l_compile.lowering.code_cache import store

    tqdm.tqdm.monitor_interval = 0  # no thread beside a bar
    model = torch.nn.Sequential(torch.nn.LayerNorm(7), torch.nn.Linear(7, 6), torch.nn.GELU(), torch.nn.Linear(6, 7))
    step = torch.compile(model, backend="l2l", options={"device": "cpu", "micro_batches": 2, "block_compiler": "eager"})
    if torch.version.cuda or torch.version.hip:
        with torch.no_grad():
            step(torch.randn(4, 7))
    else:
        step(torch.randn(4, 7)).pow(2).mean().backward()
    l2l_compile.synchronize(step)
    torch._dynamo.reset()
    store.clear()
    freeze()


def reset() -> None:
    """Dynamo forgets all that it has compiled, and its guards, which it keeps for as long as the functions and classes that they name."""
    torch._dynamo.reset()
    forget_sizes()
    for finalizer in list(weakref.finalize._registry):
        seen = finalizer.peek()
        invalidate = getattr(seen[1], "func", None) if seen is not None else None
        if isinstance(getattr(invalidate, "__self__", None), torch._dynamo.guards.CheckFunctionManager):
            finalizer.detach()


def forget_sizes() -> None:
    """Caches of PyTorch keep the ShapeEnv of each of the last hundreds of compilations."""
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def freeze() -> None:
    """What is alive now is not looked at by later collections: modules, and what earlier tests leave behind."""
    gc.collect()
    gc.freeze()
