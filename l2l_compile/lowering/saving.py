"""What a block's forward saves for its backward: the values that save the most seconds of recompute for each byte.

Without it, backward computes all of forward again that its gradients read (Chen et al. 2016). A *level* is a set of values that
are saved; each level saves more than the one before. The values of a level are found one after another: the next one saves the
most seconds of those that are still computed again, for its bytes. Seconds are estimated from FLOPs and bytes (`costs.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from l2l_compile.ir.values import Bindings, Dim, dim_of
from l2l_compile.lowering.costs import Rates, concrete, cost_of, is_free, is_light, nbytes, tensors_in
from l2l_compile.lowering.joint import Joint
from l2l_compile.lowering.widening import storages_of

_BYTES_OF_A_DRAW = 16  # as many bytes are moved in the time in which a random number is drawn
_MOST_LEVELS = 4
_LEAST_SHARE = 0.001  # of the seconds of a recompute: less is not worth a value


@dataclass(frozen=True, eq=False)
class Level:
    """Values that a forward saves: the nodes of the joint graph, their bytes, and the seconds of recompute that they save.

    `seconds` are estimated at the sizes for which the levels were made.
    """

    saved: tuple[fx.Node, ...]
    bytes: tuple[Dim, ...]
    seconds: float


class SavingChoice:
    """The choice for one joint graph at one size, on a device with these rates. `fused`: whether a compiler fuses operations.

    seconds     what each operation takes that may run again; a value that nobody must compute is free
    bytes       of each value that may be saved
    candidates  values that are saved together
    recompute   seconds of backward's recompute if nothing is saved
    forward, backward  seconds of the operations of each
    """

    def __init__(self, joint: Joint, bindings: Bindings, rates: Rates, fused: bool):
        self.joint, self.rates, self.fused = joint, rates, fused
        values = {node: concrete(node.meta.get("val"), bindings) for node in joint.graph.graph.nodes if node.op != "output"}
        again = self.computed_again(frozenset())
        self.seconds = {node: self._seconds(node, values) for node in joint.graph.graph.nodes if node in again}
        self.bytes = {node: nbytes(tensors_in(values[node])) for node in self.seconds if joint.can_save(node)}
        self.recompute = self.time(())
        every = {node: self._seconds(node, values) for node in joint.graph.graph.nodes if node.op == "call_function"}
        self.backward = sum(seconds for node, seconds in every.items() if node in joint.of_backward)
        self.forward = sum(every.values()) - self.backward
        self.candidates = [*((node,) for node in self.bytes if node.target is not operator.getitem), *self._results()]

    def levels(self) -> tuple[Level, ...]:
        """The levels, from the smallest on; none if saving gains nothing.

        There are at most `_MOST_LEVELS`, since each is compiled. What lies between two of them is reached with both, in different
        segments.
        """
        every = list(self.every_level())
        saved = [level.seconds for level in every]
        wanted = [number * max(saved) / _MOST_LEVELS for number in range(1, _MOST_LEVELS + 1)] if every else []
        near = {min(range(len(every)), key=lambda i, at=at: (abs(saved[i] - at), i)) for at in wanted}  # type: ignore[misc]
        return tuple(every[i] for i in sorted(near))

    def every_level(self) -> Iterator[Level]:
        """As `levels`, a level for each value that is found."""
        saved: tuple[fx.Node, ...] = ()
        most = before = self.recompute
        while True:
            left = (tuple(n for n in nodes if n not in saved) for nodes in self.candidates)
            gains = [(before - self.time((*saved, *nodes)), nodes) for nodes in left if nodes]
            gains = [(gain, nodes) for gain, nodes in gains if gain > _LEAST_SHARE * most]
            if not gains:
                return
            _, found = max(gains, key=lambda choice: choice[0] / max(self._bytes(choice[1]), 1))
            saved = self._without_idle((*saved, *found))
            before = self.time(saved)
            yield Level(saved, tuple(dim_of(storages_of(node)[0].nbytes()) for node in saved), most - before)

    def _results(self) -> Iterator[tuple[fx.Node, ...]]:
        """For each operation with several results, those that are read: it runs again unless all of them are saved."""
        of: dict[fx.Node, list[fx.Node]] = {}
        for node in self.seconds:
            if node.target is operator.getitem:
                of.setdefault(node.all_input_nodes[0], []).append(node)
        for picked in of.values():
            if all(node in self.bytes for node in picked):
                yield tuple(picked)

    def _bytes(self, nodes: Sequence[fx.Node]) -> int:
        return sum(self.bytes[node] for node in nodes)

    def computed_again(self, saved: frozenset[fx.Node]) -> set[fx.Node]:
        """The nodes of forward that backward computes again."""
        found: set[fx.Node] = set()
        waiting = [node for node in self.joint.needed if node not in saved]
        while waiting:
            node = waiting.pop()
            if (node.op == "call_function" or node in self.joint.drawn) and node not in found:
                found.add(node)
                waiting += [read for read in self.joint.reads[node] if read not in saved and read not in found]
        return found

    def time(self, saved: Sequence[fx.Node]) -> float:
        """Seconds for what is computed again, and for writing what is saved where it need not have been written."""
        left = self.computed_again(frozenset(saved))
        again = sum(seconds for node, seconds in self.seconds.items() if node in left)  # in order: a sum must not depend on it
        written = sum(self.bytes[node] for node in saved if self.fused and _is_light(node))
        return again + written / self.rates.kernel_bandwidth

    def _without_idle(self, saved: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """The values without those that save nothing any more, beside the others."""
        for node in saved:
            fewer = tuple(other for other in saved if other is not node)
            if self.time(fewer) <= self.time(saved):
                saved = fewer
        return saved

    def _seconds(self, node: fx.Node, values: dict) -> float:
        if node in self.joint.drawn:
            return values[node].numel() * _BYTES_OF_A_DRAW / self.rates.kernel_bandwidth
        if not isinstance(node.target, OpOverload) or is_free(node.target):
            return 0.0
        if self.fused and is_light(node.target):
            return nbytes(tensors_in(values[node])) / self.rates.kernel_bandwidth
        args, kwargs = pytree.tree_map_only(fx.Node, values.__getitem__, (node.args, node.kwargs))
        return cost_of(node.target, args, kwargs, values[node]).seconds(self.rates)


def _is_light(node: fx.Node) -> bool:
    """Whether saving a value of a compiled block writes it, where it would not have been written."""
    return isinstance(node.target, OpOverload) and is_light(node.target)
