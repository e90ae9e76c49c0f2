"""The command `l2l`: the memory that a model needs, the time of a step, and whether its numbers equal eager's."""
