"""The disk tier: parameters and optimizer state in an unnamed file, moved by direct transfers, and a ring of chunks of them."""
