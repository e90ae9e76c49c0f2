"""A captured graph as text, and read from text: what the passes before the program work on, without Dynamo.

    %x = value  float32[B, 4]
    %w = parameter  float32[4, 4], grad
    %y = F.linear(%x, %w)  float32[B, 4], grad  layers.0
    return (%y)

A line has columns two spaces apart: the call, the spec of its result, and the module that it is in. `B` is the batch, of six rows.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from l2l_compile.ir.captured import Captured, Input
from l2l_compile.ir.values import TensorSpec, dim_of
from l2l_compile.options import Options
from l2l_compile.passes.compilation import Compilation, Pass

ROWS = 6
_PLACES = {"F": F, "torch": torch, "operator": operator}
_INPUT = re.compile(r"(?P<kind>value|parameter|buffer|state)")
_SPEC = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?P<grad>, grad)?")


def compile_text(text: str, *passes: Pass, **options) -> Compilation:
    """The compilation of a graph after these passes. The text is checked: the graph that is read from it prints as it again."""
    captured = parse(text)
    different = [f"{line!r} is {made!r}" for line, made in zip(lines(text), shown(captured), strict=True) if line != made]
    assert not different, "\n".join(different)
    found = Compilation(captured, Options.build({"device": "cpu", "micro_batches": 3, **options}))
    for step in passes:
        step.apply(found)
    return found


def lines(text: str) -> list[str]:
    """The lines of a text without the width of their columns."""
    return [re.sub(r" {2,}", "  ", line).strip() for line in text.strip().split("\n")]


# ---- text to graph ------------------------------------------------------------------------------------------------------


def parse(text: str) -> Captured:
    """A graph with an example value and a spec for every line. The batch dimension of each value is the one that says `B`."""
    reader = _Reader()
    for line in lines(text):
        reader.read(line)
    return reader.captured()


class _Reader:
    def __init__(self) -> None:
        self.graph, self.nodes, self.inputs = fx.Graph(), {}, []
        self.mode = FakeTensorMode(shape_env=ShapeEnv())

    def read(self, line: str) -> None:
        if line.startswith("return "):
            self.graph.output(self._evaluate(line.removeprefix("return ")))
            return
        name, call, spec, module = re.fullmatch(r"%(\w+) = (.+?)(?:  (.+?))?(?:  (.+))?", line).groups()
        made = self._input(name, call, spec) if _INPUT.fullmatch(call) else self._operation(name, call)
        self.nodes[name] = made
        if module:
            made.meta["nn_module_stack"] = _module_stack(module)

    def _input(self, name: str, kind: str, text: str) -> fx.Node:
        spec = _SPEC.fullmatch(text)
        sizes = [size for size in spec["shape"].split(", ") if size]
        tensor = torch.empty([ROWS if size == "B" else int(size) for size in sizes], dtype=getattr(torch, spec["dtype"]))
        if kind == "parameter":
            tensor = nn.Parameter(tensor, requires_grad=bool(spec["grad"]))
        node = self.graph.placeholder(name)
        dynamic = [DimDynamic.DUCK if size == "B" else DimDynamic.STATIC for size in sizes]
        context = StatelessSymbolicContext(dynamic_sizes=dynamic)
        node.meta["example_value"] = self.mode.from_tensor(tensor, source=ConstantSource(name), symbolic_context=context)
        self.inputs.append(Input(len(self.inputs), node, name, kind))
        return node

    def _operation(self, name: str, call: str) -> fx.Node:
        """A call of a function, such as `F.linear(%x, %w)`, or of a method: `%x.add_(%y)`."""
        called, arguments = call.split("(", 1)
        args, kwargs = self._evaluate(f"arguments({arguments}")
        owner, function = called.split(".")
        if owner.startswith("%"):
            node = self.graph.create_node("call_method", function, (self._evaluate(owner), *args), kwargs, name)
        else:
            node = self.graph.create_node("call_function", getattr(_PLACES[owner], function), args, kwargs, name)
        examples, named = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
        with self.mode:
            run = node.target if node.op == "call_function" else getattr(torch.Tensor, node.target)
            node.meta["example_value"] = run(*examples, **named)
        return node

    def _evaluate(self, text: str):
        names = {**_PLACES, **self.nodes, "arguments": lambda *args, **kwargs: (args, kwargs)}
        return eval(re.sub(r"%(\w+)", r"\1", text), names)

    def captured(self) -> Captured:
        examples = {node: node.meta["example_value"] for node in self.nodes.values()}
        places = [
            (size, (i.index, dim))
            for i in self.inputs
            for dim, size in enumerate(examples[i.node].shape)
            if isinstance(size, torch.SymInt)
        ]
        batch = dim_of(places[0][0])  # inputs with the same number of rows share the symbol
        return Captured(
            self.graph,
            fx.GraphModule({}, self.graph),
            tuple(self.inputs),
            {node: TensorSpec.of(value, batch) for node, value in examples.items()},
            batch,
            None,
            {batch: ROWS},
            {batch: places[0][1]},
            grad_enabled=True,
            autocast=None,
        )


def _module_stack(module: str) -> dict[str, tuple[str, type]]:
    """What Dynamo says of a call in a module: the model, and within it the module."""
    return {"model": ("L['self']", nn.Module), module: (f"L['self'].{module}", nn.Linear)}


# ---- graph to text ------------------------------------------------------------------------------------------------------


def shown(captured: Captured) -> list[str]:
    """The lines of a graph."""
    kinds = {i.node: i.kind for i in captured.inputs}
    left = (f"%{node.name} = {kinds.get(node) or called(node)}" for node in captured.graph.nodes if node.op != "output")
    right = (
        "  ".join(filter(None, (_spec(captured, captured.specs.get(node)), _module(node))))
        for node in captured.graph.nodes
        if node.op != "output"
    )
    body = ["  ".join(filter(None, columns)) for columns in zip(left, right, strict=True)]
    return [*body, f"return {_argument(captured.graph.output_node().args[0])}"]


def called(node: fx.Node) -> str:
    """A call."""
    arguments = [*map(_argument, node.args), *(f"{key}={_argument(value)}" for key, value in node.kwargs.items())]
    if node.op == "call_method":
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    name = node.target.__name__
    place = next(place for place, module in _PLACES.items() if getattr(module, name, None) is node.target)
    return f"{place}.{name}({', '.join(arguments)})"


def of_block(graph: fx.GraphModule) -> Iterator[str]:
    """The lines of a block's graph."""
    operands = [f"%{node.name}" for node in graph.graph.find_nodes(op="placeholder")]
    yield f"({', '.join(operands)})"
    for node in graph.graph.nodes:
        if node.op.startswith("call_"):
            yield f"%{node.name} = {called(node)}"
    yield f"return {_argument(graph.graph.output_node().args[0])}"


def _argument(value) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (tuple, list)):
        inside = ", ".join(map(_argument, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)


def _module(node: fx.Node) -> str:
    return list(node.meta.get("nn_module_stack", {"": ""}))[-1]


def _spec(captured: Captured, spec: TensorSpec | None) -> str:
    if spec is None:
        return ""
    flags = [str(spec).replace(str(captured.batch), "B")]
    flags += [f"computes in {str(spec.compute_dtype).removeprefix('torch.')}"] if spec.compute_dtype else []
    flags += ["grad"] if spec.requires_grad else []
    return ", ".join(flags)
