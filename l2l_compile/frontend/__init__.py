"""From PyTorch's call of the backend to a captured graph: Dynamo, rewrites of its graph, inputs by kind."""
