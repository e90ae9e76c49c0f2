"""Trace a block into two ATen graphs: `forward`, and `backward` = recompute + gradients.

Both are pure functions of their operands. Operands that the block writes into are copied first, and their new contents
are additional outputs. No output shares memory with an operand or with another output. Every output is contiguous.
Sizes that stay symbolic (`Sizes.symbols`) are integer operands in front of the tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._C import _functorch as functorch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from l2l_compile.devices.host import HOST, is_host
from l2l_compile.errors import LoweringError, ReentryError
from l2l_compile.frontend.dynamo.wrong_inputs import without_log
from l2l_compile.ir.fx_types import name_of
from l2l_compile.ir.segments import Block, symbolic_size
from l2l_compile.ir.values import Bindings, TensorSpec, evaluate
from l2l_compile.lowering.faster.fast_make_fx import SIZES, TraceMode, lean
from l2l_compile.lowering.sizes import Sizes
from l2l_compile.lowering.widening import cancel_round_trips, keep_results_narrow
from l2l_compile.torch_internals.autograd import unseen_by_saved_tensors_hooks
from l2l_compile.torch_internals.frame_memory import with_room


def settings_of_a_trace() -> tuple:
    """The settings of PyTorch that a trace depends on."""
    return (
        torch.get_default_dtype(), torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled(),
        *_float32_precisions(),
        torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled(),
    )  # fmt: skip


def _float32_precisions() -> tuple[str, ...]:
    """The precisions of products and convolutions in float32, such as "tf32".

    `torch.get_float32_matmul_precision()` raises an error once any of them was set.
    """
    backends = torch.backends
    within = ((backends.cuda, ("matmul",)), (backends.cudnn, ("conv", "rnn")), (backends.mkldnn, ("matmul", "conv", "rnn")))
    parts = (getattr(backend, name) for backend, names in within for name in names)
    return tuple(part.fp32_precision for part in (backends, backends.cudnn, backends.mkldnn, *parts))


_in_place_of_an_accelerator = ContextVar("in_place_of_an_accelerator", default=False)


@contextmanager
def in_place_of_an_accelerator(is_so: bool) -> Iterator[None]:
    """Trace on the host what runs on an accelerator that is not here.

    Kernels of accelerators draw the dropout of attention as they go. Those of the host cannot: PyTorch would make the matrix of
    all weights there. The trace has attention without dropout, which takes as much time and memory as theirs.
    """
    token = _in_place_of_an_accelerator.set(is_so)
    try:
        yield
    finally:
        _in_place_of_an_accelerator.reset(token)


_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_DROPOUT = 4  # the position of attention's argument `dropout_p`
_IN_FUSED_ATTENTION = (torch.float32, torch.bfloat16, torch.float16)


def _without_dropout(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of attention, with `dropout_p` of 0 where a kernel of an accelerator computes it."""
    query = args[0] if args else kwargs["query"]
    if query.dtype not in _IN_FUSED_ATTENTION:
        return args, kwargs
    if len(args) > _DROPOUT:
        return (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :]), kwargs
    return args, {**kwargs, "dropout_p": 0.0}


class BlockInterpreter(fx.Interpreter):
    """Runs a block's torch-level graph with numbers in place of symbolic sizes, and the device in place of the host.

    Operations that name no device make their results on the device too (see `interpret`).
    """

    def __init__(self, block: Block, bindings: Bindings, device: torch.device):
        super().__init__(block.graph, garbage_collect_values=False)
        self.sizes, self.bindings, self.device = block.sizes, bindings, device

    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except Exception as error:
            error.__dict__.setdefault("operation", name_of(n) if n.op == "call_method" else n.name)  # the first one: `failed_in`
            raise

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is symbolic_size:
            return evaluate(self.sizes[args[0]], self.bindings)
        if target in _POWERS and any(isinstance(a, torch.SymFloat) for a in args):
            return _power(*args, **kwargs)
        if target is torch.amp.autocast_mode._enter_autocast:
            args = (self.device.type, *args[1:])
        if target in (torch.tensor, torch.as_tensor):  # a constant of the graph, which is on the host
            return self._there(super().call_function(target, args, {**kwargs, "device": HOST}))
        if target is _ATTENTION and _in_place_of_an_accelerator.get():
            args, kwargs = _without_dropout(args, kwargs)
        return self._there(super().call_function(target, self._move(args), self._move(kwargs)))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "pow" and any(isinstance(a, torch.SymFloat) for a in args):
            return _power(*args, **kwargs)
        if target == HOST.type:  # x.cpu()
            return args[0].to(self.device)
        if target == "to":
            args = tuple(self.device if isinstance(a, str) and a == HOST.type else a for a in args)
        return self._there(super().call_method(target, self._move(args), self._move(kwargs)))

    def _there(self, result: Any) -> Any:
        """Move results to the device: `torch.Tensor([1.0])` and `x.type("torch.FloatTensor")` always make them on the host."""
        if is_host(self.device):
            return result
        return tree_map_only(torch.Tensor, lambda t: t.to(self.device) if is_host(t.device) else t, result)

    def _move(self, arguments: Any) -> Any:
        if is_host(self.device):
            return arguments
        swap = lambda a: self.device if isinstance(a, torch.device) and is_host(a) else a  # noqa: E731
        moved = torch.utils._pytree.tree_map(swap, arguments)
        if isinstance(moved, dict) and moved.get("device") == HOST.type:
            moved = {**moved, "device": self.device}
        return moved


def failed_in(error: LoweringError) -> str | None:
    """The name of the operation of a block that could not be traced; None if the error is of another kind."""
    return getattr(error.__cause__, "operation", None)


_POWERS = (operator.pow, torch.pow)


def _power(base: Any, exponent: Any) -> Any:
    """A power with a symbolic float as base or exponent, which is made a tensor: autograd computes with the value of a number."""
    x = base if isinstance(base, torch.Tensor) else exponent
    if not isinstance(x, torch.Tensor):
        return base**exponent
    result = torch.result_type(x, 1.0)
    inside = torch.promote_types(result, torch.float32)

    def wide(value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.to(inside)
        return torch.scalar_tensor(value, dtype=inside, device=x.device)

    return torch.pow(wide(base), wide(exponent)).to(result)


def trace_forward(block: Block, sizes: Sizes, device: torch.device) -> fx.GraphModule:
    """ATen graph: (symbolic sizes, operands) -> (outputs..., new contents of mutated operands...)."""

    grad = any(spec.differentiable for spec in block.outputs)

    def forward(bindings: Any, operands: Any) -> Any:
        with recording(block):
            leaves = _leaves(block, operands) if grad else operands
            return tuple(_own([r.detach() for r in _to_border(block, _results(block, bindings, device, leaves))], operands))

    module = traced(block, forward, block.operands, sizes, device, "forward")
    cancel_round_trips(module)
    return module


def trace_backward(
    block: Block, sizes: Sizes, device: torch.device, gradient_mask: tuple[bool, ...]
) -> tuple[fx.GraphModule, tuple[bool, ...]]:
    """ATen graph: (symbolic sizes, operands, gradients of the outputs in `gradient_mask`) -> the gradients that exist.

    Also returns, for each operand, whether it has a gradient. The graph returns the gradients that exist, in the order of
    operands.
    """
    return _trace_gradients(block, sizes, device, gradient_mask, outputs=False)


def trace_joint(
    block: Block, sizes: Sizes, device: torch.device, gradient_mask: tuple[bool, ...]
) -> tuple[fx.GraphModule, tuple[bool, ...]]:
    """As `trace_backward`, with the outputs of forward in front of the gradients."""
    return _trace_gradients(block, sizes, device, gradient_mask, outputs=True)


def _trace_gradients(
    block: Block, sizes: Sizes, device: torch.device, gradient_mask: tuple[bool, ...], outputs: bool
) -> tuple[fx.GraphModule, tuple[bool, ...]]:
    count, first = len(block.operands), len(block.outputs) if outputs else 0
    present: list[bool] = [False] * count

    def backward(bindings: Any, arguments: Any) -> Any:
        with torch.enable_grad():
            leaves = _leaves(block, arguments[:count])
            results = _results(block, bindings, device, leaves)
            roots = [
                (o, g)
                for o, g in zip(
                    [o for o, wanted in zip(_for_gradients(block, results), gradient_mask, strict=True) if wanted],
                    arguments[count:],
                    strict=True,
                )
                if o.requires_grad
            ]
            wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
            gradients: Sequence[torch.Tensor | None] = ()
            if roots and wanted:
                gradients = torch.autograd.grad(
                    [o for o, _ in roots], [leaves[i] for i in wanted], [g for _, g in roots], allow_unused=True
                )
        found = {i: g for i, g in zip(wanted, gradients, strict=False) if g is not None}
        present[:] = [i in found for i in range(count)]
        if any(g.layout is not torch.strided for g in found.values()):
            raise LoweringError(
                f"{block.name} gives a sparse gradient, which cannot cross the link: build the embedding with sparse=False "
                "(and use another optimizer than SparseAdam)"
            )
        made = [r.detach() for r in _to_border(block, results)] if outputs else []
        return tuple(_own([*made, *(found[i] for i in sorted(found))], arguments))

    gradients = [replace(s, dtype=s.gradient_dtype) for s, wanted in zip(block.outputs, gradient_mask, strict=True) if wanted]
    which = "forward and backward" if outputs else "backward"
    module = traced(block, backward, (*block.operands, *gradients), sizes, device, which)
    cancel_round_trips(module)
    shorter = [spec.dtype.itemsize == 2 for spec, there in zip(block.operands, present, strict=True) if there]
    of_weights = range(sum(present[: len(block.weights)]))
    keep_results_narrow(module, [first + i for i in of_weights if shorter[i]])
    return module, tuple(present)


def recording(block: Block) -> AbstractContextManager:
    """Gradients are enabled as in backward: attention chooses its kernel by that, and recompute must use the same kernel.

    They are also enabled for `torch.func.grad` of a frozen block: Dynamo leaves out that it enables them, if they are already.
    """
    takes_gradients = any(n.target is functorch._grad_increment_nesting for n in block.graph.graph.nodes)
    return torch.set_grad_enabled(takes_gradients or any(spec.differentiable for spec in block.outputs))


def interpret(block: Block, operands: Sequence[torch.Tensor], interpreter: BlockInterpreter) -> list:
    device, enabled = interpreter.device, block.autocast is not None
    made_there = nullcontext() if is_host(device) else device  # without a device, torch.arange(n) would be on the host
    with torch.autocast(device.type, dtype=block.autocast, enabled=enabled, cache_enabled=False), made_there:
        return list(interpreter.run(*operands))


def _leaves(block: Block, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The operands as leaves that record gradients, in the dtypes in which the block computes with them."""
    return [
        o.detach().requires_grad_(spec.differentiable)
        for o, spec in zip(in_compute_dtypes(block, operands), block.operands, strict=True)
    ]


def in_compute_dtypes(block: Block, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The operands in the dtypes in which the block computes with them."""
    dtypes = [spec.compute_dtype or spec.dtype for spec in block.operands]
    return [o if o.dtype is dtype else o.to(dtype) for o, dtype in zip(operands, dtypes, strict=True)]


def _results(block: Block, bindings: Bindings, device: torch.device, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs and the new contents of mutated operands, in the dtypes in which they were computed. `operands` stay as they are."""
    own = [o.clone() if i in block.mutated else o for i, o in enumerate(in_compute_dtypes(block, operands))]
    outputs = interpret(block, own, BlockInterpreter(block, bindings, device))
    results = outputs + [own[i] for i in block.mutated]
    for result, spec in zip(results, block.outputs, strict=True):
        if tuple(result.shape) != spec.sizes(bindings):
            raise LoweringError(
                f"{block.name} gives a value of shape {tuple(result.shape)} where {spec} was captured, at {dict(bindings)}: "
                "the model's operations depend on the size of the micro-batch"
            )
    return results


def _to_border(block: Block, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results in the dtypes in which they go from block to block."""
    return [result.to(spec.dtype) for result, spec in zip(results, block.outputs, strict=True)]


def _for_gradients(block: Block, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results in the dtypes of their gradients."""
    return [result.to(spec.gradient_dtype) for result, spec in zip(results, block.outputs, strict=True)]


def _own(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results, made contiguous, each in memory of its own."""
    taken = {o.untyped_storage()._cdata for o in operands}
    owned = []
    for result in results:
        result = result.contiguous()
        if result.untyped_storage()._cdata in taken:
            result = result.clone()
        taken.add(result.untyped_storage()._cdata)
        owned.append(result)
    return owned


def traced(
    block: Block, function: Callable, specs: Sequence[TensorSpec], sizes: Sizes, device: torch.device, which: str
) -> fx.GraphModule:
    """The ATen graph of `function(bindings, tensors)` for tensors of these specs."""
    count = len(sizes.symbols)

    def flat(*arguments: Any) -> Any:
        return function(sizes.with_symbols(arguments[:count]), arguments[count:])

    grad, transforms = torch.is_grad_enabled(), functorch.get_dynamic_layer_stack_depth()
    fake = TraceMode(sizes.environment)
    try:
        # the Python dispatcher turns operators whose schema hides a write (native_batch_norm) into ones that show it
        anomaly = torch.autograd.set_detect_anomaly(False)  # anomaly mode reads values, and fake tensors have none
        one_thread = torch.autograd.set_multithreading_enabled(False)  # autograd's thread for a device would not be traced
        with anomaly, one_thread, without_log(), unseen_by_saved_tensors_hooks(), lean(fake), enable_python_dispatcher():
            tensors = fake.operands(specs, sizes.with_symbols(sizes.numbers), device)
            module = with_room(make_fx(flat), *sizes.numbers, *tensors)
    except (LoweringError, ReentryError):
        raise
    except Exception as error:
        raise LoweringError(f"{which} of {block.name} cannot be traced: {type(error).__name__}: {error}") from error
    finally:
        torch.set_grad_enabled(grad)
        while functorch.get_dynamic_layer_stack_depth() > transforms:  # an error inside of a vmap leaves its layer on the stack
            functorch.pop_dynamic_layer_stack()
    _check_constants(block, module)
    _erase_aliases(module.graph)
    for node in reversed(module.graph.nodes):
        node.meta.pop("tensor_meta", None)
        if node.op == "call_function" and not node.users and isinstance(node.meta.get("val"), SIZES):
            module.graph.erase_node(node)
    return module


def _erase_aliases(graph: fx.Graph) -> None:
    """Erase `detach` and `alias`: nothing records gradients where the graph runs, so they return their operand.

    They stay where an operation changes the sizes or strides of the operand or of the result in place (`transpose_`).
    """
    for target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        for node in graph.find_nodes(op="call_function", target=target):
            named = node.args[0]
            if not any(_changes_view(reader) for reader in (*node.users, *named.users)):
                node.replace_all_uses_with(named)
                graph.erase_node(node)


def _changes_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.inplace_view in node.target.tags


def _check_constants(block: Block, module: fx.GraphModule) -> None:
    """Give tensor constants of the graph their real values; raises `LoweringError` for a fake tensor without a value."""
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target, None)
        if isinstance(value, FakeTensor):
            if value.constant is None:
                raise LoweringError(f"{block.name} holds a constant without a value ({node.target})")
            setattr(module, node.target, value.constant)
