"""Passes that write the forward and backward graphs of the program, and place their nodes."""
