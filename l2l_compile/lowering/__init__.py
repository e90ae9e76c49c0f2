"""From a block to machine code: two ATen graphs, their random draws, Inductor, and the stores of traces and code."""
