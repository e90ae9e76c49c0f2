"""Passes that find the layers of a captured graph, and cut the graph into segments."""
