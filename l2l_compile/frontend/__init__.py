"""From PyTorch's call of the backend to a captured graph: adapter to Dynamo, rewrites of its graph, inputs by kind."""
