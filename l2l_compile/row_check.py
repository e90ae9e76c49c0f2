"""Option `check`: tests on rows of the first batch that a block gives the same results for rows together and for rows apart.

The proof about a block relies on the declarations (schemas, tags) of its operations, and a custom operation may declare
wrongly. The check runs for every inner-looped block, the first time that it runs forward and backward. It runs the rows of
the first two micro-batches together and apart. Random draws are the same for every row here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import fx

from l2l_compile.devices.host import HOST
from l2l_compile.errors import CheckError
from l2l_compile.ir.segments import Segment
from l2l_compile.ir.values import TensorSpec
from l2l_compile.lowering.code_cache import Lowered
from l2l_compile.lowering.lower import Lowering, one_at_a_time
from l2l_compile.lowering.probes import probe
from l2l_compile.passes.batching.batch_rules import Partial, ResultState, Rows, same_program, states_of_nodes
from l2l_compile.passes.batching.proof import probes, states_of_operands
from l2l_compile.runtime.runtime_value import RuntimeValue
from l2l_compile.runtime.segment_run import gradient_of, joined, micro_batch_of
from l2l_compile.runtime.step import Step

_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}  # narrower: 3e-2


class RowCheck:
    """Compares every block once, forward and backward. Raises `CheckError`, which names segment and operation."""

    def __init__(self, device: torch.device):
        self._plain = Lowering(device, "eager")
        self._passed: set[tuple] = set()
        self._begun: WeakKeyDictionary[Step, set[tuple]] = WeakKeyDictionary()

    def forward(
        self, step: Step, segment: Segment, weights: RuntimeValue, operands: Sequence[RuntimeValue]
    ) -> Callable[[], None] | None:
        """Work for the compute lane that compares the outputs of a segment; None if there is nothing to compare."""
        block = segment.block
        if not self._begins(step, (block, "forward")):
            return None
        pair = _Pair(step, segment, "outputs", lambda lowering, b: lowering.forward(block, b), self._plain)

        def work() -> None:
            pair.compare(weights, operands, (), block.outputs)
            self._passed.add((block, "forward"))

        return work

    def backward(
        self,
        step: Step,
        segment: Segment,
        weights: RuntimeValue,
        operands: Sequence[RuntimeValue],
        gradients: Sequence[RuntimeValue],
    ) -> Callable[[], None] | None:
        """As `forward`, for the gradients of the segment's operands."""
        block, gradient_mask = segment.block, tuple(not g.absent for g in gradients)
        if not self._begins(step, (block, gradient_mask)):
            return None
        pair = _Pair(step, segment, "gradients", lambda lowering, b: lowering.backward(block, b, gradient_mask), self._plain)
        arriving = [(g, spec) for g, spec in zip(gradients, block.outputs, strict=True) if not g.absent]
        made = [_summed(spec) for spec, there in zip(block.operands, pair.together.present, strict=True) if there]

        def work() -> None:
            pair.compare(weights, operands, arriving, made)
            self._passed.add((block, gradient_mask))

        return work

    def _begins(self, step: Step, key: tuple) -> bool:
        begun = self._begun.setdefault(step, set())
        if not key[0].inner_looped or len(step.rows.sizes) < 2 or key in self._passed | begun:
            return False
        begun.add(key)
        return True


class _Pair:
    """Runs the first two micro-batches of a step through one block, together and apart. The constructor lowers the block."""

    def __init__(self, step: Step, segment: Segment, what: str, lower: Callable[[Lowering, dict], Lowered], plain: Lowering):
        self.segment, self.what = segment, what
        bindings = segment.bindings(step.rows.bindings)
        rows = replace(step.rows, micro_batches=2, bindings={**bindings, step.rows.batch: sum(step.rows.sizes[:2])})
        self.step = replace(step, rows=rows)
        self.bindings = [{**bindings, rows.batch: size} for size in (*self.step.rows.sizes, sum(self.step.rows.sizes))]
        self.apart = [lower(step.engine.lowering, b) for b in self.bindings[:2]]
        self.together = lower(plain, self.bindings[2])

    def compare(
        self,
        weights: RuntimeValue,
        operands: Sequence[RuntimeValue],
        gradients: Sequence[tuple[RuntimeValue, TensorSpec]],
        made: Sequence[TensorSpec],
    ) -> None:
        """Raises `CheckError` unless the block makes the same values together and apart. `made` describes the values."""
        block = self.segment.block
        if self.together.seeded:
            warnings.warn(
                f"check=True cannot compare '{self.segment.name}': an operation of it draws random numbers by itself",
                stacklevel=2,
            )
            return
        values = [(o.tensors[:2], spec) for o, spec in zip(operands, block.values, strict=True)]
        arriving = [(g.tensors[:2], spec) for g, spec in gradients]
        apart = [
            [
                *weights.tensors,
                *(micro_batch_of(v, micro_batch) for v, _ in values),
                *(gradient_of(self.step, block, g, micro_batch, spec) for g, spec in arriving),
            ]
            for micro_batch in range(2)
        ]
        together = [*weights.tensors, *(joined(v, spec) for v, spec in (*values, *arriving))]
        found = [run.run(*a, *_draws(run)) for run, a in zip(self.apart, apart, strict=True)]
        whole = self.together.run(*together, *_draws(self.together))
        tolerance, rounding = _tolerance(self.together.graph)
        noise = rounding * max((_norm(w) for w in whole), default=0.0)
        for index, spec in enumerate(made):
            for actual in self._values([f[index] for f in found], spec):
                error, norm = _error(actual, whole[index]), _norm(whole[index])
                if error > tolerance * norm + noise:
                    raise CheckError(self._message(index, error / norm if norm else error, apart, together))

    def _values(self, per_micro_batch: list[torch.Tensor], spec: TensorSpec) -> list[torch.Tensor]:
        """The value, from the two micro-batches, that the joint run should give; two values if it should equal both."""
        if spec.batch is not None:
            return [torch.cat(per_micro_batch, spec.batch.dim)]
        if spec.partial is not None:
            return [self.step.rows.summed(per_micro_batch, spec.partial)]
        return per_micro_batch

    def _message(self, index: int, error: float, apart: list[list], together: list) -> str:
        count = len(self.segment.block.operands)
        name = self._first_that_differs([a[:count] for a in apart], together[:count])
        if name is None:
            targets = {n.target for n in self.together.graph.graph.nodes}
            custom = sorted(str(target) for target in targets if getattr(target, "namespace", "aten") not in ("aten", "prims"))
            name = f"an operation in its backward{': ' + ', '.join(custom) if custom else ''}"
        rows = " and ".join(map(str, self.step.rows.sizes))
        return (
            f"check=True: segment '{self.segment.name}' gives other {self.what} for {sum(self.step.rows.sizes)} rows together than for {rows} rows "
            f"apart ({self.what} {index} differ by {error:.1e}): {name} mixes the rows of the batch, but is not known to. "
            "Use micro_batches=1, or take the tag torch.Tag.pointwise off a custom operator that is not pointwise"
        )

    def _first_that_differs(self, apart: list[list], together: list) -> str | None:
        """The first ATen operation of forward that treats the rows together and apart differently.

        Looks for it on the host, where the states of values were proven. None if there is no such operation, or if an
        operator of the block has no kernel for the host.
        """
        block = self.segment.block
        with one_at_a_time:  # the caller's thread may trace at the same time
            small, large, primes, _ = probes(block, self.step.rows.bindings, self.step.rows.batch)
            graphs = [probe(block, b)[0] for b in self.bindings]
        if not all(same_program(small, g.graph) for g in graphs):
            return None
        states = states_of_nodes(small, large, *primes, states_of_operands(block, self.step.rows.bindings))
        try:
            one, other, whole = (_values_of(g, a) for g, a in zip(graphs, [*apart, together], strict=True))
        except NotImplementedError:
            return None
        tolerance, _ = _tolerance(graphs[2])
        for position, (node, state) in enumerate(zip(small.nodes, states, strict=True)):
            values = whole[position], one[position], other[position]
            if node.op == "call_function" and all(isinstance(v, torch.Tensor) for v in values):
                if any(_error(a, values[0]) > tolerance * _norm(values[0]) for a in self._by_state(list(values[1:]), state)):
                    return str(node.target)
        return None

    def _by_state(self, per_micro_batch: list[torch.Tensor], state: ResultState) -> list[torch.Tensor]:
        if state is None:
            return per_micro_batch
        if isinstance(state, Partial):
            return [self.step.rows.summed(per_micro_batch, state.how)]
        if not isinstance(state, Rows) or state.order is not None:
            return []  # the proof knows that this value mixes or sorts rows
        opened = [t.unflatten(state.dim, (state.outer, -1, state.multiple)) for t in per_micro_batch]
        return [torch.cat(opened, state.dim + 1).flatten(state.dim, state.dim + 2)]


def _summed(spec: TensorSpec) -> TensorSpec:
    """How the gradients of an operand are joined: rows are concatenated; gradients of a shared operand are summed."""
    return spec if spec.batch is not None else TensorSpec(spec.shape, spec.dtype, partial="sum")


def _draws(run: Lowered) -> list[torch.Tensor]:
    """Replace random draws by constants, so that all rows have the same: masks are True, numbers 0.5, whole numbers 0."""
    return [torch.full(d.shape, _same_for_all(d.dtype), dtype=d.dtype, device=d.device) for d in run.draws]


def _same_for_all(dtype: torch.dtype) -> float | bool:
    if dtype is torch.bool:
        return True
    return 0.5 if dtype.is_floating_point else 0


def _values_of(module: fx.GraphModule, operands: list[torch.Tensor]) -> list:
    """The values of all nodes of a graph that runs on the host. The operands may be on any device."""
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(*(operand.to(HOST) for operand in operands))
    return [interpreter.env.get(node) for node in module.graph.nodes]


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference; infinite if the sizes, whole numbers, or the places of non-finite entries differ."""
    if actual.shape != expected.shape:
        return float("inf")
    if not (actual.is_floating_point() or actual.is_complex()):
        return 0.0 if torch.equal(actual, expected) else float("inf")
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(actual)):
        return float("inf")
    return _norm(torch.where(finite, actual, 0) - torch.where(finite, expected, 0))


def _norm(value: torch.Tensor) -> float:
    """The norm of the finite entries; 0.0 for whole numbers."""
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return (
        torch.where(torch.isfinite(value), value, 0).to(torch.complex128 if value.is_complex() else torch.float64).norm().item()
    )


def _tolerance(module: fx.GraphModule) -> tuple[float, float]:
    """Two tolerances for the narrowest dtype in which a graph computes: relative to a value, and to its largest result.

    The second one is for values whose terms cancel: only the rounding of the larger terms is left in them.
    """
    values = (n.meta.get("val") for n in module.graph.nodes)
    found = {v.dtype for v in values if isinstance(v, torch.Tensor) and (v.dtype.is_floating_point or v.dtype.is_complex)}
    tolerance = max((_TOLERANCE.get(dtype, 3e-2) for dtype in found), default=1e-9)
    return tolerance, 16 * max((torch.finfo(dtype).eps for dtype in found), default=0.0)
