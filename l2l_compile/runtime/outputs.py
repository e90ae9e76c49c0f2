"""How the outputs of a program reach the caller: as eager would return them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from l2l_compile.devices.device import Device
from l2l_compile.ir import nodes
from l2l_compile.ir.graph import dims_of_memory
from l2l_compile.ir.program import Program
from l2l_compile.ir.values import TensorSpec, dim_of, evaluate
from l2l_compile.memory.address import memory_of
from l2l_compile.runtime.late_loss import Coming, LateLoss
from l2l_compile.runtime.runtime_value import RuntimeValue
from l2l_compile.runtime.step import Step


class Outputs:
    """The outputs of one program.

    differentiable  which of those that the program makes can have a gradient
    """

    def __init__(self, program: Program, differentiable: Sequence[bool]):
        captured = self.captured = program.captured
        self.carried = program.carried
        made = nodes.returned(program.forward.graph).outputs
        first = {node: position for position, node in reversed(list(enumerate(made))) if node is not None}
        self._nodes = [*captured.outputs, *(captured.inputs[index].node for index in program.carried)]
        self._made = sorted(first.values())  # positions among the outputs, each value once
        self._source = [None if node is None else self._made.index(first[node]) for node in made]
        self._viewed = {view.base for view in captured.views.values() if not view.of_argument}
        self._layouts = self._layouts_in_eager()
        self._argument_of = {i.node: i.index for i in captured.inputs}
        self.differentiable = [differentiable[position] for position in self._made]

    def _layouts_in_eager(self) -> dict[int, tuple[int, ...]]:
        """The dimensions of outputs in the order of eager's memory (channels_last), by position; blocks make contiguous ones."""
        found = {}
        for position in self._made:
            example = self._nodes[position].meta.get("example_value")
            is_read = position not in self._viewed and not self._only_for_host(position)
            plain = isinstance(example, FakeTensor) and example.layout is torch.strided and is_read
            dims = dims_of_memory(example) if plain else None
            if dims is not None and sorted(dims) != dims:
                found[position] = tuple(dims)
        return found

    def _only_for_host(self, position: int) -> bool:
        """Whether the program makes this output for a replay alone."""
        parts = self.captured.parts
        return bool(parts) and position >= parts.count

    def gradient_mask(self, gradients: Sequence[torch.Tensor | None]) -> tuple[bool, ...]:
        """Which outputs have a gradient, from the gradients of those that the program makes."""
        mask = [False] * len(self._nodes)
        for position, gradient in zip(self._made, gradients, strict=True):
            mask[position] = gradient is not None
        return tuple(mask)

    def made(self, values: Sequence[RuntimeValue], kept: Sequence[RuntimeValue], device: Device) -> list[torch.Tensor]:
        """The tensors that the program has made, on the host. `kept` are the stashes, whose memory the caller must not get."""
        for position in self._made:
            device.accesses.read(values[position].place)
        made = [_joined(values[position], self.captured.specs[self._nodes[position]]) for position in self._made]
        made = [t.contiguous() if position in self._viewed else t for position, t in zip(self._made, made, strict=True)]
        kept_memory = {memory_of(t) for value in kept for t in value.held}
        made = [t.clone() if memory_of(t) in kept_memory else device.handed_over(t) for t in made]
        return [_no_view(_laid_out(t, self._layouts.get(position))) for position, t in zip(self._made, made, strict=True)]

    def one(self, position: int, value: RuntimeValue, device: Device) -> torch.Tensor:
        """One tensor that the program has made, as `made`."""
        device.accesses.read(value.place)
        return _no_view(device.handed_over(_joined(value, self.captured.specs[self._nodes[position]]).contiguous()))

    def promised(
        self, there: Mapping[int, RuntimeValue], step: Step, fetch: Callable[[int], torch.Tensor], device: Device
    ) -> tuple[list[torch.Tensor], dict[int, Coming]]:
        """The tensors that the program makes, of which some are not there yet: `fetch` waits for one. Returns those that are to come as well."""
        found: list[torch.Tensor] = []
        coming = {}
        for position in self._made:
            if position in there:
                found.append(self.one(position, there[position], device))
                continue
            spec = self.captured.specs[self._nodes[position]]
            like = torch.zeros(spec.sizes(step.rows.bindings), dtype=spec.dtype)
            coming[position] = Coming(like, functools.partial(fetch, position))
            found.append(LateLoss(coming[position]))
        return found, coming

    def replay(self, step: Step, device: Device, results: tuple[Sequence[RuntimeValue], ...]) -> None:
        """Make the outputs that the host makes itself, each as soon as its parts are on the host: lanes may still work."""
        values, parts = results[0], self.captured.parts.outputs
        if device.is_host:
            whole = {i: value.tensors for (node, i), (value, _) in step.keeps.items() if node is nodes.keep_output}
            step.replayed = {i: tensors[0].detach() for i, tensors in whole.items() if len(tensors) == 1}
        for position in [position for position in parts if position not in step.replayed]:
            there = {part: self._part(values[part], part, step, device) for part in parts[position].made()}
            step.replayed[position] = parts[position].run(step.given, there, step.rows.bindings)

    def _part(self, value: RuntimeValue | None, position: int, step: Step, device: Device) -> Any:
        """A result that the host needs for a replay."""
        node = self._nodes[position]
        if value is None:
            return self._not_made(node, step.given)
        if value.event is not None:
            device.wait_on_host(value.event)
        device.accesses.read(value.place)
        return _joined(value, self.captured.specs[node])

    def complete(
        self, made: Sequence[torch.Tensor], arguments: Sequence, replayed: Mapping[int, torch.Tensor] = MappingProxyType({})
    ) -> list:
        """All outputs of a call, with those of `replay`. Arguments that the model writes into get their new contents here, if these
        have a gradient or if the host makes them itself.
        """
        outputs = [
            self._not_made(node, arguments) if source is None else made[source]
            for node, source in zip(self._nodes, self._source, strict=True)
        ]
        for index in reversed(self.carried):
            arguments[index].copy_(outputs.pop())  # recorded by autograd: gradients of later readers of the argument lead here
        for position, spec in self.captured.dropped.items():
            outputs[position] = torch.empty(spec.sizes(self.captured.bindings(arguments)), dtype=spec.dtype, device="meta")
        if self.captured.parts:
            for position, output in replayed.items():
                outputs[position] = output
            self._write(outputs, arguments)
            del outputs[self.captured.parts.count :]  # made for the host alone
        if self.captured.views:
            self.captured.fill_views(outputs, arguments, self.captured.bindings(arguments))
        return outputs

    def _write(self, outputs: list, arguments: Sequence) -> None:
        """The writes into arguments that the host makes itself."""
        bindings = self.captured.bindings(arguments)
        for index, writes in self.captured.parts.writes.items():
            with torch.no_grad(), torch.inference_mode(arguments[index].is_inference()):
                for write in writes:
                    write.run(arguments, outputs, bindings)

    def _not_made(self, node: Any, arguments: Sequence) -> Any:
        """An output that no segment makes: an argument as it came, a size, a constant; a placeholder for one that the host makes."""
        if not isinstance(node, fx.Node):
            return node
        if node in self._argument_of:
            return arguments[self._argument_of[node]]
        if node.target in self.captured.constants:
            return self.captured.constants[node.target]
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            return evaluate(dim_of(value), self.captured.bindings(arguments))
        return value


def _joined(value: RuntimeValue, spec: TensorSpec) -> torch.Tensor:
    """A value on the host as one tensor, for all micro-batches."""
    return torch.cat(value.tensors, spec.rows.dim) if len(value.tensors) > 1 else value.tensors[0]


def _laid_out(tensor: torch.Tensor, dims: tuple[int, ...] | None) -> torch.Tensor:
    """The tensor with its dimensions in this order in memory; None for the order that it has."""
    if dims is None:
        return tensor
    inverse = sorted(range(len(dims)), key=dims.__getitem__)
    return tensor.permute(dims).contiguous().permute(inverse)


def _no_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is no view: autograd forbids writes into a view that a Function returns."""
    if not tensor._is_view():
        return tensor
    return tensor.new_empty(0).set_(tensor)  # type: ignore[call-overload]  # PyTorch's stubs lack set_(Tensor)
