"""An elementwise optimizer's step, recorded and compiled to one pass over memory."""
