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


def freeze() -> None:
    """What is alive now is not looked at by later collections: modules, and what earlier tests leave behind.

    Dynamo's guards on functions and classes outlive its reset.
    """
    gc.collect()
    gc.freeze()
