"""What TorchDynamo is told and asked: which model is compiled, sizes, limits, frames, kept programs. Adapters to its private parts."""
