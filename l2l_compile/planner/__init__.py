"""The planner: the options with which a step on a machine is fastest, among those with which it fits. One budget over all memories."""
