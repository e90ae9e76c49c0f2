"""Runs a program on a device: the executor, the inner loop over micro-batches, and how PyTorch calls it."""
