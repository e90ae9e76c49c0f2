"""The host side: master weights, the format that crosses the link, and the optimizer, which runs while the device computes."""
