"""A training step in virtual time: the real programs, executor and host side, on a machine that is given as figures."""
