"""A compiled model as its user inspects it: programs, figures, the measured timeline of real steps."""
