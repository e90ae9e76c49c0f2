"""An optimizer's own step on some of its parameters, and whether that leaves what a step on all of them leaves."""
