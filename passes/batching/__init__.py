"""Passes that decide which blocks run micro-batch by micro-batch, and the proof."""
