"""How many micro-batches a call has: in a program without backward, as few as memory asks for."""

from __future__ import annotations

from l2l_compile.ir.program import Program
from l2l_compile.ir.segments import Block
from l2l_compile.ir.values import Bindings
from l2l_compile.lowering.lower import Lowering, wanted_of
from l2l_compile.options import Options
from l2l_compile.runtime.slab import slab_bytes

_LEAST_LIMIT = 256 << 20  # bytes


def micro_batches_of(program: Program, bindings: Bindings, options: Options, lowering: Lowering) -> int:
    """The number of micro-batches of a call with these sizes, at most.

    With gradients it is the option `micro_batches`. Without gradients the option is a maximum: a token of a text has few activations,
    and each micro-batch reads the weights of a layer from the device's memory once more. Then the number is the least power of two with
    which a layer takes no more memory beside its weights than the largest segment's weights do, or 256 MiB. It depends on sizes alone,
    so a call gives the same bits on all devices of a kind. Random numbers are drawn for each micro-batch, so a program that draws some
    has as many as with gradients.
    """
    captured, most = program.captured, options.micro_batches
    is_fixed = captured.grad_enabled or captured.mesh is not None or options.check
    if is_fixed or captured.batch is None or bindings[captured.batch] == 1:
        return most
    runs = {s.block: s.bindings(bindings) for s in program.segments if s.block.inner_looped}
    if not runs or any(block.static for block in runs):
        return most
    lowering.ahead((block, sizes, "forward", wanted_of(block, again=False)) for block, sizes in runs.items())
    limit, taken = limit_of(program, bindings), 0
    for block, sizes in runs.items():
        lowered = lowering.forward(block, sizes)
        if lowered.random:
            return most
        taken = max(taken, lowered.workspace_bytes + _bytes_of_rows(block, sizes))
    return min(most, 1 << max(0, -(-taken // limit) - 1).bit_length())


def limit_of(program: Program, bindings: Bindings) -> int:
    """Bytes that a layer may take beside its weights."""
    return max(_LEAST_LIMIT, slab_bytes(program.segments, bindings))


def _bytes_of_rows(block: Block, sizes: Bindings) -> int:
    """Bytes of the operands and the results that grow with the batch."""
    return sum(spec.bytes(sizes) for spec in (*block.values, *block.outputs) if spec.splits)
