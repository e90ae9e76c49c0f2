"""The vocabulary of layer-streamed programs."""
