"""The optimizer behind the device: when a parameter is updated, and how."""
