"""The arguments of a call: what a program cannot take is refused, and what it reads is prepared."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from l2l_compile.errors import DeviceError, L2LError
from l2l_compile.frontend.dynamo.wrong_inputs import error_of_dtypes
from l2l_compile.ir import nodes
from l2l_compile.ir.captured import Input
from l2l_compile.ir.program import Program
from l2l_compile.memory.address import address
from l2l_compile.ranks.sharded import local
from l2l_compile.runtime.runtime_value import RuntimeValue


class Arguments:
    """Prepares the arguments of the calls of one program."""

    def __init__(self, program: Program):
        captured = self.captured = program.captured
        self._derived: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by index: an argument, and what is derived from it
        writes = nodes.returned(program.forward.graph).writes
        self._written = [*program.carried, *(nodes.operands(node).input for node in writes)]
        parameters = (i for i in captured.inputs if i.kind in ("parameter", "wrapped parameter"))
        self._weights = {i.index for i in captured.inputs if i.is_weight}
        self._frozen = [i.index for i in parameters if not i.node.meta["example_value"].requires_grad]

    def check(self, arguments: Sequence, check_indices: bool) -> None:
        """Raises `DeviceError`, `IndexRangeError`, and `L2LError` for parameters that were unfrozen."""
        for argument, i in zip(arguments, self.captured.inputs, strict=True):
            if isinstance(argument, torch.Tensor) and argument.device.type != "cpu":
                raise DeviceError(f"input '{i.name}' is on {argument.device}; leave the model and its inputs on the host")
        unfrozen = [i for i in self._frozen if arguments[i].requires_grad] if torch.is_grad_enabled() else []
        if unfrozen:  # the guards of PyTorch 2.11 do not check requires_grad
            raise L2LError(
                f"{len(unfrozen)} parameters had requires_grad=False when the model was compiled, and PyTorch {torch.__version__} does not "
                "compile it again for them: they would get no gradient. Call torch._dynamo.reset() after you unfreeze parameters"
            )
        if check_indices:
            self.captured.check_indices(arguments)

    def read(self, arguments: Sequence, to_train: bool) -> list:
        """The values that the program reads: shards of this rank, slices of parameters, and copies of what may be written."""
        shards = map(local, arguments)
        found = [*shards, *(self._derive(arguments, i) for i in self.captured.derived)]
        kept = {*self._written, *self.snapshots(arguments)} if to_train else self._weights.intersection(self._written)
        for index in kept:  # backward recomputes from the values that forward read, before later writes
            found[index] = arguments[index].detach().clone()
        return found

    def snapshots(self, arguments: Sequence[torch.Tensor]) -> set[int]:
        """The arguments that are copied for backward, so that somebody may write into them after forward.

        These are the inputs that the model clones, and values in memory that PyTorch did not allocate, such as NumPy's: a write
        into that memory would not be noticed.
        """
        values = [i.index for i in self.captured.inputs if i.kind == "value"]
        return {*self.captured.snapshots, *(index for index in values if _is_of_others(arguments[index]))}

    def values(self, read: Sequence) -> list[RuntimeValue]:
        """The values of the placeholders of the forward graph, from the values that the program reads."""
        inputs = (i for i in self.captured.inputs if not i.is_weight and i.node in self.captured.specs)
        return [RuntimeValue([read[i.index]]) for i in inputs]

    def check_dtypes(self, arguments: Sequence, error: RuntimeError) -> None:
        """Raise `InputError` in the place of an error of a forward whose cause is the dtype of an input."""
        named = [(i, arguments[i.index]) for i in self.captured.inputs if isinstance(arguments[i.index], torch.Tensor)]
        values = [(i.name, tensor) for i, tensor in named if i.kind == "value"]
        wrong = error_of_dtypes(error, values, [tensor for i, tensor in named if i.kind == "parameter"])
        if wrong is not None:
            for note in getattr(error, "__notes__", ()):
                wrong.add_note(note)
            wrong.first_useful_frame = inspect.currentframe()  # Dynamo leaves the frames before it out of the traceback
            raise wrong from None

    def _derive(self, arguments: Sequence, derived: Input) -> torch.Tensor:
        """A slice or an inner tensor of an argument; the same tensor in every step, unless the argument has moved."""
        assert derived.taken is not None
        whole = arguments[derived.owner]
        view = derived.taken.view(whole)
        if derived.index in self._derived:
            before, known = self._derived[derived.index]
            if before is whole and address(known) == address(view):
                return known
        self._derived[derived.index] = (whole, view)
        return view


def _is_of_others(value: object) -> bool:
    """Whether a tensor is in memory that PyTorch did not allocate."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not local(value).untyped_storage().resizable()
