"""Training loops and checkpoints of other libraries. The module for a library imports that library and no other."""
