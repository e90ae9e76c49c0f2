"""Rewrites of a captured graph that every pass may rely on: one graph without calls, writes, views of weights or shards."""
