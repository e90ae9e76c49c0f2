"""Which segments of a program make a tensor: the gradient of a parameter, a buffer, the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Segment
from l2l_compile.testing.difference import BUFFER, GRADIENT, LOSS, PARAMETER, STATE, Key


class Places:
    """The segments of a model's programs, by the tensors that they make."""

    def __init__(self, programs: Sequence[Program]):
        self._readers: dict[str, dict[str, None]] = {}
        self._writers: dict[str, dict[str, None]] = {}
        for program in programs:
            for segment in program.segments:
                for weight in segment.weights:
                    name = weight.name.split("[")[0]  # a slice of a parameter that holds the weights of several layers
                    self._readers.setdefault(name, {})[segment.name] = None
                for name in _written(program, segment):
                    self._writers.setdefault(name, {})[segment.name] = None
        self._losses = tuple(name for program in programs for name in _makers_of_scalars(program))

    def __call__(self, key: Key) -> tuple[str, ...]:
        """Names of the segments that make a tensor, in program order; empty if they are not known."""
        if key.kind == LOSS:
            return self._losses if len(self._losses) == 1 else ()
        if key.kind in (GRADIENT, STATE):
            return _found(self._readers, key.name)
        if key.kind in (BUFFER, PARAMETER):
            return _found(self._writers, key.name) or _found(self._readers, key.name)
        return ()


def _found(places: dict[str, dict[str, None]], name: str) -> tuple[str, ...]:
    """Look a name up as a whole, or else by its end: after a graph break, a program's names may begin at an inner module."""
    while name not in places and "." in name:
        name = name.partition(".")[2]
    return tuple(places.get(name, ()))


def _written(program: Program, segment: Segment) -> Iterator[str]:
    """Names of the graph's inputs that a segment writes into."""
    names = {i.node: i.name for i in program.captured.inputs}
    for value in segment.outputs[len(segment.outputs) - len(segment.block.mutated) :]:
        if value.node in names:
            yield names[value.node]


def _makers_of_scalars(program: Program) -> Iterator[str]:
    """Names of segments that make a scalar output of the program that takes a gradient."""
    specs = program.captured.specs
    scalars = {n for n in program.captured.outputs if n in specs and not specs[n].shape and specs[n].differentiable}
    for segment in program.segments:
        if any(value.node in scalars for value in segment.outputs):
            yield segment.name
