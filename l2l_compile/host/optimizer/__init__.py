"""The optimizer on the host: when a parameter is updated, and how."""
