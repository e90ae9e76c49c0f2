"""From PyTorch's call of the backend to a captured graph."""
