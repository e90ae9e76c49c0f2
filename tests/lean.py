"""Settings of PyTorch and Python for processes that run one test after another."""

from __future__ import annotations

import gc

import torch


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
    from l2l_compile.lowering.codes import store

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


def freeze() -> None:
    """What is alive now is not looked at by later collections: modules, and what earlier tests leave behind.

    Dynamo's guards on functions and classes outlive its reset.
    """
    gc.collect()
    gc.freeze()
