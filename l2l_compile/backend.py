"""The backend that `torch.compile(model, backend="l2l")` calls with every captured graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from l2l_compile.devices.host import is_host, outside_inference_mode
from l2l_compile.dumps import log_artifact
from l2l_compile.errors import L2LError, OptionError
from l2l_compile.frontend.batch_dimension import try_other_batch_dimension
from l2l_compile.frontend.capture import capture
from l2l_compile.frontend.dynamo import adapter, batch_marks, inference_marks, kept_programs, watched_frames
from l2l_compile.frontend.dynamo.class_names import trace_methods_of_names
from l2l_compile.frontend.dynamo.fake_operations import watch_fake_operations
from l2l_compile.frontend.dynamo.readiness import refuse_packed, refuse_what_dynamo_skips
from l2l_compile.frontend.rewrites.recurrent_stacks import sizes_of_stack
from l2l_compile.ir.captured import Captured
from l2l_compile.ir.graph_modules import graph_module
from l2l_compile.ir.program import Program
from l2l_compile.lowering.lower import Lowering
from l2l_compile.options import Options
from l2l_compile.passes.compilation import Compilation
from l2l_compile.passes.pipeline import PIPELINE, PREPARATION, SEGMENTATION, STREAMING, After, run
from l2l_compile.passes.streaming.place_ranks import check_ranks
from l2l_compile.passes.streaming.place_rows import check_rows
from l2l_compile.passes.verify_stages import verify_stages
from l2l_compile.runtime.graphs_by_need import Backwards, Steps
from l2l_compile.runtime.paused_step import StepGraph
from l2l_compile.runtime.runner import Runner
from l2l_compile.session import PLANS_FIRST, Session, frame_begins, frame_skipped, function_recompiled, model_inlined, session_for
from l2l_compile.torch_internals import autograd, calls, threads
from l2l_compile.torch_internals.calls import streams_layers


def l2l(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable:
    """Compile a graph of Dynamo into a layer-streamed program (L2L, arXiv 2002.05645, Algorithm 2).

    `options` are fields of `l2l_compile.Options`. Raises `OptionError` (a `ValueError`) for a bad option or any
    `mode`, `DeviceError` for a model that is not on the host, and `LoweringError` for a block that cannot be traced.
    """
    try:
        with autograd.unseen_by_saved_tensors_hooks(), outside_inference_mode():
            chosen = _options(options, mode)
            owner = adapter.current_owner()
            if not getattr(owner, PLANS_FIRST, False):
                chosen.check_decided("this call")
            session = session_for(owner, chosen)
            return session.entry(make_runner(gm, session))
    except L2LError as error:
        error.first_useful_frame = inspect.currentframe()  # Dynamo leaves its own frames out of the traceback
        raise


def _options(options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
    if mode is not None:
        raise OptionError(f"backend 'l2l' has no modes (got mode={mode!r}); use options={{...}} instead")
    built = Options.build(options)
    built.check_folders()
    return built


def _check_call(backend: Any) -> None:
    """Raise `OptionError` for a bad option already in `torch.compile`, before the first step. `backend` is its wrapper."""
    if getattr(backend, "compiler_fn", None) is l2l:
        _options(**backend.kwargs)


def make_runner(gm: fx.GraphModule, session: Session) -> Runner:
    """Compile a captured graph for a session and register its program there."""
    local, others = adapter.modules_in_frame()
    if not is_host(session.options.device):
        refuse_packed([*local, *others])
    runner = new_runner(gm, session)
    session.server.watch([*local, *others])
    session.ends_with(adapter.current_owner(), local or others)
    return runner


def new_runner(gm: fx.GraphModule, session: Session) -> Runner:
    """As `make_runner`, without hooks on the user's modules."""
    captured, ranks = capture(gm)
    program, compilation = compile_program(captured, session.options, session.lowering)
    backwards = Backwards(compilation.gradient_mask, program.backward, lambda mask: _rebuild_backward(compilation, mask))
    steps = None
    if compilation.goes_by_turns:
        made = {} if program.step is None else {compilation.turns: _step_graph(compilation, program.step)}
        steps = Steps(compilation.gradient_mask, made, lambda turns: _rebuild_step(compilation, turns))
    runner = Runner(program, session, backwards, compilation.gradients.differentiable, ranks, steps)
    session.add(runner)
    return runner


def compile_program(
    captured: Captured, options: Options, lowering: Lowering, after: After = log_artifact
) -> tuple[Program, Compilation]:
    """Run the passes over a captured graph, then the passes of the option `passes`. `after` is called after each pass."""
    compilation = Compilation(captured, options)
    run(compilation, PIPELINE + options.passes, after=after)
    if compilation.splits_rows:
        try_other_batch_dimension(captured, compilation.segments)
    check_rows(compilation)
    check_ranks(compilation)
    verify_stages(compilation)
    return replace(compilation.program(), lowering=lowering), compilation


def _rebuild_backward(compilation: Compilation, gradient_mask: tuple[bool, ...]) -> fx.GraphModule:
    """The backward graph for a gradient mask that differs from the expected one."""
    fresh = replace(compilation, gradient_mask=gradient_mask, backward=None)
    run(fresh, STREAMING + compilation.options.passes, _BEFORE_STREAMING)
    verify_stages(fresh)
    assert fresh.backward is not None, "some output has a gradient"
    return graph_module(fresh.backward)


def _step_graph(compilation: Compilation, module: fx.GraphModule) -> StepGraph:
    return StepGraph(module, compilation.schedule.orders[compilation.stages.rank])


def _rebuild_step(compilation: Compilation, turns: int) -> StepGraph:
    """The graph of a step turn by turn with another number of micro-batches."""
    fresh = replace(compilation, backward=None, step=None, count_of_turns=turns)
    run(fresh, STREAMING + compilation.options.passes, _BEFORE_STREAMING)
    verify_stages(fresh)
    assert fresh.step is not None, "the schedule goes turn by turn"
    return _step_graph(fresh, graph_module(fresh.step))


def stream_again(compilation: Compilation, options: Options) -> Program:
    """The program of a compilation with other values of `prefetch`, `stash` or `update`: its segments stay as they are."""
    fresh = replace(compilation, options=options, backward=None)
    run(fresh, STREAMING + options.passes, _BEFORE_STREAMING)
    return fresh.program()


_BEFORE_STREAMING = frozenset().union(*(step.provides for step in PREPARATION + SEGMENTATION))

l2l.streams_layers = True  # type: ignore[attr-defined]  # `calls.streams_layers` looks for this attribute
threads.register_once()
threads.trace_beside_other_threads()
calls.look_at_calls(streams_layers, _check_call)
calls.refuse_calls_within_dynamo(streams_layers)
calls.look_before_calls(streams_layers, refuse_what_dynamo_skips)
kept_programs.note_contexts(streams_layers)
batch_marks.mark_batches(streams_layers)
inference_marks.mark_integers(streams_layers)
watched_frames.watch_frames(streams_layers, frame_skipped, function_recompiled, frame_begins)
watched_frames.keep_graphs_whole(streams_layers)
watched_frames.log_while_tracing(streams_layers)
watched_frames.watch_inlined(streams_layers, model_inlined)
trace_methods_of_names(streams_layers)
watched_frames.watch_packed(streams_layers, frame_skipped)
watch_fake_operations(streams_layers, sizes_of_stack)
