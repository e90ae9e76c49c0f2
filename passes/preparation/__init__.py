"""Passes that prepare a captured graph before it is cut into segments."""
