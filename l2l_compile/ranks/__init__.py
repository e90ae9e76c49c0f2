"""Many devices: processes of `torch.distributed` that share the parameters, the gradients and the optimizer state of a model."""
