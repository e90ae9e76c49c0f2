"""Tensors that a model makes go where its layers run, whatever the model's code says of a device.

There is no GPU here: blocks are traced for one on fake tensors, which have a device and no memory.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import l2l_compile
from l2l_compile.ir.segments import block_bindings
from l2l_compile.lowering import trace
from l2l_compile.lowering.sizes import Sizes
from models import compiled, rows

GPU = torch.device("cuda", 0)
WIDTH = 5


class Maker(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make, self.first, self.last = make, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.places = nn.Embedding(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        return self.last(self.make(self, self.first(x)))


MAKERS = {
    "arange": lambda model, x: x + model.places(torch.arange(x.shape[1])),
    "arange, device='cpu'": lambda model, x: x + model.places(torch.arange(x.shape[1], device="cpu")),
    "arange, device of the input": lambda model, x: x + model.places(torch.arange(x.shape[1], device=x.device)),
    "zeros": lambda model, x: x + torch.zeros(WIDTH),
    "mask": lambda model, x: x.masked_fill(torch.triu(torch.ones(x.shape[1], WIDTH), 1).bool(), 0.0),
    "constant": lambda model, x: x * torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0]),
    "constant, device='cpu'": lambda model, x: x * torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0], device="cpu"),
    "Tensor": lambda model, x: x * torch.Tensor([0.5, 1.0, 2.0, 3.0, 4.0]),
    "type('torch.FloatTensor')": lambda model, x: x + torch.ones(WIDTH).type("torch.FloatTensor"),
    "to('cpu')": lambda model, x: x + torch.ones(WIDTH).to("cpu"),
    "cpu()": lambda model, x: x + model.scale.cpu(),
    "random": lambda model, x: x + torch.rand(WIDTH),
}

MADE_ON_THE_HOST = ("constant", "constant, device='cpu'", "Tensor", "type('torch.FloatTensor')")  # and copied from there


@pytest.mark.parametrize("name", MAKERS)
def test_new_tensors_are_made_where_layers_run(name):
    step = compiled(Maker(MAKERS[name]))
    step(rows(6, 4, WIDTH, dtype=torch.float32)).sum().backward()
    (program,) = l2l_compile.programs(step)
    for block in program.blocks:
        graph = traced_for_gpu(block, program).graph
        assert all(v.meta["val"].device == GPU for v in graph.output_node().args[0])
        if name not in MADE_ON_THE_HOST:
            values = [node.meta.get("val") for node in graph.nodes]
            assert all(v.device == GPU for v in values if isinstance(v, torch.Tensor))


def traced_for_gpu(block, program) -> torch.fx.GraphModule:
    """A block's forward on fake tensors of a GPU; without gradients, which need a real one."""
    bindings = block_bindings(block, program.bindings, program.captured.batch, 3)[0]

    def forward(bindings, operands):
        with torch.no_grad():
            return tuple(trace.interpret(block, list(operands), trace.BlockInterpreter(block, bindings, GPU)))

    return trace.traced(block, forward, block.operands, Sizes(bindings), GPU, "forward")
