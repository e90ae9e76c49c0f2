"""Rewrite a cross entropy as one loss term for each target, followed by a reduction over these terms.

    cross_entropy(scores, target)    =>    scores = log_softmax(scores, 1)                     row by row: large
                                           terms = nll_loss(scores, target, "none")            one number a target
                                           nll_loss(-terms, zeros)                             over all rows: small

A mean over the targets that are not ignored (`ignore_index`) is not the mean of the micro-batches' means. The reduction
therefore runs once, on the terms of the whole batch, in the order and with the kernel that PyTorch would have used. Losses
without class weights are bitwise equal to PyTorch's. The operations over the classes stay together, in a part that
`prove_row_independence` can prove row-wise.

If the model folds scores of [time, batch, classes] into [time * batch, classes], the rewrite reads the scores before the fold:
segments cannot hand on rows once time is folded before the batch. (The sum over time then has another order.)

Other reductions need no rewriting: the batch rules split them as they are.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from l2l_compile.ir.batch import Batch
from l2l_compile.ir.captured import LOSS_TERM, Captured
from l2l_compile.ir.fx_types import source_of
from l2l_compile.ir.values import TensorSpec, rows_at
from l2l_compile.passes.compilation import Compilation, Fact

_LOSSES: dict[Any, inspect.Signature] = {
    F.cross_entropy: inspect.signature(F.cross_entropy),
    F.nll_loss: inspect.signature(F.nll_loss),
}
_SKIPPED = -100  # the class index that the kernel ignores


@dataclass(frozen=True)
class GatherLossTerms:
    """Rewrites losses over the batch row by row, so that the scores need not be in memory for all rows at once."""

    name: ClassVar[str] = "gather_loss_terms"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    provides: ClassVar[frozenset[Fact]] = frozenset()

    def apply(self, compilation: Compilation) -> None:
        options = compilation.options
        if compilation.splits_rows:
            only_largest = options.precision != "fp32" and not options.goes_by_turns  # which needs terms
            gather_loss_terms(compilation.captured, only_largest)


def gather_loss_terms(captured: Captured, only_largest: bool) -> None:
    """Rewrite every cross entropy and negative log likelihood of a batch in a captured graph, in place.

    With `only_largest`, a loss is rewritten only if no other batched floating-point value has more entries than its scores.
    """
    if captured.batch is None:
        return
    sizes = {
        node: _entries(spec, captured)
        for node, spec in captured.specs.items()
        if spec.batch is not None and spec.dtype.is_floating_point
    }
    least = max(sizes.values(), default=0) if only_largest else 0
    for node in list(captured.graph.nodes):
        if node.op == "call_function" and node.target in _LOSSES:
            loss = _Loss.of(captured, node)
            if loss is not None and sizes.get(loss.scores, 0) >= least:
                node.replace_all_uses_with(loss.write())
                captured.graph.erase_node(node)


_FOLDS = ("flatten", "view", "reshape", torch.flatten, torch.reshape)


def _unfolded(captured: Captured, scores: fx.Node, target: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The operands of a loss before time and batch were folded: scores [time, batch, classes] and target [time, batch].

    None if the operands are not such folds, of shape [time * batch, classes] and [time * batch]. Also None if the scores are
    narrower than the widest parameter (a float32 loss in a float64 model): the rounding would depend on the order of the sum.
    """
    if any(node.target not in _FOLDS or not node.args for node in (scores, target)):
        return None
    open_scores, open_target = source_of(scores), source_of(target)
    if open_scores not in captured.specs or open_target not in captured.specs:
        return None
    folded, unfolded = captured.specs[scores], captured.specs[open_scores]
    folded_target, unfolded_target = captured.specs[target], captured.specs[open_target]
    if len(unfolded.shape) != len(folded.shape) + 1 or len(folded_target.shape) != 1 or len(unfolded_target.shape) != 2:
        return None
    if unfolded.batch != Batch(1) or unfolded_target.batch != Batch(1):
        return None
    time, batch, *classes = unfolded.sizes(captured.hints)
    same = (time, batch) == unfolded_target.sizes(captured.hints) and tuple(classes) == folded.sizes(captured.hints)[1:]
    widest = max((captured.specs[i.node].dtype.itemsize for i in captured.inputs if i.kind == "parameter"), default=0)
    return (open_scores, open_target) if same and unfolded.dtype.itemsize >= widest else None


def _entries(spec: TensorSpec, captured: Captured) -> int:
    return spec.bytes(captured.hints) // spec.dtype.itemsize


@dataclass
class _Loss:
    """A loss that can be rewritten: scores [N, C, ...] and class indices [N, ...], with the rows outermost in both.

    With `time_first`, the scores are [time, batch, C] and the class indices [time, batch].
    """

    captured: Captured
    node: fx.Node
    scores: fx.Node
    target: fx.Node
    weight: fx.Node | None
    ignored: int
    mean: bool
    smoothing: float
    are_logits: bool
    time_first: bool = False

    @classmethod
    def of(cls, captured: Captured, node: fx.Node) -> _Loss | None:
        bound = _LOSSES[node.target].bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        scores, target = (
            captured.specs.get(arguments[name]) if isinstance(arguments[name], fx.Node) else None for name in ("input", "target")
        )
        if scores is None or target is None or arguments["reduction"] not in ("mean", "sum"):
            return None
        if isinstance(arguments.get("label_smoothing"), fx.Node):  # a float that changes
            return None
        options = (
            arguments["weight"],
            arguments["ignore_index"],
            arguments["reduction"] == "mean",
            arguments.get("label_smoothing", 0.0),
            node.target is F.cross_entropy,
        )
        current = arguments["size_average"] is None and arguments["reduce"] is None
        unfolded = _unfolded(captured, arguments["input"], arguments["target"])
        if unfolded is not None and current:
            return cls(captured, node, *unfolded, *options, time_first=True)
        places = [rows_at(spec.batch, captured.hints) for spec in (scores, target)]  # equal sizes may have different symbols
        rows = scores.batch is not None and scores.batch.dim == 0 and places[0] == places[1]
        classes = len(target.shape) == len(scores.shape) - 1 and not target.dtype.is_floating_point
        if not rows or not classes or not current:
            return None
        return cls(captured, node, arguments["input"], arguments["target"], *options)

    def write(self) -> fx.Node:
        """Insert the rewritten loss before the original call. Returns its node."""
        put, target = self._put, self.target
        place = 2 if self.time_first else 1
        scores = put(F.log_softmax, self.scores, place) if self.are_logits else self.scores
        if self.time_first:
            scores = put(torch.transpose, scores, 1, 2)  # the kernels need the classes in dimension 1
        skipped = put(operator.eq, target, self.ignored)
        terms = put(F.nll_loss, scores, target, ignore_index=self.ignored, reduction="none")
        weights = None
        if self.weight is not None:
            known = put(torch.masked_fill, target, skipped, 0)
            weights = put(torch.masked_fill, put(operator.getitem, self.weight, known), skipped, 0.0)
        loss = self._likelihood(terms, skipped, weights)
        if not self.smoothing:
            return loss
        even = scores
        if self.weight is not None:
            shape = [1, -1] + [1] * (len(self.captured.specs[self.target].shape) - 1)
            even = put(operator.mul, scores, put(torch.reshape, self.weight, shape))
        even = put(torch.masked_fill, put(operator.neg, put(torch.sum, even, 1)), skipped, 0.0)
        even = self._reduced(even, skipped, weights)
        classes = self.captured.specs[self.scores].shape[place]
        return put(operator.add, put(operator.mul, loss, 1 - self.smoothing), put(operator.mul, even, self.smoothing / classes))

    def _likelihood(self, terms: fx.Node, skipped: fx.Node, weights: fx.Node | None) -> fx.Node:
        put = self._put
        if weights is None:
            zeros = put(torch.masked_fill, put(torch.zeros_like, self.target), skipped, _SKIPPED)
            picked = put(torch.unsqueeze, put(operator.neg, terms), 1)
            return put(F.nll_loss, picked, zeros, ignore_index=_SKIPPED, reduction="mean" if self.mean else "sum")
        return self._reduced(put(operator.mul, terms, weights), skipped, weights)

    def _reduced(self, terms: fx.Node, skipped: fx.Node, weights: fx.Node | None) -> fx.Node:
        """The sum of the terms. For a mean, it is divided by the sum of the weights, or the number of targets not ignored."""
        put = self._put
        total = put(torch.sum, terms)
        if not self.mean:
            return total
        return put(operator.truediv, total, put(torch.sum, weights if weights is not None else put(operator.invert, skipped)))

    def _put(self, function: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call before the original loss, with the metadata that Dynamo would have given it."""
        graph, captured = self.captured.graph, self.captured
        with graph.inserting_before(self.node):
            made = graph.call_function(function, args, kwargs)
        examples = fx.node.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        with self.node.meta["example_value"].fake_mode, torch.set_grad_enabled(captured.grad_enabled):
            value = function(*examples[0], **examples[1])
        made.meta = {k: v for k, v in self.node.meta.items() if k in ("nn_module_stack", "stack_trace")} | {
            "example_value": value,
            LOSS_TERM: True,
        }
        captured.specs[made] = TensorSpec.of(value, captured.batch)
        return made
