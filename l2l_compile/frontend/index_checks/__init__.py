"""Indices that a device does not check: they are checked on the host, or before an operation that reads them."""
