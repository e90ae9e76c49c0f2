"""The host side: master weights, the format that crosses the link, and the optimizer that runs behind the device."""
