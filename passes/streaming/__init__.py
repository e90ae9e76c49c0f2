"""From segments to the forward and backward graphs of the program, and where their nodes stand."""
