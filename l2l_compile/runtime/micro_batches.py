"""How many micro-batches a call has: in a program without backward, as few as memory asks for."""

from __future__ import annotations

from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Block, Segment
from l2l_compile.ir.values import Bindings
from l2l_compile.lowering.lower import Lowering, Request, wanted_of
from l2l_compile.options import Options
from l2l_compile.runtime.slab import slab_bytes

_LEAST_LIMIT = 256 << 20  # bytes


class MicroBatches:
    """The number of micro-batches of the calls of a program, at most.

    With gradients it is the option `micro_batches`. Without gradients the option is a maximum: a token of a text has few activations,
    and each micro-batch reads the weights of a layer from the device's memory once more. Then the number is the least power of two with
    which a layer takes no more memory beside its weights than the largest segment's weights do, or 256 MiB. It depends on sizes alone,
    so a call gives the same bits on all devices of a kind. Random numbers are drawn for each micro-batch, so a program that draws some
    has as many as with gradients.
    """

    def __init__(self, program: Program, options: Options, lowering: Lowering):
        captured, self._lowering, self.most = program.captured, lowering, options.micro_batches
        runs = {s.block: s for s in program.segments if s.block.inner_looped}
        is_fixed = captured.grad_enabled or captured.mesh is not None or options.check or any(block.static for block in runs)
        self._batch = captured.batch
        self._runs: dict[Block, Segment] = {} if is_fixed or self.most == 1 else runs
        self._limit = limit_of(program)

    def of(self, bindings: Bindings) -> int:
        """The number for a call with these sizes."""
        if not self._runs or self._batch is None or bindings[self._batch] == 1:
            return self.most
        requests: list[Request] = []
        for block, segment in self._runs.items():
            requests.append((block, segment.bindings(bindings), "forward", wanted_of(block, again=False)))
        if any(self._lowering.known(request) is None for request in requests):
            self._lowering.ahead(requests)
        taken = 0
        for block, sizes, *_ in requests:
            lowered = self._lowering.forward(block, sizes)
            if lowered.random:
                return self.most
            taken = max(taken, lowered.workspace_bytes + _bytes_of_rows(block, sizes))
        return min(self.most, 1 << max(0, -(-taken // self._limit) - 1).bit_length())


def limit_of(program: Program) -> int:
    """Bytes that a layer may take beside its weights."""
    return max(_LEAST_LIMIT, slab_bytes(program.segments, program.captured.hints))


def _bytes_of_rows(block: Block, sizes: Bindings) -> int:
    """Bytes of the operands and the results that grow with the batch."""
    return sum(spec.bytes(sizes) for spec in (*block.values, *block.outputs) if spec.splits)
