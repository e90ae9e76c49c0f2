"""Training loops of other libraries: a module each, which imports its library and no other."""
