"""The command `l2l`: what a model would need, how long a step would take, whether its numbers are eager's."""
