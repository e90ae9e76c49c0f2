"""Adapters to private parts of PyTorch besides Dynamo's tracing: what another version of PyTorch may break."""
