"""Programs, which the passes make and the executor runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from l2l_compile.errors import L2LError
from l2l_compile.ir import nodes
from l2l_compile.ir.captured import Captured, Input, Mesh
from l2l_compile.ir.graph_modules import graph_module
from l2l_compile.ir.parse import Parsed, parse
from l2l_compile.ir.schedule import Schedule
from l2l_compile.ir.segments import Block, BlockLowering, Segment, Uncut, block_bindings
from l2l_compile.ir.stages import Stages
from l2l_compile.ir.text import print_program
from l2l_compile.ir.values import Bindings

LEAST_ON_DISK = 1 << 20  # bytes: smaller stashes stay in memory, as their transfers take more of the disk's time than their bytes
DISK_AHEAD = 2  # segments: how much earlier than its copy to the device a stash is read from the disk


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """The layer-streamed forward and backward graphs of one captured graph; `print(program)` shows them.

    `forward` and `backward` are `torch.fx.GraphModule`s of the vocabulary in `l2l_compile.ir.nodes`; `backward` is
    the graph of the last backward call, or before the first call a prediction. It is None where nothing requires a gradient.
    `bindings` are the sizes of the last forward, or before the first step those of the capture.
    `uncut` has the segments that hold several layers. `carried` has the indices of the inputs that the model writes into with
    a gradient: the last outputs of `forward` are their new contents. `lowering` makes the ATen graphs of blocks; a program that
    was parsed from text has none. `stages` says which ranks of a pipeline run each segment, and `schedule` in which order they do, if
    steps go turn by turn.
    """

    captured: Captured
    segments: tuple[Segment, ...]
    blocks: tuple[Block, ...]
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    bindings: Bindings
    uncut: tuple[Uncut, ...] = ()
    carried: tuple[int, ...] = ()
    lowering: BlockLowering | None = None
    stages: Stages | None = None
    step: fx.GraphModule | None = None
    schedule: Schedule | None = None

    def __repr__(self) -> str:
        return f"<Program of {len(self.segments)} segments, instances of {len(self.blocks)} blocks>"

    def forward_of(self, block: Block) -> fx.GraphModule:
        """The ATen graph of one micro-batch forward of a block, for the sizes in `bindings`.

        Raises `L2LError` if the program was parsed from text.
        """
        return self._lowering_of(block).forward(block, self.sizes_of(block)).graph

    def backward_of(self, block: Block) -> fx.GraphModule:
        """As `forward_of`, the recompute and the gradients for one micro-batch, for all differentiable outputs."""
        mask = tuple(spec.differentiable for spec in block.outputs)
        return self._lowering_of(block).backward(block, self.sizes_of(block), mask).graph

    def sizes_of(self, block: Block) -> Bindings:
        """The sizes of the first run of a block: of the first micro-batch, or of the whole batch."""
        micro_batches = max(s.micro_batches for s in self.segments if s.block is block)
        return block_bindings(block, self.bindings, self.captured.batch, micro_batches)[0]

    def _lowering_of(self, block: Block) -> BlockLowering:
        if self.lowering is None:
            raise L2LError(f"block '{block.name}' was parsed from text, which does not have its operations")
        return self.lowering

    @property
    def break_reason(self) -> str | None:
        """Why the program ends before the end of the user's function (a graph break); None if it does not."""
        return self.captured.break_reason

    @property
    def here(self) -> tuple[Segment, ...]:
        """The segments that this rank runs: all, unless the model is a pipeline."""
        return tuple(s for s in self.segments if self.stages is None or self.stages.runs(s))

    @property
    def resident(self) -> tuple[Segment, ...]:
        """The segments whose weights stay on the device from forward to backward of a step, in memory of their own."""
        graphs = self.graphs.values()
        fetches = [n for graph in graphs for n in graph.find_nodes(op="call_function", target=nodes.fetch_resident)]
        return tuple(self.segments[nodes.operands(node).segment] for node in fetches)

    @property
    def streamed(self) -> tuple[Segment, ...]:
        """The segments that this rank runs with their weights in a slab."""
        resident = {segment.index for segment in self.resident}
        return tuple(segment for segment in self.here if segment.index not in resident)

    @property
    def whole_batch(self) -> tuple[Segment, ...]:
        """The segments that run on the whole batch at once; their `block.reason` says why."""
        return tuple(s for s in self.segments if not s.block.inner_looped)

    @property
    def host_stashes(self) -> dict[fx.Node, int]:
        """The stashes that forward keeps on the host for backward: nodes of `forward`, each with its bytes. A step by turns has none."""
        if self.step is not None:
            return {}
        small = {node: size for node, size in self._stashes(nodes.store).items() if size < LEAST_ON_DISK}
        return self._stashes(nodes.offload) | small

    @property
    def disk_stashes(self) -> dict[fx.Node, int]:
        """The stashes that forward keeps on disk for backward: `store` nodes of `forward`, each with its bytes."""
        return {node: size for node, size in self._stashes(nodes.store).items() if size >= LEAST_ON_DISK}

    def _stashes(self, function: Callable) -> dict[fx.Node, int]:
        if self.step is not None:
            return {}
        returned: Any = self.forward.graph.output_node().args[0]
        kept = [node for node in dict.fromkeys(returned[1]) if isinstance(node, fx.Node) and node.target is function]
        return {node: node.meta["spec"].bytes(self.bindings) for node in kept}

    def __str__(self) -> str:
        names = {i.index: i.name for i in self.captured.inputs}
        return print_program(
            self.graphs, self.blocks, self.segments, names, self.bindings, self.captured.batch, self.captured.shards
        )

    @property
    def graphs(self) -> Mapping[str, fx.Graph]:
        """The graphs of a step, by the heading under which they print: `forward` and `backward`, or one `step` that goes by turns.

        A step of one micro-batch, and a call without gradients, run `forward` and `backward` in any case.
        """
        modules = {"forward": self.forward, "backward": self.backward} if self.step is None else {"step": self.step}
        return {title: module.graph for title, module in modules.items() if module is not None}

    @classmethod
    def parse(cls, text: str) -> Program:
        """The program of a printed text. It has the same graphs as the printed program, node by node, and prints the same.

        It can be verified, and changed by passes. It cannot run: the text does not have the operations of the blocks.
        Raises `ParseError`, with the line number, if `text` is no text of a program.
        """
        found = parse(text)
        modules = {title: graph_module(graph) for title, graph in found.graphs.items()}
        step = modules.get("step")
        forward, backward = modules["forward"] if step is None else step, modules.get("backward")
        return cls(_captured(found), found.segments, found.blocks, forward, backward, found.bindings, step=step)


def _captured(found: Parsed) -> Captured:
    """A captured graph with the parts that a text has: the inputs that are written into, the sizes, the batch and the ranks."""
    graph = fx.Graph()
    inputs = tuple(Input(index, graph.placeholder(f"written_{index}"), name, "buffer") for index, name in enumerate(found.inputs))
    graph.output(())
    return Captured(
        graph,
        torch.nn.Module(),
        inputs,
        {},
        found.batch,
        "",
        found.bindings,
        {},
        grad_enabled=True,
        autocast=None,
        mesh=Mesh(found.ranks) if found.ranks > 1 else None,
    )
