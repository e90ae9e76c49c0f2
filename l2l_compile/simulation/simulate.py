"""`simulate`: steps of a model in virtual time, without the machine and without memory for the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from l2l_compile.devices.host import HOST
from l2l_compile.errors import OptionError
from l2l_compile.frontend.dynamo import adapter, watched_frames
from l2l_compile.frontend.dynamo.meta_models import on_the_host
from l2l_compile.host.compiled_step.compiled_step import why_not_compiled
from l2l_compile.host.step.closures import check_needs_no_closure
from l2l_compile.host.step.torch_step import state_bytes_of_trial
from l2l_compile.host.step.trial import check_layers_are_independent
from l2l_compile.options import Options
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.result import Simulation
from l2l_compile.simulation.ring import machine_of_rank
from l2l_compile.simulation.simulated_disk import on_disk_of
from l2l_compile.simulation.simulated_loop import Loss, Rank, Setting, SimulatedLoop
from l2l_compile.simulation.simulated_ranks import division_of, modules_of, pipeline_behind
from l2l_compile.simulation.simulated_stages import on_fakes, simulate_stages
from l2l_compile.torch_internals.fresh_code import WithoutArguments


def simulate(
    model: Callable,
    machine: str | Path | Machine,
    options: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    blocks: str = "roofline",
) -> Callable[..., Simulation]:
    """`simulate(model, "h200", options)(**batch)`: a training step of a compiled model on a machine, in virtual time.

    Under `torch.no_grad()`, a call without backward. An argument that the model writes into, such as an attention cache, is what the
    call before it has left: a token of a text follows a token. The caller's own arguments stay as they are.

    model    a module or a function, compiled or not; its tensors may be on the meta device
    machine  the name of a machine that comes with the package, the path of a file that `measure_machine` wrote, or a `Machine`
    options  options of the backend, by default the options of a compiled model. `device` and `check` are ignored. With
             `optimizer`, the time includes the optimizer's step
    loss     a function from the model's outputs to a number, computed on the host. The default is the model's own loss if it
             returns one (an attribute or an entry `loss`, or a single number), else the sum of all entries of its outputs
    blocks   "roofline": seconds of a block are computed from FLOPs, bytes and the machine's figures. "measured": its code is run on
             random numbers of its sizes, on this host, which has to be the device of the machine (`measure_machine("cpu")`)

    Pass the arguments of a training step, on the host or on meta. Programs, executor, waits and host side are the same as in a
    real step; only times are computed, from the machine's figures. No numbers of the model are computed, and the model and the
    optimizer stay as they are. Raises the errors that compilation would raise.

    For a model that `shard` has sharded, this rank is simulated. The other ranks do the same at the same time, on as many rows
    of their own. For a model that `pipeline` has divided, all ranks of the pipeline are simulated, and the result is that of this
    rank, with those of all in `stages`. The host is shared by as many devices as the machine says. Raises `OptionError` if the
    machine lacks a figure for the links between devices.
    """
    given = dict(options if options is not None else adapter.options_of(model) or {})
    chosen = Options.build({**given, "device": HOST, "check": False})
    chosen.check_decided("a simulation")
    figures = machine if isinstance(machine, Machine) else Machine.load(machine)
    _check_blocks(blocks, figures)
    plain = adapter.uncompiled(model)
    pipeline, division = pipeline_behind(plain), division_of(plain, figures)
    together = division.ranks.world_size if division is not None else pipeline.world_size if pipeline is not None else 1
    if together > 1:
        figures = machine_of_rank(figures, together)
    chosen = on_disk_of(chosen, figures)

    def run(*args: Any, **kwargs: Any) -> Simulation:
        state_bytes = state_bytes_of(chosen)
        watched_frames.retry_skipped()
        try:
            with torch.random.fork_rng([]), on_the_host(plain, args, kwargs, all_fake=True) as call:
                setting = Setting(plain, call, figures, division, chosen, state_bytes, loss or _loss_of, blocks)
                if pipeline is not None:
                    return simulate_stages(setting, pipeline)
                optimizer = on_fakes(chosen.optimizer, call.fake) if chosen.optimizer is not None else None
                parameters = dict.fromkeys(p for module in modules_of(plain) for p in module.parameters())
                return SimulatedLoop(setting, Rank(list(parameters), optimizer)).simulation()
        finally:
            watched_frames.retry_skipped()

    return WithoutArguments(run, "simulate(model, machine)")


def _check_blocks(blocks: str, machine: Machine) -> None:
    if blocks not in ("roofline", "measured"):
        raise OptionError(f"blocks is 'roofline' or 'measured', not {blocks!r}")
    if blocks == "measured" and machine.overlaps:
        raise OptionError(
            f"blocks='measured' runs blocks on this host, but layers of machine '{machine.name}' run on an accelerator: "
            "take measure_machine('cpu'), or blocks='roofline'"
        )


def state_bytes_of(options: Options) -> int | None:
    """Bytes of optimizer state for each entry of a parameter, by a trial on real tensors; None if its step is not compiled."""
    if options.optimizer is None:
        return None
    if options.mode.is_overlapped:
        check_needs_no_closure(options.optimizer, f"update={options.update!r}")
        check_layers_are_independent(options.optimizer)
        if options.compile_update and why_not_compiled(options.optimizer) is None:
            return state_bytes_of_trial(options.optimizer)
    return None


def _loss_of(outputs: Any) -> torch.Tensor:
    """The model's own loss if it returns one, else the sum of all entries of the outputs that take a gradient."""
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    tensors = [t for t in torch.utils._pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    return tensors[0] if tensors and tensors[0].dim() == 0 else sum((t.sum() for t in tensors), torch.zeros(()))
