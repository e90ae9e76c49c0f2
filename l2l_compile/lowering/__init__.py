"""From a block to machine code: two ATen graphs, their random draws, Inductor, and what is kept of all that."""
