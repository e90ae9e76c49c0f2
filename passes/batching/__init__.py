"""Which blocks may run micro-batch by micro-batch, and the proof."""
